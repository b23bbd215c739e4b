"""Write the report of a run: one HTML file with the run's page of the dashboard and its data.

The file includes the scripts and styles of the dashboard. It has as JSON the data that the page
would otherwise request from the server. These are thinned, so that the size of the file does not
grow with the run.
"""

import shlex
import sqlite3
import time
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from markupsafe import Markup

from unstale.analysis.dashboard import audits, details, limits, summary, timeline, tokens
from unstale.analysis.dashboard.charts import sections
from unstale.analysis.dashboard.database import Database
from unstale.analysis.dashboard.factors import Brush, TokenCache, TokenChoice, answer
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.indexer import FAILURES
from unstale.analysis.report.bundle import script
from unstale.analysis.report.markup import document
from unstale.durability.journal import JournalError
from unstale.durability.run_folder import (
    EVENTS,
    METRICS,
    REPORT,
    TOKENIZER,
    Row,
    RunFolder,
    dumps,
    write_whole,
)

READ_S = 60.0
"""Seconds after which no more of a long run's journal is read for the report."""

POINTS, OTHER_POINTS = 240, 60
"""Largest number of points of one metric in the report: of a metric in a described plot, and of any
other.
"""

VALUES, OTHER_VALUES = 40_000, 12_000
"""Largest number of points in the report of all metrics in described plots together, and of all
others together.
"""

LAG_PARTS, SPANS, EVALUATIONS = 120, 800, 300
FAILURES_LISTED, EVENTS_LISTED = 20, 100
"""Number of newest failed episodes, and of newest events, in the report."""

TOKEN_POINTS = 800
"""Number of tokens in the report's plot of D and S. It must be the number in plane.js."""

LAST_STEPS = 8
"""Number of last steps that have a timeline of their own in the report of a long run, besides the
timeline of the whole run.
"""

EPISODE_TOKENS = 1000
"""Number of tokens from the start of an example episode that are in the report."""

SUCCESS, MEAN_STEPS = "rollout/success_rate", 5
"""The metric of the learning curve, and the number of steps over which it is averaged. This must be
the number in run.js.
"""


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder. The run may be unfinished. Return the report's path.

    Raises `ConfigError` if the folder has no run, and OSError if a file cannot be written.
    """
    return _write(run_folder, freeze(run_folder))


def write_and_warn(run_folder: Path) -> tuple[Path, list[str]]:
    """Write the report of a run. Return its path, and the report's warnings as sentences."""
    answers = freeze(run_folder)
    return _write(run_folder, answers), _warnings(answers["run"])


def write_and_summarize(run_folder: Path) -> str:
    """Write the report of a run. Return a text: the report's path, then its main sentences, one a
    line.

    The sentences are about the end of the run, its success, warnings, the bottleneck, and advice.
    """
    answers = freeze(run_folder)
    return "\n".join([str(_write(run_folder, answers)), *_sentences(answers["run"])])


def _write(folder: Path, answers: Row) -> Path:
    run = answers["run"]
    page = document(
        run["name"],
        script("report.js", (("api.js", "frozen.js"),)),
        summary=_sentences(run),
        data=Markup(dumps(answers).replace("<", "\\u003c")),
    )
    write_whole(folder / REPORT, page)
    return folder / REPORT


def _sentences(run: Row) -> list[str]:
    found = run["outcome"]
    return [
        each
        for each in (
            run["end"] or "State: not finished: still running, or killed.",
            f"{' to '.join(share for share, _ in found['shares'])}: {found['note']}."
            if found
            else "",
            *_warnings(run),
            run["pace"]["sentence"],
            run["pace"]["advice"],
        )
        if each
    ]


def _warnings(run: Row) -> list[str]:
    failed = run["failures"]["text"]
    checks = (
        f"Warning, in {check['steps']} of {run['step']} steps: {check['text']}"
        for check in run["checks"]
        if check["text"]
    )
    return [*checks, *([f"Warning: {failed}"] if failed else [])]


def freeze(folder: Path) -> Row:
    """Return the data that the page of a run would request from the server, by name of the request.

    Raises `ConfigError` if the folder has no run, and OSError if the index cannot be written.
    """
    RunFolder(folder)  # refuses a folder without a run
    with TemporaryDirectory(prefix="unstale-report-") as made:
        try:
            index = RunIndex(folder, Path(made) / "index.sqlite")
            try:
                _fill(index)
                with index.database.read():
                    return _answers(index)
            finally:
                index.close()
        except sqlite3.Error as error:
            raise OSError(f"the index of {folder} in {made} failed: {error}") from error


def _fill(index: RunIndex) -> None:
    end = time.monotonic() + READ_S
    try:
        while index.update_files():
            pass
        while index.update_journal() and time.monotonic() < end:
            pass
    except FAILURES as error:
        index.failure = f"the run could not be read to its end: {error!r}"


def _answers(index: RunIndex) -> Row:
    database = index.database
    name = index.folder.resolve().name
    found = details.details(database)
    live = shlex.join(["unstale", "dashboard", str(index.folder)])
    return {
        "run": _run(index, name) | {"live": live},
        "elsewhere": f"A report has a part of a run. The whole run: {live}",
        "details": _short(found),
        "lags": summary.lags(database, LAG_PARTS),
        "log": {"events": summary.log(database, limit=EVENTS_LISTED)},
        "audit": _short(audits.audit(index)),
        "factors": _factors(index.folder),
        "spans": _spans(database),
        "episodes": {
            str(number): read
            for number in dict.fromkeys(each["episode"] for each in found["examples"])
            if (read := _episode(index, number))
        },
        **_series(index),
    }


def _run(index: RunIndex, name: str) -> Row:
    """Return the data about the run as a whole, without values that depend on the present time."""
    run = summary.overview(name, index)
    if run["state"] == "live":
        run["state"] = "failed" if run["error"] else "silent"
    read = [text for text in index.problems if text != index.search_problem]
    missing = [
        f"{file} is missing"
        for file in (METRICS, EVENTS, TOKENIZER)
        if not (index.folder / file).is_file()
    ]
    if not index.is_complete and not read:
        read.append(f"The run is long, so not all of it is here: {index.coverage}.")
    held = run["evaluations"]
    return run | {
        "age_s": None,
        "written_at": 0,
        "problems": [*missing, *read],
        "evaluations": [*held[: -1 : max(1, -(-len(held) // EVALUATIONS))], *held[-1:]],
        "failures": run["failures"] | {"rows": run["failures"]["rows"][:FAILURES_LISTED]},
    }


def _series(index: RunIndex) -> Row:
    """Return the values of all metrics over the steps, thinned.

    `steps` is a list of lists of steps. `series` has for each metric a position in `steps` and the
    values at these steps. `means` has the learning curve in the same form, averaged over
    `MEAN_STEPS` steps.
    """
    main: list[str] = ["time_s"]
    other: list[str] = []
    for section in sections(index.names):
        names = [line["metric"] for chart in section["charts"] for line in chart["lines"]]
        (other if section["name"].startswith("other-") else main).extend(names)
    places: dict[tuple[int, ...], int] = {}

    def read(names: Iterable[str], points: int, window: int = 1) -> Row:
        found: Row = {}
        wanted = list(dict.fromkeys(names))
        for at in range(0, len(wanted), summary.MAX_METRICS):
            part = wanted[at : at + summary.MAX_METRICS]
            for name, (steps, values) in summary.series(
                index.database, part, points, window=window
            ).items():
                found[name] = [places.setdefault(tuple(steps), len(places)), _short(values, 4)]
        return found

    series = read(other, min(OTHER_POINTS, max(8, OTHER_VALUES // max(1, len(other)))))
    series |= read(main, min(POINTS, max(8, VALUES // len(main))))
    means = read([SUCCESS], POINTS, MEAN_STEPS)
    return {"series": series, "means": means, "steps": [list(steps) for steps in places]}


def _spans(database: Database) -> list[Row]:
    """Return the timeline of the whole run, and in a long run also that of the last `LAST_STEPS`
    steps.

    A run is long if its timeline has too many activities to list each.
    """
    whole = timeline.spans(database, 0.0, 1e18, SPANS)
    times = summary.series(database, ["time_s"], summary.MAX_POINTS)["time_s"][1]
    if not whole["parts"] or len(times) <= LAST_STEPS:
        return [_short(whole, 7)]
    start = times[-LAST_STEPS - 1]
    return [_short(whole, 7), _short(timeline.spans(database, start, whole["last"], SPANS), 7)]


def _factors(folder: Path) -> Row | None:
    try:
        found = TokenCache().read(folder, TokenChoice())
        return dict(_short(answer(found, Brush(), limits.of_run(folder), TOKEN_POINTS), 4))
    except (JournalError, OSError):  # the page says what is wrong with the journal
        return None


def _episode(index: RunIndex, number: int) -> Row | None:
    """Return the first `EPISODE_TOKENS` tokens of an episode. None if the episode is damaged or was
    not copied into the index.
    """
    try:
        return dict(_short(tokens.episode(index, number, limit=EPISODE_TOKENS), 5))
    except (JournalError, OSError, tokens.UnknownEpisode, tokens.NotYet):
        return None


def _short(value: Any, digits: int = 6) -> Any:
    """Return a JSON value with floats rounded to `digits` significant digits. NaN and infinity
    become None.

    >>> _short({"a": [0.123456789, 2]}, 3)
    {'a': [0.123, 2]}
    """
    match value:
        case float():
            return float(f"{value:.{digits}g}") if isfinite(value) else None
        case dict():
            return {name: _short(each, digits) for name, each in value.items()}
        case list() | tuple():
            return [_short(each, digits) for each in value]
    return value
