"""Compare the arms of a deterministic study after equal time, from measured costs of a step.

    python -m benchmarks.equal_time runs/levels --step current_recompute=1.07 snapshot_old=1.14

A deterministic run has no duration of its own, because its tools take no time and its engine waits
for the trainer. `--step` gives the time of a step over that of the fastest arm, which has 1, as
`make bench-routes` measures it. While the fastest arm does all its n steps, an arm with time t does
n / t. The table compares the success in training before that step, and after n steps of each.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

from benchmarks.tables import columns, row, write
from unstale.observe.report.compare import SUCCESS, Trial
from unstale.observe.report.compare_page import points_with_interval
from unstale.observe.report.study import ALPHA, StudyResults, read_results
from unstale.observe.statistics import paired_difference

WINDOW = 10
"""Number of steps over which a success in training is a mean."""


def success_before(trial: Trial, step: int) -> float:
    """Return the mean success in training of the `WINDOW` steps that end with `step`.

    Raises ValueError if the run has no success in these steps.
    """
    found = [value for at, value in trial.series[SUCCESS] if step - WINDOW < at <= step]
    if not found:
        raise ValueError(f"{trial.folder}: no success in the {WINDOW} steps before step {step}")
    return mean(found)


def pairs(study: StudyResults, arm: str, own: int, reference: int) -> list[float]:
    """Return the arm's success before step `own` minus the reference's before step `reference`.

    A pair is a setting and a seed that both have finished.
    """
    found = []
    for setting in study.settings:
        arms = {each.name: each for each in setting.comparison.arms}
        if arm not in arms:
            continue
        others = {trial.seed: trial for trial in arms[study.reference].finished}
        for trial in arms[arm].finished:
            if other := others.get(trial.seed):
                found.append(success_before(trial, own) - success_before(other, reference))
    return found


def table(study: StudyResults, cost: Mapping[str, float]) -> Iterator[str]:
    """Yield a row for each arm: its steps in equal time, and its differences to the reference."""
    last = max(int(at) for each in _trials(study) for at, _ in each.series[SUCCESS])
    steps = {arm: int(last / time) for arm, time in cost.items()}
    yield from columns(
        "arm",
        "time of a step",
        f"steps in the time of {last} of the fastest",
        f"minus {study.reference} after {last} steps, points",
        "after equal time, points",
    )
    for arm, time in sorted(cost.items(), key=lambda each: each[1]):
        cells = [f"{time:.2f}", steps[arm]]
        if arm == study.reference:
            cells += ["—", "—"]
        else:
            for own, other in ((last, last), (steps[arm], steps[study.reference])):
                paired = paired_difference(pairs(study, arm, own, other))
                cells.append(points_with_interval(paired, ALPHA) if paired else "—")
        yield row(f"`{arm}`", *cells)


def _trials(study: StudyResults) -> Iterator[Trial]:
    for setting in study.settings:
        for arm in setting.comparison.arms:
            yield from arm.finished


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder of the study")
    parser.add_argument(
        "--step",
        nargs="+",
        required=True,
        metavar="ARM=TIME",
        help="time of a step; the least is 1",
    )
    chosen = parser.parse_args()
    study = read_results(chosen.folder)
    cost = {}
    for text in chosen.step:
        name, _, time = text.partition("=")
        if name not in study.arms or not time:
            parser.error(f"--step {text}: ARM=TIME, of the arms {', '.join(study.arms)}")
        cost[name] = float(time)
    if min(cost.values()) != 1 or study.reference not in cost:
        parser.error(f"--step: the fastest arm has 1, and {study.reference} needs a time")
    count = len(study.settings)
    write(
        "equal-time",
        f"Routes after equal time: {study.name}",
        [
            f"All {count} settings together. Success is that in training, mean of {WINDOW} steps.",
            "Intervals of 95% by Student's t. They take pairs as independent and are not adjusted.",
            "",
            *table(study, cost),
        ],
    )


if __name__ == "__main__":
    main()
