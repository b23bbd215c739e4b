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
"""A function of the results so far of a group's episodes, in the order of their start. A group is
several episodes of one task. The function returns an element for each further episode to run: the
place at which it is forked from an earlier one, or None for an episode with its own beginning. No
element ends the group.
"""


async def no_more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork | None]:
    """Return () for no further episodes: a group then ends when its first episodes have ended."""
    return ()


def activity(wait_times: Stopwatch) -> str:
    """Return a text that counts the episodes waiting for replies and for tools.

    Empty if none waits.

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
        """The seconds that episodes waited for replies and for tools, for metrics."""
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

        Episodes that were started before a resume count as part of the `size`. When all have ended,
        `more` is called with their results: it returns an element for each further episode to run,
        until it returns none. `rounds` fork and prune episodes while they run. `open_writer` opens
        the journal's record of an episode.
        """
        ...


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a run on held-out tasks, on which it does not train."""

    measure: Callable[..., Awaitable[list[bool | None]]]
    """A function that runs `samples` episodes on each held-out task. It returns each episode's
    success, or None for an episode that failed, with all episodes of one task in a row. It calls
    its argument `progress` with a text, the numbers `done` and `total`, and a function `detail`
    whose text names what the episodes wait for.
    """
    samples: int = 1
    """Number of episodes on each held-out task."""
    best: BestPolicy | None = None
    """The best policy so far, by evaluation. None if the run does not keep one."""

    @property
    def ends_run(self) -> bool:
        """True if the run should stop, because its evaluations have not improved for long
        enough.
        """
        return self.best is not None and self.best.ends_run
