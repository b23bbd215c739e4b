"""Write the table of comparisons behind `unstale advise`, from the folders of comparisons.

python -m tools.advice_table FOLDER... --keep   # add comparisons, or studies, to the table
python -m tools.advice_table --arm rollout      # what the table has on an arm, study by study

Without `--keep` the table gets the settings of the folders alone. What it says about all settings
stays, and has to be edited by hand.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from unstale.analysis.advice.comparisons import TABLE, Case, ComparisonTable, measure
from unstale.analysis.report.compare_page import points, points_with_interval
from unstale.analysis.report.study import ALPHA
from unstale.config import ConfigError
from unstale.durability.run_folder import dumps, write_whole
from unstale.observe.statistics import paired_difference, pool


def by_study(cases: Sequence[Case], arm: str) -> Iterator[str]:
    """Yield a Markdown table of an arm: a row for each study, then one with all pairs.

    The last column has all pairs but those of the row's study. A line below has the mean of the
    studies, each as one value, which does not take pairs as independent.
    """
    yield f"| study | settings | pairs | {arm} minus exact, points | all but this study |"
    yield "| --- | --- | --- | --- | --- |"
    studies = {each.study: [case for case in cases if case.study == each.study] for each in cases}
    for study, own in studies.items():
        rest = [case for case in cases if case.study != study]
        yield f"| {study} | {_summary(own)} | {_spread(rest) if rest else '—'} |"
    yield f"| all | {_summary(cases)} | — |"
    means = [pool([case.difference for case in own]).mean for own in studies.values()]
    yield ""
    found = paired_difference(means)
    text = points_with_interval(found, ALPHA) if found else points(means[0])
    yield f"Mean of {len(means)} studies, each as one value: {text}"


def _summary(cases: Sequence[Case]) -> str:
    pairs = sum(case.difference.n for case in cases)
    return f"{len(cases)} | {pairs} | {_spread(cases)}"


def _spread(cases: Sequence[Case]) -> str:
    return points_with_interval(pool([case.difference for case in cases]), ALPHA)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folders", nargs="*", type=Path, help="comparisons or studies")
    parser.add_argument("--arm", metavar="NAME", help="show an arm, study by study")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="STUDY", help="leave out studies; with --arm"
    )
    parser.add_argument("--keep", action="store_true", help="keep the settings of the table")
    parser.add_argument("--out", type=Path, default=TABLE, help=f"default: {TABLE.name}")
    chosen = parser.parse_args()
    if bool(chosen.folders) == bool(chosen.arm):
        parser.error("name either folders or --arm")
    if chosen.without and not chosen.arm:
        parser.error("--without goes with --arm")
    table = ComparisonTable.load()
    if chosen.arm:
        known = [case for case in table.cases if case.kind and case.kind.one_minibatch]
        cases = [each for each in known if each.arm == chosen.arm]
        cases = [each for each in cases if each.study not in chosen.without]
        if not cases:
            arms = ", ".join(dict.fromkeys(each.arm for each in known))
            parser.error(f"no such arm with one minibatch per batch; the table has: {arms}")
        print("\n".join(by_study(cases, chosen.arm)))
        return
    try:
        settings, left_out = measure(chosen.folders)
    except ConfigError as error:
        sys.exit(f"advice_table: {error}")
    for folder in left_out:
        print(f"left out: {folder} has no finished run of an exact reference")
    if not settings:
        sys.exit("advice_table: no setting has a finished run of an exact reference")
    if chosen.keep:
        new = {(setting["study"], setting["name"]) for setting in settings}
        kept = [row for row in table.settings if (row["study"], row["name"]) not in new]
        settings = kept + settings
    stored = {"about": table.about, "settings": settings}
    write_whole(chosen.out, dumps(stored, indent=1) + "\n")
    print(f"settings in {chosen.out}: {len(settings)}")


if __name__ == "__main__":
    main()
