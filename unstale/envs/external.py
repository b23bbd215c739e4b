"""Tasks of an external agent: a function that calls an endpoint and returns a reward."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from numbers import Real
from typing import Any

from unstale.envs import EnvError, ListedTasks, Turn
from unstale.records import Task

Rewards = float | Mapping[str, float]
"""A reward, or several by name."""
Agent = Callable[[str, Any, int, str], Awaitable[Rewards] | Rewards]
"""`(base_url, task, seed, api_key)` -> rewards. A plain function runs in a new thread."""


class ExternalAgent(ListedTasks):
    """A task set whose episodes are runs of `agent`, which gets an item of `tasks` or `held_out`.

    `timeout_s` limits a whole episode; `rollout.timeout_s` limits the time between two calls. At
    most `concurrency` agents run at once. All randomness of an agent has to come from its `seed`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    """Empty: the agent sends its tools with each call."""

    def __init__(  # noqa: PLR0913 - the agent, its tasks and its limits
        self,
        agent: Agent,
        tasks: Sequence[Any],
        *,
        held_out: Sequence[Any] = (),
        name: str = "external",
        timeout_s: float = 3600.0,
        concurrency: int = 64,
    ) -> None:
        if not tasks:
            raise ValueError("tasks is empty: an agent needs at least one task")
        if concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency}")
        self.name = name
        self.data = {"train": tasks, "held_out": held_out}
        self.timeout_s = timeout_s
        self._agent = agent
        self._slots = asyncio.Semaphore(concurrency)

    def env(self, task: Task, seed: int) -> "ExternalEnv":
        return ExternalEnv(self._agent, self.data_of(task), seed, self._slots, self.timeout_s)


@dataclass(frozen=True)
class ExternalEnv:
    """One run of an agent, which makes its own calls."""

    agent: Agent
    task: Any
    seed: int
    slot: asyncio.Semaphore
    """Held while the agent runs. It limits the number of agents that run at once."""
    timeout_s: float

    async def drive(self, base_url: str, api_key: str) -> Turn:
        """Run the agent to its end."""
        arguments = (base_url, self.task, self.seed, api_key)
        call = type(self.agent).__call__
        if inspect.iscoroutinefunction(self.agent) or inspect.iscoroutinefunction(call):
            result = self.agent(*arguments)
        else:
            result = await _in_thread(self.agent, *arguments)
        if inspect.isawaitable(result):
            result = await result
        return Turn((), done=True, rewards=_named(result))


async def _in_thread(agent: Agent, *arguments: Any) -> Any:
    """Run a plain function in a new thread.

    A thread cannot be stopped. After a time-out it runs on, but the endpoint refuses its calls.
    """
    outcome = _Outcome()
    outcome.set_running_or_notify_cancel()  # cancelling the waiting task leaves it settable

    def work() -> None:
        with outcome:
            outcome.set_result(agent(*arguments))

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await asyncio.wrap_future(outcome)


class _Outcome(Future[Any]):
    """A future that takes an error raised in its context."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        if isinstance(error, Exception):
            self.set_exception(error)
        elif error:  # SystemExit would end the event loop
            self.set_exception(EnvError(f"the agent raised {error!r}"))
        return True


def _named(result: Any) -> Mapping[str, float]:
    rewards = result if isinstance(result, Mapping) else {"reward": result}
    for name, value in rewards.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EnvError(
                f"an agent returns a number, or numbers by name; got {value!r} as {name}"
            )
    return {str(name): float(value) for name, value in rewards.items()}
