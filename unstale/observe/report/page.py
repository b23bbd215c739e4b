"""Write the report of a run as one HTML page, which also names the data that are missing.

`templates/run.html` is the page. This module computes the values in it.
"""

import base64
import hashlib
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from unstale.config.routes import exact_routes
from unstale.durability.run_folder import CONFIG, REPORT, Row, write_whole
from unstale.observe.health import CHECKS
from unstale.observe.report import figures, timeline
from unstale.observe.report.audited import audit
from unstale.observe.report.gather import Gathered, flatten, gather
from unstale.observe.report.held_out import UNBROKEN, Outcome, outcome
from unstale.observe.report.markup import read_asset, render
from unstale.observe.report.options import changed_options, written
from unstale.observe.report.survivors import trained_on
from unstale.observe.report.transcripts import conversation
from unstale.observe.report.words import (
    MEANS,
    NONE,
    amount,
    duration,
    factor_names,
    semantics,
    tiles,
)

MAX_REASONS = 20
CHOICES = ("early success", "early failure", "late success", "late failure")


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into a run folder, also of an unfinished run. Return its path.

    Raises `ConfigError` if the folder has no run.
    """
    return _write(run_folder, gather(run_folder))


def write_and_summarize(run_folder: Path) -> str:
    """Write the report. Return its path and the most important sentences of it, a line each.

    They are the end of the run, its success, warnings, the bottleneck, and what would help.
    """
    run = gather(run_folder)
    path, wait = _write(run_folder, run), run.pace.wait
    found = _outcome(run)
    lines = [
        _end(run) or f"State: {status(run)[0]}.",
        f"{' to '.join(share for share, _ in found.shares)}: {found.note}." if found else "",
        *(
            f"Warning, in {each.steps} of {run.steps} steps: {each.text}"
            for each in run.health.findings.values()
        ),
        wait.sentence,
        wait.advice,
    ]
    return "\n".join([str(path), *filter(None, lines)])


def _write(run_folder: Path, run: Gathered) -> Path:
    write_whole(run_folder / REPORT, _page(run))
    return run_folder / REPORT


def _page(run: Gathered) -> str:
    lags = figures.total_lags(run)
    total = sum(lags.values())
    age = sum(lag * count for lag, count in lags.items()) / total if total else None
    have = {chosen.why for chosen in run.conversations}
    return document(
        "run.html",
        run.name,
        run=run,
        status=status,
        outcome=_outcome(run),
        end=_end(run),
        sound=[check.title for check in CHECKS if check.name not in run.health.findings],
        facts=_facts(run),
        tiles=tiles(figures_of(run, total), run.num_failures),
        figures=figures,
        timeline=timeline,
        meanings=_meanings(run),
        sizes={
            "D": _size("D", run.mean("correction/log_d_abs_mean")),
            "S": _size("S", run.mean("objective/log_s_abs_mean")),
        },
        exact_routes=exact_routes(),
        semantics=semantics(run.setting, run.mean("old_logps/exact_share")),
        lags=lags,
        mean_staleness=age,
        ratios=" ".join(factor_names(run.route, exact=run.exact)),
        audit=audit(run),
        pace=run.pace.wait,
        trained_on=trained_on(run),
        conversation=conversation,
        not_found=[why for why in CHOICES if why not in have],
        failures=[
            [str(failure.get(name, NONE))[:300] for name in ("time", "task", "stage", "error")]
            for failure in run.failures
        ],
        forks=_forks(run),
        **_reproduction(run),
    )


def document(template: str, title: str, **values: Any) -> Markup:
    """Fill a template that extends `base.html`. Return the page.

    The only script of the page is report.js, because its content security policy has the script's
    hash.
    """
    script = read_asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return render(
        template,
        title=title,
        style=Markup(read_asset("report.css")),
        script=Markup(script),
        script_digest=f"sha256-{digest}",
        **values,
    )


def _outcome(run: Gathered) -> Outcome | None:
    rollouts = [value for _, value in run.series("rollout/success_rate")]
    return outcome(run.evaluations, rollouts, run.setting("eval.tasks"))


def status(run: Gathered) -> tuple[str, str]:
    """Return the state of a run in words, and its colour. Green means that nothing is wrong."""
    reason = run.stopped.get("reason", "no reason given")
    if run.error:
        return "failed", "bad"
    has_ended = bool(run.stopped or not run.started)  # without events, the steps decide
    if (has_ended and run.planned and run.steps >= run.planned) or reason == "finished":
        wrong = run.health.findings or (len(run.evaluations) > 1 and not run.improved)
        return "finished", "plain" if wrong else "good"
    if run.stopped:
        return f"stopped: {str(reason)[:120]}", "plain"
    return "not finished: still running, or killed", "plain"


def _end(run: Gathered) -> str:
    """Return the reason why the run ended. Empty if it is not known."""
    reason, detail = (str(run.stopped.get(name, ""))[:1000] for name in ("reason", "detail"))
    if reason == "failed":
        return f"The run failed: {detail}" if detail else ""
    ended = f"Ended by {reason}; {detail}" if reason == "Ctrl-C" else f"Ended: {detail or reason}"
    return ended if reason else ""


def _facts(run: Gathered) -> list[str]:
    recipe = str(run.setting("recipe", "unknown recipe"))
    env = str(run.setting("task.env", recipe))
    return [
        recipe,
        *([env] if env != recipe else []),
        f"seed {run.setting('seed', '?')}",
        f"{run.steps} of {run.planned or '?'} steps",
        duration(run.seconds).replace(" ", UNBROKEN),
    ]


def figures_of(run: Gathered, tokens: float) -> dict[str, float | None]:
    """Return the figures of `words.tiles`."""
    return {
        "staleness_max": max(
            (value for _, value in run.series("schedule/staleness_max")), default=None
        ),
        "staleness_bound": run.bound,
        "trained_tokens": tokens or None,
        **{name: run.mean(metric) for name, metric in MEANS.items()},
    }


def _meanings(run: Gathered) -> tuple[str, str]:
    """Return what discrepancy D and staleness ratio S contain with the route of the run."""
    if run.exact:
        return "discrepancy", "staleness"
    if run.route == "rollout":
        return "0 by construction", "discrepancy and staleness"
    return "mixed", "remaining staleness"


def _size(ratio: str, size: float | None) -> str:
    return NONE if size is None else f"mean |log {ratio}| {amount(size)}"


def _forks(run: Gathered) -> list[tuple[Any, ...]]:
    """Return the table of forks, which are places where an agent changed its history.

    A row has a reason, its number of forks, and the episode, parent and message of the first one.
    """
    firsts: dict[str, Row] = {}
    for fork in run.forks:
        firsts.setdefault(str(fork.get("reason"))[:300], fork)
    counts = Counter(str(fork.get("reason"))[:300] for fork in run.forks)
    names = ("episode", "parent", "at")
    return [
        (reason, count, *(str(firsts[reason].get(name, NONE)) for name in names))
        for reason, count in counts.most_common(MAX_REASONS)
    ]


def _reproduction(run: Gathered) -> dict[str, Any]:
    """Return the command that repeats the run, facts about its start, and all its options."""
    command = run.started.get("command")
    known = ("kind", "time", "command")
    options = flatten(run.config)
    changed = changed_options(options)
    return {
        "command": command if isinstance(command, str) else repeat_command(run),
        "started": [
            (name, written(value)) for name, value in run.started.items() if name not in known
        ],
        "options": [(name, written(value), name in changed) for name, value in options.items()],
    }


def repeat_command(run: Gathered) -> str:
    """Return a command that trains again with the options in the run's folder.

    Empty if they could not be read.
    """
    if "recipe" not in run.config:
        return ""
    name = f"{run.name}-again"
    return shlex.join(["unstale", "train", str(run.folder / CONFIG), "--name", name])
