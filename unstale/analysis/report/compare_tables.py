"""Write a comparison as Markdown tables and as JSON.

An arm is one configuration that was trained with several seeds. The dashboard draws the curves of
its runs: `unstale dashboard FOLDER`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from unstale.analysis.report.compare import (
    CLIPPED,
    EXACT_SHARE,
    KEPT,
    STALENESS,
    UNCOUNTED,
    ArmResult,
    Comparison,
    SeedMean,
    Trial,
    Unit,
    grouped,
    mean_over_seeds,
    read_comparison,
)
from unstale.analysis.report.markup import render
from unstale.durability.run_folder import dumps, plain, write_whole
from unstale.observe.statistics import PairedDifference
from unstale.observe.words import NONE, amount, percent

TABLES, RESULTS = "compare.md", "compare.json"
HOW = (
    "Means over seeds with 95% intervals by Student's t. Differences are between runs with the "
    "same seed. A single value has no interval, and neither have values that are all equal. "
    "Intervals are not adjusted for multiple comparisons. Unfinished runs are listed, but excluded "
    "from all means."
)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts: the names of its columns, and rows with one text for each column."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        escaped = [[text.replace("|", "\\|") for text in line] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def tenths(share: float | None) -> str:
    return percent(share, 1)


def spread(mean: SeedMean | None, show: Callable[[float], str] = tenths) -> str:
    """Return the mean and its 95% interval as text, or a dash for None. `show` formats each number.

    >>> spread(SeedMean(3, 0.7, 0.45, 0.95)), spread(SeedMean(1, 0.7, None, None)), spread(None)
    ('70.0% (45.0% to 95.0%)', '70.0%', '—')
    """
    if mean is None:
        return NONE
    if mean.low is None or mean.high is None:
        return show(mean.mean)
    return f"{show(mean.mean)} ({show(mean.low)} to {show(mean.high)})"


def points(share: float) -> str:
    """Return a difference of shares as text in percentage points.

    >>> points(-0.0312)
    '-3.1'
    """
    return f"{100 * share:+z.1f}"


def points_with_interval(paired: PairedDifference, alpha: float) -> str:
    """Return a mean difference of shares as text in percentage points, with its 1 - `alpha`
    interval.

    >>> points_with_interval(PairedDifference(5, -0.02, 0.01), 0.05)
    '-2.0 (-3.2 to -0.8)'
    """
    return spread(SeedMean(paired.n, paired.mean, *paired.interval(alpha)), points)


UNITS: Mapping[Unit, tuple[str, str, Callable[[float], str]]] = {
    "tokens": ("At equal tokens", "sampled tokens", amount),
    "minutes": ("At equal wall-clock", "minutes of training", "{:.1f}".format),
}
"""Unit of an amount of training -> heading of its table, name in words, and number format."""


def equal_steps(comparison: Comparison) -> Table:
    """Return a table of the held-out success of each configuration after all steps of its runs."""
    head = ["arm", "runs", "held-out success", f"less {comparison.reference.name}, points", "pairs"]
    head += ["best", "rollouts, last quarter", "collapsed"]
    rows = []
    for arm in comparison.arms:
        versus = comparison.versus(arm)
        row = [
            arm.name,
            _runs(arm),
            spread(comparison.success(arm)),
            spread(versus, points),
            _count(versus),
        ]
        best = mean_over_seeds(run.best for run in arm.finished)
        late = mean_over_seeds(run.late for run in arm.finished)
        row += [
            tenths(best.mean if best else None),
            spread(late),
            f"{arm.collapsed} of {len(arm.finished)}",
        ]
        rows.append(tuple(row))
    return Table(tuple(head), tuple(rows))


def equal(comparison: Comparison, unit: Unit) -> Table | None:
    """Return a table of the held-out success of each configuration after equal amounts of training.

    The amount is the largest one in `unit` (tokens or minutes) that all finished runs reached. None
    if there is no such amount.
    """
    budget = comparison.budget(unit)
    if budget is None:
        return None
    _, words, show = UNITS[unit]
    head = ["arm", "runs", f"success after {show(budget.amount)} {words}"]
    head += [f"less {comparison.reference.name}, points", "pairs", f"{words}, mean"]
    rows = []
    for arm in comparison.arms:
        success, versus = comparison.success(arm, budget), comparison.versus(arm, budget)
        took = mean_over_seeds(trial.total(unit) for trial in arm.finished)
        row = (arm.name, _count(success), spread(success), spread(versus, points), _count(versus))
        rows.append((*row, show(took.mean) if took else NONE))
    return Table(tuple(head), tuple(rows))


def lengths(comparison: Comparison) -> str:
    """Return a sentence on how the number of sampled tokens differs between the configurations."""
    means = []
    for arm in comparison.arms:
        tokens = mean_over_seeds(trial.tokens for trial in arm.finished)
        if tokens:
            means.append((tokens.mean, arm.name))
    if not means:
        return UNCOUNTED
    (fewest, low_arm), (most, high_arm) = min(means), max(means)
    return (
        "Episodes differ in length, so equal steps are not equal tokens: mean sampled tokens per "
        f"run range from {amount(fewest)} ({low_arm}) to {amount(most)} ({high_arm})."
    )


def conduct(comparison: Comparison) -> Table:
    """Return a table with a row per configuration: staleness, and shares of tokens kept by the
    correction, stopped by the clip, and with exact `old_logp`.

    If a run reset its moving average of the weights, the table also has the mean number of resets.
    """
    head = ["arm", "staleness", "kept", "clipped", "exact"]
    some_reset = any(trial.resets for trial in comparison.finished)
    rows = []
    for arm in comparison.arms:
        row = [arm.name, spread(arm.mean(STALENESS), "{:.2f}".format)]
        row += [
            spread(arm.mean(name), partial(percent, digits=2))
            for name in (KEPT, CLIPPED, EXACT_SHARE)
        ]
        if some_reset:
            resets = mean_over_seeds(float(trial.resets) for trial in arm.finished)
            row.append(f"{resets.mean:.1f}" if resets else NONE)
        rows.append(tuple(row))
    return Table((*head, "resets") if some_reset else tuple(head), tuple(rows))


def _runs(arm: ArmResult) -> str:
    return f"{len(arm.finished)} of {len(arm.trials)}"


def _count(mean: SeedMean | None) -> str:
    return str(mean.n) if mean else NONE


def findings(comparison: Comparison) -> list[str]:
    """Return sentences on the configuration with the highest success, and on each one's difference
    from the reference.
    """
    ended = [(arm, success) for arm in comparison.arms if (success := comparison.success(arm))]
    if not ended:
        return ["No run has a held-out result."]
    best, success = max(ended, key=lambda pair: pair[1].mean)
    seeds = f"{success.n} {'seed' if success.n == 1 else 'seeds'}"
    sentences = [
        f"After the same {_all(comparison, 'max_steps')} steps, {best.name} has the highest mean "
        f"held-out success: {spread(success)}, {seeds}."
    ]
    for arm in comparison.arms:
        versus = comparison.versus(arm)
        if versus is None:
            continue
        if versus.low is None or versus.high is None:
            verdict = "one pair allows" if versus.n == 1 else "equal differences allow"
            verdict += " no interval"
        elif versus.low <= 0 <= versus.high:
            verdict = "no significant difference"
        else:
            verdict = "lower" if versus.high < 0 else "higher"
        pairs = f"{versus.n} {'pair' if versus.n == 1 else 'pairs'}"
        sentences.append(
            f"{arm.name} less {comparison.reference.name}: {spread(versus, points)} points, "
            f"{pairs}: {verdict}."
        )
    return sentences


def remarks(comparison: Comparison) -> list[str]:
    """Return reasons to read a comparison with caution: unfinished runs, a decaying learning rate,
    or different versions of the code.
    """
    notes = []
    unfinished = [arm for arm in comparison.arms if len(arm.finished) < len(arm.trials)]
    if unfinished:
        counts = ", ".join(f"{arm.name} {_runs(arm)}" for arm in unfinished)
        notes.append(f"Not all runs finished: {counts}.")
    falling = [name for name in comparison.settings("trainer.lr_schedule") if name != "constant"]
    if falling:
        notes.append(
            f"The learning rate decays with the steps ({', '.join(map(str, falling))}). At equal "
            "tokens or wall-clock time, arms with steps left are at a higher learning rate."
        )
    commits = comparison.launched("commit")
    if len(commits) > 1:
        notes.append(f"The runs used different versions of the code: {', '.join(commits)}.")
    elif any(commit.endswith("-dirty") for commit in commits):
        notes.append(f"The code had uncommitted changes: {commits[0]}.")
    return notes


def linted(comparison: Comparison) -> list[str]:
    """Return the linter's warnings about the compared configurations, or a sentence that there are
    none.
    """
    warnings = grouped(comparison.warnings)
    unknown = [arm.name for arm in comparison.arms if arm.name not in comparison.warnings]
    if unknown:
        warnings.append(f"Not recorded: {', '.join(unknown)}.")
    return warnings or ["No warnings."]


def _all(comparison: Comparison, name: str) -> str:
    return " or ".join(str(value) for value in comparison.settings(name))


def provenance(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (name, value) pairs on how results were measured: recipe, tasks, commit, machine,
    versions.
    """
    facts = [
        (name, ", ".join(comparison.launched(name)) or "not recorded")
        for name in ("commit", "machine", "versions")
    ]
    return [
        ("recipe", _all(comparison, "recipe")),
        ("held-out tasks", _held_out_tasks(comparison)),
        *facts,
    ]


def tables(comparison: Comparison) -> str:
    """Return the page `compare.md`, with all tables of the comparison."""
    return render("compare.md", **_values(comparison))


def _values(comparison: Comparison) -> dict[str, Any]:
    """Return the values with which the template `compare.md` is filled."""
    return {
        "comparison": comparison,
        "findings": findings(comparison),
        "how": HOW,
        "remarks": remarks(comparison),
        "lengths": lengths(comparison),
        "equal_steps": equal_steps(comparison),
        "equal": partial(equal, comparison),
        "units": UNITS,
        "conduct": conduct(comparison),
        "linted": linted(comparison),
        "settings": partial(_settings, comparison),
        "result": _result,
        "provenance": provenance(comparison),
    }


def _held_out_tasks(comparison: Comparison) -> str:
    """Return the numbers of held-out tasks as text, followed by the option `eval.tasks` if it
    differs.
    """
    asked = _all(comparison, "eval.tasks")
    tasks = {trial.last.tasks for trial in comparison.trials if trial.last and trial.last.tasks}
    measured = ", ".join(map(str, sorted(tasks)))
    return f"{measured} (eval.tasks = {asked})" if measured and measured != asked else asked


def _settings(comparison: Comparison, arm: ArmResult) -> str:
    return (
        ", ".join(f"{name}={value}" for name, value in comparison.differences(arm).items())
        or "no run yet"
    )


def _result(trial: Trial) -> str:
    if not trial.finished:
        return f"{trial.state}{': ' if trial.error else ''}{trial.error}"
    collapsed = ", collapsed" if trial.collapsed else ""
    success = f"{trial.last} held out" if trial.last else "no evaluation"
    return f"{success}, {amount(trial.minutes)} min of training{collapsed}"


def results(comparison: Comparison) -> Mapping[str, Any]:
    """Return all runs and means of a comparison, for `compare.json`."""
    tokens, minutes = comparison.budget("tokens"), comparison.budget("minutes")
    arms = [
        {
            "arm": arm.name,
            "settings": comparison.differences(arm),
            "planned": len(arm.trials),
            "finished": len(arm.finished),
            "collapsed": arm.collapsed,
            "final": comparison.success(arm),
            "final_less_reference": comparison.versus(arm),
            "best": mean_over_seeds(trial.best for trial in arm.finished),
            "late_training": mean_over_seeds(trial.late for trial in arm.finished),
            "equal_tokens": tokens and comparison.success(arm, tokens),
            "equal_tokens_less_reference": tokens and comparison.versus(arm, tokens),
            "equal_minutes": minutes and comparison.success(arm, minutes),
            "equal_minutes_less_reference": minutes and comparison.versus(arm, minutes),
            "staleness": arm.mean(STALENESS),
            "kept_share": arm.mean(KEPT),
            "clipped_share": arm.mean(CLIPPED),
            "exact_fraction": arm.mean(EXACT_SHARE),
            "warnings": comparison.warnings.get(arm.name),
            "runs": [_data(trial) for trial in arm.trials],
        }
        for arm in comparison.arms
    ]
    return {
        "name": comparison.name,
        "commands": comparison.commands,
        "reference": comparison.reference.name,
        "tokens": tokens and tokens.amount,
        "minutes": minutes and minutes.amount,
        "made": dict(provenance(comparison)),
        "arms": plain(arms),
    }


def _data(trial: Trial) -> Mapping[str, Any]:
    names = (
        "folder",
        "seed",
        "state",
        "error",
        "minutes",
        "tokens",
        "final",
        "best",
        "late",
        "collapsed",
        "evaluations",
    )
    return {name: getattr(trial, name) for name in names}


def write_comparison(folder: Path) -> Path:
    """Write `compare.md` and `compare.json` to the folder of a comparison. Return the path of the
    first.
    """
    comparison = read_comparison(folder)
    for name, text in (
        (RESULTS, dumps(results(comparison), indent=2)),
        (TABLES, tables(comparison)),
    ):
        write_whole(folder / name, text)
    return folder / TABLES
