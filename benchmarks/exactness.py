"""Draw the held-out success of a study's arms over the steps, and write its table to the results.

    unstale compare benchmarks/studies/fresh.toml --jobs 2
    python -m benchmarks.exactness runs/fresh --settings bfloat16-token int4-token int4-clip3

Thin lines are runs, thick ones their means. Each setting has its own panel.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.tables import legend_below, picture, share_axis, write
from unstale.analysis.report.compare import Comparison, read_comparison

COLOURS = ("#1f77b4", "#d62728", "#7f7f7f", "#2ca02c", "#9467bd")


def draw(panel: Any, comparison: Comparison, title: str, colours: dict[str, str]) -> None:
    for arm in [arm for arm in comparison.arms if arm.finished]:
        colour = colours[arm.name]
        by_step = defaultdict(list)
        for trial in arm.finished:
            run = [(each.step, each.success) for each in trial.evaluations]
            panel.plot(*zip(*run, strict=True), color=colour, alpha=0.25, linewidth=0.8)
            for step, success in run:
                by_step[step].append(success)
        means = list(map(mean, by_step.values()))
        panel.plot(list(by_step), means, color=colour, linewidth=2.2, marker="o", label=arm.name)
        panel.set_xticks(list(by_step))
    runs = sorted({len(arm.finished) for arm in comparison.arms if arm.finished})
    number = " or ".join(map(str, runs))
    panel.set_title(f"{title}, {number} run{'s' if number != '1' else ''} each", fontsize=10)
    panel.set_xlabel("training steps")
    share_axis(panel)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the study")
    parser.add_argument("--settings", nargs="+", required=True, help="settings to draw")
    parser.add_argument("--titles", nargs="+", default=[], help="titles of the panels")
    parser.add_argument("--name", default="exactness", help="name of the results' files")
    chosen = parser.parse_args()
    titles = chosen.titles or chosen.settings
    width = max(4.2, 2.6 * len(chosen.settings))
    with picture(chosen.name, width=width, height=3.4, panels=len(chosen.settings)) as panels:
        panels = panels if len(chosen.settings) > 1 else [panels]
        comparisons = [read_comparison(chosen.folder / setting) for setting in chosen.settings]
        names = dict.fromkeys(arm.name for each in comparisons for arm in each.arms)
        colours = dict(zip(names, COLOURS, strict=False))
        for panel, comparison, title in zip(panels, comparisons, titles, strict=True):
            draw(panel, comparison, title, colours)
        panels[0].set_ylabel("success on held-out tasks")
        legend_below(*panels, ncols=len(names) if width > 7 else 2)
    text = (chosen.folder / "study.md").read_text("utf-8").splitlines()[1:]
    write(chosen.name, "When an exact old log-probability pays", text)


if __name__ == "__main__":
    main()
