"""Write the table of comparisons in docs/advise.md, from the folders of comparisons.

python -m tools.advice_table FOLDER... --keep   # add comparisons, or studies, to the table
python -m tools.advice_table --arm rollout      # what the table has on an arm, study by study

A route is a method to obtain old log-probabilities. A setting is one comparison, with one task
environment, engine and staleness bound. Its arms are routes with thresholds, trained with several
seeds, and compared with an exact route. Without `--keep` the table gets the settings of the folders
only. What it says about all settings stays, and has to be edited by hand.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unstale.analysis.report.compare import PLAN, ArmResult, Comparison, read_comparison
from unstale.analysis.report.compare_tables import points, points_with_interval
from unstale.analysis.report.study import ALPHA, is_study_folder
from unstale.config import ConfigError, ObjectiveConfig, RunConfig
from unstale.config.options import options, stored_config
from unstale.durability.run_folder import CONFIG, Row, RunFolder, dumps, write_whole
from unstale.observe.statistics import PairedDifference, paired_difference

TABLE = Path(__file__).parents[1] / "benchmarks" / "results" / "comparisons.json"
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
    """The properties in which settings of the table must agree to be pooled.

    With one minibatch per batch, the route `current_recompute` has S = 1, so a clip on S never
    acts. With several it does. Limits on ratios of sequences are far narrower than on tokens.
    """

    one_minibatch: bool
    clips_tokens: bool
    """True if the clip is on the ratio of each token."""

    @classmethod
    def of_options(cls, values: Row) -> "SettingKind | None":
        """Return the kind of a setting from the options of its reference, by full name.

        None if the objective has no clip that stops tokens.
        """
        unit = values.get("objective.unit", "token")
        objective = ObjectiveConfig(loss_type=values["objective.loss_type"], unit=unit)
        if not objective.stops or not objective.bounds():
            return None
        is_token = objective.ratio_unit == "token"
        steps = values["trainer.minibatches_per_batch"] * values.get("trainer.epochs_per_batch", 1)
        return cls(steps == 1, is_token)


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration (arm) with approximate `old_logp`, compared with the exact reference."""

    setting: str
    """Name of the study and of the setting in it."""
    kind: SettingKind | None
    arm: str
    """Name of the arm: its route, with a word if its limits differ from the reference's, and the
    route's options.
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
        """The arms whose difference in success has a known spread.

        Arms with a single pair, or with equal differences in all pairs, are left out.
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


def _label(arm: str, values: Row) -> str:
    """Return the name of a configuration (arm) with the options in `values`, if any.

    >>> _label("ewma_prox", {"old_logps.beta": 0.75})
    'ewma_prox, beta 0.75'
    """
    return arm + "".join(f", {name.partition('.')[2]} {value}" for name, value in values.items())


def measure(folders: Sequence[Path]) -> tuple[list[Row], list[Path]]:
    """Return a row of the table for each setting in the folders of comparisons and studies.

    A study is a folder with one comparison for each setting. Settings without a finished run of an
    exact reference have no row. The second list has their folders. Raises `ConfigError` for a
    folder without a comparison, or a setting that occurs twice.
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
    """Return the table's row of an arm: its difference in held-out success from the reference."""
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


def pool(parts: Sequence[PairedDifference]) -> PairedDifference:
    """Return the mean and spread of the pairs of several samples, as if they were one sample.

    The spread is that of all pairs around the common mean. Raises ValueError without samples.

    >>> pool([PairedDifference(2, 1.0, 0.5), PairedDifference(6, -1.0, 0.5)]).mean
    -0.5
    """
    if not parts:
        raise ValueError("no samples of pairs to pool")
    n = sum(part.n for part in parts)
    mean = sum(part.n * part.mean for part in parts) / n
    squares = sum((part.n - 1) * part.sd**2 + part.n * (part.mean - mean) ** 2 for part in parts)
    return PairedDifference(n, mean, math.sqrt(squares / (n - 1)))


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
