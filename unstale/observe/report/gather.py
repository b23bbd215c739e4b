"""Read a run folder for its report. All data are checked, because others may have written them."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from unstale.config import ConfigError
from unstale.config.names import RENAMED
from unstale.config.options import TECHNIQUE_OPTIONS
from unstale.durability.run_folder import AUDIT, EVENTS, METRICS, SURVIVORS, Row, RunFolder
from unstale.observe.health import TrainingHealth, examine
from unstale.observe.report.held_out import HeldOut, held_out, improved
from unstale.observe.report.pace import Pace, Span, pace_of
from unstale.observe.report.words import is_exact, mapping, number

MAX_POINTS, MAX_SPANS, MAX_FAILURES, MAX_LAG = 20_000, 4_000, 20, 99

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """The logarithms of a token's ratios D = old_logp / behavior_logp and S = logp / old_logp.

    `lag` is the number of versions published between sampling and training.
    """

    lag: int
    log_d: float
    log_s: float


@dataclass(frozen=True, slots=True)
class AuditedPoint:
    """A token's ratios, computed with the old_logp of the route and with the true old_logp."""

    by_route: Point
    true: Point


@dataclass(frozen=True, slots=True)
class Chosen:
    """A conversation for the page. `why` says why it was chosen, such as "early success"."""

    why: str
    record: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The data of a run that its report shows."""

    folder: Path
    name: str
    config: Row
    rows: list[Row]
    """Rows of `metrics.jsonl` from step 1 on, sorted by step."""
    begin_s: float
    """Start of the first step, in seconds since the start of the run."""
    evaluations: list[HeldOut]
    spans: list[Span]
    spans_left_out: int
    pace: Pace
    points: list[Point]
    points_seen: int
    audited: list[AuditedPoint]
    audit: Row
    """Results of `unstale audit`. Empty if there are none."""
    survivors: Row
    """Statistics from `survivors.json` of how groups and attempts ended. Empty if there are
    none.
    """
    conversations: list[Chosen]
    health: TrainingHealth
    failures: list[Row]
    num_failures: int
    num_held_out_failures: int
    """Number of episodes of evaluations that failed. They are in no other number of failures."""
    forks: list[Row]
    data_changes: list[Row]
    """The events of resumes with other rows: the step after which it began, and what changed."""
    started: Row
    stopped: Row
    """The event with which the run ended. Empty if it has not ended since it was last resumed."""
    error: str
    gaps: list[str]

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the value of an option by its full name, such as `trainer.lr`."""
        value: Any = self.config
        for part in name.split("."):
            value = mapping(value).get(part)
        return default if value is None else value

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return `(step, value)` for each step at which a metric has a value."""
        pairs = ((step_of(row), number(row.get(name))) for row in self.rows)
        return [(step, value) for step, value in pairs if value is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the steps at which it has a value."""
        values = [value for _, value in self.series(name)]
        return sum(values) / len(values) if values else None

    @property
    def improved(self) -> bool:
        """True if the last held-out success is above the first."""
        return improved(self.evaluations)

    @property
    def route(self) -> str:
        return str(self.setting("old_logps.route", "unknown"))

    @property
    def exact(self) -> bool:
        return is_exact(self.setting)

    @property
    def steps(self) -> int:
        return step_of(self.rows[-1]) if self.rows else 0

    @property
    def planned(self) -> int:
        return int(number(self.setting("steps")) or 0)

    @property
    def seconds(self) -> float | None:
        times = [time for row in self.rows if (time := number(row.get("time_s"))) is not None]
        return times[-1] if times else None

    @property
    def bound(self) -> float | None:
        """Return the guaranteed limit on staleness in versions."""
        bounds = self.series("schedule/staleness_bound")
        return bounds[-1][1] if bounds else number(self.setting("schedule.max_staleness"))


def gather(path: Path) -> Gathered:
    """Read a run folder. Missing or damaged data are listed in `gaps` and raise no error.

    Raises `ConfigError` if the folder has no run, or one with old names of the options.
    """
    folder = RunFolder(path)
    config = folder.config()
    refuse_old(config, path)
    rows = sorted(
        (row for row in folder.rows(METRICS) if number(row.get("step")) is not None), key=step_of
    )
    trained = [row for row in rows if step_of(row) > 0]
    before = [
        time
        for row in rows
        if step_of(row) <= 0 and (time := number(row.get("time_s"))) is not None
    ]
    log = list(folder.rows(EVENTS))
    events: dict[str, list[Row]] = {}
    for event in log:
        events.setdefault(str(event.get("kind")), []).append(event)
    spans = _spans(events.get("span", ()))
    failed = [event for event in events.get("episode_failed", ()) if event.get("final", True)]
    failures = [event for event in failed if not event.get("held_out")]
    last = step_of(trained[-1]) if trained else 0
    samples, conversations = _read_journal(folder, last)
    points, audited, seen = _points(samples)
    begin_s = (
        before[-1]
        if before
        else min((span.start for span in spans if span.lane == "wait"), default=0.0)
    )
    return Gathered(
        folder=path,
        name=path.resolve().name,
        config=config,
        rows=trained,
        begin_s=begin_s,
        evaluations=held_out(events.get("eval", ())),
        spans=spans[-MAX_SPANS:],
        spans_left_out=max(0, len(spans) - MAX_SPANS),
        pace=pace_of(trained, spans, begin_s),
        points=points,
        points_seen=seen,
        audited=audited,
        audit=folder.read_object(AUDIT),
        survivors=folder.read_object(SURVIVORS),
        conversations=conversations,
        health=examine(trained),
        failures=failures[:MAX_FAILURES],
        num_failures=len(failures),
        num_held_out_failures=len(failed) - len(failures),
        forks=events.get("forked", []),
        data_changes=events.get("data_changed", []),
        started=events.get("started", [{}])[-1],
        stopped=last_stop(log),
        error=folder.error(),
        gaps=folder.gaps,
    )


def last_stop(events: Iterable[Row]) -> Row:
    """Return the event with which a run ended.

    Empty if the run has not ended, or was resumed after it.

    >>> last_stop([{"kind": "started"}, {"kind": "stopped", "reason": "Ctrl-C"}])["reason"]
    'Ctrl-C'
    >>> last_stop([{"kind": "stopped", "reason": "Ctrl-C"}, {"kind": "resumed"}])
    {}
    """
    stopped: Row = {}
    for event in events:
        match event.get("kind"):
            case "started" | "resumed":
                stopped = {}
            case "stopped":
                stopped = event
    return stopped


def refuse_old(config: Row, path: Path) -> None:
    """Raise `ConfigError` for a run from before the options and metrics were renamed."""
    names = RENAMED.keys() - {"tensorboard"}  # this option was renamed after the metrics
    old = next((name for name in (*config, *flatten(config)) if name in names), None)
    if old:
        raise ConfigError(
            f"{path} is from an older version of unstale ({old} is now {RENAMED[old]}). "
            "Metrics were renamed, too: write its report with the version that ran it."
        )


def _read_journal(folder: RunFolder, last: int) -> tuple[list[Row], list[Chosen]]:
    """Return samples of trained tokens, and a few conversations as text, from the journal."""
    from unstale.durability.journal import (  # this imports torch
        JOURNAL,
        Journal,
        JournalError,
        conversation,
        trained_episodes,
    )
    from unstale.durability.journal.conversations import load_decoder

    samples: list[Row] = []
    conversations: list[Chosen] = []
    if not folder.holds(JOURNAL):
        folder.add_gap(f"{JOURNAL} is missing")
        return samples, conversations
    try:
        with Journal.read(folder.path) as journal:
            samples.extend(journal.token_samples())
            chosen = _conversations(trained_episodes(journal), last)
            decode = load_decoder(folder.path) if chosen else str
            for choice in chosen:
                text = conversation(journal.episode(choice.record["episode"]), decode)
                conversations.append(Chosen(choice.why, text))
    except (JournalError, OSError, ValueError) as error:
        folder.add_gap(f"conversations and samples are incomplete: {error}")
    return samples, conversations


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options under their full names, as on the command line.

    >>> flatten({"a": 1, "b": {"c": 2}, "technique_options": {"ess_lr": {"base": 0.5}}})
    {'a': 1, 'b.c': 2, 'ess_lr.base': 0.5}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and name == TECHNIQUE_OPTIONS:
            flat.update(flatten(value, prefix))
        elif isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def step_of(row: Mapping[str, Any]) -> int:
    return int(number(row.get("step")) or 0)


def histogram(row: Mapping[str, Any]) -> dict[int, float]:
    """Return how many tokens a step trained on at each lag. Invalid entries are left out."""
    return by_lag(mapping(row.get("schedule/staleness_histogram")).items())


def lag_values(row: Mapping[str, Any], prefix: str) -> dict[int, float]:
    """Return the metrics of one step that are named `prefix` + lag, by lag."""
    return by_lag(
        (name.removeprefix(prefix), value) for name, value in row.items() if name.startswith(prefix)
    )


def by_lag(pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Return numbers by lag. Pairs without a lag or a number are left out.

    >>> by_lag([("0", 3), ("x", 1), ("2", None), (1, 4.5)])
    {0: 3.0, 1: 4.5}
    """
    lags: dict[int, float] = {}
    for key, value in pairs:
        text, amount = str(key), number(value)
        if amount is not None and text.isascii() and text.isdigit() and len(text) <= 2:
            lags[int(text)] = amount
    return dict(sorted(lags.items()))


def _spans(events: Iterable[Row]) -> list[Span]:
    spans = []
    for event in events:
        start, end = number(event.get("start")), number(event.get("end"))
        if start is not None and end is not None and 0 <= start <= end:
            spans.append(Span(str(event.get("lane")), start, end, str(event.get("label") or "")))
    return spans


def _points(rows: Iterable[Row]) -> tuple[list[Point], list[AuditedPoint], int]:
    """Return samples of the tokens without and with a true old_logp, and the number without."""
    rng = random.Random(0)
    kept: list[Point] = []
    audited: list[AuditedPoint] = []
    seen = 0
    seen_audited = 0
    for row in rows:
        lag, log_d, log_s = (number(row.get(name)) for name in ("lag", "log_d", "log_s"))
        if lag is None or log_d is None or log_s is None or not 0 <= lag <= MAX_LAG:
            continue
        point = Point(int(lag), log_d, log_s)
        true_d, true_s = number(row.get("true_log_d")), number(row.get("true_log_s"))
        if true_d is not None and true_s is not None:
            seen_audited += 1
            _sample(
                audited, AuditedPoint(point, Point(int(lag), true_d, true_s)), seen_audited, rng
            )
            continue
        seen += 1
        _sample(kept, point, seen, rng)
    return kept, audited, seen


def _sample(kept: list[T], item: T, seen: int, rng: random.Random) -> None:
    """Keep a uniform sample of all items (reservoir sampling).

    `seen` is the number of items so far, including this one.
    """
    if len(kept) < MAX_POINTS:
        kept.append(item)
    elif (index := rng.randrange(seen)) < MAX_POINTS:
        kept[index] = item


def succeeded(record: Mapping[str, Any]) -> bool:
    """Return the fact `success` of an episode. Without it, a reward above 0.5 is a success."""
    success = record.get("success")
    return bool(success) if success is not None else (number(record.get("reward")) or 0.0) > 0.5


def _conversations(rows: Iterable[Row], last: int) -> list[Chosen]:
    """Choose a success and a failure from the first and from the last quarter of the steps.

    Episodes that several versions sampled are preferred. Among them, the earliest is chosen for the
    first quarter, the latest for the last.
    """
    best: dict[tuple[bool, bool], tuple[tuple[int, int], Row]] = {}
    quarter = max(1, last // 4)
    for row in rows:
        step = step_of(row)
        versions = row.get("versions")
        mixed = min(2, len(versions)) if isinstance(versions, list) else 0
        for late in (False, True):
            if step > quarter if not late else step <= last - quarter:
                continue
            slot, rank = (late, succeeded(row)), (mixed, step if late else -step)
            if slot not in best or rank > best[slot][0]:
                best[slot] = (rank, row)
    chosen: list[Chosen] = []
    shown: set[int] = set()
    for late, won in ((False, True), (False, False), (True, True), (True, False)):
        if (late, won) in best and id(best[late, won][1]) not in shown:
            record = best[late, won][1]
            shown.add(id(record))
            chosen.append(
                Chosen(f"{'late' if late else 'early'} {'success' if won else 'failure'}", record)
            )
    return chosen
