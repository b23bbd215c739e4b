"""Rollout: run episodes of an engine and an environment, and bound the age of their tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from unstale.engines import Stopwatch
    from unstale.records import Group, GroupRequest
    from unstale.rollout.transcript import OpenWriter


class GroupRollout(Protocol):
    """The methods of `episode.Rollout` that the training loop calls. The planner simulates them."""

    @property
    def wait_times(self) -> Stopwatch:
        """The seconds that episodes waited for replies and for tools, for metrics."""
        ...

    @property
    def resources(self) -> AbstractAsyncContextManager[Any]:
        """Return a context that must be open while episodes run, such as an HTTP endpoint."""
        ...

    async def group(self, request: GroupRequest, *, size: int, open_writer: OpenWriter) -> Group:
        """Run `size` episodes of one task. Complete those that were started before a resume.

        `open_writer` opens the journal's record of an episode.
        """
        ...


Evaluation = Callable[..., Awaitable[list[bool | None]]]
"""A function that runs an episode on each held-out task. It returns the success of each, or None
for a failed episode. Its argument `progress` is called with a text and the numbers `done` and
`total`.
"""
