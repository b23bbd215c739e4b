"""Durability: the journal, checkpoints and virtual clock with which a killed run can be resumed.

The training loop uses the Protocols of this file. Their methods are described in `journal.Journal`
and `checkpoint.Checkpoints`. The planner simulates runs with implementations that write nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from unstale.durability.checkpoint import Checkpoint, Progress
    from unstale.records import Group, GroupRequest
    from unstale.rollout.transcript import EpisodeWriter
    from unstale.token_values import TokenValues
    from unstale.weights.publish import VersionedWeights


class RunJournal(Protocol):
    """The journal's methods that a run calls.

    The journal is a database of a run's episodes on disk.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None: ...

    async def watch(self) -> None: ...

    async def barrier(self) -> None: ...

    def add_request(self, request: GroupRequest) -> None: ...

    def resize(self, number: int, size: int) -> None: ...

    def begin(
        self, number: int, sibling: int, *, episode: int, seed: int, again: bool = False
    ) -> EpisodeWriter: ...

    async def finish(self, group: Group) -> None: ...

    async def publishing(self, version: int) -> None: ...

    def commit(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        version: int,
        replayed: Sequence[int] = (),
        tokens: Sequence[TokenValues] = (),
    ) -> None: ...

    async def checkpoint(self, name: str, *, step: int, version: int) -> None: ...


class CheckpointWriter(Protocol):
    """The checkpoint methods that the training loop calls."""

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint: ...

    def write(self, checkpoint: Checkpoint) -> str: ...

    def prune(self) -> Mapping[str, str]: ...
