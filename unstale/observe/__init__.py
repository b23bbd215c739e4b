"""Watching a run: its log, the live display, the report. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # records import torch
    from unstale.records import Group


class RunRecorder(Protocol):
    """The part of `recorder.Recorder` that the loop calls."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics row of a step."""
        ...

    def sample(self, step: int, groups: "Sequence[Group]") -> None:
        """Offer the episodes of a batch to the trackers, which show one of them as text."""
        ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def phase(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """Show the current activity in the live display."""
        ...

    def span(self, lane: str, label: str) -> AbstractContextManager[None]:
        """Record when the block starts and ends, for a lane (row) of the timeline."""
        ...

    def learnt(
        self, step: int, *, points: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> None:
        """Record the ratios of some tokens of a batch, and events of the old_logp route."""
        ...

    def close(self) -> None: ...
