"""Return the timeline of a run: its activities in a time range, by lane (row of the timeline), and
their shares of the time.

The size of an answer is limited. If a range has too many activities, each lane is divided into
parts of equal length. The answer then has the share of each part in which the activities took
place.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from unstale.analysis.dashboard.database import Database
from unstale.analysis.report.pace import MAX_SHARED, Pace, Span, pace_of
from unstale.durability.run_folder import Row
from unstale.observe.words import WAITING_METRICS, duration, percent

MAX_SPANS = 3000
"""Largest number of activities that an answer lists one by one. If a range has more, the answer has
only the share of time that they cover.
"""

MAX_READ = 200_000
"""Largest number of activities that are read for an answer. If a range has more, the newest are
read.
"""

PARTS = 400
"""Number of parts into which a lane (row of the timeline) with too many activities is divided. It
is also the largest number of bars in a lane of levels, such as an engine's busy share.
"""

MAX_MARKS = 200
"""Largest number of marks of published versions, and of ends of steps, in an answer."""

MAX_ENGINES = 16
"""Largest number of engines that have a lane (row of the timeline) of their own."""


def spans(database: Database, start: float, end: float, limit: int = MAX_SPANS) -> Row:
    """Return the activities between `start` and `end`, in seconds since the start of the run.

    `spans` has lane (row of the timeline), start, end and label of each activity. With more than
    `limit` activities, it is empty. `parts` then has `[lane, shares]` for each lane, as from
    `_parts`. `levels` has bars with the values that are known only by step: the busy share of each
    engine, and the episodes in tools. A bar has lane, start, end, level from 0 to 1 and label.
    `marks` has the times at which versions were published, and `steps` the ends of steps.
    """
    ((first, last, total),) = database.rows('SELECT min(start), max("end"), count(*) FROM spans')
    first, last = first or 0.0, last or 0.0
    start, end = max(start, first), min(end, last)
    inside = 'FROM spans WHERE "end" >= ? AND start <= ?'
    ((count,),) = database.rows(f"SELECT count(*) {inside}", (start, end))
    rows = database.rows(
        f'SELECT lane, start, "end", label {inside} ORDER BY "end" DESC LIMIT ?',
        (start, end, MAX_READ),
    )
    is_dense = count > max(1, min(limit, MAX_SPANS))
    return {
        "first": first,
        "last": last,
        "start": start,
        "end": end,
        "total": total,
        "inside": count,
        "left_out": count - len(rows),
        "spans": [] if is_dense else [list(row) for row in rows],
        "parts": _parts(rows, start, end) if is_dense else [],
        "levels": _levels(database, start, end),
        "marks": _marks(database, start, end),
        "steps": _steps(database, start, end),
    }


def _parts(rows: Sequence[tuple[Any, ...]], start: float, end: float) -> list[list[Any]]:
    """Return `[lane, shares]` for each lane (row of the timeline): the share of each of `PARTS`
    equal parts of the range that the lane's activities cover.
    """
    edges = np.linspace(start, max(end, start + 1e-9), PARTS + 1)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for lane, begin, stop, _ in rows:
        lanes.setdefault(lane, []).append((begin, stop))
    found = []
    for lane, pairs in lanes.items():
        begins, stops = np.array(pairs).T
        covered = np.diff(_integral(begins, edges) - _integral(stops, edges))
        shares = np.clip(covered / np.diff(edges), 0.0, 1.0)
        found.append([lane, [round(float(share), 3) for share in shares]])
    return found


def _integral(times: Any, at: Any) -> Any:
    """Return, for each time t in `at`, the sum of t - u over all u in `times` that are before t."""
    times = np.sort(times)
    sums = np.concatenate(([0.0], np.cumsum(times)))
    count = np.searchsorted(times, at, side="right")
    return count * at - sums[count]


def _levels(database: Database, start: float, end: float) -> list[list[Any]]:
    """Return the bars of values known only by step: the busy share of each engine, and the episodes
    in tools as a share of their largest number.

    A bar has lane (row of the timeline), start, end, level from 0 to 1 and label.
    """
    times = _column(database, "time_s", start, end)
    found: list[list[Any]] = []
    if len(times) < 2:
        return found
    width = max(1, -(-(len(times) - 1) // PARTS))
    busy = {
        int(name[len("engine_") : -len("/busy_share")]): name
        for (name,) in database.rows(
            "SELECT name FROM names WHERE name GLOB 'engine_[0-9]*/busy_share' LIMIT 200"
        )
        if name[len("engine_") : -len("/busy_share")].isdigit()
    }
    shown = {f"engine {number}": busy[number] for number in sorted(busy)[:MAX_ENGINES]}
    for lane, name in (shown or {"engine": "engine/busy_share"}).items():
        values = _column(database, name, start, end)
        for begin, stop, steps in _chunks(times, width):
            level = _mean([(values.get(step), seconds) for step, seconds in steps])
            if level is not None:
                label = f"{_named(steps)}: busy {percent(level)}"
                found.append([lane, begin, stop, min(1.0, max(0.0, level)), label])
    waits = _column(database, "rollout/tool_wait_s", start, end)
    tools = []
    for begin, stop, steps in _chunks(times, width):
        known = [waits[step] for step, _ in steps if step in waits]
        if known and stop > begin:
            tools.append((begin, stop, sum(known) / (stop - begin), _named(steps)))
    most = max((each[2] for each in tools), default=0.0)
    for begin, stop, episodes, name in tools if most else ():
        label = f"{name}: {episodes:.1f} episodes at once, on average"
        found.append(["tools", begin, stop, episodes / most, label])
    return found


def _column(database: Database, name: str, start: float, end: float) -> dict[int, float]:
    """Return step -> value of a metric, for the steps in a time range and one step on each side."""
    return dict(
        database.rows(
            """SELECT step, value FROM metrics WHERE name = (SELECT id FROM names WHERE name = ?)
            AND step BETWEEN
                coalesce((SELECT max(step) FROM metrics WHERE name = (
                    SELECT id FROM names WHERE name = 'time_s') AND value <= ?), 0) AND
                coalesce((SELECT min(step) FROM metrics WHERE name = (
                    SELECT id FROM names WHERE name = 'time_s') AND value >= ?), 1e18)
            ORDER BY step""",
            (name, start, end),
        )
    )


def _chunks(
    times: dict[int, float], width: int
) -> list[tuple[float, float, list[tuple[int, float]]]]:
    """Return parts of `width` steps: start and end of the part in seconds, and its steps with their
    durations in seconds.

    `times` has the end of each step in seconds.
    """
    steps = sorted(times)
    found = []
    for at in range(1, len(steps), width):
        part = steps[at : at + width]
        begin, stop = times[steps[at - 1]], times[part[-1]]
        before = [steps[at - 1], *part[:-1]]
        seconds = [
            (step, max(0.0, times[step] - times[last]))
            for step, last in zip(part, before, strict=True)
        ]
        if stop > begin:
            found.append((begin, stop, seconds))
    return found


def _mean(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else None


def _named(steps: Sequence[tuple[int, float]]) -> str:
    first, last = steps[0][0], steps[-1][0]
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _marks(database: Database, start: float, end: float) -> list[list[Any]]:
    """Return the times in a range at which all engines had loaded a new version, as `[time,
    label]`.

    If there are more than `MAX_MARKS`, they are thinned evenly.
    """
    rows = database.rows(
        """SELECT "end", label FROM spans WHERE "end" BETWEEN ? AND ? AND lane = 'publish'
        ORDER BY "end" LIMIT ?""",
        (start, end, MAX_READ),
    )
    step = max(1, -(-len(rows) // MAX_MARKS))
    return [[time, label] for time, label in rows[::step]]


def _steps(database: Database, start: float, end: float) -> list[float]:
    """Return the times in a range at which steps ended. More than `MAX_MARKS` are thinned
    evenly.
    """
    rows = database.rows(
        "SELECT value FROM metrics WHERE name = (SELECT id FROM names WHERE name = 'time_s') "
        "AND value BETWEEN ? AND ? ORDER BY step",
        (start, end),
    )
    step = max(1, -(-len(rows) // MAX_MARKS))
    return [time for (time,) in rows[::step]]


def pace(database: Database) -> Pace:
    """Return how the trainer and the engines of a run spent their time, and what they waited
    for.
    """
    rows = database.rows(
        'SELECT lane, start, "end", label FROM spans ORDER BY "end" DESC LIMIT ?', (MAX_SHARED + 1,)
    )
    spans = [Span(*row) for row in rows]
    since = min((span.start for span in spans), default=0.0) if len(rows) > MAX_SHARED else -1.0
    begun = database.rows(
        "SELECT value FROM metrics WHERE name = (SELECT id FROM names WHERE name = 'time_s') "
        "AND step <= 0 ORDER BY step DESC LIMIT 1"
    )
    waits = [span.start for span in spans if span.lane == "wait"]
    begin_s = begun[0][0] if begun else min(waits, default=0.0)
    values = database.rows(
        f"""SELECT step, names.name, value FROM names JOIN metrics ON metrics.name = names.id
        WHERE names.name IN ({", ".join("?" * len(WAITING_METRICS))}) AND step > 0
        AND step >= coalesce((SELECT min(step) FROM metrics WHERE name = (
            SELECT id FROM names WHERE name = 'time_s') AND value >= ?), 0) ORDER BY step""",
        (*WAITING_METRICS, since),
    )
    steps: dict[int, Row] = {}
    for step, name, value in values:
        steps.setdefault(step, {})[name] = value
    return pace_of(list(steps.values()), spans, begin_s)


def shares(database: Database) -> list[Row]:
    """Return a bar for the trainer and for each engine, with the share of the time of each
    activity.
    """
    found = pace(database)
    busy = [
        (lane, level, stop - start)
        for lane, start, stop, level, _ in _levels(database, found.begin, found.end)
        if lane.startswith("engine") and start >= found.begin and stop <= found.end
    ]
    lanes = list(dict.fromkeys(lane for lane, _, _ in busy))
    bars = {"trainer": found.trainer, "engine": found.engine}
    if len(lanes) > 1:
        del bars["engine"]
    for lane in lanes if len(lanes) > 1 else ():
        level = _mean([(level, seconds) for each, level, seconds in busy if each == lane]) or 0.0
        bars[lane] = [("generating", "engine", level), ("idle", "wait", 1 - level)]
    about = f"{duration(found.begin)} to {duration(found.end)}"
    return [
        {"name": name, "parts": [list(part) for part in parts], "about": about}
        for name, parts in bars.items()
        if parts
    ]
