"""The log of the training loop. It writes to run folder, journal, terminal and TensorBoard."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from unstale.durability.run_folder import RunLog
from unstale.observe.metrics import Sink

if TYPE_CHECKING:  # records import torch, which a report does not need
    from unstale.records import Failure


class Watcher(Protocol):
    """The part of the live display that the recorder calls."""

    def update(self, metrics: Mapping[str, Any]) -> None: ...

    def phase(self, text: str, done: int = 0, total: int = 0) -> None: ...

    def note(self, text: str) -> None: ...


class Recorder:
    """The log of the training loop. The journal gets every event but spans through `on_event`."""

    def __init__(
        self,
        log: RunLog,
        watcher: Watcher,
        *,
        sinks: Sequence[Sink] = (),
        on_event: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self._log = log
        self._watcher = watcher
        self._sinks = sinks
        self._on_event = on_event

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = {"time_s": round(self._log.seconds, 3), **metrics}
        for sink in (self._log, *self._sinks):
            sink.write(step, row)
        self._watcher.update({"step": step, **row})

    def close(self) -> None:
        """Close the sinks. The caller that opened the run folder closes it."""
        for sink in self._sinks:
            sink.close()

    def event(self, kind: str, **fields: Any) -> None:
        self._log.event(kind, **fields)
        self._on_event(kind, **fields)

    def phase(self, text: str, *, done: int = 0, total: int = 0) -> None:
        """Show the current activity on the live display."""
        self._watcher.phase(text, done, total)

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        """Record when the block starts and ends, for a lane (row) of the timeline."""
        with self._log.span(lane, label):
            yield

    def learnt(
        self, step: int, *, points: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> None:
        """Record sampled tokens of a step in the journal and log the route's events."""
        points = list(points)
        tokens = [point for point in points if "true_log_d" not in point]
        audited = [point for point in points if "true_log_d" in point]
        if points:
            columns = {"tokens": _to_columns(tokens), "audited": _to_columns(audited)}
            self._on_event("token_samples", step=step, **columns)
        for event in events:
            self.event(step=step, **event)

    def failure(self, episode: int, failure: "Failure", final: bool) -> None:
        """Log an episode whose environment failed. It is tried again unless `final` is True."""
        self.event("episode_failed", episode=episode, final=final, **_describe(failure))
        self._watcher.note(
            f"episode {episode} of {failure.task.key} failed in {failure.stage}: {failure.error}"
        )

    def blocked(self, name: str, seconds: float) -> None:
        """Log user code that blocked the event loop. Not in the journal: runs differ in it."""
        self._log.event("loop_blocked", by=name, duration_s=round(seconds, 3))
        self._watcher.note(
            f"{name} blocked all episodes for {seconds:.1f} s: make it a plain function, "
            "which runs in a thread, or await"
        )

    def restarted(self, episode: int, failure: "Failure") -> None:
        """Log an episode that restarts, because replaying it after a resume gave another text."""
        self.event("episode_restarted", episode=episode, **_describe(failure))
        self._watcher.note(
            f"episode {episode} of {failure.task.key} was restarted: {failure.error}"
        )


def _to_columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Turn rows with equal keys into columns. Six significant digits save space."""
    if not rows:
        return {}
    return {name: [float(f"{row[name]:.6g}") for row in rows] for name in rows[0]}


def _describe(failure: "Failure") -> dict[str, Any]:
    return {
        "task": failure.task.key,
        "stage": failure.stage,
        "error": failure.error,
        "turns": failure.turns,
        "sampled_tokens": failure.sampled_tokens,
    }
