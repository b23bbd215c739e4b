"""Write the tables and the figure of the study of recipes.

    unstale compare benchmarks/studies/recipes.toml --jobs 2
    python -m benchmarks.recipes_study runs/recipes

Each setting has a recipe and the plain one. The figure has the held-out success of each run over
its sampled tokens.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tables import columns, picture, row, write
from unstale.analysis.report.compare import ArmResult, Comparison, Trial
from unstale.analysis.report.study import Difference, StudyResults, read_results
from unstale.durability.run_folder import RunFolder

NAME = "recipes-study"
COLOURS = ("#8a8a8a", "#1f77b4")
TRAINED = "trainer/forward_tokens"


def per_cent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def forwarded(run: Path) -> float:
    """Return the number of tokens that the trainer computed in a run."""
    return sum(each.get(TRAINED) or 0.0 for each in RunFolder(run).metrics())


def run_rows(folder: Path, comparison: Comparison) -> Iterator[str]:
    budget = comparison.budget("tokens")
    for arm in comparison.arms:
        for trial in arm.finished:
            begun = trial.evaluations[0].success
            equal = trial.after(budget) if budget else None
            cells = [per_cent(each) for each in (begun, equal, trial.final)]
            computed = forwarded(folder / comparison.name / trial.folder)
            tokens = [f"{trial.tokens or 0:,.0f}", f"{computed:,.0f}"]
            yield row(comparison.name, f"`{arm.name}`", trial.seed, *cells, *tokens)


def difference_row(each: Difference) -> str:
    if each.paired is None or each.interval is None or each.p is None:
        return row(each.setting, f"`{each.arm}`", len(each.pairs), "", "", "")
    low, high = (f"{100 * value:+.1f}" for value in each.interval)
    mean = f"{100 * each.paired.mean:+.1f}"
    return row(
        each.setting, f"`{each.arm}`", len(each.pairs), mean, f"{low} to {high}", f"{each.p:.2f}"
    )


def lines(folder: Path, study: StudyResults) -> list[str]:
    heads = ("setting", "arm", "pairs", "less plain, points", "interval", "p")
    planned = [each for each in study.at("tokens") if each.arm != study.reference]
    runs = ("setting", "arm", "seed", "start", "equal tokens", "end", "sampled", "in the trainer")
    found = [each for setting in study.settings for each in run_rows(folder, setting.comparison)]
    return [
        "Held-out success less that of the plain recipe after equally many sampled tokens. The",
        "intervals hold with 95% for all three together.",
        "",
        *columns(*heads),
        *map(difference_row, planned),
        "",
        f"![Held-out success over sampled tokens in three settings]({NAME}.png)",
        "",
        "Held-out success of each run in %, after no, equally many, and all sampled tokens of the",
        "run; and its tokens, sampled and computed by the trainer.",
        "",
        *columns(*runs),
        *found,
    ]


def draw(panel: Any, arms: tuple[ArmResult, ...]) -> None:
    for arm, colour in zip(arms, COLOURS, strict=True):
        for number, trial in enumerate(arm.finished):
            label = arm.name if number == 0 else None
            panel.plot(*points(trial), "o-", color=colour, markersize=3, linewidth=1.2, label=label)
    panel.legend(fontsize=8)
    panel.set_xlabel("sampled tokens")
    panel.set_ylim(0, None)


def points(trial: Trial) -> tuple[list[float], list[float]]:
    places = trial.evaluations
    return [each.tokens for each in places], [100 * each.success for each in places]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder of the study")
    chosen = parser.parse_args()
    study = read_results(chosen.folder)
    with picture(NAME, width=10, height=3, panels=len(study.settings)) as panels:
        for panel, setting in zip(panels, study.settings, strict=True):
            draw(panel, setting.comparison.arms)
            panel.set_title(setting.name, fontsize=10)
        panels[0].set_ylabel("held-out success, %")
    write(NAME, "Three recipes beside the plain one on SmolLM2", lines(chosen.folder, study))


if __name__ == "__main__":
    main()
