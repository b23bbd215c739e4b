"""`outer_step`: a lower learning rate while the gradient is mostly noise.

The factor of the learning rate is share / base, at least `lowest` and at most 1. share = 1 - N / S
is the part of the squared gradient that is not noise. S averages the squared norm of a step's
gradient g over past steps, N the estimate m k |a / m - b / k|^2 of the variance of g, where a and b
are the gradients of two halves with m and k groups, a + b = g. In both averages, the weight of a
step falls by the factor 0.9 per step. Steps with KL(pi_old || pi) above `max_kl` are skipped. A
paper on PPO with a million environments states that training ends on a plateau if steps are too
large for their noise. The rule here is our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unstale.config.checks import ConfigError, NonNegative, Positive, Section, Share
from unstale.config.techniques import Entry
from unstale.techniques.hooks import Outcome, StepPlan, StepSeen

if TYPE_CHECKING:
    from unstale.config import RunConfig

DECAY = 0.9
"""Weight of the past steps in the averages of gradient noise and squared norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStepConfig(Section):
    """A lower learning rate while the gradient is mostly noise (PPO at 1M environments)."""

    base: Positive = 0.5
    """The learning rate is lowered only while the share of the squared gradient that is not noise
    is below this.
    """
    lowest: Share = 0.2
    """Smallest factor of the learning rate. With 1, the learning rate never changes, so that the
    technique only adds metrics.
    """
    max_kl: NonNegative = 0.0
    """Steps with a larger KL(pi_old || pi) per token, in nats, are skipped; 0 skips none."""


class OuterStep:
    """A technique that lowers the learning rate by averages of gradient noise and squared norm."""

    def __init__(self, options: OuterStepConfig) -> None:
        self._options = options
        self._averages = (0.0, 0.0)
        self._next = self._averages
        """The averages including steps of the current batch, which `observe` has not yet
        confirmed.
        """

    def plan(self, seen: StepSeen) -> StepPlan:
        options = self._options
        now = (seen.gradient_noise, seen.grad_norm**2)
        if math.isfinite(now[0]):
            past = zip(self._next, now, strict=True)
            noise, square = (DECAY * old + (1 - DECAY) * new for old, new in past)
            self._next = (noise, square)
        noise, square = self._next
        share = 1 - noise / square if square else math.nan
        factor = 1.0 if math.isnan(share) else max(options.lowest, min(1.0, share / options.base))
        return StepPlan(
            lr_factor=factor,
            skip=0 < options.max_kl < seen.kl,
            metrics={
                "outer_step/signal_share": share,
                "outer_step/kl": seen.kl,
                "outer_step/kl_of_batch": seen.kl_of_batch,
            },
        )

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._averages = self._next

    def state(self) -> Mapping[str, Any]:
        return {"averages": list(self._averages)}

    def restore(self, state: Mapping[str, Any]) -> None:
        noise, square = state["averages"]
        self._averages = self._next = (noise, square)


def _check(options: OuterStepConfig, config: RunConfig) -> None:
    if options.max_kl and not config.old_logps.exact:
        raise ConfigError(
            f"outer_step.max_kl = {options.max_kl:g} needs a route whose old_logp is that of the "
            f"sampling policy, got old_logps.route = {config.old_logps.route}. Set "
            "old_logps.route snapshot_old, or outer_step.max_kl 0"
        )


def _describe(options: OuterStepConfig) -> str:
    if options.lowest == 1:
        rate = "the noise of two halves of a step's groups is measured"
    else:
        rate = (
            f"the learning rate times s / {options.base:g}, from {options.lowest:g} to 1, where s "
            "is the share of the squared gradient that is not noise, from two halves of the groups"
        )
    limit = f"; no step over KL(pi_old || pi) {options.max_kl:g}" if options.max_kl else ""
    return (
        f"{rate}{limit}; sequences with advantage 0 need a forward pass, too, and one more copy of "
        "the gradient is in memory"
    )


_MEASURED = """
Two toys, 8 groups of 4 episodes per step, plain gradient steps, 24 seeds, the mean after 150 steps.
*Target*: actions around a mean of 10 numbers; minus the squared distance of the mean from the best
one, which starts at -10. *Bandit*: 10 positions with 10 arms, noisy rewards; the mean probability
of the best arm.

| toy | learning rate r | r | r / 2 | r / 5 | r with `outer_step` |
|---|---|---|---|---|---|
| target | 0.03 | -0.014 | -0.007 | -1.431 | -0.004 |
| target | 0.1 | -0.056 | -0.025 | -0.009 | -0.013 |
| target | 0.3 | -0.281 | -0.096 | -0.030 | -0.147 |
| bandit | 1 | 0.77 | 0.36 | 0.15 | 0.15 |
| bandit | 3 | 0.94 | 0.89 | 0.47 | 0.49 |
| bandit | 10 | 0.69 | 0.90 | 0.92 | 0.93 |

On the plateaus of the first toy it is both fast and precise: after 30 steps at 0.1, -0.030 against
-3.3 with r / 5. In the bandit the gradient is mostly noise from the first step, so it always uses
the lowest factor. That helps only where the learning rate is too high. It has not been measured on
the desks.
"""

ENTRY = Entry(
    name="outer_step",
    slot="controller",
    rows=(50,),
    makes=OuterStep,
    options=OuterStepConfig,
    changes=frozenset({"step"}),
    describe=_describe,
    check=_check,
    use="Reward has stopped rising, and a lower learning rate would raise it. Where gradients are "
    "noisy from the start, it only slows learning: look at `outer_step/signal_share` with "
    "`outer_step.lowest 1` first.",
    measured=_MEASURED,
    exactness="The size of a step changes, not its direction. D and S do not change. The size "
    "depends on the gradient of the same step. Sequences with advantage 0 need a forward pass, "
    "too, because their groups count.",
    requires=frozenset({"halves"}),
    evidence="own reading",
)
