"""Draw the differences of the arms of a study, and write its tables to the results.

    unstale compare benchmarks/studies/techniques.toml --jobs 2
    python -m benchmarks.differences runs/techniques --at tokens --name techniques

Dots are means of paired differences in held-out success. Lines are their 95% intervals; those of
planned differences hold for all of them together. Each setting has its own panel.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.tables import picture, write
from unstale.analysis.report.study import MEASURES, Difference, StudyResults, read_results

PLANNED, OTHER = "#1f77b4", "#8a8a8a"


def draw(panel: Any, differences: list[Difference], title: str) -> None:
    for row, each in enumerate(differences):
        if each.paired is None or each.interval is None:
            continue
        colour = PLANNED if each.planned else OTHER
        low, high = each.interval
        panel.plot([100 * low, 100 * high], [row, row], color=colour, linewidth=1.6)
        face = colour if each.significant else "white"
        panel.plot(100 * each.paired.mean, row, "o", color=colour, markerfacecolor=face)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.grid(axis="x", alpha=0.25)
    panel.grid(visible=False, axis="y")
    panel.set_yticks(range(len(differences)), [each.arm for each in differences])
    panel.set_ylim(len(differences) - 0.5, -0.5)
    panel.set_title(title, fontsize=10)


def settings_of(study: StudyResults, measure: Any) -> dict[str, list[Difference]]:
    """Return the differences of each setting, planned ones first, without the reference."""
    found = {
        setting.name: [
            each
            for each in study.at(measure)
            if each.setting == setting.name and each.arm != study.reference
        ]
        for setting in study.settings
    }
    return {name: sorted(each, key=lambda one: not one.planned) for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the study")
    parser.add_argument("--at", choices=MEASURES, default="steps", help="what is equal")
    parser.add_argument("--name", default="differences", help="name of the results' files")
    parser.add_argument("--titles", nargs="+", default=[], help="titles of the panels")
    parser.add_argument("--title", default="Differences between the arms of a study")
    chosen = parser.parse_args()
    study = read_results(chosen.folder)
    settings = settings_of(study, chosen.at)
    titles = chosen.titles or list(settings)
    rows = max(map(len, settings.values()))
    size = {"width": 1.4 + 3.4 * len(settings), "height": 1.2 + 0.27 * rows}
    with picture(chosen.name, **size, panels=len(settings)) as panels:
        panels = panels if len(settings) > 1 else [panels]
        for panel, title, found in zip(panels, titles, settings.values(), strict=True):
            draw(panel, found, title)
            panel.set_xlabel(f"less {study.reference}, points, at equal {chosen.at}")
    text = (chosen.folder / "study.md").read_text("utf-8").splitlines()[1:]
    write(chosen.name, chosen.title, text)


if __name__ == "__main__":
    main()
