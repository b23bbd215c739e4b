"""Run episodes, in which the policy acts in environments, and bound their staleness.

The staleness of a token is the number of weight versions between sampling it and training on it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unstale.durability.best_policy import BestPolicy
    from unstale.engines import Stopwatch
    from unstale.records import Failure, Fork, Group, GroupRequest, Trajectory
    from unstale.rollout.rounds import Rounds
    from unstale.rollout.transcript import OpenWriter


More = Callable[["Sequence[Trajectory | Failure]"], Awaitable["Sequence[Fork | None]"]]
"""A function `(results)` that decides how a group continues. A group is several episodes of one
task, and `results` are those of its episodes so far, in the order of their start. It returns one
element for each further episode to run: the `Fork` that names the earlier episode whose first
tokens it repeats, or None for an episode that starts anew. An empty sequence ends the group.
"""


async def no_more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork | None]:
    """Return (): the group runs no further episodes."""
    return ()


def activity(wait_times: Stopwatch) -> str:
    """Return a text with the numbers of episodes that wait for a reply and for a tool or reward.

    `wait_times.running` has these numbers. The text is empty if no episode waits.

    >>> from unstale.engines import Stopwatch
    >>> waits = Stopwatch("generation_wait", "tool_wait")
    >>> waits.running["tool_wait"] += 3
    >>> activity(waits)
    '3 in tools or rewards'
    """
    words = {"generation_wait": "generating", "tool_wait": "in tools or rewards"}
    numbers = ((wait_times.running[name], text) for name, text in words.items())
    return ", ".join(f"{number} {text}" for number, text in numbers if number)


class GroupRollout(Protocol):
    """The interface of `episode.Rollout` that the training loop uses.

    The planner (`unstale plan`) implements it with simulated episodes.
    """

    @property
    def wait_times(self) -> Stopwatch:
        """The seconds for which episodes waited for replies and for tools. Metrics report them."""
        ...

    @property
    def resources(self) -> AbstractAsyncContextManager[Any]:
        """A context that must be open while episodes run.

        It may serve an HTTP endpoint, for example.
        """
        ...

    async def group(
        self,
        request: GroupRequest,
        *,
        size: int,
        open_writer: OpenWriter,
        more: More = no_more,
        rounds: Rounds | None = None,
    ) -> Group:
        """Run `size` episodes of one task and return them as a group.

        Episodes that were begun before the run was resumed count towards `size`. When all have
        ended, `more` is called with their results and returns the start of each further episode,
        until it returns none. `rounds` lets a strategy fork and end episodes while they run.
        `open_writer` opens an episode's record in the journal.
        """
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a run on held-out tasks, on which it does not train."""

    measure: Callable[..., Awaitable[list[bool | None]]]
    """A function that runs `samples` episodes on each held-out task. It returns whether each
    episode succeeded, or None for an episode that failed. In this list, the episodes of one task
    are next to each other. Its argument `progress` is a function that it calls with a text, the
    numbers `done` and `total`, and a function `detail` that returns what the episodes wait for.
    """
    samples: int = 1
    """Number of episodes on each held-out task."""
    best: BestPolicy | None = None
    """The best policy so far, measured on the held-out tasks. None if the run keeps no best
    policy.
    """

    @property
    def ends_run(self) -> bool:
        """True if the run should stop because its evaluations no longer improve."""
        return self.best is not None and self.best.ends_run
