"""Write a comparison as an HTML page, as Markdown tables and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from unstale.durability.run_folder import REPORT, dumps, plain, write_whole
from unstale.observe.report.compare import (
    CLIPPED,
    EXACT_SHARE,
    KEPT,
    STALENESS,
    SUCCESS,
    ArmResult,
    Comparison,
    Point,
    SeedMean,
    TrainingBudget,
    Trial,
    Unit,
    grouped,
    mean_over_seeds,
    read_comparison,
)
from unstale.observe.report.figures import figure, gap
from unstale.observe.report.markup import Markup, el
from unstale.observe.report.page import document
from unstale.observe.report.plots import FULL, HALF, Axis, Series, legend, line_plot, smooth, thin
from unstale.observe.report.sections import bar, section
from unstale.observe.report.words import NONE, amount, percent

PAGE, TABLES, RESULTS = "compare.html", "compare.md", "compare.json"
COLOURS, GRID = 10, 40
HOW = (
    "Means over seeds with 95% intervals by Student's t. Differences are between runs with the "
    "same seed. Intervals are not adjusted for multiple comparisons. Unfinished runs are listed, "
    "but excluded from all means."
)
LINTER = "Linter warnings"
UNCOUNTED = "The number of trained action tokens was not recorded."
BY_STEPS, BY_TOKENS, BY_CLOCK = "At equal steps", "At equal tokens", "At equal wall-clock"


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. The first column holds the name of the arm."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        escaped = [[text.replace("|", "\\|") for text in line] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def tenths(share: float | None) -> str:
    return percent(share, 1)


def spread(mean: SeedMean | None, show: Callable[[float], str] = tenths) -> str:
    """
    >>> spread(SeedMean(3, 0.7, 0.45, 0.95)), spread(SeedMean(1, 0.7, None, None)), spread(None)
    ('70.0% (45.0% to 95.0%)', '70.0%', '—')
    """
    if mean is None:
        return NONE
    if mean.low is None or mean.high is None:
        return show(mean.mean)
    return f"{show(mean.mean)} ({show(mean.low)} to {show(mean.high)})"


def points(share: float) -> str:
    """Format a difference of shares in percentage points.

    >>> points(-0.0312)
    '-3.1'
    """
    return f"{100 * share:+.1f}"


UNITS: Mapping[Unit, tuple[Callable[[float], str], str]] = {
    "minutes": ("{:.1f}".format, "minutes of training"),
    "tokens": (amount, "action tokens"),
}


def equal_steps(comparison: Comparison) -> Table:
    """Return the table of success at the end of training, after equal steps."""
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


def equal_tokens(comparison: Comparison) -> Table | None:
    """Return the table of success after equal action tokens, or None if they are unknown."""
    budget = comparison.smallest("tokens")
    return _after(comparison, budget) if budget else None


def equal_clock(comparison: Comparison) -> Table | None:
    """Return the table of success after equal training time, or None if not comparable."""
    budget = None if comparison.shared_machine else comparison.smallest("minutes")
    return _after(comparison, budget) if budget else None


def _after(comparison: Comparison, budget: TrainingBudget) -> Table:
    show, words = UNITS[budget.unit]
    head = ("arm", "runs", f"success after {show(budget.amount)} {words}")
    rows = []
    for arm in comparison.arms:
        success, versus = comparison.success(arm, budget), comparison.versus(arm, budget)
        took = mean_over_seeds(
            total.amount for trial in arm.finished if (total := trial.all(budget.unit))
        )
        row = (arm.name, _count(success), spread(success), spread(versus, points), _count(versus))
        rows.append((*row, show(took.mean) if took else NONE))
    return Table(
        (*head, f"less {comparison.reference.name}, points", "pairs", f"{words}, mean"), tuple(rows)
    )


def lengths(comparison: Comparison) -> str:
    """Return a sentence on the range of trained tokens between arms."""
    means = []
    for arm in comparison.arms:
        tokens = mean_over_seeds(trial.tokens for trial in arm.finished)
        if tokens:
            means.append((tokens.mean, arm.name))
    if not means:
        return UNCOUNTED
    (fewest, low_arm), (most, high_arm) = min(means), max(means)
    return (
        "Episodes differ in length, so equal steps are not equal tokens: mean action tokens per "
        f"run range from {amount(fewest)} ({low_arm}) to {amount(most)} ({high_arm})."
    )


def conduct(comparison: Comparison) -> Table:
    """Return the table of staleness and of kept, clipped and exact tokens per arm."""
    head = ("arm", "staleness", "kept", "clipped", "exact")
    rows = []
    for arm in comparison.arms:
        shares = tuple(
            spread(arm.mean(name), partial(percent, digits=2))
            for name in (KEPT, CLIPPED, EXACT_SHARE)
        )
        rows.append((arm.name, spread(arm.mean(STALENESS), "{:.2f}".format), *shares))
    return Table(head, tuple(rows))


def _runs(arm: ArmResult) -> str:
    return f"{len(arm.finished)} of {len(arm.trials)}"


def _count(mean: SeedMean | None) -> str:
    return str(mean.n) if mean else NONE


def findings(comparison: Comparison) -> list[str]:
    """Return sentences on the best arm, and on each arm against the reference."""
    ended = [(arm, success) for arm in comparison.arms if (success := comparison.success(arm))]
    if not ended:
        return ["No run has a held-out result."]
    best, success = max(ended, key=lambda pair: pair[1].mean)
    seeds = f"{success.n} {'seed' if success.n == 1 else 'seeds'}"
    sentences = [
        f"After the same {_all(comparison, 'steps')} steps, {best.name} has the highest mean "
        f"held-out success: {spread(success)}, {seeds}."
    ]
    for arm in comparison.arms:
        versus = comparison.versus(arm)
        if versus is None:
            continue
        if versus.low is None or versus.high is None:
            verdict = "one pair allows no interval"
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
    """Return the caveats of a comparison: unfinished runs, learning-rate decay and code changes."""
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
    """Return the linter's warnings about the arms."""
    warnings = grouped(comparison.warnings)
    unknown = [arm.name for arm in comparison.arms if arm.name not in comparison.warnings]
    if unknown:
        warnings.append(f"Not recorded: {', '.join(unknown)}.")
    return warnings or ["No warnings."]


def _all(comparison: Comparison, name: str) -> str:
    return " or ".join(str(value) for value in comparison.settings(name))


def provenance(comparison: Comparison) -> list[tuple[str, str]]:
    """Return the recipe, tasks, commit, machine and versions behind the numbers."""
    facts = [
        (name, ", ".join(comparison.launched(name)) or "not recorded")
        for name in ("commit", "machine", "versions")
    ]
    return [
        ("recipe", _all(comparison, "recipe")),
        ("held-out tasks", _all(comparison, "eval.tasks")),
        *facts,
    ]


def tables(comparison: Comparison) -> str:
    """Return the comparison as Markdown."""
    tokens, clock = equal_tokens(comparison), equal_clock(comparison)
    parts = [f"# {comparison.name}", *findings(comparison), HOW, *remarks(comparison)]
    parts += [f"## {BY_STEPS}", lengths(comparison), equal_steps(comparison).markdown()]
    parts += [f"## {BY_TOKENS}", tokens.markdown() if tokens else UNCOUNTED]
    parts += [f"## {BY_CLOCK}", clock.markdown() if clock else comparison.shared_machine]
    parts += ["## During training", conduct(comparison).markdown()]
    parts += [f"## {LINTER}", "\n".join(f"- {warning}" for warning in linted(comparison))]
    parts += [
        "## Arms",
        "\n".join(f"- {arm.name}: {_settings(comparison, arm)}" for arm in comparison.arms),
        "## Runs",
    ]
    parts.append("\n".join(f"- {trial.folder}: {_result(trial)}" for trial in comparison.trials))
    parts += [
        "## Commands",
        "\n".join(f"- `{command}`" for command in comparison.commands) or "Not recorded.",
    ]
    parts.append("\n".join(f"- {name}: {value}" for name, value in provenance(comparison)))
    return "\n\n".join(parts) + "\n"


def _settings(comparison: Comparison, arm: ArmResult) -> str:
    return (
        ", ".join(f"{name}={value}" for name, value in comparison.differences(arm).items())
        or "no run yet"
    )


def _result(trial: Trial) -> str:
    if not trial.finished:
        return f"{trial.state}{': ' if trial.error else ''}{trial.error}"
    collapsed = ", collapsed" if trial.collapsed else ""
    return f"{percent(trial.final, 1)} held out, {amount(trial.minutes)} min of training{collapsed}"


def results(comparison: Comparison) -> Mapping[str, Any]:
    """Return the runs and all means of a comparison as data."""
    tokens = comparison.smallest("tokens")
    minutes = None if comparison.shared_machine else comparison.smallest("minutes")
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
    """Write the page, the Markdown tables and the JSON results. Return the page's path."""
    comparison = read_comparison(folder)
    for name, text in (
        (RESULTS, dumps(results(comparison), indent=2)),
        (TABLES, tables(comparison)),
        (PAGE, page(comparison)),
    ):
        write_whole(folder / name, text)
    return folder / PAGE


def page(comparison: Comparison) -> str:
    """Return the comparison as an HTML page."""
    return document(
        comparison.name,
        _header(comparison),
        _outcome(comparison),
        _read_off(comparison, "tokens", equal_tokens(comparison)),
        _read_off(comparison, "minutes", equal_clock(comparison)),
        _on_the_way(comparison),
        section("linter", LINTER, None, el("ul", [el("li", text) for text in linted(comparison)])),
        _listed(comparison),
        _again(comparison),
    )


def _header(comparison: Comparison) -> Markup:
    first, *others = findings(comparison)
    notes = remarks(comparison)
    done = f"{len(comparison.finished)} of {len(comparison.trials)} runs finished"
    return el(
        "header",
        bar(done, "good" if len(comparison.finished) == len(comparison.trials) else "plain"),
        el("p", comparison.name, class_="run-name"),
        el("p", first, class_="finding"),
        el("ul", [el("li", text) for text in others]),
        el("p", HOW, class_="quiet"),
        el("ul", [el("li", note) for note in notes], class_="gaps") if notes else None,
    )


def _html(comparison: Comparison, table: Table) -> Markup:
    names = [arm.name for arm in comparison.arms]
    head = el("thead", el("tr", [el("th", name) for name in table.head]))
    rows = []
    for row in table.rows:
        swatch = el("i", class_=f"swatch {_colour(names.index(row[0]))}")
        rows.append(el("tr", el("td", swatch, row[0]), [el("td", text) for text in row[1:]]))
    return el("div", el("table", head, el("tbody", rows), class_="results"), class_="scroll")


def _colour(position: int) -> str:
    return f"arm-{position % COLOURS}"


def _outcome(comparison: Comparison) -> Markup:
    curves = _curves(comparison, _by_step)
    batch = f"{_all(comparison, 'schedule.groups_per_step')} x "
    batch += _all(comparison, "schedule.group_size")
    lead = (
        f"Every run trained {_all(comparison, 'steps')} steps of {batch} episodes and was "
        f"evaluated at the end. {lengths(comparison)} Best is the maximum over a run's "
        "evaluations, which is biased upwards. A run collapsed if its final success is less than "
        "half of its best."
    )
    plot = _plot(comparison, curves, "Held-out success over the steps", "optimizer step")
    return section("steps", BY_STEPS, lead, _html(comparison, equal_steps(comparison)), plot)


def _read_off(comparison: Comparison, unit: Unit, table: Table | None) -> Markup:
    """Render success after the largest budget that every run reached."""
    if unit == "tokens":
        title, missing = BY_TOKENS, UNCOUNTED
    else:
        title, missing = BY_CLOCK, comparison.shared_machine
    budget = comparison.smallest(unit)
    show, words = UNITS[unit]
    if table is None or budget is None:
        return section(unit, title, None, gap(title, missing))
    lead = (
        f"Held-out success after {show(budget.amount)} {words}, the largest amount that every "
        "finished run reached. It is interpolated between evaluations. Evaluations count "
        f"neither as time nor as tokens. The last column is the {words} of the whole run."
    )
    plot = _plot(
        comparison,
        _curves(comparison, partial(_up_to, budget=budget)),
        f"Held-out success over the {words}",
        words,
    )
    return section(unit, title, lead, _html(comparison, table), plot)


Curve = tuple[str, str, Sequence[Point], Sequence[Point]]
"""Name, colour, means and intervals (may be empty)."""


def _curves(
    comparison: Comparison, of: Callable[[ArmResult], Sequence[tuple[float, SeedMean]]]
) -> list[Curve]:
    curves: list[Curve] = []
    for position, arm in enumerate(comparison.arms):
        means = of(arm)
        ends = [(e.low, e.high) for _, e in means if e.low is not None and e.high is not None]
        intervals = (
            [(max(0.0, low), min(1.0, high)) for low, high in ends]
            if len(ends) == len(means)
            else []
        )
        if means:
            curves.append((arm.name, _colour(position), [(x, e.mean) for x, e in means], intervals))
    return curves


def _by_step(arm: ArmResult) -> list[tuple[float, SeedMean]]:
    """Return the mean success at each step where all finished runs of the arm were evaluated."""
    runs = [
        {evaluation.step: evaluation.success for evaluation in trial.evaluations}
        for trial in arm.finished
    ]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    return [
        (float(step), mean)
        for step in steps
        if (mean := mean_over_seeds(run[step] for run in runs))
    ]


def _up_to(arm: ArmResult, budget: TrainingBudget) -> list[tuple[float, SeedMean]]:
    """Return the mean success up to a budget.

    The plot ends there, because a single long run would squeeze all others.
    """
    at = [TrainingBudget(budget.unit, budget.amount * index / GRID) for index in range(GRID + 1)]
    return [
        (x.amount, mean)
        for x in at
        if (mean := mean_over_seeds(trial.after(x) for trial in arm.finished))
    ]


def _plot(
    comparison: Comparison, curves: Sequence[Curve], title: str, across: str, *, wide: bool = True
) -> Markup:
    """Render one line per arm, with a band where there are intervals."""
    if not curves:
        return gap(title, "Nothing was recorded.")
    values = [y for _, _, means, _ in curves for _, y in means]
    values += [end for *_, intervals in curves for pair in intervals for end in pair]
    margin = 0.05 * (max(values) - min(values)) or 0.01
    share = "staleness" not in title.lower()
    low, high = max(0.0, min(values) - margin), max(values) + margin
    digits = 0 if high - low > 0.08 else 1 if high - low > 0.008 else 2
    y = Axis(
        label="",
        low=low,
        high=min(1.0, high) if share else high,
        show=(lambda value: f"{100 * value:.{digits}f}%") if share else amount,
    )
    last = max(x for _, _, means, _ in curves for x, _ in means)
    x = Axis(label=across, low=0, high=last, show=amount, whole=across.endswith("step"))
    lines = [
        Series(
            name=name,
            colour=colour,
            points=means,
            intervals=intervals,
            band=True,
            show=tenths if share else amount,
        )
        for name, colour, means, intervals in curves
    ]
    banded = any(intervals for *_, intervals in curves)
    about = "Mean over seeds"
    about += "; the band is its 95% interval, cut at 0 and 100%." if banded else "."
    keys = legend(*((colour, name) for name, colour, _, _ in curves))
    plot = line_plot(lines, x, y, label=title, width=FULL if wide else HALF)
    return figure(title, about, keys, plot, class_="full" if wide else "")


def _on_the_way(comparison: Comparison) -> Markup:
    plots = {
        name: _plot(
            comparison,
            _seed_means(comparison, metric),
            title,
            "optimizer step",
            wide=metric == SUCCESS,
        )
        for name, metric, title in (
            ("success", SUCCESS, "Success in training, mean of the last 5 steps"),
            ("staleness", STALENESS, "Mean staleness of the action tokens"),
            ("kept", KEPT, "Kept share of the tokens with an advantage"),
            ("clipped", CLIPPED, "Clipped share of the tokens with an advantage"),
            ("exact", EXACT_SHARE, "Share of the tokens with an exact old log-probability"),
        )
    }
    lead = "Means over the steps of each run, then over seeds."
    return section(
        "way",
        "During training",
        lead,
        _html(comparison, conduct(comparison)),
        plots["success"],
        el("div", plots["staleness"], plots["exact"], class_="grid-2"),
        el("div", plots["kept"], plots["clipped"], class_="grid-2"),
    )


def _seed_means(comparison: Comparison, metric: str) -> list[Curve]:
    """Return the mean of a metric per step, over the finished runs of each arm."""
    curves: list[Curve] = []
    for position, arm in enumerate(comparison.arms):
        sums: dict[float, list[float]] = {}
        for trial in arm.finished:
            for step, value in trial.series[metric]:
                sums.setdefault(step, []).append(value)
        means = [(step, sum(values) / len(values)) for step, values in sorted(sums.items())]
        if means:
            curves.append(
                (
                    arm.name,
                    _colour(position),
                    thin(smooth(means) if metric == SUCCESS else means),
                    (),
                )
            )
    return curves


def _listed(comparison: Comparison) -> Markup:
    rows = []
    for position, arm in enumerate(comparison.arms):
        for trial in arm.trials:
            begun = bool(trial.config)
            link = (
                el("a", trial.folder, href=f"{quote(trial.folder)}/{REPORT}")
                if begun
                else trial.folder
            )
            swatch = el("i", class_=f"swatch {_colour(position)}")
            rows.append(
                el(
                    "tr",
                    el("td", swatch, link),
                    el("td", str(trial.seed)),
                    el("td", _result(trial)),
                )
            )
    head = el("tr", [el("th", name) for name in ("run", "seed", "outcome")])
    table = el("table", el("thead", head), el("tbody", rows))
    return section("runs", "Runs", None, el("div", table, class_="scroll results"))


def _again(comparison: Comparison) -> Markup:
    arms = [
        el("li", el("b", arm.name), f": {_settings(comparison, arm)}") for arm in comparison.arms
    ]
    facts = [
        el("li", el("span", name), el("code", value)) for name, value in provenance(comparison)
    ]
    return section(
        "again",
        "Reproduce",
        "The same command continues an interrupted comparison. Finished runs are kept.",
        *(el("pre", command, class_="command") for command in comparison.commands),
        el("p", "Where the arms differ:", class_="quiet"),
        el("ul", arms),
        el("ul", facts, class_="knobs"),
    )
