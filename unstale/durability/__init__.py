"""Durability: the files and the virtual clock with which a killed run can be resumed.

The journal records a run's episodes, and checkpoints have its weights and other state. The training
loop uses the Protocols of this file. Their methods are described in `journal.Journal` and
`checkpoint.Checkpoints`. The planner, which simulates runs, uses implementations that write
nothing.
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
    """The methods of a journal that a run calls.

    A journal is a database on disk that records the episodes of a run.
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
    """The methods of `Checkpoints` that the training loop calls."""

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint: ...

    def write(self, checkpoint: Checkpoint) -> str: ...

    def prune(self) -> Mapping[str, str]: ...
