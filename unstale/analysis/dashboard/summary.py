"""Return data about a run as a whole: its state, outcome, series of metrics, events and
failures.
"""

import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from unstale.analysis.dashboard.axes import positions
from unstale.analysis.dashboard.charts import sections
from unstale.analysis.dashboard.database import Database
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.limits import own_config
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.dashboard.timeline import pace
from unstale.analysis.report.options import changed_options, written
from unstale.analysis.report.words import MEANS, factor_names, is_exact, meanings, tiles
from unstale.config import ConfigError, RunConfig
from unstale.config.routes import exact_routes
from unstale.durability.journal import JOURNAL
from unstale.durability.run_folder import CONFIG, EVENTS, METRICS, Row, RunFolder
from unstale.lint.semantics import exactness, factors, versions
from unstale.observe.health import CHECKS
from unstale.observe.held_out import HeldOut, held_out, outcome, remarks
from unstale.observe.run_rows import flatten, step_of
from unstale.observe.words import number, percent

LIVE_S = 120.0
"""Seconds after the last write during which a run without a recorded end counts as live. A step of
a large run may take longer, so the page shows the time of the last write beside the state.
"""

MAX_POINTS = 2000
MAX_METRICS = 24
MAX_WINDOW = 100
MAX_EVENTS = 200
LIST_POINTS = 60
"""Largest number of points of a run's curves in the list of runs."""


def state_of(index: RunIndex, *, now: float | None = None) -> Row:
    """Return the state of a run, with `reason` and `detail` of its end and `age_s`, the seconds
    since the last write.

    `state` is `finished`, `failed`, `stopped`, `live` or `silent`. A silent run has no recorded end
    and wrote nothing for `LIVE_S` seconds. It was killed or is in a long step. `now` is in seconds
    since 1970, by default the present time.
    """
    age = (time.time() if now is None else now) - last_write(index.folder)
    events = index.state_events
    begun = max((at for kind, (at, _) in events.items() if kind != "stopped"), default=-1)
    stopped_at, stopped = events.get("stopped", (-1, {}))
    reason, detail = (stopped.get(name, "")[:1000] for name in ("reason", "detail"))
    if stopped_at > begun:
        state = reason if reason in ("finished", "failed") else "stopped"
        return {"state": state, "reason": reason, "detail": detail, "age_s": max(0.0, age)}
    state = "live" if age < LIVE_S else "silent"
    return {"state": state, "reason": "", "detail": "", "age_s": max(0.0, age)}


def last_write(folder: Path) -> float:
    """Return the time at which the run last wrote a file in `folder`, in seconds since 1970.

    0 if the folder has no files of a run.
    """
    times = []
    for name in (CONFIG, METRICS, EVENTS, JOURNAL, f"{JOURNAL}-wal"):
        try:
            times.append(os.lstat(folder / name).st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def _load(fields: str) -> Row:
    try:
        value = json.loads(fields)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def evaluations(database: Database) -> list[HeldOut]:
    """Return the evaluations on held-out tasks of a run, in the order of their steps."""
    return held_out(_events(database, "eval"))


def _events(database: Database, kind: str) -> list[Row]:
    rows = database.rows(
        "SELECT fields FROM events WHERE kind = ? ORDER BY id LIMIT 10000", (kind,)
    )
    return [_load(fields) for (fields,) in rows]


def _shown(evaluation: HeldOut) -> Row:
    return asdict(evaluation) | {
        "interval": evaluation.interval,
        "share": evaluation.share,
        "about": evaluation.about,
    }


def list_runs(indexes: Iterable[tuple[str, RunIndex]]) -> list[Row]:
    """Return the short description of each run (`describe`). The run that wrote last comes
    first.
    """
    rows = [describe(name, index) for name, index in indexes]
    return sorted(rows, key=lambda row: -row["written_at"])


def describe(name: str, index: RunIndex) -> Row:
    """Return the short description of a run for the list of runs: options, state, progress, two
    curves.
    """
    config = _config(index.folder)[0]
    rollouts = series(index.database, ["rollout/success_rate"], LIST_POINTS)
    steps = config.get("max_steps")
    return {
        "name": name,
        "recipe": _text(config.get("recipe")),
        "route": _text(config.get("old_logps.route")),
        "techniques": _text(config.get("techniques")),
        "seed": number(config.get("seed")),
        "step": index.last_step,
        "steps": number(steps),
        "written_at": last_write(index.folder),
        "evaluations": [_shown(each) for each in _thin(evaluations(index.database), LIST_POINTS)],
        "rollouts": rollouts["rollout/success_rate"],
        "problems": index.problems,
        **state_of(index),
    }


def overview(name: str, index: RunIndex) -> Row:
    """Return the data of a run's page, except the series of metrics."""
    config, gaps = _config(index.folder)
    database = index.database

    def setting(option: str, default: Any = None) -> Any:
        value = config.get(option)
        return default if value is None else value

    exact = is_exact(setting)
    route = _text(setting("old_logps.route", "unknown"))
    wait, held, figures = pace(database).wait, evaluations(database), _figures(database, setting)
    rollouts = series(database, ["rollout/success_rate"], MAX_POINTS)["rollout/success_rate"][1]
    shown = outcome(held, rollouts, setting("eval.tasks"))
    changes = _events(database, "data_changed")
    failed = failures(database)
    exact_share = _mean(database, "old_logps/exact_share")
    folder = RunFolder(index.folder)
    error = folder.error()[-20_000:]
    try:
        known = own_config(index.folder)
        semantics, changed = _semantics(known, exact_share), changed_options(known)
    except BadQuestion as problem:
        semantics, changed = [["Not known", str(problem)]], set()
    described = describe(name, index)
    started = {} if not (begun := _events(database, "started")) else begun[-1]
    return {
        **described,
        "end": _end(described, error),
        "exact": exact,
        "exact_routes": list(exact_routes()),
        "factors": list(factor_names(route, exact=exact)),
        "meanings": meanings(route, exact=exact),
        "semantics": semantics,
        "pace": {"sentence": wait.sentence, "advice": wait.advice},
        "evaluations": [_shown(each) for each in held],
        "outcome": asdict(shown) if shown else None,
        "remarks": remarks(held, changes),
        "data_changes": sorted({step_of(event) for event in changes}),
        "figures": figures,
        "tiles": tiles(figures, failed["count"]),
        "checks": _checks(index),
        "failures": failed,
        "error": error,
        **_command(name, index.folder, started, config),
        "started": [
            [key, written(value)[:2000]]
            for key, value in started.items()
            if key not in ("kind", "time", "command")
        ],
        "options": {key: written(value)[:2000] for key, value in config.items()},
        "changed": [key for key in config if key in changed],
        "sections": sections(index.names),
        "gaps": [*gaps, *folder.gaps],
        "index": progress(index),
    }


def _semantics(config: RunConfig, exact_share: float | None) -> list[list[str]]:
    """Return what a run's options mean, as a list of [heading, text], in the words of the linter.

    `exact_share` is the measured share of tokens whose old_logp was computed with the version that
    sampled them. None if it was not measured.
    """
    d, s = factors(config)
    measured = "" if exact_share is None else f"; measured: for {percent(exact_share, 1)} of tokens"
    return [
        ["Discrepancy D", f"{d.meaning}; {d.bound}"],
        ["Staleness ratio S", f"{s.meaning}; {s.bound}"],
        ["Exact old_logp", exactness(config) + measured],
        ["Versions", versions(config)],
    ]


def _end(described: Row, error: str) -> str:
    """Return a sentence on how a run ended, or "" if its end is not recorded."""
    reason, detail = described["reason"], described["detail"]
    if described["state"] == "failed" or (error and not reason):
        return f"The run failed: {detail or error.rpartition(chr(10))[2]}"
    ended = f"Ended by {reason}; {detail}" if reason == "Ctrl-C" else f"Ended: {detail or reason}"
    return ended if reason else ""


def _command(name: str, folder: Path, started: Row, config: Row) -> Row:
    """Return a command that repeats a run's training, and a sentence on the command's origin.

    Both are empty if no command is known. `started` is the event of the run's start.
    """
    if isinstance(command := started.get("command"), str):
        about = "The command that started this run."
    elif "recipe" in config:
        command = shlex.join(["unstale", "train", str(folder / CONFIG), "--name", f"{name}-again"])
        about = (
            "No command was recorded, as for a run that was started from Python. This one reads "
            "the options from the run folder."
        )
    else:
        command = about = ""
    return {"command": command, "command_about": about}


def progress(index: RunIndex) -> Row:
    """Return how much of a run's files was copied into `index`. `changes` grows when the content
    changes.
    """
    return {
        "rows": index.num_rows,
        "events": index.num_events,
        "last_step": index.last_step,
        "episodes": index.num_episodes,
        "ended": index.num_ended,
        "searchable": index.num_searchable,
        "started": index.num_started,
        "complete": index.is_complete and not index.lacks_words,
        "problems": index.problems,
        "changes": index.changes,
    }


def series(
    database: Database,
    names: Sequence[str],
    points: int = 500,
    *,
    axis: str = "step",
    window: int = 1,
) -> dict[str, list[Any]]:
    """Return the values of metrics over the steps: by name of the metric, a list of steps and a
    list of values.

    With another `axis` of `axes.AXES`, the places on this axis replace the steps. Steps without a
    place there are left out.

    With `window` above 1, a value is the mean of the last `window` recorded values. Series of more
    than `points` values are thinned (`thin`). Raises `BadQuestion` if an argument is outside its
    limits.
    """
    if len(names) > MAX_METRICS:
        raise BadQuestion(f"at most {MAX_METRICS} metrics at a time, got {len(names)}")
    if not 2 <= points <= MAX_POINTS:
        raise BadQuestion(f"points must be between 2 and {MAX_POINTS}, got {points}")
    if not 1 <= window <= MAX_WINDOW:
        raise BadQuestion(f"window must be between 1 and {MAX_WINDOW}, got {window}")
    rows: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    running = (
        f"avg(value) OVER (PARTITION BY names.id ORDER BY step ROWS {window - 1} PRECEDING)"
        if window > 1
        else "value"
    )
    marks = ", ".join("?" * len(rows))
    for name, step, value in database.rows(
        f"SELECT names.name, step, {running} FROM names "
        f"JOIN metrics ON metrics.name = names.id WHERE names.name IN ({marks}) "
        "ORDER BY names.id, step",
        list(rows),
    ):
        rows[name].append((step, value))
    kept = {name: thin(each, points) for name, each in rows.items()}
    if axis == "step":
        return {
            name: [[step for step, _ in each], [value for _, value in each]]
            for name, each in kept.items()
        }
    steps = sorted({step for each in kept.values() for step, _ in each})
    places = dict(zip(steps, positions(database, axis, steps), strict=True))
    found: dict[str, list[Any]] = {}
    for name, each in kept.items():
        both = [(places[step], value) for step, value in each if places[step] is not None]
        found[name] = [[place for place, _ in both], [value for _, value in both]]
    return found


def thin(rows: Sequence[tuple[int, float]], points: int) -> list[tuple[int, float]]:
    """Return about `points` pairs of a step and a value: the first, the last, and the smallest and
    largest value of each of several equal parts, so that no peak is lost.

    >>> thin([(0, 0.0), (1, 9.0), (2, 0.0), (3, -1.0), (4, 0.0), (5, 2.0), (6, 1.0)], 4)
    [(0, 0.0), (1, 9.0), (3, -1.0), (5, 2.0), (6, 1.0)]
    """
    if len(rows) <= points:
        return list(rows)
    parts = max(1, points // 2)
    kept = {0, len(rows) - 1}
    for part in range(parts):
        places = range(part * len(rows) // parts, (part + 1) * len(rows) // parts)
        if places:
            kept.add(min(places, key=lambda at: rows[at][1]))
            kept.add(max(places, key=lambda at: rows[at][1]))
    return [rows[at] for at in sorted(kept)]


def lags(database: Database, points: int = 300) -> Row:
    """Return the number of tokens trained on at each lag (staleness).

    `total` has `[lag, tokens]` over all steps. `steps` has `[step, pairs]` for each part of `width`
    steps: its first step, and pairs (lag, tokens) in it. There are at most `points` parts.
    """
    total = database.rows("SELECT lag, sum(tokens) FROM lags GROUP BY lag ORDER BY lag")
    ((first, last),) = database.rows("SELECT min(step), max(step) FROM lags")
    if first is None:
        return {"total": [], "steps": []}
    width = max(1, -(-(last - first + 1) // points))
    rows = database.rows(
        "SELECT (step - ?) / ? AS part, lag, sum(tokens) FROM lags GROUP BY part, lag "
        "ORDER BY part, lag",
        (first, width),
    )
    steps: dict[int, dict[int, float]] = {}
    for part, lag, tokens in rows:
        steps.setdefault(first + part * width, {})[lag] = tokens
    return {
        "total": [list(row) for row in total],
        "width": width,
        "steps": [[step, sorted(by_lag.items())] for step, by_lag in steps.items()],
    }


def failures(database: Database, limit: int = MAX_EVENTS) -> Row:
    """Return the failures of training episodes that were not retried, the newest `limit` of them as
    `rows`.

    `count` is the number of all such failures, and `held_out` the same number for evaluations.
    `text` is a sentence with `count`, the number of different tasks and the most frequent error, or
    "".
    """
    # CASE, because SQLite may evaluate the operands of AND in any order
    final = (
        "kind = 'episode_failed' AND CASE WHEN json_valid(fields) "
        "THEN coalesce(json_extract(fields, '$.final'), 1) AND {} "
        "coalesce(json_extract(fields, '$.held_out'), 0) ELSE 0 END"
    )
    training, of_evaluations = final.format("NOT"), final.format("")
    tasks_of = "count(DISTINCT json_extract(fields, '$.task'))"
    ((count, tasks),) = database.rows(f"SELECT count(*), {tasks_of} FROM events WHERE {training}")
    ((held_out,),) = database.rows(f"SELECT count(*) FROM events WHERE {of_evaluations}")
    rows = database.rows(
        f"SELECT fields FROM events WHERE {training} ORDER BY id DESC LIMIT ?", (limit,)
    )
    errors = database.rows(
        f"SELECT json_extract(fields, '$.error') AS error FROM events WHERE {training} "
        "GROUP BY substr(error, 1, instr(error || char(10), char(10)) - 1) "
        "ORDER BY count(*) DESC, min(id) LIMIT 1"
    )
    names = ("time", "episode", "task", "stage", "error")
    found = [_load(fields) for (fields,) in rows]
    return {
        "count": count,
        "held_out": held_out,
        "text": _of_failures(count, tasks, _text(errors[0][0])) if count else "",
        "rows": [{name: _text(event.get(name))[:300] for name in names} for event in found],
    }


def _of_failures(episodes: int, tasks: int, error: str) -> str:
    counted = f"{episodes} episode{'s' * (episodes > 1)} of {tasks} task{'s' * (tasks > 1)}"
    return f"{counted} failed, most often with: {error.partition(chr(10))[0][:300]}"


def log(database: Database, after: int = 0, limit: int = MAX_EVENTS) -> list[Row]:
    """Return the newest events of a run's log whose numbers are above `after`, the newest first.

    Activities and evaluations are left out. Failed episodes are left out unless they are of an
    evaluation and were not retried.
    """
    rows = database.rows(
        "SELECT id, time, kind, fields FROM events WHERE id > ? AND kind != 'eval' "
        "AND (kind != 'episode_failed' OR CASE WHEN json_valid(fields) "
        "THEN coalesce(json_extract(fields, '$.held_out'), 0) "
        "AND coalesce(json_extract(fields, '$.final'), 1) ELSE 0 END) "
        "ORDER BY id DESC LIMIT ?",
        (after, max(1, min(limit, MAX_EVENTS))),
    )
    return [
        {"id": at, "time": when, "kind": kind, "text": _event_text(fields)}
        for at, when, kind, fields in rows
    ]


def _event_text(fields: str) -> str:
    event = _load(fields)
    parts = [
        f"{name} {_text(value)}" for name, value in event.items() if name not in ("time", "kind")
    ]
    return ", ".join(parts)[:600]


def _checks(index: RunIndex) -> list[Row]:
    """Return the checks of training health, each with what it found. Empty before the first step.

    `text` is "" if a check found nothing. `passed` is None if too few steps had the metrics that
    the check needs.
    """
    if not index.database.rows("SELECT 1 FROM metrics WHERE step > 0 LIMIT 1"):
        return []
    findings = index.health.findings
    missing: Row = {"text": "", "step": None, "steps": 0}
    return [
        (asdict(findings[check.name]) if check.name in findings else missing)
        | {"name": check.name, "title": check.title, "passed": index.health.passed(check)}
        for check in CHECKS
    ]


def _figures(database: Database, setting: Callable[..., Any]) -> Row:
    ((stalest,),) = _aggregate(database, "max", "schedule/staleness_max")
    bounds = database.rows(
        "SELECT value FROM metrics WHERE name = (SELECT id FROM names WHERE name = "
        "'schedule/staleness_bound') AND step > 0 ORDER BY step DESC LIMIT 1"
    )
    bound = bounds[0][0] if bounds else number(setting("schedule.max_staleness"))
    ((tokens,),) = database.rows("SELECT sum(tokens) FROM lags")
    ((seconds,),) = _aggregate(database, "max", "time_s")
    return {
        "staleness_max": stalest,
        "staleness_bound": bound,
        "trained_tokens": tokens,
        "seconds": seconds,
        **{key: _mean(database, name) for key, name in MEANS.items()},
    }


def _aggregate(database: Database, function: str, name: str) -> list[tuple[Any, ...]]:
    return database.rows(
        f"SELECT {function}(value) FROM metrics "
        "WHERE name = (SELECT id FROM names WHERE name = ?) AND step > 0",
        (name,),
    )


def _mean(database: Database, name: str) -> float | None:
    ((mean,),) = _aggregate(database, "avg", name)
    return None if mean is None else float(mean)


def _config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return a run's options by full name, such as `engine.temperature`, and sentences on what
    could not be read.
    """
    try:
        status = os.lstat(folder / CONFIG)
        state = status.st_ino, status.st_size, status.st_mtime_ns
    except OSError:
        state = 0, 0, 0
    try:
        config, gaps = _read_config(folder, state)
    except ConfigError as error:  # the folder was removed
        return {}, [str(error)]
    return config, list(gaps)


@lru_cache(maxsize=256)
def _read_config(folder: Path, state: tuple[int, int, int]) -> tuple[dict[str, Any], list[str]]:
    """Return the result of `_config`. `state` changes with the file, so a cached result is up to
    date.
    """
    read = RunFolder(folder)
    return flatten(read.config()), read.gaps


def _text(value: Any) -> str:
    return "" if value is None else str(value)[:2000]


def _thin(rows: Sequence[HeldOut], points: int) -> list[HeldOut]:
    step = max(1, -(-len(rows) // points))
    return [*rows[:-1:step], *rows[-1:]]
