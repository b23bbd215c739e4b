"""Compute the shares of a run's time in which its trainer and engine worked and waited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unstale.observe.words import Waiting, number, waiting


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of a run, with its start and end in seconds since the run began.

    `lane` is the row of the timeline that shows it.
    """

    lane: str
    start: float
    end: float
    label: str


LANES = (
    ("engine", "generation", "engine"),
    ("wait", "trainer waits", "wait"),
    ("old_logps", "scoring", "d"),
    ("trainer", "training", "trainer"),
    ("publish", "publishing", "s"),
    ("checkpoint", "checkpoints", "checkpoint"),
    ("eval", "evaluation", "good"),
)
"""Lanes (rows) of the timeline: recorded name, name on the page, and colour."""

FIRST_OF_ALL = ("trainer", "old_logps", "wait", "eval", "publish", "checkpoint")
"""Lanes (rows of the timeline) of the trainer's activities, by priority. Time in which activities
overlap counts for the lane that comes first.
"""

_WORK = {
    "scoring": "Scoring old log-probabilities",
    "training": "Training",
    "publishing": "Publishing",
    "checkpoints": "Checkpointing",
    "evaluation": "Evaluation",
}
"""Name of an activity on the page -> its name as a bottleneck, a key of `words.BOTTLENECKS`."""

MAX_SHARED = 4000
"""Largest number of activities from which shares of time are computed. If there are more, only the
newest are used.
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """The shares of time in which trainer and engine worked and waited.

    The shares are of the time from `begin` to `end`, in seconds since the start of the run.
    """

    wait: Waiting
    trainer: Sequence[tuple[str, str, float]] = ()
    """The trainer's activities, as (name, colour, share of the time). Empty if none was
    recorded.
    """
    begin: float = 0.0
    end: float = 0.0

    @property
    def engine(self) -> list[tuple[str, str, float]]:
        """The engine's activities, as (name, colour, share of the time). Empty if its time is not
        known.
        """
        idle = self.wait.engine
        return [] if idle is None else [("generating", "engine", 1 - idle), ("idle", "wait", idle)]


def pace_of(rows: Sequence[Mapping[str, Any]], spans: Sequence[Span], begin_s: float) -> Pace:
    """Return the shares of a run's time in which trainer and engine worked and waited.

    `rows` are the metrics from step 1 on. `spans` are the recorded activities. `begin_s` is the
    start of step 1, in seconds since the start of the run. With more than two steps, step 1 is left
    out, because it waits for the first groups. Only the newest `MAX_SHARED` activities are used.
    The trainer's shares are computed from activities, or from metrics if no activities were
    recorded.
    """
    timed: Sequence[Mapping[str, Any]] = rows if len(rows) > 2 else [{"time_s": begin_s}, *rows]
    newest = sorted(spans, key=lambda span: span.end)[-MAX_SHARED:]
    if len(newest) < len(spans):
        timed = [row for row in timed if (number(row.get("time_s")) or 0.0) >= newest[0].start]
    wait = waiting(timed)
    times = [time for row in timed if (time := number(row.get("time_s"))) is not None]
    if len(times) < 2:
        return Pace(wait)
    parts = time_shares(newest, times[0], times[-1])
    if parts:
        shares = {name: share for name, _, share in parts}
        wait = replace(
            wait,
            trainer=shares.get("trainer waits", 0.0),
            work={_WORK[name]: share for name, share in shares.items() if name in _WORK},
        )
    return Pace(wait, parts, times[0], times[-1])


def time_shares(spans: Sequence[Span], begin: float, end: float) -> list[tuple[str, str, float]]:
    """Return the trainer's activities from `begin` to `end`, as (name, colour, share of the time).

    Times are in seconds since the start of the run. Where activities overlap, the time counts for
    the one that comes first in `FIRST_OF_ALL`. More than 0.5% of other time is the entry `other`.
    Empty without an activity.
    """
    inside = [
        replace(span, start=max(span.start, begin), end=min(span.end, end))
        for span in spans
        if span.end > begin and span.start < end
    ]
    spent, total = _alone(inside), end - begin
    if total <= 0 or not any(spent.values()):
        return []
    shares = [
        (name, colour, spent[lane] / total)
        for lane, name, colour in LANES
        if spent.get(lane, 0.0) > 0
    ]
    other = 1 - sum(share for _, _, share in shares)
    return [*shares, ("other", "other", other)] if other > 0.005 else shares


def _alone(spans: Sequence[Span]) -> dict[str, float]:
    """Return lane -> seconds of its activities in which no lane before it in `FIRST_OF_ALL` is
    active.

    >>> spans = [Span("trainer", 0, 4, ""), Span("publish", 3, 6, ""), Span("publish", 5, 7, "")]
    >>> _alone(spans)["publish"]
    3.0
    """
    covered: list[tuple[float, float]] = []
    spent: dict[str, float] = {}
    covered_s = 0.0
    for lane in FIRST_OF_ALL:
        merged: list[tuple[float, float]] = []
        intervals = [(span.start, span.end) for span in spans if span.lane == lane]
        for start, end in sorted([*covered, *intervals]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        covered = merged
        total = sum(end - start for start, end in covered)
        spent[lane] = float(total - covered_s)
        covered_s = total
    return spent
