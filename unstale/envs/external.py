"""Bring your own agent: a function that talks to an OpenAI-compatible endpoint, and says what its episode was worth."""

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from types import MappingProxyType
from typing import Any

from unstale.envs import EnvError, ListedTasks, Turn
from unstale.records import Task

Verdict = float | Mapping[str, float]
"""A reward, or several by name."""
Agent = Callable[[str, Any, int, str], Awaitable[Verdict] | Verdict]
"""`(base_url, task, seed, api_key)` -> what it was worth. A plain function gets a thread of its own."""


class ExternalAgent(ListedTasks):
    """A task set whose episodes `agent` runs by itself. `tasks` and `held_out` are whatever it is to get as `task`.

    `timeout_s` is for a whole episode; what the agent may take between two calls is `rollout.timeout_s`. At most
    `concurrency` agents run at the same time. What is random in an agent is to come from its `seed`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    """Each call brings its own."""

    def __init__(  # noqa: PLR0913 - what it is, and the limits that it keeps
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
            raise ValueError("an agent needs at least one task")
        if concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency}")
        self.name = name
        self._agent = agent
        self.data = {"train": tasks, "held_out": held_out}
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(concurrency)

    def env(self, task: Task, seed: int) -> "ExternalEnv":
        return ExternalEnv(self._agent, (self.data_of(task), seed), self._slots, self._timeout_s)


class ExternalEnv:
    """One run of the agent. It asks by itself, so there is nothing to answer to."""

    def __init__(
        self, agent: Agent, given: tuple[Any, int], slot: asyncio.Semaphore, timeout_s: float
    ) -> None:
        self._agent, self._given = agent, given
        self.slot = slot
        """Held while it runs."""
        self.timeout_s = timeout_s

    async def drive(self, base_url: str, api_key: str) -> Turn:
        """Run the agent to its end."""
        if inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(
            type(self._agent).__call__
        ):
            found = self._agent(base_url, *self._given, api_key)
        else:
            found = await _in_thread(self._agent, base_url, *self._given, api_key)
        return Turn(
            (), done=True, rewards=_named(await found if inspect.isawaitable(found) else found)
        )


async def _in_thread(agent: Agent, *given: Any) -> Any:
    """A thread cannot be stopped: one that nobody waits for any more is refused every further call."""
    told = _Told()

    def work() -> None:
        with told:
            told.result = agent(*given)

    threading.Thread(target=work, name="agent", daemon=True).start()
    return await told.future


class _Told:
    """Takes what a block in another thread leaves or raises to the loop that waits for it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self._loop.create_future()
        self.result: Any = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> bool:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._tell, error)
        return True

    def _tell(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(
                error if isinstance(error, Exception) else EnvError(f"it raised {error!r}")
            )


def _named(found: Any) -> Mapping[str, float]:
    """Rewards by name."""
    named = found if isinstance(found, Mapping) else {"reward": found}
    for name, value in named.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise EnvError(
                f"an agent returns a number, or numbers by name; got {value!r} as {name}"
            )
    return MappingProxyType({str(name): float(value) for name, value in named.items()})
