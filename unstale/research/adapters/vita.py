"""The delivery and in-store services of VitaBench: `--task.env vita:delivery`, `vita:instore`.

`vita:all` has the tasks of both in turn. Needs vita, installed from its source (arXiv:2509.26490).
VitaBench's orchestrator exchanges the messages, and the policy is its agent. The user is scripted,
or a model behind an endpoint (`--task.user URL`). A model behind `--task.judge URL` decides which
requirements of the task the conversation has met, and the reward is 1 if it has met all.
"""

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from unstale.config import ConfigError
from unstale.envs import EnvError, ListedTasks, Taskset, Turn
from unstale.envs.mixed import MixedTasks
from unstale.records import Task
from unstale.research.envs.orchestrated import (
    USER_TIMEOUT_S,
    Conversation,
    LiveConversation,
    MessageTypes,
    PolicyAgent,
    api_key,
    check_domain,
)
from unstale.research.envs.vita import VitaConfig

try:
    from loguru import logger

    logger.disable("vita")
    with redirect_stdout(sys.stderr):  # on import, vita prints a list of models
        from vita.agent.base import BaseAgent, is_valid_agent_history_message
        from vita.data_model.message import AssistantMessage, ToolCall, ToolMessage, UserMessage
        from vita.data_model.simulation import TerminationReason
        from vita.data_model.tasks import Location, ProductBaseModel, StoreBaseModel
        from vita.environment import environment as vita_environment
        from vita.orchestrator.orchestrator import Orchestrator
        from vita.registry import registry
        from vita.user.base import STOP, BaseUser
        from vita.user.user_simulator import UserSimulator
        from vita.utils import get_weekday
except ImportError as error:
    raise ImportError(
        f"vita:<domain> needs VitaBench from its source ({error}): pip install -e ./vitabench"
    ) from error

DOMAINS = ("delivery", "instore")
ALL = "all"
"""The name that selects the tasks of both domains in turn."""
MAX_STEPS = 300
"""Largest number of messages in an episode, as in VitaBench's own runs."""
MAX_ERRORS = 10
"""Largest number of errors in an episode, as in VitaBench's own runs."""
WINDOW = 10
"""Number of messages that the judge sees at a time, as in VitaBench."""
OVERLAP = 2
"""Number of messages that two consecutive windows share, as in VitaBench."""
MAX_ANSWER_BYTES = 1 << 20
"""Largest size in bytes of an answer from the model that simulates the user."""

RUBRIC = """Decide if an assistant has met one requirement in a conversation with a user.
`requirement` is what you decide about. `instruction` is what the user wants in all, and `time` the
time at which the conversation begins. `messages` is a part of the conversation, in order, and
`part` says which. `before` says if the requirement was met at the end of the earlier parts, and
why. Only what the assistant says and does counts, not what the user says. A tool's result is seen
by the assistant alone: it counts once the assistant uses it or tells the user. An order or a
booking counts only if its tool call succeeded. Amounts and times must be exactly as required; a
text such as an address or a note must have the same meaning.
Score 10: the requirement is met at the end of `messages`. Score 0: it is not. If `messages` do not
concern the requirement, the result is that of `before`. In your reason, repeat what a later part
must know."""

# The policy receives the error of a failed call. vita would print a traceback of each, too.
vita_environment.traceback = SimpleNamespace(print_exc=lambda: None)


class VitaTasks(ListedTasks):
    """The tasks of a domain of VitaBench. Every second task is held out.

    VitaBench has no split of its own.
    """

    def __init__(self, domain: str, *, options: VitaConfig, judge: Any) -> None:
        """Load the tasks of a domain.

        `judge` is an `LLMJudge` that decides which requirements of a task are met.
        """
        check_domain("VitaBench", domain, (*DOMAINS, ALL))
        self.name = f"vita:{domain}"
        self.domain = domain
        self.options = options
        try:
            tasks = registry.get_tasks_loader(domain)(options.language)
        except FileNotFoundError as error:
            raise ConfigError(
                f"VitaBench has no data ({error}): install its source with pip install -e"
            ) from error
        self.data = {"train": tasks[1::2], "held_out": tasks[::2]}
        self.tools = tuple(tool.openai_schema for tool in self.environment(tasks[0]).get_tools())
        self._judge = judge

    def environment(self, task: Any) -> Any:
        """Return a new VitaBench environment with the data of a task."""
        make = registry.get_env_constructor(self.domain)
        return make(task.environment, self.options.language)

    def env(self, task: Task, seed: int) -> "VitaEnv":
        """Return the environment of a task.

        `seed` is not used: only the models of user and judge are random.
        """
        kind = LiveEnv if self.options.user else VitaEnv
        return kind(self, self.data_of(task))

    async def met(self, task: Any, messages: Sequence[Any]) -> list[bool]:
        """Return a bool for each requirement of a task: True if the conversation has met it.

        The judge reads the conversation in windows. In each window it decides about each
        requirement again, and receives its earlier decision.
        """
        lines = [f"[{number}] {_as_text(message)}" for number, message in enumerate(messages, 1)]
        windows = [
            "\n".join(lines[start : start + WINDOW])
            for start in range(0, max(1, len(lines) - OVERLAP), WINDOW - OVERLAP)
        ]
        requirements = rubrics(task)
        verdicts = [(False, "not judged yet")] * len(requirements)
        time = task.environment.get("time", "")

        async def decide(
            window: str, number: int, requirement: str, before: tuple[bool, str]
        ) -> tuple[bool, str]:
            verdict = await self._judge.verdict(
                requirement=requirement,
                instruction=task.instructions,
                time=time,
                part=f"{number} of {len(windows)}",
                messages=window,
                before=f"{'met' if before[0] else 'not met'}: {before[1]}",
            )
            return verdict.score >= 0.5, verdict.reason

        for number, window in enumerate(windows, 1):
            try:
                async with asyncio.TaskGroup() as group:
                    deciding = [
                        group.create_task(decide(window, number, requirement, before))
                        for requirement, before in zip(requirements, verdicts, strict=True)
                    ]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from errors
            verdicts = [task.result() for task in deciding]
        return [met for met, _ in verdicts]


def rubrics(task: Any) -> list[str]:
    """Return a task's requirements, each once: those of its final states, then general ones."""
    criteria = task.evaluation_criteria
    if criteria is None:
        return []
    of_states = [
        rubric
        for state in criteria.expected_states or ()
        for rubric in getattr(state, "state_rubrics", None) or ()
    ]
    return list(dict.fromkeys([*of_states, *(criteria.overall_rubrics or ())]))


def _as_text(message: Any) -> str:
    """Return a message's role, content and tool calls as one text."""
    calls = [f"{call.name}({call.arguments})" for call in getattr(message, "tool_calls", ()) or ()]
    return f"{message.role}: {' '.join([message.content or '', *calls]).strip()}"


class VitaEnv(Conversation):
    """One conversation with a user of VitaBench.

    Its code runs in one thread, because VitaBench keeps the records of a task by thread.
    """

    types = MessageTypes(
        AssistantMessage, UserMessage, ToolMessage, ToolCall, is_valid_agent_history_message
    )
    reward = "rubrics"

    def __init__(self, tasks: VitaTasks, task: Any) -> None:
        self._thread = ThreadPoolExecutor(1, "vita")
        super().__init__(self._thread, task)
        self._tasks = tasks

    def close(self) -> None:
        """Delete VitaBench's records of this conversation, and end its thread."""
        self._thread.submit(_forget_records)
        self._thread.shutdown(wait=False)

    def _orchestrate(self, task: Any) -> Any:
        _forget_records()
        options = self._tasks.options
        world = self._tasks.environment(task)
        time = world.tools.db.time
        now = f"{time} {get_weekday(time, options.language)}"
        self._system = world.get_policy().format(time=now)
        for message in task.message_history or ():
            for call in getattr(message, "tool_calls", None) or ():
                world.get_response(call)
        user = ModelUser(task, options) if options.user else ScriptedUser(task.instructions)
        return Orchestrator(
            self._tasks.domain,
            VitaAgent(),
            user,
            world,
            task,
            max_steps=MAX_STEPS,
            max_errors=MAX_ERRORS,
            language=options.language,
        )

    def _check_limits(self) -> None:
        orchestrator = self._orchestrator
        for reached, reason in (
            (orchestrator.step_count >= MAX_STEPS, TerminationReason.MAX_STEPS),
            (orchestrator.num_errors >= MAX_ERRORS, TerminationReason.TOO_MANY_ERRORS),
        ):
            if reached and not orchestrator.done:
                orchestrator.done = True
                orchestrator.termination_reason = reason

    async def _end(self) -> Turn:
        """Return the last turn. Its reward is 0 if neither the user nor the policy ended the
        conversation.
        """
        ended = (TerminationReason.USER_STOP, TerminationReason.AGENT_STOP)
        if self._orchestrator.termination_reason not in ended:
            return Turn((), done=True, rewards={self.reward: 0.0})
        met = await self._tasks.met(self._task, self._orchestrator.trajectory)
        share = sum(met) / len(met) if met else 1.0
        facts = {"rubrics_met": share}
        return Turn((), done=True, rewards={self.reward: float(all(met))}, facts=facts)


class LiveEnv(VitaEnv, LiveConversation):
    """A conversation in which a model plays the user."""

    def _with_history(self, messages: list[Any]) -> Any:
        return self._task.model_copy(update={"message_history": messages})


def _forget_records() -> None:
    for kind in (StoreBaseModel, ProductBaseModel, Location):
        kind.clear_thread_data()


class VitaAgent(PolicyAgent, BaseAgent):
    """An agent for VitaBench's orchestrator whose answers are the replies of the policy."""


class ScriptedUser(BaseUser):
    """A user that follows a fixed script instead of a model.

    It sends its instructions, answers the agent's first message with agreement, and ends the
    conversation after the second one.
    """

    _messages = ("{}", "Yes, please go ahead. If all of it is done, tell me so.", STOP)

    def __init__(self, instructions: str) -> None:
        super().__init__(instructions=instructions)

    def get_init_state(self, message_history: Any = None) -> int:
        return 0

    def generate_next_message(self, message: Any, state: int) -> tuple[Any, int]:
        text = self._messages[state].format(self.instructions)
        return UserMessage(role="user", content=text), state + 1

    @classmethod
    def is_stop(cls, message: Any) -> bool:
        return STOP in (message.content or "")


class ModelUser(UserSimulator):
    """VitaBench's simulated user, played by the model of the endpoint `--task.user`."""

    def __init__(self, task: Any, options: VitaConfig) -> None:
        super().__init__(
            persona=str(task.user_scenario.user_profile),
            instructions=task.instructions,
            language=options.language,
        )
        self._options = options
        http = import_module("unstale.engines.http")  # engines and environments are of one layer
        self._http = http.Http(options.user, key=api_key(), max_body_bytes=MAX_ANSWER_BYTES)

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        state.messages.append(message)
        shown = [*state.system_messages, *state.flip_roles()]
        text = self._ask([{"role": each.role, "content": each.content} for each in shown])
        answer = UserMessage(role="user", content=text)
        state.messages.append(answer)
        return answer, state

    def _ask(self, messages: Sequence[dict[str, str]]) -> str:
        """Return the text of the model's answer, without its reasoning.

        Raises `EnvError` if the model gives no answer, or one without text.
        """
        body = {
            "model": self._options.user_model,
            "messages": messages,
            "temperature": self._options.user_temperature,
        }
        call = self._http.call("POST", "/chat/completions", body)
        try:
            completion = asyncio.run(asyncio.wait_for(call, USER_TIMEOUT_S))
        except TimeoutError as error:
            raise EnvError(
                f"the model that simulates the user gave no answer within {USER_TIMEOUT_S:g} s"
            ) from error
        except OSError as error:
            raise EnvError(f"the model that simulates the user gave no answer: {error}") from error
        match completion:
            case {"choices": [{"message": {"content": str(text)}}, *_]}:
                if said := text.rpartition("</think>")[2].strip():
                    return said
        raise EnvError(
            f"the model that simulates the user returned no text: {str(completion)[:300]}. Check "
            "that it is a chat model whose token limit leaves room after its reasoning"
        )


def vita_tasks(domain: str, *, options: VitaConfig) -> Taskset:
    """Return the tasks of a domain, or of both domains in turn (`all`)."""
    rewards = import_module("unstale.rewards.judge")  # a layer above environments
    judge = rewards.LLMJudge(
        rewards.JudgeEndpoint(url=options.judge, model=options.judge_model, key=api_key()),
        RUBRIC,
        # A call costs a token or more. So the limit on tokens is one on calls, too.
        budget=rewards.JudgeBudget(calls=options.judge_tokens, tokens=options.judge_tokens),
    )
    if domain != ALL:
        return VitaTasks(domain, options=options, judge=judge)
    parts = [VitaTasks(each, options=options, judge=judge) for each in DOMAINS]
    return MixedTasks(f"vita:{ALL}", parts)


TASKSET = vita_tasks
