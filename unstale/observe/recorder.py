"""The log of the training loop, which writes to run folder, journal, terminal and trackers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from unstale.durability.run_folder import METRICS, RunLog, read_jsonl
from unstale.observe.health import examine
from unstale.observe.trackers import RunOutcome, Trackers

if TYPE_CHECKING:  # `records` imports torch, which a report does not need
    from unstale.records import Failure, Group


class Watcher(Protocol):
    """The methods of the live display (`live.LiveDisplay`) that the recorder calls."""

    def update(self, metrics: Mapping[str, Any]) -> None: ...

    def phase(
        self, text: str, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None: ...

    def note(self, text: str) -> None: ...


class EventLog(Protocol):
    """The methods of the journal that the recorder calls."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Outputs:
    """The receivers of a run's metrics besides its journal: run folder, display and trackers."""

    log: RunLog
    watcher: Watcher
    trackers: Trackers = field(default_factory=Trackers)


MAX_SHOWN = 1000
"""Largest number of failures that the recorder remembers in order not to show one twice."""


class Recorder:
    """The log of the training loop, which sends metrics and events to `Outputs` and to the journal.

    The journal does not get the times of activities (`span`), failures of trackers, and events
    about a blocked event loop.
    """

    def __init__(
        self,
        outputs: Outputs,
        *,
        journal: EventLog | None = None,
        decode: Callable[[list[int]], str] = str,
    ) -> None:
        """Create the log. `decode` turns tokens into text.

        If the run is resumed, the checks of `health` also count its earlier steps, from the run
        folder.
        """
        self._log = outputs.log
        self._watcher = outputs.watcher
        self._journal = journal
        self._trackers = outputs.trackers
        self._decode = decode
        self._health = examine(read_jsonl(self._log.path / METRICS))
        self._shown: set[tuple[str, bool]] = set()
        """Failures that the terminal has shown: text, and True if not tried again."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        row = {"time_s": round(self._log.seconds, 3), **metrics}
        self._log.write(step, row)
        if self._journal:
            self._journal.write(step, row)
        self._trackers.write(step, row)
        self._watcher.update({"step": step, **row})
        for found in self._health.update({"step": step, **row}):
            self.event("health", step=found.step, check=found.name, text=found.text)
            self._watcher.note(f"warning: since step {found.step}, {found.text}")
        self._report_failed_trackers()

    def sample(self, step: int, groups: "Sequence[Group]") -> None:
        """Send one of the batch's episodes as text to the trackers, at step 1 and every
        `TEXT_EVERY` steps.
        """
        self._trackers.sample(step, groups, self._decode)

    def close(self, outcome: RunOutcome) -> None:
        """Close the trackers, which get `outcome`. The caller closes journal and run folder."""
        self._trackers.close(outcome)
        self._report_failed_trackers()

    def _report_failed_trackers(self) -> None:
        for name, error in self._trackers.failures():
            text = f"{type(error).__name__}: {error}"
            self._log.event("tracker_failed", tracker=name, error=text)
            self._watcher.note(f"warning: {name} gets no more metrics, it failed: {text}")

    def event(self, kind: str, **fields: Any) -> None:
        self._log.event(kind, **fields)
        if self._journal:
            self._journal.event(kind, **fields)

    def phase(
        self, text: str, *, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None:
        self._watcher.phase(text, done, total, detail)

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        with self._log.span(lane, label):
            yield

    def trained(
        self, step: int, *, points: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> None:
        """Record a sample of a step's tokens (`points`) in the journal, and log `events`.

        Points with `true_log_d` are tokens whose exact old log-probability an audit computed.
        `events` come from the method that computes old log-probabilities.
        """
        points = list(points)
        tokens = [point for point in points if "true_log_d" not in point]
        audited = [point for point in points if "true_log_d" in point]
        if points and self._journal:
            columns = {"tokens": _to_columns(tokens), "audited": _to_columns(audited)}
            self._journal.event("token_samples", step=step, **columns)
        for event in events:
            self.event(step=step, **event)

    def failure(self, episode: int, failure: "Failure", final: bool) -> None:
        """Log an episode whose environment failed. It is tried again unless `final` is True."""
        self.event("episode_failed", episode=episode, final=final, **_describe(failure))
        text = f"of {failure.task.key} failed in {failure.stage}: {failure.error}"
        self._note_failure(f"episode {episode}", text, final)

    def _note_failure(self, what: str, text: str, final: bool) -> None:
        """Show a failure on the terminal, unless the same text was shown before.

        Often all episodes of a group fail with the same text, and each is tried several times.
        `final` is True if the episode is not tried again.
        """
        key = (text, final)
        if key in self._shown:
            return
        if len(self._shown) >= MAX_SHOWN:
            self._shown.clear()
        self._shown.add(key)
        self._watcher.note(f"{what} {text}{'; it is not tried again' * final}")

    def held_out_failure(self, episode: int, failure: "Failure", final: bool) -> None:
        """Log an episode of an evaluation whose environment failed.

        The log does not get the number `episode`, because episodes of an evaluation have the same
        numbers as training episodes.
        """
        self.event("episode_failed", held_out=True, final=final, **_describe(failure))
        text = f"of the held-out task {failure.task.key} failed in {failure.stage}: {failure.error}"
        self._note_failure("an episode", text, final)

    def blocked(self, name: str, seconds: float) -> None:
        """Log that the user's code called `name` has blocked the event loop for `seconds` seconds.

        The journal does not get the event, because two deterministic runs may differ in it.
        """
        self._log.event("loop_blocked", by=name, duration_s=round(seconds, 3))
        self._watcher.note(
            f"{name} blocked all episodes for {seconds:.1f} s: make it a plain function, "
            "which runs in a thread, or await"
        )

    def restarted(self, episode: int, failure: "Failure") -> None:
        """Log an episode that starts again because a resumed run could not replay it."""
        self.event("episode_restarted", episode=episode, **_describe(failure))
        self._watcher.note(
            f"episode {episode} of {failure.task.key} was restarted: {failure.error}"
        )


def _to_columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return rows with equal keys as a list of numbers for each key, rounded to six digits."""
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
