"""Return the audit of a run, which measures the errors of its old log-probabilities.

A route is a method to compute old_logp. `unstale audit` writes `audit.json`, which compares routes
on recorded batches. With `audit.share`, a run measures its own route while it trains.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from unstale.analysis.dashboard.folders import is_own_file
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.journals import open_journal
from unstale.analysis.report.audited import COLUMNS, cells
from unstale.analysis.report.words import is_exact
from unstale.durability.journal import JOURNAL, JournalError
from unstale.durability.run_folder import AUDIT, Row, RunFolder
from unstale.observe.run_rows import by_lag, flatten
from unstale.observe.words import amount, mapping, number, percent, records

MAX_BYTES = 8 << 20
"""Largest size in bytes of an `audit.json` that is read. The parsed content takes several times
this memory.
"""

MAX_STEPS = 32
"""Number of newest steps whose audited tokens are shown. A step has at most 64 such tokens."""

MAX_ROUTES = 40
MAX_POINTS = 400

NOISE_TIMES = 3.0
"""`old_logp` counts as exact if its mean error is at most this multiple of the numerical noise."""

LEAK = 0.1
"""Share above which the verdict on a route names a leak: the part of log S that the route counts as
log D, or of log D as log S.
"""

AGREEMENT = 0.95
"""F1 of the dropped or clipped tokens, compared with those of the true `old_logp`. If it is lower,
the verdict on a route says that the route drops or clips other tokens.
"""


def audit(index: RunIndex) -> Row:
    """Return the audit of a run, measured `during` training and `after` it by `unstale audit`.

    `during` has the last values of the metrics `audit/...`, and is empty if the run did not measure
    them. `after` is None if there is no `audit.json`. `tokens` has a list for each of some audited
    tokens: log D and log S with the run's `old_logp`, then the true log D and log S. `problems` has
    sentences on what could not be read.
    """
    after, problems = _stored(index)
    tokens, problem = _audited_tokens(index.folder)
    last = index.database.rows(
        """SELECT names.name, value, max(step) FROM names JOIN metrics ON metrics.name = names.id
        WHERE names.name GLOB 'audit/*' GROUP BY names.id"""
    )
    during = {name: value for name, value, _ in last}
    options = flatten(RunFolder(index.folder).config())
    route = str(options.get("old_logps.route", "unknown"))[:80]
    return {
        "route": route,
        "exact": is_exact(options.get),
        "problems": [*problems, *([problem] if problem else [])],
        "during": during,
        "tokens": tokens,
        "verdict": verdict(_of_metrics(during, route)) if during else "",
        "after": after,
    }


def _stored(index: RunIndex) -> tuple[Row | None, list[str]]:
    """Return the content of `audit.json` in the form for the page, and sentences on what could not
    be read.

    The content is None if there is no readable file.
    """
    try:
        status = os.lstat(index.folder / AUDIT)
    except OSError:
        return None, []
    return _read(index.folder, status.st_ino, status.st_size, status.st_mtime_ns, MAX_BYTES)


@lru_cache(maxsize=8)
def _read(
    path: Path, _inode: int, _size: int, _time: int, max_bytes: int
) -> tuple[Row | None, list[str]]:
    folder = RunFolder(path)
    found = folder.read_object(AUDIT, max_bytes=max_bytes)
    return _after(found) if found else None, folder.gaps


def _audited_tokens(folder: Path) -> tuple[list[list[float]], str]:
    """Return log D, log S, true log D and true log S of each audited token of the newest steps.

    The second result is a sentence on why the tokens cannot be read, or "".
    """
    names = ("log_d", "log_s", "true_log_d", "true_log_s")
    if not is_own_file(folder / JOURNAL):
        return [], ""
    try:
        with open_journal(folder) as journal:
            rows = [
                [number(row.get(name)) for name in names]
                for row in journal.token_samples(newest=MAX_STEPS)
            ]
    except (JournalError, OSError) as error:
        return [], f"audited tokens cannot be read: {error}"
    return [[each for each in row if each is not None] for row in rows if None not in row], ""


def _of_metrics(metrics: Mapping[str, float], route: str) -> Row:
    """Return metrics `audit/...` as a row of `audit.json`, which has the figures of one route."""
    own = {name.removeprefix("audit/"): value for name, value in metrics.items()}
    return {**own, "route": route, "noise": own.get("logp_noise_rms")}


def _after(found: Row) -> Row:
    noise = number(found.get("noise"))
    rows = records(found.get("routes"), MAX_ROUTES)
    return {
        "tokens": number(found.get("tokens")),
        "steps": number(found.get("steps")),
        "noise": noise,
        "dtype": str(found.get("dtype", ""))[:40],
        "tokens_by_lag": by_lag(mapping(found.get("tokens_by_lag")).items()),
        "columns": [{"name": column.name, "about": column.about} for column in COLUMNS],
        "routes": [
            {
                "route": str(row.get("route"))[:80],
                "cells": cells(row),
                "verdict": verdict({**row, "noise": noise}),
                "error": number(row.get("logp_error_abs_mean")),
                "mask_f1": number(row.get("mask_f1")),
                "clip_f1": number(row.get("clip_f1")),
                "by_lag": by_lag(
                    (lag, mapping(figures).get("error"))
                    for lag, figures in mapping(row.get("by_lag")).items()
                ),
                "points": _points(row.get("points")),
            }
            for row in rows
        ],
        "points": _points(found.get("points")),
        "not_built": {
            str(name)[:80]: str(why)[:300]
            for name, why in list(mapping(found.get("not_built")).items())[:MAX_ROUTES]
        },
    }


def verdict(row: Mapping[str, Any]) -> str:
    """Return sentences on what an audit found about a route (a method to compute `old_logp`).

    `row` has the figures of the route, as in `audit.json`, and the numerical `noise` in nats.

    >>> verdict({"logp_error_abs_mean": 1e-6, "noise": 1e-6})
    'Exact: the mean error of 1e-06 nats is within the numerical noise.'
    >>> verdict({"logp_error_abs_mean": 0.02, "noise": 1e-6, "staleness_leak": 0.4})
    'Approximate: the mean error is 0.02 nats. It moves 40% of the staleness into D.'
    """
    error, noise = number(row.get("logp_error_abs_mean")), number(row.get("noise"))
    if error is None:
        return "Not known: no audited token could be scored by its version."
    if noise is not None and error <= NOISE_TIMES * noise:
        first = f"Exact: the mean error of {amount(error)} nats is within the numerical noise."
    elif noise is None:
        first = f"The mean error is {amount(error)} nats. The numerical noise is not known."
    else:
        first = f"Approximate: the mean error is {amount(error)} nats."
    sentences = [first]
    moved = [
        f"{percent(leak)} of the {ratio} into {into}"
        for name, ratio, into in (
            ("staleness_leak", "staleness", "D"),
            ("discrepancy_leak", "discrepancy", "S"),
        )
        if (leak := number(row.get(name))) is not None and leak > LEAK
    ]
    if moved:
        sentences.append(f"It moves {' and '.join(moved)}.")
    wrong = [
        f"{what} (F1 {f1:.2f})"
        for name, what in (("mask_f1", "dropped"), ("clip_f1", "clipped"))
        if (f1 := number(row.get(name))) is not None and 0 < f1 < AGREEMENT
    ]
    # an F1 of 0 is no measure of agreement: often the true old_logp drops no token at all
    sentences += [
        f"No token is {what} both by the route and with the true old_logp."
        for name, what in (("mask_f1", "dropped"), ("clip_f1", "clipped"))
        if number(row.get(name)) == 0
    ]
    if wrong:
        sentences.append(f"Other tokens are {' and '.join(wrong)} than with the true old_logp.")
    return " ".join(sentences)


def _points(columns: Any) -> list[list[float]]:
    first = [
        column[:MAX_POINTS]
        for name in ("log_d", "log_s")
        if isinstance(column := mapping(columns).get(name), list)
    ]
    if len(first) < 2:
        return []
    found = [(number(log_d), number(log_s)) for log_d, log_s in zip(*first, strict=False)]
    return [[x, y] for x, y in found if x is not None and y is not None]
