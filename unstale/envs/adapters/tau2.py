"""The customer service of tau2-bench: `--task.env tau2:retail`, `tau2:airline`, `tau2:telecom`.

Needs tau2 installed from its source. Its orchestrator exchanges the messages. The policy is its
agent; the user is scripted (offline) or a model (`tau2:retail@openai/gpt-4.1`, a name of litellm).
The reward is tau2's for the final state. Assertions in natural language need a judge and are left out.
"""

import asyncio
import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

from unstale.config import ConfigError, nearest
from unstale.envs import EnvError, ListedTasks, Message, Turn
from unstale.records import Task

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would be downloaded on import
try:
    from loguru import logger

    logger.disable("tau2")
    from tau2.agent.base_agent import HalfDuplexAgent, is_valid_agent_history_message
    from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT
    from tau2.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
    from tau2.data_model.simulation import TerminationReason
    from tau2.data_model.tasks import InitialState, RewardType
    from tau2.evaluator.evaluator_communicate import CommunicateEvaluator
    from tau2.evaluator.evaluator_env import EnvironmentEvaluator
    from tau2.orchestrator.orchestrator import Orchestrator, Role
    from tau2.registry import registry
    from tau2.runner.build import build_user
    from tau2.user.user_simulator_base import STOP, TRANSFER, HalfDuplexUser
    from tau2.utils import DATA_DIR
except ImportError as error:
    raise ImportError(
        f"tau2:<domain> needs tau2-bench from its source ({error}): pip install ./tau2-bench, Python 3.12 or 3.13; "
        "`tau2` in package registries is another project"
    ) from error

DOMAINS = ("airline", "retail", "telecom")
MAX_STEPS, MAX_ERRORS = 200, 10
"""Messages and failed calls of an episode at most, as in tau2's runs."""
THREADS = 64
"""Episodes that can wait for their users at the same time."""
USER_ARGS = {"temperature": 0.0, "timeout": 50.0}
"""Sampling options of a user's model."""

_TRANSFERRED = "YOU ARE BEING TRANSFERRED TO A HUMAN AGENT"


class Tau2Tasks(ListedTasks):
    """A domain with tau2's split into training and held-out tasks (`test`).

    `user` is the name of a model, or "" for the scripted user. `user_args` are litellm's arguments,
    such as `api_base`.
    """

    def __init__(
        self, domain: str, *, user: str = "", user_args: Mapping[str, Any] = USER_ARGS
    ) -> None:
        domain, _, named = domain.partition("@")
        if domain not in DOMAINS:
            raise ConfigError(
                f"tau2 is played in {', '.join(DOMAINS)}, not in {domain!r}{nearest(domain, DOMAINS)}"
            )
        self.name, self.domain = f"tau2:{domain}", domain
        self.user, self.user_args = user or named, dict(user_args)
        self.threads = ThreadPoolExecutor(
            THREADS, "tau2"
        )  # the shared pool is small, and an engine's updates need it
        try:
            environment, tasks = self.environment(), registry.get_tasks_loader(domain)(None)
            split = registry.get_task_splits_loader(domain)()
        except FileNotFoundError as error:
            raise ConfigError(
                f"tau2 has no data in {DATA_DIR} ({error}); set TAU2_DATA_DIR to its data folder"
            ) from error
        by_id = {task.id: task for task in tasks}
        self.data = {
            "train": [by_id[name] for name in split["train"]],
            "held_out": [by_id[name] for name in split["test"]],
        }
        self.tools: tuple[Mapping[str, Any], ...] = tuple(
            tool.openai_schema for tool in environment.get_tools()
        )
        self.system = SYSTEM_PROMPT.format(
            agent_instruction=AGENT_INSTRUCTION, domain_policy=environment.get_policy()
        )

    def environment(self) -> Any:
        """Return a new environment of the domain."""
        return registry.get_env_constructor(self.domain)()

    def env(self, task: Task, seed: int) -> "Tau2Env":
        """Only a user's model is random; `seed` is not used."""
        return (
            Tau2Env(self, self.data_of(task))
            if not self.user
            else LiveEnv(self, self.data_of(task))
        )


class Tau2Env:
    """One conversation: the policy answers the user's messages and the results of its calls."""

    def __init__(self, tasks: Tau2Tasks, task: Any) -> None:
        self._tasks, self._task = tasks, task
        self._state = "new"
        self._orchestrator: Any = None

    async def begin(self) -> Turn:
        if self._state != "new":
            raise EnvError("an episode begins once; make a new environment")
        self._state = "open"
        return await self._in_thread(self._begin)

    async def step(self, reply: Message) -> Turn:
        if self._state != "open":
            raise EnvError(f"step() in an episode that is {self._state}")
        return await self._in_thread(self._step, reply)

    async def _in_thread(self, work: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._tasks.threads, work, *given)

    def _begin(self) -> Turn:
        self._start(self._task)
        return Turn((Message("system", self._tasks.system), *self._told(0)))

    def _start(self, task: Any) -> None:
        """Start an orchestrator and run it up to the policy's turn."""
        world = self._tasks.environment()
        policy, model = (
            PolicyAgent([], ""),
            {"llm": self._tasks.user, "llm_args": self._tasks.user_args},
        )
        user = (
            build_user("user_simulator", world, task, **model)
            if self._tasks.user
            else ScriptedUser(task, world, policy)
        )
        limits = {"max_steps": MAX_STEPS, "max_errors": MAX_ERRORS}
        self._orchestrator = Orchestrator(self._tasks.domain, policy, user, world, task, **limits)
        self._orchestrator.initialize()
        self._pass_on()

    def _pass_on(self) -> None:
        """Run the orchestrator up to the policy's turn."""
        orchestrator = self._orchestrator
        while not orchestrator.done and orchestrator.to_role != Role.AGENT:
            orchestrator.step()
            orchestrator._check_termination()

    def _step(self, reply: Message) -> Turn:
        orchestrator, text = self._orchestrator, reply.content.rpartition("</think>")[2].strip()
        calls = [
            ToolCall(
                id=f"call_{orchestrator.step_count}_{place}",
                name=call.name,
                arguments=dict(call.arguments),
            )
            for place, call in enumerate(reply.tool_calls)
        ]
        if not (calls or text):
            return self._end(facts={"empty_reply": 1.0})
        before = len(orchestrator.trajectory) + 1
        orchestrator.agent.says = AssistantMessage(
            role="assistant", content=text or None, tool_calls=calls or None
        )
        orchestrator.step()
        self._pass_on()
        if orchestrator.done:
            return self._end()
        told = self._told(before)
        why = [
            Message("tool", f"Error: {call.error}") if call.error else None
            for call in reply.tool_calls
        ]
        return Turn(
            tuple(reason or said for reason, said in zip(why, told, strict=True)) if calls else told
        )

    def _told(self, since: int) -> tuple[Message, ...]:
        """Return the messages for the policy: without the user's calls and the agent's greeting."""
        return tuple(
            Message("tool" if isinstance(said, ToolMessage) else "user", said.content)
            for said in self._orchestrator.trajectory[since:]
            if is_valid_agent_history_message(said) and not isinstance(said, AssistantMessage)
        )

    def _end(self, facts: Mapping[str, float] = MappingProxyType({})) -> Turn:
        """End with tau2's reward, which is 0 unless the user ended the conversation."""
        self._state = "over"
        said, criteria = self._orchestrator.get_trajectory(), self._task.evaluation_criteria
        if self._orchestrator.termination_reason != TerminationReason.USER_STOP:
            return Turn((), done=True, rewards=MappingProxyType({"state": 0.0}), facts=facts)
        found = EnvironmentEvaluator.calculate_reward(
            registry.get_env_constructor(self._tasks.domain), self._task, said
        )
        if RewardType.COMMUNICATE in criteria.reward_basis:
            facts = {"communicated": CommunicateEvaluator.calculate_reward(self._task, said).reward}
        return Turn((), done=True, rewards=MappingProxyType({"state": found.reward}), facts=facts)


class LiveEnv(Tau2Env):
    """A conversation with a model as user. It is restored from its messages, not replayed."""

    def snapshot(self) -> str:
        kept = {"role", "id", "content", "tool_calls", "requestor", "error"}
        orchestrator = self._orchestrator
        said = [
            one.model_dump(mode="json", include=kept, exclude_none=True)
            for one in orchestrator.trajectory
        ]
        return json.dumps(
            {"steps": orchestrator.step_count, "errors": orchestrator.num_errors, "said": said}
        )

    async def resume(self, state: str) -> None:
        """Restore the conversation. tau2 repeats the recorded calls."""
        kept, self._state = json.loads(state), "open"
        said = [_KINDS[one["role"]].model_validate(one) for one in kept["said"]]
        initial = (self._task.initial_state or InitialState()).model_copy(
            update={"message_history": said}
        )
        await self._in_thread(self._start, self._task.model_copy(update={"initial_state": initial}))
        self._orchestrator.step_count, self._orchestrator.num_errors = kept["steps"], kept["errors"]


_KINDS = {"assistant": AssistantMessage, "tool": ToolMessage, "user": UserMessage}


class PolicyAgent(HalfDuplexAgent[None]):
    """tau2's agent, which returns the replies of the policy."""

    says: AssistantMessage
    calls = 0
    """Number of calls made."""

    def get_init_state(self, message_history: Any = None) -> None: ...

    def generate_next_message(self, message: Any, state: None) -> tuple[AssistantMessage, None]:
        self.calls += len(self.says.tool_calls or ())
        return self.says, None


class ScriptedUser(HalfDuplexUser[None]):
    """A user without a model.

    It sends its instructions, makes the calls that a message names with the task's arguments, and
    agrees to anything else. It ends the conversation after two messages without a call in between.
    """

    def __init__(self, task: Any, world: Any, policy: PolicyAgent) -> None:
        super().__init__(instructions=str(task.user_scenario.instructions))
        self._policy, self._heard, self._idle = policy, 0, -1
        self._tools = world.user_tools.get_tools() if world.user_tools else {}
        names = "|".join(
            sorted((name.replace("_", "[_ ]") for name in self._tools), key=len, reverse=True)
        )
        self._named = re.compile(rf"\b({names or '(?!)'})\b", re.IGNORECASE)
        self._arguments: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
        for action in task.evaluation_criteria.actions or ():
            if action.requestor == "user":
                self._arguments[action.name].append(action.arguments)

    def get_init_state(self, message_history: Any = None) -> None: ...

    def generate_next_message(self, message: Any, state: None) -> tuple[UserMessage, None]:
        calls: list[ToolCall] = []
        if not isinstance(message, AssistantMessage):  # results of its own calls
            text = "\n".join(one.content for one in getattr(message, "tool_messages", [message]))
        elif self._idle < 0:
            text, self._idle = f"This is what I call about.\n{self.instructions}", 0
        else:
            text, calls = self._answer(message.content)
        return UserMessage(role="user", content=text or None, tool_calls=calls or None), None

    def _answer(self, asked: str) -> tuple[str, list[ToolCall]]:
        """Return a text or calls."""
        if _TRANSFERRED in asked:
            return TRANSFER, []
        named = [found.lower().replace(" ", "_") for found in self._named.findall(asked)]
        calls = [self._call(name, place) for place, name in enumerate(named) if self._knows(name)]
        self._idle = 0 if calls or self._policy.calls > self._heard else self._idle + 1
        self._heard = self._policy.calls
        if calls:
            return "", calls
        if named:
            return f"I do not know what to enter for {' or '.join(named)}.", []
        return (
            STOP if self._idle > 1 else "Yes, please go ahead. If all of it is done, tell me so."
        ), []

    def _knows(self, name: str) -> bool:
        fields = self._tools[name].params.model_fields.values()
        return bool(self._arguments[name]) or not any(field.is_required() for field in fields)

    def _call(self, name: str, place: int) -> ToolCall:
        given = self._arguments[name] or deque([{}])
        arguments = given.popleft() if len(given) > 1 else given[0]
        return ToolCall(id=f"user_{place}", name=name, arguments=dict(arguments), requestor="user")


TASKSET = Tau2Tasks
