"""Draw what tight limits on sequences do to each route, and how resets of an average act.

    unstale compare benchmarks/studies/bands.toml --jobs 2
    python -m benchmarks.bands runs/bands

The first picture has the held-out success and the share of tokens that the mask on D keeps, over
the limits. Dots are runs, lines go through their means. The second has the kept share over the
steps for three averages, with a line for each run and a mark where the average started again.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.levels import differences, draw, successes, within_bounds
from benchmarks.tables import columns, legend_below, picture, row, share_axis, write
from unstale.analysis.report.compare import KEPT, ArmResult, Comparison
from unstale.analysis.report.compare_tables import points_with_interval, spread
from unstale.analysis.report.study import ALPHA, StudyResults, StudySetting, read_results
from unstale.durability.run_folder import EVENTS, RunFolder

LIMITS = {"seq2": "1.002", "seq4": "1.004", "seq6": "1.006"}
"""Positions of the dial `limits` in the first picture, and the limit of the clip on S."""
RESET_AT = "seq5"
"""Position of the dial `limits` in the second picture."""
WINDOW = 5
"""Number of steps over which the drawn kept share is a mean."""


def kept_shares(study: StudyResults) -> list[str]:
    """Return the table of kept shares: a row for each setting, a column for each arm."""
    lines = columns("setting", *study.arms)
    for setting in study.settings:
        arms = {arm.name: arm for arm in setting.comparison.arms}
        cells = (
            spread(arms[name].mean(KEPT), within_bounds) if name in arms else "—"
            for name in study.arms
        )
        lines.append(row(setting.name, *cells))
    return lines


def resets(folder: Path) -> list[int]:
    """Return the first steps of a run after its average started again.

    Step v + 1 trains the weights of version v, so a reset at version v acts in step v + 1.
    """
    events = RunFolder(folder).rows(EVENTS)
    return [int(each["version"]) + 1 for each in events if each.get("kind") == "ewma_reset"]


def with_limits(study: StudyResults, limits: Sequence[str]) -> StudyResults:
    """Return the settings of a study that have one of these positions of the dial `limits`."""
    settings = tuple(each for each in study.settings if each.positions["limits"] in limits)
    names = {each.name for each in settings}
    differences = tuple(each for each in study.differences if each.setting in names)
    return replace(study, settings=settings, differences=differences)


def over_all(study: StudyResults) -> list[str]:
    """Return a line for each arm with its difference over the pairs of all settings."""
    return [
        f"- {each.arm}, over all {len(study.settings)} settings: "
        f"{points_with_interval(each.paired, ALPHA)}, {each.paired.n} pairs"
        for each in study.pooled("steps")
    ]


def draw_limits(study: StudyResults) -> None:
    engines = list(dict.fromkeys(each.positions["engine"] for each in study.settings))
    with picture("bands", width=12.5, height=3.9, panels=2 * len(engines)) as panels:
        for index, engine in enumerate(engines):
            here = [_setting(study, engine, limit) for limit in LIMITS]
            success, shares = panels[2 * index], panels[2 * index + 1]
            draw(success, here, "limit of the clip on S", list(LIMITS.values()))
            success.set_title(f"held-out success, {engine} engine", fontsize=10)
            draw(
                shares,
                here,
                "limit of the clip on S",
                list(LIMITS.values()),
                value=lambda trial: trial.mean(KEPT),
            )
            shares.set_title(f"kept tokens, {engine} engine", fontsize=10)
        legend_below(panels[0])


def _setting(study: StudyResults, engine: str, limit: str) -> StudySetting:
    (found,) = (
        each
        for each in study.settings
        if each.positions["engine"] == engine and each.positions["limits"] == limit
    )
    return found


def draw_resets(folder: Path, comparison: Comparison) -> None:
    arms = [arm for arm in comparison.arms if arm is not comparison.reference and arm.finished]
    with picture("resets", width=11.5, height=3.4, panels=len(arms)) as panels:
        for panel, arm in zip(panels, arms, strict=True):
            _draw_arm(panel, folder, arm)
        panels[0].set_ylabel(f"kept share, mean of {WINDOW} steps")


def _draw_arm(panel: Any, folder: Path, arm: ArmResult) -> None:
    for index, trial in enumerate(arm.finished):
        colour = f"C{index}"
        line = smoothed(trial.series[KEPT])
        panel.plot(*zip(*line, strict=True), color=colour, linewidth=1.3)
        at = dict(line)
        marks = [step for step in resets(folder / trial.folder) if step in at]
        panel.scatter(marks, [at[step] for step in marks], color=colour, marker="v", s=42, zorder=3)
    panel.set_title(arm.name, fontsize=10)
    panel.set_xlabel("training steps")
    share_axis(panel)


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[int, float]]:
    """Return the mean of each step and the `WINDOW` - 1 before it.

    >>> smoothed([(1, 0.0), (2, 1.0)])
    [(1, 0.0), (2, 0.5)]
    """
    shares = [share for _, share in points]
    return [
        (int(step), mean(shares[max(0, index + 1 - WINDOW) : index + 1]))
        for index, (step, _) in enumerate(points)
    ]


def reset_table(comparison: Comparison) -> list[str]:
    """Return the table of the arms of the second picture."""
    lines = columns("arm", "held-out success", "kept", "resets of each run")
    for arm in (arm for arm in comparison.arms if arm.finished):
        lines.append(
            row(
                arm.name,
                spread(comparison.success(arm), within_bounds),
                spread(arm.mean(KEPT), within_bounds),
                ", ".join(str(trial.resets) for trial in arm.finished),
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the study")
    folder = parser.parse_args().folder
    study = read_results(folder)
    bands = with_limits(study, tuple(LIMITS))
    draw_limits(bands)
    reset = _setting(study, "bfloat16", RESET_AT)
    draw_resets(folder / reset.name, reset.comparison)
    lines = [
        "## Success on held-out tasks at the end",
        "",
        "Means over seeds with 95% intervals by Student's t, cut at 0% and 100%.",
        "",
        *successes(bands),
        "",
        "## Share of tokens that the mask on D kept",
        "",
        *kept_shares(bands),
        "",
        "## Differences to snapshot_old by engine, in points",
        "",
        "Means over the pairs of all settings with this engine, each pair taken as independent.",
        "These intervals are exploratory and not adjusted for their number. The table of the study",
        f"over all its settings, below, also has {reset.name}.",
        "",
        *differences(bands, "engine"),
        "",
        *over_all(bands),
        "",
        f"## Resets, in {reset.name}",
        "",
        *reset_table(reset.comparison),
    ]
    results = (folder / "study.md").read_text("utf-8").splitlines()[1:]
    write("bands", "Tight limits on sequences", [*lines, *results])


if __name__ == "__main__":
    main()
