"""Rollout: episodes of an engine and an environment, and a bound on the age of their tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unstale.engines import Stopwatch
    from unstale.records import Group, GroupRequest
    from unstale.rollout.transcript import OpenWriter


class GroupRollout(Protocol):
    """The part of `episode.Rollout` that the loop uses. The planner simulates it."""

    @property
    def wait_times(self) -> Stopwatch:
        """Seconds that episodes waited for replies and for tools."""
        ...

    @property
    def resources(self) -> AbstractAsyncContextManager[Any]:
        """A context that must be open while episodes run."""
        ...

    async def group(self, request: GroupRequest, *, size: int, open_writer: OpenWriter) -> Group:
        """Run `size` episodes of one task, or finish those that an earlier process started."""
        ...


Evaluation = Callable[..., Awaitable[list[bool | None]]]
"""Runs an episode on each held-out task and returns its success, or None for a failed episode.

The argument `progress` is called with a text and the numbers `done` and `total`."""
