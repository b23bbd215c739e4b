"""Draw the final success of a study's arms over the positions of a dial, and write its tables.

    unstale compare benchmarks/studies/levels.toml --jobs 2
    python -m benchmarks.levels runs/levels --over bound --panels engine --x 2 6 12

Dots are runs, lines go through their means. There is one panel for each position of another dial.
The tables have a row for each setting, and the differences to the reference over the settings that
have the same position of a dial.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import columns, legend_below, picture, row, share_axis, write
from unstale.analysis.report.compare import Trial, mean_over_seeds
from unstale.analysis.report.compare_tables import points_with_interval, spread
from unstale.analysis.report.study import ALPHA, StudyResults, StudySetting, read_results
from unstale.observe.statistics import paired_difference
from unstale.observe.words import percent

STYLES = {
    "snapshot_old": ("#1f77b4", "-"),
    "rollout": ("#d62728", "-"),
    "current_recompute": ("#7f7f7f", "-"),
    "current_recompute equal reach": ("#7f7f7f", ":"),
    "interp_prox_loglinear": ("#8c564b", "-"),
    "interp_prox_loglinear equal reach": ("#8c564b", ":"),
    "ewma_prox": ("#2ca02c", "-"),
    "ppo_ewma_async": ("#9467bd", "-"),
}
"""Colour and line of each arm. An arm of equal reach has the colour of its route."""


def draw(
    panel: Any,
    settings: Sequence[StudySetting],
    dial: str,
    places: Sequence[str],
    *,
    value: Callable[[Trial], float | None] = lambda trial: trial.final,
) -> None:
    """Draw a share of all arms, by default their success, in settings that differ in one dial."""
    comparisons = [each.comparison for each in settings]
    names = list(dict.fromkeys(arm.name for each in comparisons for arm in each.arms))
    for index, name in enumerate(names):
        colour, line = STYLES[name]
        shift = (index - (len(names) - 1) / 2) * 0.06  # dots of two arms do not hide each other
        xs, means = [], []
        for place, comparison in enumerate(comparisons):
            for arm in (arm for arm in comparison.arms if arm.name == name and arm.finished):
                shares = [share for trial in arm.finished if (share := value(trial)) is not None]
                dots = [place + shift] * len(shares)
                panel.scatter(dots, shares, s=8, color=colour, alpha=0.45, linewidths=0)
                if mean := mean_over_seeds(shares):
                    xs.append(place + shift)
                    means.append(mean.mean)
        panel.plot(xs, means, line, color=colour, linewidth=1.9, label=name)
    panel.set_xticks(range(len(places)), places)
    panel.set_xlabel(dial)
    share_axis(panel)


def successes(study: StudyResults) -> list[str]:
    """Return the table of final success: a row for each setting, a column for each arm."""
    means = {(each.setting, each.arm): each.success for each in study.at("steps")}
    lines = columns("setting", *study.arms)
    for setting in study.settings:
        cells = (spread(means.get((setting.name, arm)), within_bounds) for arm in study.arms)
        lines.append(row(setting.name, *cells))
    return lines


def within_bounds(share: float) -> str:
    """Return a share as text, cut at 0% and 100%: Student's interval of few runs goes beyond."""
    return percent(min(max(share, 0.0), 1.0), 0)


def differences(study: StudyResults, dial: str) -> list[str]:
    """Return the table of differences to the reference, over all settings at each position."""
    others = [name for name in study.arms if name != study.reference]
    lines = columns(dial, *others)
    for position in dict.fromkeys(each.positions[dial] for each in study.settings):
        here = [each.name for each in study.settings if each.positions[dial] == position]
        lines.append(row(position, *(_difference(study, here, name) for name in others)))
    return lines


def _difference(study: StudyResults, settings: Sequence[str], arm: str) -> str:
    """Return the mean difference of an arm over the pairs of some settings."""
    found = [each for each in study.at("steps") if each.arm == arm and each.setting in settings]
    pairs = [pair for each in found for pair in each.pairs]
    if (paired := paired_difference(pairs)) is None:
        return "—"
    return f"{points_with_interval(paired, ALPHA)}, {len(pairs)} pairs"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the study")
    parser.add_argument("--over", default="bound", help="the dial on the horizontal axis")
    parser.add_argument("--panels", default="engine", help="the dial with one panel per position")
    parser.add_argument("--label", default="versions that a token may be old", help="of the axis")
    parser.add_argument("--x", nargs="+", default=[], help="names of the positions on the axis")
    parser.add_argument("--name", default="levels", help="name of the results' files")
    chosen = parser.parse_args()
    study = read_results(chosen.folder)
    titles = list(dict.fromkeys(each.positions[chosen.panels] for each in study.settings))
    with picture(chosen.name, width=9.6, height=3.9, panels=len(titles)) as panels:
        for panel, title in zip(panels, titles, strict=True):
            here = [each for each in study.settings if each.positions[chosen.panels] == title]
            places = chosen.x or [each.positions[chosen.over] for each in here]
            draw(panel, here, chosen.label, places)
            panel.set_title(f"{title} engine", fontsize=10)
        panels[0].set_ylabel("success on held-out tasks")
        legend_below(panels[0], fontsize=8.5)
    lines = [
        "## Success on held-out tasks at the end",
        "",
        "Means over seeds with 95% intervals by Student's t, cut at 0% and 100%.",
        "",
        *successes(study),
    ]
    for dial in (chosen.over, chosen.panels):
        lines += [
            "",
            f"## Differences to {study.reference} by {dial}, in points",
            "",
            "Means over the pairs of all settings with this position, each pair taken as",
            "independent. These intervals are exploratory and not adjusted for their number.",
            "",
            *differences(study, dial),
        ]
    results = (chosen.folder / "study.md").read_text("utf-8").splitlines()[1:]
    write(chosen.name, "Routes by engine and staleness bound", [*lines, *results])


if __name__ == "__main__":
    main()
