"""Read the results of a study: a folder with one comparison for each of several settings.

Every setting has the same arms (configurations). The p-values of planned differences are corrected
for their number. For a difference that may be 0, the power of the test is computed. This module
does not import torch.
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
"""Measures of the amount of training. Configurations (arms) are compared after equal amounts."""
ALPHA = 0.05
"""Probability of finding a difference where there is none: in any of the planned differences
together, or in a single difference that was not planned.
"""
SOUGHT = 0.05
"""Difference in success, as a share, for which the number of needed seeds is computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The success of an arm (configuration) in a setting, and its difference from the reference."""

    setting: str
    arm: str
    measure: Measure
    success: SeedMean | None
    pairs: Sequence[float]
    """Success of a run minus that of the reference's run with the same seed, by seed. Empty for the
    reference.
    """
    paired: PairedDifference | None
    """The mean of `pairs`. None if `pairs` has fewer than two different values."""
    planned: bool
    """True if the study's plan names this difference. `p` and `alpha` are then corrected for the
    number of planned differences.
    """
    alpha: float
    """Probability with which the interval misses the true difference."""
    p: float | None
    """The p-value of no difference, adjusted by Holm's method if the difference is planned. None if
    `paired` is None.
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
        """The smallest true difference that this number of pairs finds with 80% power.

        None unless the interval contains 0.
        """
        return self.paired.detectable(self.alpha) if self.paired and self.may_be_zero else None

    @property
    def seeds_needed(self) -> int | None:
        """The number of pairs that finds a true difference of 5 points with 80% power.

        None unless the interval contains 0.
        """
        if not self.paired or not self.may_be_zero:
            return None
        return self.paired.pairs_needed(SOUGHT, self.alpha)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The mean difference of a configuration from the reference, over pairs of several settings.

    Pairs are taken as independent. So settings are weighted by their number of pairs.
    """

    arm: str
    settings: tuple[str, ...]
    paired: PairedDifference


@dataclass(frozen=True, slots=True)
class StudySetting:
    """A setting of a study, in which all configurations (arms) are compared.

    Settings differ in dials. A dial, such as the thresholds, is a choice between sets of options.
    """

    name: str
    positions: Mapping[str, str]
    """Name of the dial (choice between sets of options) -> name of its position. Empty if the plan
    of the study is missing.
    """
    comparison: Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResults:
    """The results of a study."""

    name: str
    settings: tuple[StudySetting, ...]
    """The settings that have planned runs."""
    num_settings: int
    """Number of all settings in the study's file."""
    num_planned: int
    """Number of planned differences, including those of settings without runs."""
    differences: tuple[Difference, ...]
    commands: tuple[str, ...]

    @property
    def reference(self) -> str:
        return self.settings[0].comparison.reference.name

    @property
    def arms(self) -> list[str]:
        """The names of all arms (compared configurations), in the order of the settings."""
        names = [arm.name for each in self.settings for arm in each.comparison.arms]
        return list(dict.fromkeys(names))

    def at(self, measure: Measure) -> list[Difference]:
        return [each for each in self.differences if each.measure == measure]

    def pooled(self, measure: Measure) -> list["Pooled"]:
        """Return the mean difference over all settings, of each arm (configuration) with pairs in
        at least two.
        """
        found = []
        for arm in self.arms:
            settings = [each for each in self.at(measure) if each.arm == arm and each.pairs]
            paired = paired_difference([pair for each in settings for pair in each.pairs])
            if len(settings) > 1 and paired:
                found.append(Pooled(arm, tuple(each.setting for each in settings), paired))
        return found


def is_study_folder(folder: Path) -> bool:
    """Return True if a folder is that of a study: it has folders of comparisons."""
    plan = folder / PLAN
    if plan.is_file():
        return "settings" in read_mapping(plan)
    return any(folder.glob(f"*/{PLAN}"))


def read_results(folder: Path) -> StudyResults:
    """Read the results of a study. Raises ConfigError if the folder has no comparisons.

    Without the plan of the study, all differences after equally many steps count as planned.
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
    """Return the difference of an arm (configuration) from the reference in a setting.

    `num_planned` is the number of planned ones, or 0 if this one was not planned.
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
    """Return the differences. The p-values of planned ones are adjusted by Holm's method.

    `number` is the number of planned differences.
    """
    planned = [
        index for index, each in enumerate(differences) if each.planned and each.paired is not None
    ]
    p_values = [each.p for each in differences if each.planned and each.p is not None]
    found = list(differences)
    for index, p in zip(planned, holm(p_values, number), strict=True):
        found[index] = replace(found[index], p=p)
    return found
