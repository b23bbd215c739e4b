"""The table of comparisons behind the advice, and what it can predict.

A setting is one comparison: a task environment, an engine, a staleness bound. It is named by its
study and its folder. Its arms are routes with thresholds, trained with several seeds. Advice counts
which stops by exact values a route misses. The table has the settings in which such a route was
also less successful.
`python -m tools.advice_table FOLDER` writes the table from the folders of comparisons.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from unstale.config import ConfigError, RunConfig
from unstale.config.options import options, stored_config
from unstale.durability.run_folder import Row, RunFolder
from unstale.observe.advice.evidence import TokenSample, of_sample, read_sample, with_route
from unstale.observe.advice.measured import read_lengths
from unstale.observe.advice.samples import (
    Difference,
    Factors,
    Lengths,
    Thresholds,
    difference,
    draw_sequences,
    factors_of_route,
    is_computable,
)
from unstale.observe.report.compare import PLAN, ArmResult, Comparison, read_comparison
from unstale.observe.report.study import is_study_folder
from unstale.observe.report.words import percent

TABLE = Path(__file__).with_name("comparisons.json")
MIN_SETTINGS = 6
"""Smallest number of settings from which a threshold is fitted: with fewer, one setting more or
less moves it anywhere.
"""
MIN_OF_EACH = 2
"""Smallest number of settings with a route that was worse, and with one that was not."""
MARGIN = 0.1
"""Largest loss of held-out success at which a route counts as not worse than an exact one. The
whole interval must be above it: too few seeds show neither.
"""
DESCRIBED = (
    "task.env", "task.level", "engine.dtype", "engine.quantise", "trainer.dtype",
    "trainer.quantise", "trainer.routing_replay", "trainer.minibatches_per_batch", "trainer.lr",
    "schedule.max_staleness", "schedule.groups_per_step", "correction.control", "correction.low",
    "correction.high", "correction.unit", "objective.kind", "objective.unit", "objective.clip_low",
    "objective.clip_high",
)  # fmt: skip
"""Options by which the table describes a setting: those of its reference."""


@dataclass(frozen=True, slots=True)
class Case:
    """An arm with an inexact route in one setting, compared with the exact reference."""

    setting: str
    """Name of the study and of the setting in it."""
    env: str
    """The task environment."""
    arm: str
    missed: float
    """Share of the reference's stops that the arm misses."""
    low: float
    """95% interval of the difference in held-out success, arm less reference."""
    high: float

    @property
    def exact_is_better(self) -> bool:
        return self.high < 0

    @property
    def is_decided(self) -> bool:
        """True if the arm was worse, or was shown to be at most `MARGIN` worse."""
        return self.exact_is_better or self.low > -MARGIN


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The number of cases that were predicted right, each by the cases that are unlike it."""

    right: int
    cases: int
    by_majority: int
    """The number that the more frequent answer predicts right."""

    @property
    def is_better(self) -> bool:
        """True if the limit predicts more cases right than the more frequent answer does."""
        return self.right > self.by_majority

    def __str__(self) -> str:
        return f"{self.right} of {self.cases} (by the more frequent answer: {self.by_majority})"


@dataclass(frozen=True, slots=True)
class Calibration:
    """The settings of the table."""

    settings: Sequence[Row]

    @classmethod
    def load(cls, path: Path = TABLE) -> "Calibration":
        return cls(json.loads(path.read_text("utf-8"))["settings"])

    @property
    def cases(self) -> list[Case]:
        """Return the arms whose decisions and whose difference in success are both known."""
        return [
            Case(
                setting=f"{setting['study']}/{setting['name']}",
                env=setting["options"]["task.env"],
                arm=arm["name"],
                missed=arm["missed"],
                low=arm["low"],
                high=arm["high"],
            )
            for setting in self.settings
            for arm in setting["arms"]
            if arm["missed"] is not None and arm["low"] is not None
        ]

    @property
    def decided(self) -> list[Case]:
        """Return the cases that can be predicted. The others had too few seeds."""
        return [case for case in self.cases if case.is_decided]

    @property
    def enough(self) -> bool:
        """True if there are enough settings of both kinds to fit a threshold."""
        worse = {case.setting for case in self.decided if case.exact_is_better}
        equal = {case.setting for case in self.decided if not case.exact_is_better}
        few = min(len(worse), len(equal))
        return len(worse | equal) >= MIN_SETTINGS and few >= MIN_OF_EACH

    @property
    def threshold(self) -> float | None:
        """Return the share of missed stops from which exact routes were better.

        None if there are too few settings, or if the share predicts settings or environments that
        were left out no better than the more frequent answer does.
        """
        if not self.enough:
            return None
        limit = fit(self.decided)
        predicts = all(accuracy.is_better for accuracy in self.left_out.values())
        return limit if predicts and 0 < limit < math.inf else None

    @property
    def left_out(self) -> Mapping[str, Accuracy]:
        """Return how well cases are predicted without those of their setting or environment.

        Environments are left out only if there are several.
        """
        found = {"settings": leave_out(self.decided, lambda case: case.setting)}
        if len({case.env for case in self.decided}) > 1:
            found["environments"] = leave_out(self.decided, lambda case: case.env)
        return found

    def tested(self, new: "Calibration") -> Accuracy | None:
        """Return how well the limit of this table predicts the arms of other settings.

        The more frequent answer is that of this table. None if it has no limit.
        """
        limit = self.threshold
        if limit is None:
            return None
        mostly = 2 * sum(case.exact_is_better for case in self.decided) > len(self.decided)
        return Accuracy(
            right=sum((case.missed >= limit) == case.exact_is_better for case in new.decided),
            cases=len(new.decided),
            by_majority=sum(mostly == case.exact_is_better for case in new.decided),
        )

    def sentences(self, figures: Mapping[str, float]) -> list[str]:
        """Return sentences on the table, and on what it predicts for a run with these figures."""
        cases = self.cases
        worse = sum(case.exact_is_better for case in cases)
        count = len({case.setting for case in cases})
        settings = "1 setting" if count == 1 else f"{count} settings"
        if not cases:
            return [
                "The table of comparisons has no setting yet. The conclusions above are arithmetic "
                "on this run's figures; none of them is a measurement of success."
            ]
        lines = [
            f"{len(cases)} inexact arms in {settings} were compared with an exact route: "
            f"{worse} had less success, {len(self.decided) - worse} lost at most {100 * MARGIN:g} "
            f"points, and {len(cases) - len(self.decided)} are undecided (95% intervals, not "
            "adjusted for their number)."
        ]
        if not self.enough:
            return [
                *lines,
                f"That is too few to predict success: at least {MIN_SETTINGS} settings must have "
                f"an arm that is decided, {MIN_OF_EACH} with a route that had less success and "
                f"{MIN_OF_EACH} without. The conclusions above are arithmetic on this run's "
                "figures.",
            ]
        about = "right for arms of left-out "
        about += "; of ".join(f"{kind}: {accuracy}" for kind, accuracy in self.left_out.items())
        if "environments" not in self.left_out:
            about += "; all are of one task environment, so nothing is known of others"
        limit = self.threshold
        if limit is None:
            lines.append(
                "The share of exact stops that a route misses did not predict which had less "
                f"success ({about})."
            )
            return lines
        lines.append(
            f"Routes that miss more than {percent(limit)} of the exact stops had less success "
            f"({about})."
        )
        return [*lines, *_prediction(figures, limit)]

    def as_json(self, figures: Mapping[str, float]) -> dict[str, Any]:
        return {
            "settings": len({case.setting for case in self.cases}),
            "arms": len(self.cases),
            "decided": len(self.decided),
            "threshold": self.threshold,
            "left_out": {kind: asdict(accuracy) for kind, accuracy in self.left_out.items()},
            "text": self.sentences(figures),
        }


def _prediction(figures: Mapping[str, float], limit: float) -> Iterator[str]:
    """Predict the success of the run's own route, or of every route if the run's is exact."""
    own = figures.get("missed_by_route")
    shares = {
        f"`{name.removeprefix('missed/')}`": share
        for name, share in figures.items()
        if name.startswith("missed/")
    }
    if own is not None:
        shares = {"its route": own}
    for expected, chosen in (
        ("less success", {name: each for name, each in shares.items() if each >= limit}),
        (
            f"at most {100 * MARGIN:g} points less success",
            {name: each for name, each in shares.items() if each < limit},
        ),
    ):
        if chosen:
            words = ", ".join(f"{name} {percent(share)}" for name, share in chosen.items())
            yield (
                f"In this run {expected} than with an exact route is predicted for routes by the "
                f"exact stops that they miss: {words}."
            )


def fit(cases: Sequence[Case]) -> float:
    """Return the share of missed stops from which exact routes are predicted to be better.

    It is right for as many cases as possible. Of several such limits the largest is returned, which
    predicts a difference least often. Infinity predicts none.

    >>> fit([Case("s/a", "retail", "x", 0.09, -0.1, 0.1),
    ...      Case("s/b", "retail", "x", 0.25, -0.3, -0.1)])
    0.15
    """
    shares = sorted({case.missed for case in cases})
    between = [
        math.sqrt(low * high) if low > 0 else (low + high) / 2 for low, high in pairwise(shares)
    ]
    limits = [0.0, *between, math.inf]

    def right(limit: float) -> int:
        return sum((case.missed >= limit) == case.exact_is_better for case in cases)

    return max(limits, key=lambda limit: (right(limit), limit))


def leave_out(cases: Sequence[Case], group: Callable[[Case], str]) -> Accuracy:
    """Predict the cases of each group by a limit that was fitted to the other groups."""
    right = by_majority = 0
    for name in {group(case) for case in cases}:
        others = [case for case in cases if group(case) != name]
        limit = fit(others)
        mostly = 2 * sum(case.exact_is_better for case in others) > len(others)
        for case in cases:
            if group(case) == name:
                right += (case.missed >= limit) == case.exact_is_better
                by_majority += mostly == case.exact_is_better
    return Accuracy(right, len(cases), by_majority)


def measure(folders: Sequence[Path]) -> list[Row]:
    """Return a row of the table for each setting in the folders of comparisons and studies.

    A study is a folder with one comparison for each setting. A setting without a finished run of
    its reference, or whose reference is not exact, is left out. Raises `ConfigError` for a folder
    without a comparison, or a setting that occurs twice.
    """
    rows: list[Row | None] = []
    for folder in folders:
        plans = [folder / PLAN]
        if is_study_folder(folder):
            plans = sorted(folder.glob(f"*/{PLAN}"))
        if not plans or not plans[0].is_file():
            raise ConfigError(f"{folder} has no comparison: {PLAN} is neither in it nor one below")
        rows += [_setting(plan.parent) for plan in plans]
    found = [row for row in rows if row]
    names = [f"{row['study']}/{row['name']}" for row in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two folders have the setting {twice[0]}: name each folder once, and give the folders "
            "of studies different names"
        )
    return found


def _setting(folder: Path) -> Row | None:
    comparison = read_comparison(folder)
    reference = _Arm.of(folder, comparison.reference)
    if (
        reference is None
        or not reference.config.old_logps.exact
        or not len(reference.sample.tokens)
    ):
        return None
    config, tokens = reference.config, reference.sample.tokens
    arms = [
        (arm, found)
        for arm in comparison.arms
        if arm is not comparison.reference and (found := _Arm.of(folder, arm))
    ]
    return {
        "study": folder.resolve().parent.name,
        "name": comparison.name,
        "options": described(config),
        "reference": {
            "name": comparison.reference.name,
            "runs": len(comparison.reference.finished),
        },
        "figures": of_sample(config, tokens, tokens, lengths=reference.lengths),
        "arms": [
            _row(comparison, arm, found, reference)
            for arm, found in arms
            if not found.config.old_logps.exact
        ],
    }


def recount(
    settings: Sequence[Row], folders: Sequence[Path], *, of: Sequence[str] = ()
) -> list[Row]:
    """Count the decisions of arms again, on the tokens of other runs with the same options.

    For settings whose runs are gone: success stays, `changed` and `missed` are new. `folders` are
    run folders, one with the exact reference for each setting, and one for each arm with averages
    of the weights. Arms without such runs keep what they have. `of` are the studies whose settings
    are counted again, by default all.
    """
    runs = [_Arm.read([RunFolder(folder)]) for folder in folders]
    chosen = of or [setting["study"] for setting in settings]
    return [
        _recounted(setting, runs) if setting["study"] in chosen else setting for setting in settings
    ]


def _recounted(setting: Row, runs: "Sequence[_Arm]") -> Row:
    same = [run for run in runs if described(run.config) == setting["options"]]
    reference = next((run for run in same if run.config.old_logps.exact), None)
    if reference is None:
        return setting
    arms = []
    for arm in setting["arms"]:
        config = with_route(reference.config, arm["route"])
        own = (run for run in same if run.config.old_logps.route == arm["route"])
        computed = replace(reference, config=config) if is_computable(config) else None
        found = computed or next(own, None)
        decisions = _decisions(found, reference) if found else None
        counted = {"changed": decisions.share, "missed": decisions.missed} if decisions else {}
        arms.append({**arm, **counted})
    return {**setting, "arms": arms}


def described(config: RunConfig) -> Row:
    """Return the options by which a setting is described."""
    return {
        name: options()[name].of(config)
        for name in DESCRIBED
        if name in options() and options()[name].is_in(config)
    }


@dataclass(frozen=True, slots=True)
class _Arm:
    """The finished runs of an arm: configuration, sample of tokens, mean lengths of sequences."""

    config: RunConfig
    sample: TokenSample
    lengths: Lengths

    @classmethod
    def of(cls, folder: Path, arm: ArmResult) -> "_Arm | None":
        """Read the runs of an arm. None if none has finished."""
        if not arm.finished:
            return None
        return cls.read([RunFolder(folder / trial.folder) for trial in arm.finished])

    @classmethod
    def read(cls, runs: Sequence[RunFolder]) -> "_Arm":
        """Read runs with the options of the first, which may differ in their seed."""
        samples = [read_sample(run) for run in runs]
        rows = [row for run in runs for row in run.metrics()]
        pooled = TokenSample(
            Factors.join([sample.tokens for sample in samples]),
            Factors.join([sample.audited for sample in samples]),
            Factors.join([sample.audited_by_route for sample in samples]),
        )
        return cls(stored_config(runs[0].config()), pooled, read_lengths(rows))


def _row(comparison: Comparison, arm: ArmResult, found: _Arm, reference: _Arm) -> Row:
    """Return an arm's decisions, and its difference in success from the reference."""
    less = comparison.versus(arm)
    decisions = _decisions(found, reference)
    return {
        "name": arm.name,
        "route": found.config.old_logps.route,
        "runs": len(arm.finished),
        "collapsed": arm.collapsed,
        "changed": decisions and decisions.share,
        "missed": decisions and decisions.missed,
        "pairs": less.n if less else 0,
        "mean": less.mean if less else None,
        "low": less.low if less else None,
        "high": less.high if less else None,
    }


def _decisions(arm: _Arm, reference: _Arm) -> Difference | None:
    """Compare the tokens that an arm stops with those that the reference stops.

    Ratios that follow from the exact ones are computed from the reference's tokens. Those of an
    average of the weights are known from the audit of the arm's own runs, if there was one.
    """
    lengths = reference.lengths
    true, by_arm = arm.sample.audited, arm.sample.audited_by_route
    if is_computable(arm.config):
        true = reference.sample.tokens
        by_arm = factors_of_route(arm.config, true)
    if not len(true):
        return None
    ours, theirs = (Thresholds.of(each.config, lengths) for each in (reference, arm))
    rows = draw_sequences(true, max(ours.tokens, theirs.tokens))
    stopped = ours.stopped(true, rows), theirs.stopped(by_arm, rows)
    return difference(*stopped, effective=len(true))
