"""Checks of a run's metrics for signs that it cannot learn, such as advantages that are all 0."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from unstale.observe.words import amount, number, percent

IN_A_ROW = 3
"""Number of successive steps that must show a sign before its check fails. A single small batch may
show the sign by chance.
"""

COLLAPSED, NO_ENTROPY = 0.1, 1e-3
"""The policy's entropy counts as collapsed if it is below `COLLAPSED` times its value in the first
steps, or below `NO_ENTROPY` nats per token.
"""

FAINT = 1e-7
"""Gradient norm below which Adam hardly changes weights, because each weight's gradient is then
small beside Adam's epsilon of 1e-8.
"""

LEAST_DUE, LOST = 2e-4, 0.6
"""A step's updates count as lost to rounding if, of the weights that should change, less than the
share `LOST` has changed. The check is made only if more than the share `LEAST_DUE` of all weights
should change.
"""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Check:
    """A check of each step's metrics for one sign that a run learns nothing or too little."""

    name: str
    title: str
    """Text for a check that passes: what is right about the run."""
    holds: Callable[[Row, float], bool | None]
    """A function that gets a step's metrics and `TrainingHealth.first_entropy`. It returns True if
    the metrics show the sign, and None if they cannot show it. It raises KeyError if a metric is
    missing.
    """
    text: str
    """Text for the user if the check fails: what was found and what to do. Names of metrics in
    braces stand for their values.
    """
    in_a_row: int = IN_A_ROW
    least: int = 1
    """The check can pass only after this number of steps with the metrics that it needs."""
    from_start: bool = False
    """True if the check fails already when the first step shows the sign. This failure is withdrawn
    if one of the steps up to number `in_a_row` does not show it.
    """


@dataclass(frozen=True, slots=True)
class Finding:
    """A failed check of a run."""

    name: str
    text: str
    step: int
    """The first of the successive steps that showed the sign and made the check fail."""
    steps: int
    """Number of steps that showed the sign, from `step` on."""


def _value(row: Row, name: str) -> float:
    if (value := number(row.get(name))) is None:
        raise KeyError(name)
    return value


CHECKS = (
    Check(
        "no_advantage",
        "batches have an advantage",
        lambda row, _: _value(row, "trainer/tokens_with_gradient") == 0,
        "no token had an advantage, so nothing was learned: the rewards of every group were equal. "
        "Use tasks that the policy sometimes solves, a finer reward or a larger "
        "schedule.group_size.",
        from_start=True,
    ),
    Check(
        "constant_rewards",
        "rewards differ",
        lambda row, _: _value(row, "reward/std") == 0,
        "every reward was {reward/mean}. Check the reward function on a good and on a bad answer, "
        "and that the task is neither too hard nor too easy.",
    ),
    Check(
        "missing_rewards",
        "every finished episode has a reward",
        lambda row, _: _value(row, "reward/missing_share") > 0,
        "{reward/missing_share} of the episodes ended without a reward, which counts as 0. The "
        "last Turn of an episode (done) must have rewards.",
        in_a_row=1,
    ),
    Check(
        "faint_gradient",
        "gradients are large enough to change weights",
        lambda row, _: (
            _value(row, "trainer/grad_norm") < FAINT
            if _value(row, "trainer/tokens_with_gradient") > 0
            else None
        ),
        "the gradient had a norm of {trainer/grad_norm}, which the optimizer's epsilon outweighs. "
        "Scale the rewards so that good and bad answers differ by about 1.",
    ),
    Check(
        "lost_updates",
        "small updates change weights",
        lambda row, _: (
            _value(row, "trainer/moved_weight_share") < LOST * due
            if (due := _value(row, "trainer/due_weight_share")) > LEAST_DUE
            else None
        ),
        "{trainer/moved_weight_share} of the weights changed, and {trainer/due_weight_share} "
        "should have: rounding loses updates that are smaller than the distance of two numbers of "
        "trainer.dtype. Set trainer.rounding stochastic, or trainer.dtype float32.",
    ),
    Check(
        "entropy_collapse",
        "the policy keeps its entropy",
        lambda row, first: _value(row, "policy/entropy_mean") < max(NO_ENTROPY, COLLAPSED * first),
        "the entropy fell to {policy/entropy_mean} nats per token: replies hardly vary, so groups "
        "have no differences to learn from. Lower trainer.lr, or set objective.entropy_coef or "
        "objective.kl_coef.",
        least=2 * IN_A_ROW,  # the first ones give `first_entropy`
    ),
    Check(
        "kept_share",
        "the correction keeps most tokens",
        lambda row, _: _value(row, "correction/kept_share") < 0.5,
        "the correction kept {correction/kept_share} of the tokens. Engine and trainer disagree: "
        "compare engine.dtype with trainer.dtype, lower schedule.max_staleness or widen the band "
        "(correction.low, correction.high).",
        in_a_row=1,
    ),
    Check(
        "all_truncated",
        "episodes reach their end",
        lambda row, _: _value(row, "completion/truncated_share") == 1,
        "a limit ended every episode or cut its last reply, so only rewards for unfinished work "
        "count. Raise engine.max_completion_tokens, engine.max_context or rollout.max_turns, or "
        "the max_tokens of the agent's calls.",
        in_a_row=1,
    ),
    Check(
        "invalid_formats",
        "replies have the requested format",
        lambda row, _: _value(row, "completion/invalid_format_share") > 0.5,
        "{completion/invalid_format_share} of the episodes ended because no reply had the "
        "response_format that the agent asked for, so they got no reward. Raise "
        "endpoint.format_retries, show an example of the format in the prompt, or ask for a "
        "simpler schema.",
    ),
)


@dataclass(slots=True)
class TrainingHealth:
    """The results of all checks of a run, updated after each step."""

    findings: dict[str, Finding] = field(default_factory=dict)
    """The checks that failed, by name, in the order in which they failed."""
    first_entropy: float = math.nan
    """Mean entropy of the policy in the first `IN_A_ROW` steps, in nats per token.

    NaN before that.
    """
    _entropies: list[float] = field(default_factory=list)
    _streaks: dict[str, int] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)
    """Number of steps that had the metrics that a check needs, by the check's name."""

    def passed(self, check: Check) -> bool | None:
        """Return whether a check passed. None if too few steps had the metrics that it needs."""
        if check.name in self.findings:
            return False
        enough = self._told.get(check.name, 0) >= max(check.least, check.in_a_row)
        return True if enough else None

    def update(self, row: Row) -> list[Finding]:
        """Add the metrics of a step. Return the checks that have failed with this step."""
        step = int(number(row.get("step")) or 0)
        if step < 1:
            return []
        new = []
        for check in CHECKS:
            shown: bool | None = None
            with suppress(KeyError):
                shown = check.holds(row, self.first_entropy)
            holds = shown is True
            told = self._told[check.name] = self._told.get(check.name, 0) + (shown is not None)
            streak = self._streaks[check.name] = holds * (self._streaks.get(check.name, 0) + 1)
            found = self.findings.get(check.name)
            if found and (holds or found.steps >= check.in_a_row):
                self.findings[check.name] = replace(found, steps=found.steps + holds)
            elif found and shown is False:
                del self.findings[check.name]  # it was chance
            elif streak == check.in_a_row or (check.from_start and streak == told == 1):
                first = step - streak + 1
                found = Finding(check.name, _fill(check.text, row), first, streak)
                self.findings[check.name] = found
                new.append(found)
        self._add_entropy(number(row.get("policy/entropy_mean")))
        return new

    def _add_entropy(self, entropy: float | None) -> None:
        if len(self._entropies) < IN_A_ROW and entropy is not None:
            self._entropies.append(entropy)
            if len(self._entropies) == IN_A_ROW:
                self.first_entropy = sum(self._entropies) / IN_A_ROW


def examine(rows: Iterable[Row]) -> TrainingHealth:
    """Return the results of all checks of a run. `rows` has the metrics of each step, in order."""
    health = TrainingHealth()
    for row in rows:
        health.update(row)
    return health


def _fill(text: str, row: Row) -> str:
    """Return `text` with each metric's name in braces replaced by its value, shares in percent."""
    for name, value in row.items():
        if f"{{{name}}}" in text:
            shown = percent(number(value)) if name.endswith("_share") else amount(number(value))
            text = text.replace(f"{{{name}}}", shown)
    return text
