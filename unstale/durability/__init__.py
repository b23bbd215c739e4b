"""Durability: the journal, the checkpoints and the virtual clock with which a run can resume.

The loop uses the Protocols here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from unstale.durability.checkpoint import Checkpoint, Progress
    from unstale.records import Group, GroupRequest
    from unstale.rollout.transcript import EpisodeWriter
    from unstale.weights.publish import VersionedWeights


class RunJournal(Protocol):
    """The part of the journal that a run calls. See `journal.Journal`."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None: ...

    async def watch(self) -> None:
        """Raise the first error of the writing thread."""
        ...

    async def barrier(self) -> None:
        """Wait until everything recorded so far is on disk."""
        ...

    def add_request(self, request: GroupRequest) -> None:
        """Record that a group starts."""
        ...

    def begin(
        self, number: int, sibling: int, *, episode: int, seed: int, again: bool = False
    ) -> EpisodeWriter:
        """Record that an episode starts. Return the writer of its pieces."""
        ...

    async def finish(self, group: Group) -> None:
        """Record that a group is finished. Return when that is on disk."""
        ...

    async def publishing(self, version: int) -> None:
        """Record that `version` will be loaded by engines. Return when that is on disk."""
        ...

    def consume(self, groups: Sequence[Group], *, step: int, version: int) -> None:
        """Note the groups of a batch. The next checkpoint records them."""
        ...

    async def checkpoint(self, name: str, *, step: int, version: int) -> None:
        """Record a checkpoint, and the groups consumed before it, in one transaction."""
        ...


class CheckpointWriter(Protocol):
    """The part of `checkpoint.Checkpoints` that the loop calls."""

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint:
        """Return the run's state now.

        Its tensors are live: the weights may not move until it is written.
        """
        ...

    def write(self, checkpoint: Checkpoint) -> str:
        """Write a checkpoint to disk and verify it. Return its name."""
        ...

    def prune(self) -> None:
        """Remove old checkpoints, and versions that no kept checkpoint needs."""
        ...
