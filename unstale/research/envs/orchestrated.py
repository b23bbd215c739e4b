"""Environments whose conversations are led by the orchestrator of tau2-bench, or by VitaBench's.

VitaBench's orchestrator is a fork of tau2's, so both adapters share this code. The user is scripted
or a model behind an endpoint, by the options of `SimulatedUserConfig`.
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from unstale.config import ConfigError, TaskConfig, nearest
from unstale.config.checks import NonNegative
from unstale.envs import Message, Turn

KEY = "OPENAI_API_KEY"
"""The environment variable with the API key of the endpoints of user and judge."""
USER_TIMEOUT_S = 50.0
"""Longest time in seconds for an answer of the model that plays the user. It is below the default
of `rollout.timeout_s`, 60.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedUserConfig(TaskConfig):
    """Tasks in which the policy serves a simulated user."""

    user: str = ""
    """URL of the OpenAI-compatible endpoint whose model plays the user, such as
    http://127.0.0.1:8000/v1. Its key is read from OPENAI_API_KEY. Empty means a scripted user.
    """
    user_model: str = "policy"
    """Name of the model that plays the user. `unstale serve` calls its model `policy`."""
    user_temperature: NonNegative = 0.0
    """Sampling temperature of the model that plays the user."""

    def check_combination(self) -> None:
        super(SimulatedUserConfig, self).check_combination()
        check_url("task.user", self.user)


def check_domain(library: str, domain: str, known: Sequence[str]) -> None:
    """Raise `ConfigError` if `domain` is not one of the `known` domains of a library."""
    if domain not in known:
        raise ConfigError(
            f"{library}'s domain must be one of {', '.join(known)}; "
            f"got {domain!r}{nearest(domain, known)}"
        )


def check_url(name: str, url: str) -> None:
    """Raise `ConfigError` if the option `name` is neither empty nor the URL of an endpoint."""
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of an IPv6 address or a port
        complete = False
    printable = url.isascii() and url.isprintable() and " " not in url
    if url and not (complete and printable):
        raise ConfigError(
            f"{name} must be the URL of an endpoint, such as http://127.0.0.1:8000/v1, got {url!r}"
        )


def api_key() -> str:
    """Return the API key of the endpoints of user and judge, or "none" if it is not set."""
    return os.environ.get(KEY) or "none"


@dataclass(frozen=True, slots=True)
class MessageTypes:
    """A library's message classes, and its test for messages that the policy may see."""

    assistant: Any
    user: Any
    tool: Any
    call: Any
    is_for_agent: Callable[[Any], bool]

    def load(self, row: Mapping[str, Any]) -> Any:
        """Convert a message's fields, as `LiveConversation.snapshot` stores them, to a message."""
        kinds = {"assistant": self.assistant, "user": self.user, "tool": self.tool}
        return kinds[row["role"]].model_validate(row)


class PolicyAgent:
    """A base class for the agents of tau2 and VitaBench, whose answers are the policy's replies."""

    reply: Any
    calls = 0
    """Number of tool calls that the policy has made so far."""

    def get_init_state(self, message_history: Any = None) -> None: ...

    def generate_next_message(self, message: Any, state: None) -> tuple[Any, None]:
        self.calls += len(self.reply.tool_calls or ())
        return self.reply, None


class Conversation:
    """A base class for environments of one episode of tau2 or VitaBench.

    The policy answers the user's messages and reads the results of its tool calls. The library's
    code runs in a thread of `executor`. An adapter implements `_orchestrate` and `_end`.
    """

    types: MessageTypes
    reward = "state"
    """Name under which the episode's reward is reported."""

    def __init__(self, executor: Executor, task: Any) -> None:
        self._executor = executor
        self._task = task
        self._orchestrator: Any = None
        self._system = ""

    def _orchestrate(self, task: Any) -> Any:
        """Return a new orchestrator for a task, and store the policy's system
        prompt in `_system`.
        """
        raise NotImplementedError

    def _check_limits(self) -> None:
        """End the orchestrator's conversation if it has too many messages or failed calls."""
        raise NotImplementedError

    async def _end(self) -> Turn:
        """Return the last turn, with the rewards."""
        raise NotImplementedError

    async def begin(self) -> Turn:
        await self._in_thread(self._start, self._task)
        return Turn((Message("system", self._system), *self._messages_since(0)))

    async def step(self, reply: Message) -> Turn:
        text = reply.content.rpartition("</think>")[2].strip()
        if not (reply.tool_calls or text):
            return Turn((), done=True, rewards={self.reward: 0.0}, facts={"empty_reply": 1.0})
        before = len(self._orchestrator.trajectory) + 1
        await self._in_thread(self._exchange, reply, text)
        if self._orchestrator.done:
            return await self._end()
        answers = list(self._messages_since(before))
        for place, call in enumerate(reply.tool_calls):
            if call.error:
                answers[place] = Message("tool", f"Error: {call.error}")
        return Turn(tuple(answers))

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def _start(self, task: Any) -> None:
        self._orchestrator = self._orchestrate(task)
        self._orchestrator.initialize()
        self._run_to_policy()

    def _run_to_policy(self) -> None:
        orchestrator = self._orchestrator
        while not orchestrator.done and orchestrator.to_role != "agent":
            orchestrator.step()
            self._check_limits()

    def _exchange(self, reply: Message, text: str) -> None:
        """Pass the policy's reply to the orchestrator, and run it until the policy's next turn.

        `text` replaces the text of the reply.
        """
        orchestrator = self._orchestrator
        calls = [
            self.types.call(
                id=f"call_{orchestrator.step_count}_{place}",
                name=call.name,
                arguments=dict(call.arguments),
            )
            for place, call in enumerate(reply.tool_calls)
        ]
        orchestrator.agent.reply = self.types.assistant(
            role="assistant", content=text or None, tool_calls=calls or None
        )
        orchestrator.step()
        self._run_to_policy()

    def _messages_since(self, start: int) -> Iterator[Message]:
        """Yield the messages of the orchestrator's trajectory for the policy, from index `start`
        on.

        The user's tool calls and the agent's messages are left out.
        """
        for message in self._orchestrator.trajectory[start:]:
            if isinstance(message, self.types.assistant) or not self.types.is_for_agent(message):
                continue
            is_result = isinstance(message, self.types.tool)
            yield Message("tool" if is_result else "user", message.content)


class LiveConversation(Conversation):
    """A conversation in which a model plays the user.

    After a resume it continues from its recorded messages, because the model might answer
    differently if it were asked again.
    """

    def _with_history(self, messages: list[Any]) -> Any:
        """Return a copy of the episode's task that begins with the given messages."""
        raise NotImplementedError

    def snapshot(self) -> str:
        fields = {"role", "id", "name", "content", "tool_calls", "requestor", "error"}
        orchestrator = self._orchestrator
        messages = [
            message.model_dump(mode="json", include=fields, exclude_none=True)
            for message in orchestrator.trajectory
        ]
        return json.dumps(
            {"steps": orchestrator.step_count, "errors": orchestrator.num_errors, "said": messages}
        )

    async def resume(self, state: str) -> None:
        """Restore the conversation from its recorded messages, and execute its tool calls again."""
        record = json.loads(state)
        messages = [self.types.load(row) for row in record["said"]]
        await self._in_thread(self._start, self._with_history(messages))
        self._orchestrator.step_count = record["steps"]
        self._orchestrator.num_errors = record["errors"]
