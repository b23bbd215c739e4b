"""Tasks of an external agent: a function that calls the policy over HTTP and returns a reward."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unstale.envs import ListedTasks, Turn, read_rewards
from unstale.envs.guard import call, is_coroutine
from unstale.records import Task

Rewards = float | Mapping[str, float]
"""One reward, or name -> reward."""
Agent = Callable[[str, Any, int, str], Awaitable[Rewards] | Rewards]
"""A function `(base_url, task, seed, api_key)` that runs one episode and returns its rewards. It
runs in a new thread unless it is a coroutine.
"""


def role_url(base_url: str, role: str) -> str:
    """Return the base URL for calls in one role of the agent.

    >>> role_url("http://127.0.0.1:8000/e/0a1b/v1", "planner")
    'http://127.0.0.1:8000/e/0a1b/planner/v1'
    """
    return f"{base_url.removesuffix('/v1')}/{role}/v1"


class ExternalAgent(ListedTasks):
    """A task set in which each episode is one run of the function `agent`.

    The agent gets an item of `tasks` or `held_out` as its task. `timeout_s` limits its whole run,
    and `rollout.timeout_s` the time between two of its calls. At most `concurrency` agents run at
    once. All random choices of an agent must follow from its `seed`.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    """Empty, because the agent sends its tools with each call."""

    def __init__(  # noqa: PLR0913 - the agent, its tasks and its limits
        self,
        agent: Agent,
        tasks: Sequence[Any],
        *,
        held_out: Sequence[Any] = (),
        name: str = "external",
        roles: Sequence[str] = (),
        timeout_s: float = 3600.0,
        concurrency: int = 64,
    ) -> None:
        """Create the task set. `roles` are the policy's roles in an episode, () without roles."""
        for role in roles:
            if not role.isidentifier() or role == "v1" or [*roles].count(role) > 1:
                raise ValueError(
                    f"roles must be different names of letters, digits and _, got {role!r}"
                )
        self.roles = tuple(roles)
        if not tasks:
            raise ValueError("tasks is empty: an agent needs at least one task")
        if concurrency < 1:
            raise ValueError(f"concurrency must be >= 1, got {concurrency}")
        self.name = name
        self.data = {"train": tasks, "held_out": held_out}
        self.timeout_s = timeout_s
        self._agent = agent
        self._slots = asyncio.Semaphore(concurrency)

    @property
    def is_coroutine(self) -> bool:
        """True if the agent runs on the event loop, False if it runs in a thread."""
        return is_coroutine(self._agent)

    def env(self, task: Task, seed: int) -> "ExternalEnv":
        return ExternalEnv(self._agent, self.data_of(task), seed, self._slots, self.timeout_s)


@dataclass(frozen=True)
class ExternalEnv:
    """One run of an external agent, which calls the policy itself."""

    agent: Agent
    task: Any
    seed: int
    slot: asyncio.Semaphore
    """Held while the agent runs, to limit how many run at once."""
    timeout_s: float

    async def drive(self, base_url: str, api_key: str) -> Turn:
        """Run the agent to its end. Return a turn with its rewards.

        After a time-out, an agent's thread continues, because Python cannot stop it. The endpoint
        then refuses its calls.
        """
        rewards = await call(self.agent, base_url, self.task, self.seed, api_key)
        name = getattr(self.agent, "__qualname__", type(self.agent).__name__)
        return Turn((), done=True, rewards=read_rewards(rewards, f"the agent {name}: "))
