"""Read the results of a study: a folder with one comparison for each of several settings.

A comparison trains the same arms (configurations) in each setting. The p-values of planned
differences are corrected for multiple tests. For a difference that may be 0, the power of the test
is computed. This module does not import torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from unstale.analysis.report.compare import PLAN, ArmResult, Comparison, SeedMean, read_comparison
from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.durability.run_folder import Row
from unstale.observe.statistics import PairedDifference, holm, paired_difference

Measure = Literal["steps", "tokens", "minutes"]
MEASURES: tuple[Measure, ...] = ("steps", "tokens", "minutes")
"""Measures of training: steps, sampled tokens or minutes. Arms (configurations) are compared after
equal amounts of each.
"""
ALPHA = 0.05
"""Probability of finding a difference where there is none: in any of the planned differences
together, or in a single difference that was not planned.
"""
SOUGHT = 0.05
"""Difference between two success rates for which the number of needed seeds is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The held-out success of an arm (configuration) in a setting, and its difference from the
    reference.
    """

    setting: str
    arm: str
    measure: Measure
    success: SeedMean | None
    pairs: Sequence[float]
    """Success of each run minus that of the reference's run with the same seed. Empty for the
    reference.
    """
    paired: PairedDifference | None
    """The mean of `pairs` with its spread. None if `pairs` has fewer than two different values."""
    planned: bool
    """True if the study's plan names this difference. `p` and `alpha` then account for the number
    of planned differences.
    """
    alpha: float
    """Probability with which `interval` misses the true difference."""
    p: float | None
    """The p-value of the hypothesis that there is no difference. It is adjusted by Holm's method if
    the difference is planned. None if `paired` is None.
    """

    @property
    def interval(self) -> tuple[float, float] | None:
        return self.paired.interval(self.alpha) if self.paired else None

    @property
    def significant(self) -> bool:
        return self.p is not None and self.p < ALPHA

    @property
    def may_be_zero(self) -> bool:
        return self.interval is not None and self.interval[0] <= 0 <= self.interval[1]

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that as many pairs of runs as in `pairs` would detect with a
        probability of 80%.

        None unless `interval` contains 0.
        """
        return self.paired.detectable(self.alpha) if self.paired and self.may_be_zero else None

    @property
    def seeds_needed(self) -> int | None:
        """The number of pairs of runs that would detect a true difference of `SOUGHT` with a
        probability of 80%.

        None unless `interval` contains 0.
        """
        if not self.paired or not self.may_be_zero:
            return None
        return self.paired.pairs_needed(SOUGHT, self.alpha)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The mean difference of an arm (configuration) from the reference over the pairs of all
    settings.

    Pairs are taken as independent, so a setting counts by its number of pairs.
    """

    arm: str
    settings: tuple[str, ...]
    paired: PairedDifference


@dataclass(frozen=True, slots=True)
class StudySetting:
    """A setting of a study, in which all arms (configurations) are compared.

    A setting chooses one position of each dial. A dial is a choice between sets of options, such as
    the thresholds.
    """

    name: str
    positions: Mapping[str, str]
    """Name of a dial (choice between sets of options) -> name of its position in this setting.
    Empty without a plan of the study.
    """
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResults:
    """The comparisons of all settings of a study, and the differences between their arms
    (configurations).
    """

    name: str
    settings: tuple[StudySetting, ...]
    """The settings with a planned comparison: their folder has `plan.json`."""
    num_settings: int
    """Number of settings that the study defines."""
    num_planned: int
    """Number of differences from the reference that the study planned to test, including those of
    settings that have not been run. Intervals and p-values are corrected for this number.
    """
    differences: tuple[Difference, ...]
    commands: tuple[str, ...]

    @property
    def reference(self) -> str:
        return self.settings[0].comparison.reference.name

    @property
    def arms(self) -> list[str]:
        """The names of all compared configurations, in the order of the settings."""
        names = [arm.name for each in self.settings for arm in each.comparison.arms]
        return list(dict.fromkeys(names))

    def at(self, measure: Measure) -> list[Difference]:
        return [each for each in self.differences if each.measure == measure]

    def pooled(self, measure: Measure) -> list["Pooled"]:
        """Return for each arm (configuration) its mean difference from the reference, over all
        settings.

        Arms are left out unless they have pairs in at least two settings.
        """
        found = []
        for arm in self.arms:
            settings = [each for each in self.at(measure) if each.arm == arm and each.pairs]
            paired = paired_difference([pair for each in settings for pair in each.pairs])
            if len(settings) > 1 and paired:
                found.append(Pooled(arm, tuple(each.setting for each in settings), paired))
        return found


def is_study_folder(folder: Path) -> bool:
    """Return True if `folder` is that of a study, False for that of a single comparison."""
    plan = folder / PLAN
    if plan.is_file():
        return "settings" in read_mapping(plan)
    return any(folder.glob(f"*/{PLAN}"))


def read_results(folder: Path) -> StudyResults:
    """Read the results of a study. Raises `ConfigError` if the folder has no comparisons.

    If the study has no plan, all differences after equally many steps count as planned.
    """
    path = folder / PLAN
    plan: Row = read_mapping(path) if path.is_file() else {}
    names: Iterable[str] = plan.get("settings") or sorted(
        each.parent.name for each in folder.glob(f"*/{PLAN}")
    )
    settings = tuple(
        StudySetting(name, plan.get("settings", {}).get(name, {}), read_comparison(folder / name))
        for name in names
        if (folder / name / PLAN).is_file()
    )
    if not settings:
        raise ConfigError(f"{folder} is not a study: it has no folders of comparisons")
    planned = {(setting, arm) for setting, arm in plan.get("planned", [])} or {
        (each.name, arm.name)
        for each in settings
        for arm in each.comparison.arms
        if arm is not each.comparison.reference
    }
    measures: Sequence[Measure] = plan.get("at", ["steps"])
    num_planned = len(planned) * len(measures)
    found = [
        _difference(
            each,
            arm,
            measure,
            num_planned if measure in measures and (each.name, arm.name) in planned else 0,
        )
        for measure in MEASURES
        for each in settings
        for arm in each.comparison.arms
    ]
    return StudyResults(
        name=folder.resolve().name,
        settings=settings,
        num_settings=len(plan.get("settings", settings)),
        num_planned=num_planned,
        differences=tuple(_adjusted(found, num_planned)),
        commands=tuple(plan.get("commands", settings[0].comparison.commands)),
    )


def _difference(
    setting: StudySetting, arm: ArmResult, measure: Measure, num_planned: int
) -> Difference:
    """Return the difference of `arm` (a configuration) from the reference, after equal training.

    `num_planned` is the number of differences that the study planned to test, or 0 if this is none
    of them.
    """
    comparison = setting.comparison
    budget = None if measure == "steps" else comparison.budget(measure)
    is_known = measure == "steps" or budget is not None
    pairs = comparison.pairs(arm, budget) if is_known and arm is not comparison.reference else []
    paired = paired_difference(pairs)
    return Difference(
        setting=setting.name,
        arm=arm.name,
        measure=measure,
        success=comparison.success(arm, budget) if is_known else None,
        pairs=pairs,
        paired=paired,
        planned=num_planned > 0,
        alpha=ALPHA / max(num_planned, 1),
        p=paired.p if paired else None,
    )


def _adjusted(differences: Sequence[Difference], number: int) -> list[Difference]:
    """Return `differences`, with the p-values of planned ones adjusted by Holm's method for
    `number` tests.
    """
    planned = [
        index for index, each in enumerate(differences) if each.planned and each.paired is not None
    ]
    p_values = [each.p for each in differences if each.planned and each.p is not None]
    found = list(differences)
    for index, p in zip(planned, holm(p_values, number), strict=True):
        found[index] = replace(found[index], p=p)
    return found
