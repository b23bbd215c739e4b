"""Compare the arms of a deterministic study after equal time, from measured times of a step.

    python -m benchmarks.equal_time runs/levels --step rollout=1 snapshot_old=1.14

The duration of a deterministic run says nothing: its tools take no time, and its engine waits for
the trainer. `--step` gives the time of an arm's step over that of the fastest arm, which has 1.
`python -m benchmarks.route_steps` measures it. While the fastest arm does all its n steps, an arm
with time t does n / t. The table compares the success in training up to that step, and after n
steps of each. This needs a constant learning rate: a run that is planned with fewer steps would
have another rate in each.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean

from benchmarks.tables import columns, row, write
from unstale.analysis.report.compare import SUCCESS, Trial
from unstale.analysis.report.compare_tables import points_with_interval
from unstale.analysis.report.study import ALPHA, StudyResults, read_results
from unstale.config import ConfigError
from unstale.observe.statistics import paired_difference

WINDOW = 10
"""Number of steps over which a success in training is a mean."""


def success_up_to(trial: Trial, step: int) -> float:
    """Return the mean success in training of the `WINDOW` steps that end with `step`.

    Raises ConfigError if the run has no success in these steps.
    """
    found = [value for at, value in trial.series[SUCCESS] if step - WINDOW < at <= step]
    if not found:
        raise ConfigError(f"{trial.folder}: no success in the {WINDOW} steps up to step {step}")
    return mean(found)


def pairs(study: StudyResults, arm: str, step: int, reference_step: int) -> list[float]:
    """Return the arm's success up to `step` minus the reference's up to `reference_step`.

    A pair is a seed that both have finished in a setting.
    """
    return [
        difference
        for setting in study.settings
        for each in setting.comparison.arms
        if each.name == arm
        for difference in setting.comparison.paired_values(
            each,
            lambda trial: success_up_to(trial, step),
            lambda trial: success_up_to(trial, reference_step),
        )
    ]


def table(study: StudyResults, step_time: Mapping[str, float]) -> Iterator[str]:
    """Yield a row for each arm with a time: its steps, and its differences to the reference.

    Raises ConfigError if a run has no constant learning rate.
    """
    for trial in _trials(study):
        if (schedule := trial.config["trainer"]["lr_schedule"]) != "constant":
            raise ConfigError(
                f"{trial.folder}: trainer.lr_schedule is {schedule}. Only with `constant` is a run "
                "of fewer steps the beginning of a longer one"
            )
    last = max(int(at) for trial in _trials(study) for at, _ in trial.series[SUCCESS])
    steps = {arm: int(last / time + 1e-9) for arm, time in step_time.items()}
    yield from columns(
        "arm",
        "time of a step",
        f"steps in the time of {last} of the fastest",
        f"minus {study.reference} after {last} steps, points",
        "after equal time, points",
    )
    for arm, time in sorted(step_time.items(), key=lambda each: each[1]):
        cells: list[object] = [f"{time:.2f}", steps[arm]]
        if arm == study.reference:
            cells += ["—", "—"]
        else:
            for step, other in ((last, last), (steps[arm], steps[study.reference])):
                paired = paired_difference(pairs(study, arm, step, other))
                cells.append(points_with_interval(paired, ALPHA) if paired else "—")
        yield row(f"`{arm}`", *cells)
    if missing := [f"`{arm}`" for arm in study.arms if arm not in step_time]:
        yield ""
        yield f"Without a time of a step, so not in the table: {', '.join(missing)}."


def _trials(study: StudyResults) -> Iterator[Trial]:
    for setting in study.settings:
        for arm in setting.comparison.arms:
            yield from arm.finished


def step_times(words: list[str], study: StudyResults) -> dict[str, float]:
    """Return the times of texts such as `rollout=1`.

    Raises ConfigError if a text has another form or names no arm, if the reference has no time, or
    if the smallest time is not 1.
    """
    found = {}
    for text in words:
        name, _, time = text.partition("=")
        try:
            found[name] = float(time)
        except ValueError:
            raise ConfigError(f"--step {text}: not of the form ARM=TIME") from None
        if name not in study.arms:
            raise ConfigError(f"--step {text}: the study has the arms {', '.join(study.arms)}")
    if study.reference not in found:
        raise ConfigError(f"--step: the reference {study.reference} has no time")
    if min(found.values()) != 1:
        raise ConfigError(f"--step: the smallest time is {min(found.values()):g}; divide all by it")
    return found


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
        help="time of a step over that of the fastest arm, which has 1",
    )
    chosen = parser.parse_args()
    try:
        study = read_results(chosen.folder)
        lines = list(table(study, step_times(chosen.step, study)))
    except ConfigError as error:
        parser.exit(1, f"equal_time: {error}\n")
    explanation = [
        f"All {len(study.settings)} settings together. Success is the training success rate,",
        f"averaged over the last {WINDOW} steps. Intervals of 95% by Student's t. They take pairs",
        "as independent and are not adjusted.",
    ]
    write("equal-time", f"Routes after equal time: {study.name}", [*explanation, "", *lines])


if __name__ == "__main__":
    main()
