"""Compute which differences a study can find, from the spread of a pilot.

    python -m benchmarks.power --sd 0.12 0.15 0.20            # guesses of the spread
    python -m benchmarks.power --pilot runs/pilot             # its measured spread
    python -m benchmarks.power --pilot runs/pilot --planned 3 --pairs 6 12 24

The spread is the standard deviation of the differences between runs with the same seed. A pilot is
a study with at least two seeds, whose seeds are not those of the study. Write the result into the
study's file before its first run.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.tables import CONSOLE, columns, row
from unstale.analysis.report.study import ALPHA, SOUGHT, read_results
from unstale.observe.statistics import PairedDifference


def pilot_spreads(folder: Path) -> dict[str, float]:
    """Return the spread of each arm's differences to the reference in each setting."""
    study = read_results(folder)
    return {
        f"{each.setting}, {each.arm}": each.paired.sd for each in study.at("steps") if each.paired
    }


def table(
    spreads: Mapping[str, float], pairs: Sequence[int], planned: int, sought: float = SOUGHT
) -> list[str]:
    """Return the true difference that each number of pairs finds with 80% power, in points.

    The last column is the number of pairs that finds the difference `sought`. Intervals of
    `planned` differences are Bonferroni's.
    """
    alpha = ALPHA / planned
    heads = [f"{number} pairs" for number in pairs]
    lines = columns("differences", "spread", *heads, f"pairs for {100 * sought:g} points")
    for name, sd in spreads.items():
        found = [PairedDifference(mean=0.0, sd=sd, n=n).detectable(alpha) for n in pairs]
        needed = PairedDifference(mean=0.0, sd=sd, n=2).pairs_needed(sought, alpha)
        lines.append(row(name, f"{100 * sd:.1f}", *(f"{100 * each:.0f}" for each in found), needed))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sd", type=float, nargs="+", default=[], help="guesses of the spread")
    parser.add_argument("--pilot", type=Path, help="folder of a study that was run before")
    parser.add_argument("--pairs", type=int, nargs="+", default=[4, 8, 12, 24])
    parser.add_argument("--planned", type=int, default=3, help="number of planned differences")
    chosen = parser.parse_args()
    spreads = {f"guess {number + 1}": sd for number, sd in enumerate(chosen.sd)}
    if chosen.pilot:
        spreads |= pilot_spreads(chosen.pilot)
    if not spreads:
        parser.error("give --sd or --pilot")
    CONSOLE.print("\n".join(table(spreads, chosen.pairs, chosen.planned)))


if __name__ == "__main__":
    main()
