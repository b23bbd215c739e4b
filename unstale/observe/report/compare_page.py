"""A comparison for readers: one HTML page, the same tables as Markdown, the same numbers as JSON."""

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
    "Means over seeds with 95% intervals by Student's t; differences are of runs with the same seed. Nothing is "
    "adjusted for the number of intervals looked at. Runs that did not finish are listed, and are in no mean."
)
LINTER = "What the linter says of the arms"
UNCOUNTED = "How many action tokens the runs trained on was not recorded."
BY_STEPS, BY_TOKENS, BY_CLOCK = "At equal steps", "At equal tokens", "At equal wall-clock"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a head; the first cell of a row names its arm."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.head, ("---",) * len(self.head), *self.rows]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def tenths(share: float | None) -> str:
    return percent(share, 1)


def spread(found: SeedMean | None, show: Callable[[float], str] = tenths) -> str:
    """
    >>> spread(SeedMean(3, 0.7, 0.45, 0.95)), spread(SeedMean(1, 0.7, None, None)), spread(None)
    ('70.0% (45.0% to 95.0%)', '70.0%', '—')
    """
    if found is None:
        return NONE
    between = (
        ""
        if found.low is None or found.high is None
        else f" ({show(found.low)} to {show(found.high)})"
    )
    return show(found.mean) + between


def points(share: float) -> str:
    """A difference of shares.

    >>> points(-0.0312)
    '-3.1'
    """
    return f"{100 * share:+.1f}"


UNITS: Mapping[Unit, tuple[Callable[[float], str], str]] = {
    "minutes": ("{:.1f}".format, "minutes of training"),
    "tokens": (amount, "action tokens"),
}


def equal_steps(found: Comparison) -> Table:
    """Success after the same number of steps."""
    head = ["arm", "runs", "held-out success", f"less {found.reference.name}, points", "pairs"]
    head += ["best", "late in training", "collapsed"]
    rows = []
    for arm in found.arms:
        versus = found.versus(arm)
        row = [
            arm.name,
            _runs(arm),
            spread(found.success(arm)),
            spread(versus, points),
            _count(versus),
        ]
        best, late = (
            mean_over_seeds(run.best for run in arm.finished),
            mean_over_seeds(run.late for run in arm.finished),
        )
        row += [
            tenths(best.mean if best else None),
            spread(late),
            f"{arm.collapsed} of {len(arm.finished)}",
        ]
        rows.append(tuple(row))
    return Table(tuple(head), tuple(rows))


def equal_tokens(found: Comparison) -> Table | None:
    """Success after as many action tokens; None where they were not recorded."""
    budget = found.smallest("tokens")
    return _after(found, budget) if budget else None


def equal_clock(found: Comparison) -> Table | None:
    """Success after the same training time; None where times cannot be compared."""
    budget = None if found.shared_machine else found.smallest("minutes")
    return _after(found, budget) if budget else None


def _after(found: Comparison, budget: TrainingBudget) -> Table:
    show, words = UNITS[budget.unit]
    head = ("arm", "runs", f"success after {show(budget.amount)} {words}")
    rows = []
    for arm in found.arms:
        success, versus = found.success(arm, budget), found.versus(arm, budget)
        took = mean_over_seeds(
            total.amount for trial in arm.finished if (total := trial.all(budget.unit))
        )
        row = (arm.name, _count(success), spread(success), spread(versus, points), _count(versus))
        rows.append((*row, show(took.mean) if took else NONE))
    return Table(
        (*head, f"less {found.reference.name}, points", "pairs", f"{words}, mean"), tuple(rows)
    )


def lengths(found: Comparison) -> str:
    """How far equal steps are from equal tokens."""
    means = [
        (e.mean, arm.name)
        for arm in found.arms
        if (e := mean_over_seeds(trial.tokens for trial in arm.finished))
    ]
    if not means:
        return UNCOUNTED
    (least, few), (most, many) = min(means), max(means)
    return (
        "Episodes differ in length, so equal steps are not equal tokens: the means go from "
        f"{amount(least)} action tokens a run ({few}) to {amount(most)} ({many})."
    )


def conduct(found: Comparison) -> Table:
    """What the runs did on the way."""
    head = ("arm", "staleness", "kept", "clipped", "exact")
    rows = []
    for arm in found.arms:
        shares = tuple(
            spread(arm.mean(name), partial(percent, digits=2))
            for name in (KEPT, CLIPPED, EXACT_SHARE)
        )
        rows.append((arm.name, spread(arm.mean(STALENESS), "{:.2f}".format), *shares))
    return Table(head, tuple(rows))


def _runs(arm: ArmResult) -> str:
    return f"{len(arm.finished)} of {len(arm.trials)}"


def _count(found: SeedMean | None) -> str:
    return str(found.n) if found else NONE


def findings(found: Comparison) -> list[str]:
    """What came out, in sentences: the outcome, then each arm against the reference."""
    ended = [(arm, success) for arm in found.arms if (success := found.success(arm))]
    if not ended:
        return ["No run has a held-out result."]
    best, success = max(ended, key=lambda pair: pair[1].mean)
    told = [
        f"After the same {_all(found, 'steps')} steps, {best.name} has the highest mean held-out success: "
        f"{spread(success)}, {success.n} {'seed' if success.n == 1 else 'seeds'}."
    ]
    for arm in found.arms:
        versus = found.versus(arm)
        if versus is None:
            continue
        if versus.low is None or versus.high is None:
            verdict = "one pair allows no interval"
        elif versus.low <= 0 <= versus.high:
            verdict = "not told apart"
        else:
            verdict = "lower" if versus.high < 0 else "higher"
        pairs = f"{versus.n} {'pair' if versus.n == 1 else 'pairs'}"
        told.append(
            f"{arm.name} less {found.reference.name}: {spread(versus, points)} points, {pairs}: {verdict}."
        )
    return told


def remarks(found: Comparison) -> list[str]:
    """What a reader has to know before believing the tables."""
    told = []
    short = [arm for arm in found.arms if len(arm.finished) < len(arm.trials)]
    if short:
        told.append(
            "Not all runs finished: " + ", ".join(f"{arm.name} {_runs(arm)}" for arm in short) + "."
        )
    falling = [name for name in found.settings("trainer.lr_schedule") if name != "constant"]
    if falling:
        told.append(
            f"The learning rate falls over a run's own steps ({', '.join(map(str, falling))}): at equal tokens or "
            "wall-clock, an arm that is not through with its steps stands at a higher rate than one that is."
        )
    commits = found.launched("commit")
    if len(commits) > 1:
        told.append(f"The runs were made by different code: {', '.join(commits)}.")
    elif any(commit.endswith("-dirty") for commit in commits):
        told.append(f"The code had changes that are not in the commit: {commits[0]}.")
    return told


def linted(found: Comparison) -> list[str]:
    """What the linter said of the arms before they ran."""
    told = grouped(found.warnings)
    silent = [arm.name for arm in found.arms if arm.name not in found.warnings]
    return [*told, *([f"Not recorded: {', '.join(silent)}."] if silent else [])] or ["No warnings."]


def _all(found: Comparison, name: str) -> str:
    return " or ".join(str(value) for value in found.settings(name))


def provenance(found: Comparison) -> list[tuple[str, str]]:
    """Where the numbers come from."""
    facts = [
        (name, ", ".join(found.launched(name)) or "not recorded")
        for name in ("commit", "machine", "versions")
    ]
    return [
        ("recipe", _all(found, "recipe")),
        ("held-out tasks", _all(found, "eval.tasks")),
        *facts,
    ]


def tables(found: Comparison) -> str:
    """The comparison as Markdown."""
    tokens, clock = equal_tokens(found), equal_clock(found)
    parts = [f"# {found.name}", *findings(found), HOW, *remarks(found)]
    parts += [f"## {BY_STEPS}", lengths(found), equal_steps(found).markdown()]
    parts += [f"## {BY_TOKENS}", tokens.markdown() if tokens else UNCOUNTED]
    parts += [f"## {BY_CLOCK}", clock.markdown() if clock else found.shared_machine]
    parts += ["## On the way", conduct(found).markdown()]
    parts += [f"## {LINTER}", "\n".join(f"- {told}" for told in linted(found))]
    parts += [
        "## Arms",
        "\n".join(f"- {arm.name}: {_settings(found, arm)}" for arm in found.arms),
        "## Runs",
    ]
    parts.append("\n".join(f"- {trial.folder}: {_told(trial)}" for trial in found.trials))
    parts += [
        "## Made by",
        "\n".join(f"- `{command}`" for command in found.commands) or "Not recorded.",
    ]
    parts.append("\n".join(f"- {name}: {value}" for name, value in provenance(found)))
    return "\n\n".join(parts) + "\n"


def _settings(found: Comparison, arm: ArmResult) -> str:
    return (
        ", ".join(f"{name}={value}" for name, value in found.differences(arm).items())
        or "no run yet"
    )


def _told(trial: Trial) -> str:
    if not trial.finished:
        return f"{trial.state}{': ' if trial.error else ''}{trial.error}"
    collapsed = ", collapsed" if trial.collapsed else ""
    return f"{percent(trial.final, 1)} held out, {amount(trial.minutes)} min of training{collapsed}"


def results(found: Comparison) -> Mapping[str, Any]:
    """The comparison as data: every run, and every estimate of the tables."""
    tokens, minutes = (
        found.smallest("tokens"),
        None if found.shared_machine else found.smallest("minutes"),
    )
    arms = [
        {
            "arm": arm.name,
            "settings": found.differences(arm),
            "planned": len(arm.trials),
            "finished": len(arm.finished),
            "collapsed": arm.collapsed,
            "final": found.success(arm),
            "final_less_reference": found.versus(arm),
            "best": mean_over_seeds(trial.best for trial in arm.finished),
            "late_training": mean_over_seeds(trial.late for trial in arm.finished),
            "equal_tokens": tokens and found.success(arm, tokens),
            "equal_tokens_less_reference": tokens and found.versus(arm, tokens),
            "equal_minutes": minutes and found.success(arm, minutes),
            "equal_minutes_less_reference": minutes and found.versus(arm, minutes),
            "staleness": arm.mean(STALENESS),
            "kept_share": arm.mean(KEPT),
            "clipped_share": arm.mean(CLIPPED),
            "exact_fraction": arm.mean(EXACT_SHARE),
            "warnings": found.warnings.get(arm.name),
            "runs": [_data(trial) for trial in arm.trials],
        }
        for arm in found.arms
    ]
    told: dict[str, Any] = {
        "name": found.name,
        "commands": found.commands,
        "reference": found.reference.name,
    }
    told |= {"tokens": tokens and tokens.amount, "minutes": minutes and minutes.amount}
    return {**told, "made": dict(provenance(found)), "arms": plain(arms)}


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
    """Write the page, the tables as Markdown and the results as JSON; the page's path."""
    found = read_comparison(folder)
    for name, text in (
        (RESULTS, dumps(results(found), indent=2)),
        (TABLES, tables(found)),
        (PAGE, page(found)),
    ):
        write_whole(folder / name, text)
    return folder / PAGE


def page(found: Comparison) -> str:
    """The comparison as a page of its own."""
    return document(
        found.name,
        _header(found),
        _outcome(found),
        _read_off(found, "tokens", equal_tokens(found)),
        _read_off(found, "minutes", equal_clock(found)),
        _on_the_way(found),
        section("linter", LINTER, None, el("ul", [el("li", told) for told in linted(found)])),
        _listed(found),
        _again(found),
    )


def _header(found: Comparison) -> Markup:
    first, *others = findings(found)
    notes = remarks(found)
    done = f"{len(found.finished)} of {len(found.trials)} runs finished"
    return el(
        "header",
        bar(done, "good" if len(found.finished) == len(found.trials) else "plain"),
        el("p", found.name, class_="run-name"),
        el("p", first, class_="finding"),
        el("ul", [el("li", text) for text in others]),
        el("p", HOW, class_="quiet"),
        el("ul", [el("li", note) for note in notes], class_="gaps") if notes else None,
    )


def _html(found: Comparison, table: Table) -> Markup:
    names = [arm.name for arm in found.arms]
    head = el("thead", el("tr", [el("th", cell) for cell in table.head]))
    rows = []
    for row in table.rows:
        swatch = el("i", class_=f"swatch {_colour(names.index(row[0]))}")
        rows.append(el("tr", el("td", swatch, row[0]), [el("td", cell) for cell in row[1:]]))
    return el("div", el("table", head, el("tbody", rows), class_="results"), class_="scroll")


def _colour(position: int) -> str:
    return f"arm-{position % COLOURS}"


def _outcome(found: Comparison) -> Markup:
    curves = _curves(found, _by_step)
    lead = (
        f"Every run trained {_all(found, 'steps')} steps of {_all(found, 'schedule.groups_per_step')} x "
        f"{_all(found, 'schedule.group_size')} episodes, and was evaluated at the end. {lengths(found)} Best: of a "
        "run's evaluations, picked after the fact, so it flatters. Late in training: rollouts of the last quarter of "
        "the steps. Collapsed: ended under half of its best."
    )
    plot = _plot(found, curves, "Held-out success over the steps", "optimizer step")
    return section("steps", BY_STEPS, lead, _html(found, equal_steps(found)), plot)


def _read_off(found: Comparison, unit: Unit, table: Table | None) -> Markup:
    """After a budget that every run has reached; a gap where `table` is missing."""
    title, why = {"tokens": (BY_TOKENS, UNCOUNTED), "minutes": (BY_CLOCK, found.shared_machine)}[
        unit
    ]
    budget, (show, words) = found.smallest(unit), UNITS[unit]
    if table is None or budget is None:
        return section(unit, title, None, gap(title, why))
    lead = (
        f"After {show(budget.amount)} {words}: all that the finished run with the fewest took, so every one has come "
        "so far. Held-out success, between two evaluations read off the line; what they take is not counted. The last "
        "column is what the runs took to their ends."
    )
    plot = _plot(
        found,
        _curves(found, partial(_up_to, budget=budget)),
        f"Held-out success over the {words}",
        words,
    )
    return section(unit, title, lead, _html(found, table), plot)


Curve = tuple[str, str, Sequence[Point], Sequence[Point]]
"""Name, colour, means, and intervals where there are any."""


def _curves(
    found: Comparison, of: Callable[[ArmResult], Sequence[tuple[float, SeedMean]]]
) -> list[Curve]:
    curves: list[Curve] = []
    for position, arm in enumerate(found.arms):
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
    """Where all finished runs of the arm were evaluated."""
    runs = [
        {evaluation.step: evaluation.success for evaluation in trial.evaluations}
        for trial in arm.finished
    ]
    steps = sorted(set.intersection(*map(set, runs))) if runs else []
    return [
        (float(step), found)
        for step in steps
        if (found := mean_over_seeds(run[step] for run in runs))
    ]


def _up_to(arm: ArmResult, budget: TrainingBudget) -> list[tuple[float, SeedMean]]:
    """As far as the table looks: one run that took many times more would squeeze all others."""
    at = [TrainingBudget(budget.unit, budget.amount * index / GRID) for index in range(GRID + 1)]
    return [
        (x.amount, found)
        for x in at
        if (found := mean_over_seeds(trial.after(x) for trial in arm.finished))
    ]


def _plot(
    found: Comparison, curves: Sequence[Curve], title: str, across: str, *, wide: bool = True
) -> Markup:
    """A card with a line per arm, and a band where there are intervals."""
    if not curves:
        return gap(title, "Nothing was recorded.")
    values = [y for _, _, means, _ in curves for _, y in means]
    values += [end for *_, intervals in curves for pair in intervals for end in pair]
    room = 0.05 * (max(values) - min(values)) or 0.01
    share = "staleness" not in title.lower()
    low, high = max(0.0, min(values) - room), max(values) + room
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
    told = "Mean over seeds" + (
        "; the band is its 95% interval, cut at 0 and 100%." if banded else "."
    )
    keys = legend(*((colour, name) for name, colour, _, _ in curves))
    plot = line_plot(lines, x, y, label=title, width=FULL if wide else HALF)
    return figure(title, told, keys, plot, class_="full" if wide else "")


def _on_the_way(found: Comparison) -> Markup:
    plots = {
        name: _plot(
            found, _seed_means(found, metric), title, "optimizer step", wide=metric == SUCCESS
        )
        for name, metric, title in (
            ("success", SUCCESS, "Success in training, mean of the last 5 steps"),
            ("staleness", STALENESS, "Mean staleness of the action tokens"),
            ("kept", KEPT, "Kept share of the tokens with an advantage"),
            ("clipped", CLIPPED, "Clipped share of the tokens with an advantage"),
            ("exact", EXACT_SHARE, "Share of the tokens with an exact old log-probability"),
        )
    }
    lead = "Means over each run's steps, then over seeds. Kept and clipped are shares of the tokens with an advantage."
    return section(
        "way",
        "On the way",
        lead,
        _html(found, conduct(found)),
        plots["success"],
        el("div", plots["staleness"], plots["exact"], class_="grid-2"),
        el("div", plots["kept"], plots["clipped"], class_="grid-2"),
    )


def _seed_means(found: Comparison, metric: str) -> list[Curve]:
    """Step by step, over the finished runs of each arm."""
    curves: list[Curve] = []
    for position, arm in enumerate(found.arms):
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


def _listed(found: Comparison) -> Markup:
    rows = []
    for position, arm in enumerate(found.arms):
        for trial in arm.trials:
            begun = bool(trial.config)
            link = (
                el("a", trial.folder, href=f"{quote(trial.folder)}/{REPORT}")
                if begun
                else trial.folder
            )
            swatch = el("i", class_=f"swatch {_colour(position)}")
            rows.append(
                el("tr", el("td", swatch, link), el("td", str(trial.seed)), el("td", _told(trial)))
            )
    head = el("tr", [el("th", name) for name in ("run and its report", "seed", "what came of it")])
    table = el("table", el("thead", head), el("tbody", rows))
    return section("runs", "Runs", None, el("div", table, class_="scroll results"))


def _again(found: Comparison) -> Markup:
    arms = [el("li", el("b", arm.name), f": {_settings(found, arm)}") for arm in found.arms]
    facts = [el("li", el("span", name), el("code", value)) for name, value in provenance(found)]
    return section(
        "again",
        "Do it again",
        "The command goes on where it stopped; what has finished is not run again.",
        *(el("pre", command, class_="command") for command in found.commands),
        el("p", "Where the arms differ:", class_="quiet"),
        el("ul", arms),
        el("ul", facts, class_="knobs"),
    )
