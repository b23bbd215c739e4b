"""Episodes of engine and environment as trajectories, and a queue that bounds staleness."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unstale.engines import Stopwatch
    from unstale.records import Group, GroupRequest
    from unstale.rollout.transcript import OpenWriter


class GroupRollout(Protocol):
    """The part of `episode.Rollout` that a run calls."""

    @property
    def wait_times(self) -> Stopwatch:
        """Seconds that episodes waited, by cause."""
        ...

    @property
    def resources(self) -> AbstractAsyncContextManager[Any]:
        """A context that must be open while episodes run."""
        ...

    async def group(self, request: GroupRequest, *, size: int, open_writer: OpenWriter) -> Group:
        """Run `size` episodes of one task, or finish those that an earlier process started."""
        ...


class Evaluation(Protocol):
    """One episode on each held-out task."""

    async def __call__(self, *, progress: Callable[..., None]) -> list[bool | None]:
        """Return each task's success, or None if its episode failed."""
        ...
