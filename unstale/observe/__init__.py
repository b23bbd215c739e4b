"""Show and record a run: its log, the live display, experiment trackers and the report.

These modules import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # `records` imports torch
    from unstale.observe.trackers import RunOutcome
    from unstale.records import Group


class RunRecorder(Protocol):
    """The methods of `recorder.Recorder`, the log of a run, that the training loop calls."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the metrics of a step."""
        ...

    def sample(self, step: int, groups: "Sequence[Group]") -> None:
        """Offer the episodes of the batch of step `step` to the experiment trackers.

        The trackers may show one of them as text.
        """
        ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def phase(
        self, text: str, *, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None:
        """Show the run's current activity `text` on the live display, with progress `done` of
        `total`.

        `detail` returns a text that says what the run waits for. It is called repeatedly.
        """
        ...

    def span(self, lane: str, label: str) -> AbstractContextManager[None]:
        """Return a context that records the times at which its body starts and ends.

        `lane` is the row of the report's timeline that shows them, and `label` the text there.
        """
        ...

    def trained(
        self, step: int, *, points: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> None:
        """Record a sample of the tokens that step `step` trained on.

        `points` has a row for each token of the sample: its lag (age of the version that sampled
        it, in versions), log_d (old_logp - behavior_logp) and log_s (logp - old_logp). `events` are
        log entries of the method that computes old log-probabilities.
        """
        ...

    def close(self, outcome: RunOutcome) -> None: ...
