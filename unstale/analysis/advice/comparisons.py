"""The table of comparisons behind the advice: the success of inexact routes and of exact ones.

A route is a method to obtain old log-probabilities. A setting is one comparison, with one task
environment, engine and staleness bound. Its arms are routes with thresholds, trained with several
seeds, and compared with an exact route. `python -m tools.advice_table FOLDER` writes the table from
folders of comparisons.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unstale.analysis.report.compare import PLAN, ArmResult, Comparison, read_comparison
from unstale.analysis.report.study import ALPHA, is_study_folder
from unstale.config import ConfigError, ObjectiveConfig, RunConfig
from unstale.config.options import options, stored_config
from unstale.durability.run_folder import CONFIG, Row, RunFolder
from unstale.observe.statistics import PairedDifference, paired_difference, pool

TABLE = Path(__file__).with_name("comparisons.json")
DESCRIBED = (
    "model", "max_steps", "task.env", "task.level", "engine.dtype", "engine.quantise",
    "trainer.dtype", "trainer.quantise", "trainer.routing_replay",
    "trainer.minibatches_per_batch", "trainer.lr", "schedule.max_staleness",
    "schedule.groups_per_step", "correction.mode", "correction.low", "correction.high",
    "correction.unit", "objective.loss_type", "objective.unit", "objective.clip_low",
    "objective.clip_high",
)  # fmt: skip
"""Options that describe a setting in the table. Their values are those of the exact reference."""


@dataclass(frozen=True, slots=True)
class SettingKind:
    """The properties in which a run and a setting of the table must agree to be compared.

    With one minibatch per batch, the route `current_recompute` (a way to get `old_logp`) has S = 1,
    so a clip on S never acts. With several it does. Limits on ratios of sequences are far narrower
    than on tokens.
    """

    one_minibatch: bool
    clips_tokens: bool
    """True if the clip is on the ratio of each token."""

    @classmethod
    def of(cls, config: RunConfig) -> "SettingKind | None":
        """Return the properties of a run by which it is compared with settings of the table.

        None if its objective has no clip that stops tokens.
        """
        return cls.of_options(described(config))

    @classmethod
    def of_options(cls, values: Row) -> "SettingKind | None":
        """Return the properties of a setting of the table, from the options of its reference.

        `values` has these options by full name. None if the objective has no clip that stops
        tokens.
        """
        unit = values.get("objective.unit", "token")
        objective = ObjectiveConfig(loss_type=values["objective.loss_type"], unit=unit)
        if not objective.stops or not objective.bounds():
            return None
        is_token = objective.ratio_unit == "token"
        steps = values["trainer.minibatches_per_batch"] * values.get("trainer.epochs_per_batch", 1)
        return cls(steps == 1, is_token)

    def __str__(self) -> str:
        batches = "one minibatch" if self.one_minibatch else "several minibatches"
        unit = "tokens" if self.clips_tokens else "sequences, turns or segments"
        return f"{batches} per batch and a clip on {unit}"


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration (arm) with approximate `old_logp`, compared with the exact reference."""

    setting: str
    """Name of the study and of the setting in it."""
    kind: SettingKind | None
    arm: str
    """Name of the arm (configuration): its route (way to get `old_logp`), with a word if its limits
    differ from the reference's, and the route's options.
    """
    difference: PairedDifference
    """Held-out success of this configuration minus that of the reference, over pairs of runs."""

    @property
    def study(self) -> str:
        return self.setting.partition("/")[0]

    @property
    def is_worse(self) -> bool:
        """True if the whole confidence interval of the difference is below 0."""
        return self.difference.interval(ALPHA)[1] < 0


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """The results of one configuration (arm) in settings of one kind.

    Its name has a way to get `old_logp`, and thresholds if they differ from the reference's.
    """

    arm: str
    settings: int
    worse: int
    """The number of settings in which the arm (configuration) had significantly less success than
    the reference.
    """
    difference: PairedDifference
    """Mean difference in held-out success from the reference, over all pairs of runs in these
    settings. Pairs are taken as independent.
    """


@dataclass(frozen=True)
class ComparisonTable:
    """The table of comparisons: one row per setting."""

    settings: Sequence[Row]
    about: str = ""
    """Remarks on all settings: their models and tasks, and how the studies were chosen."""

    @classmethod
    def load(cls, path: Path = TABLE) -> "ComparisonTable":
        stored = json.loads(path.read_text("utf-8"))
        return cls(stored["settings"], stored.get("about", ""))

    @cached_property
    def cases(self) -> list[Case]:
        """The configurations (arms) whose difference in success has a known spread.

        Arms with a single pair of runs, or with equal differences in all pairs, are left out.
        """
        return [
            Case(
                setting=f"{setting['study']}/{setting['name']}",
                kind=SettingKind.of_options(setting["options"]),
                arm=_label(arm["name"], arm["options"]),
                difference=PairedDifference(arm["pairs"], arm["mean"], arm["sd"]),
            )
            for setting in self.settings
            for arm in setting["arms"]
            if arm["sd"]
        ]

    def records(self, kind: SettingKind) -> list[ArmRecord]:
        """Return the results of each arm (configuration) in settings of a kind, the most successful
        arm first.
        """
        cases = [case for case in self.cases if case.kind == kind]
        found = []
        for arm in dict.fromkeys(case.arm for case in cases):
            own = [case for case in cases if case.arm == arm]
            worse = sum(case.is_worse for case in own)
            difference = pool([case.difference for case in own])
            found.append(ArmRecord(arm, len(own), worse, difference))
        return sorted(found, key=lambda record: -record.difference.mean)

    def as_json(self, config: RunConfig) -> dict[str, Any]:
        kind = SettingKind.of(config)
        return {
            "kind": kind and asdict(kind),
            "about": self.about,
            "routes": [
                {
                    "arm": each.arm,
                    "settings": each.settings,
                    "worse": each.worse,
                    "pairs": each.difference.n,
                    "mean": each.difference.mean,
                    "low": each.difference.interval(ALPHA)[0],
                    "high": each.difference.interval(ALPHA)[1],
                }
                for each in (self.records(kind) if kind else ())
            ],
        }


def label_of(config: RunConfig) -> str:
    """Return the name in the table of an arm (configuration) with the route (way to get `old_logp`)
    of this run.
    """
    return _label(config.old_logps.route, _route_options(config))


def _label(arm: str, values: Row) -> str:
    """Return the name of a configuration (arm) with the options in `values`, if any.

    >>> _label("ewma_prox", {"old_logps.beta": 0.75})
    'ewma_prox, beta 0.75'
    """
    return arm + "".join(f", {name.partition('.')[2]} {value}" for name, value in values.items())


def measure(folders: Sequence[Path]) -> tuple[list[Row], list[Path]]:
    """Return a row of the table for each setting in the folders of comparisons and studies.

    A study is a folder with one comparison for each setting. Settings without a finished run of an
    exact reference have no row; the second list has the folders of these settings. Raises
    `ConfigError` for a folder without a comparison, or a setting that occurs twice.
    """
    rows: list[tuple[Path, Row | None]] = []
    for folder in folders:
        plans = [folder / PLAN]
        if is_study_folder(folder):
            plans = sorted(folder.glob(f"*/{PLAN}"))
        if not plans or not plans[0].is_file():
            raise ConfigError(f"{folder} has no comparison: {PLAN} is neither in it nor one below")
        rows += [(plan.parent, _setting(plan.parent)) for plan in plans]
    found = [row for _, row in rows if row]
    names = [f"{row['study']}/{row['name']}" for row in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two folders have the setting {twice[0]}: name each folder once, and give the folders "
            "of studies different names"
        )
    return found, [folder for folder, row in rows if row is None]


def _setting(folder: Path) -> Row | None:
    comparison = read_comparison(folder)
    reference = _config(folder, comparison.reference)
    if reference is None or not reference.old_logps.exact:
        return None
    inexact = [
        (arm, config)
        for arm in comparison.arms
        if (config := _config(folder, arm)) and not config.old_logps.exact
    ]
    return {
        "study": folder.resolve().parent.name,
        "name": comparison.name,
        "options": described(reference),
        "reference": {
            "name": comparison.reference.name,
            "runs": len(comparison.reference.finished),
        },
        "arms": [_row(comparison, arm, config) for arm, config in inexact],
    }


def _config(folder: Path, arm: ArmResult) -> RunConfig | None:
    """Return the configuration of an arm, a group of runs. None if none of them has finished."""
    if not arm.finished:
        return None
    run = folder / arm.finished[0].folder
    return stored_config(RunFolder(run).config(), str(run / CONFIG))


def _row(comparison: Comparison, arm: ArmResult, config: RunConfig) -> Row:
    """Return the table's row of an arm (configuration): its difference in held-out success from the
    reference.
    """
    pairs = comparison.pairs(arm)
    paired = paired_difference(pairs)
    return {
        "name": arm.name,
        "route": config.old_logps.route,
        "options": _route_options(config),
        "runs": len(arm.finished),
        "collapsed": arm.collapsed,
        "pairs": len(pairs),
        "mean": sum(pairs) / len(pairs) if pairs else None,
        "sd": paired and paired.sd,
    }


def _route_options(config: RunConfig) -> Row:
    """Return the configuration's options, if set, for age and resets of the moving average."""
    names = ("old_logps.beta", "old_logps.reset_below")
    values = {name: options()[name].of(config) for name in names if options()[name].is_in(config)}
    return {name: value for name, value in values.items() if value}


def described(config: RunConfig) -> Row:
    """Return the options in `DESCRIBED` that a configuration has, by full name."""
    return {
        name: options()[name].of(config)
        for name in DESCRIBED
        if name in options() and options()[name].is_in(config)
    }
