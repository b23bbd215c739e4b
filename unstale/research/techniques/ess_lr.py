"""`ess_lr`: a lower learning rate while few sequences carry the importance weights.

The factor of the learning rate is sqrt(ESS / n), at most 1. ESS = (sum w)^2 / sum w^2 is the
effective sample size of the n sequences of an optimizer step. The weight of a sequence is w =
exp(sum_t log pi - log mu) over its sampled tokens, with the current policy pi and the engine's
policy mu. From VCPO (arXiv 2602.17616).
"""

from __future__ import annotations

from dataclasses import dataclass

from unstale.config.checks import Positive, Section
from unstale.config.techniques import Entry
from unstale.techniques.hooks import StepPlan, StepSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class EssLrConfig(Section):
    """A lower learning rate while few sequences carry the importance weights (VCPO)."""

    base: Positive = 1.0
    """The learning rate is lowered only while ESS / n, the effective share of a step's n sequences,
    is below this value.
    """


class EssLr:
    """A technique that lowers the learning rate with a step's effective sample size."""

    def __init__(self, options: EssLrConfig) -> None:
        self._options = options

    def plan(self, seen: StepSeen) -> StepPlan:
        # The largest weight cancels in the ratio. Without it, exp could overflow.
        weight = (seen.log_weight - seen.log_weight.max()).exp()
        share = float(weight.sum() ** 2 / (weight * weight).sum()) / len(weight)
        factor = min(1.0, (share / self._options.base) ** 0.5)
        return StepPlan(lr_factor=factor, metrics={"ess_lr/effective_share": share})


def _describe(options: EssLrConfig) -> str:
    share = "ESS / n" if options.base == 1 else f"ESS / n / {options.base:g}"
    return (
        f"the learning rate times sqrt({share}), at most 1, where ESS is that of pi / mu over "
        "sequences; sequences with advantage 0 need a forward pass, too"
    )


_MEASURED = """
A bandit of 10 positions with 10 arms: 150 steps, 40 seeds; the mean probability of the best arm at
the end, with a standard error of at most 0.02. `tests/techniques/test_ess_lr.py` repeats two of the
rows with 24 seeds.

| lag in versions | learning rate | without | with `ess_lr` |
|---|---|---|---|
| 16 | 3 | 0.49 | 0.61 |
| 64 | 3 | 0.28 | 0.38 |
| 64 | 1 | 0.34 | 0.29 |
| 64 | 0.3 | 0.16 | 0.15 |
| 0 | 3 | 0.90 | 0.90 |

It has not been measured on the desks.
"""

ENTRY = Entry(
    name="ess_lr",
    slot="controller",
    rows=(16,),
    makes=EssLr,
    options=EssLrConfig,
    changes=frozenset({"step"}),
    describe=_describe,
    use="The learning rate is too high for the staleness. If the learning rate is already low, it "
    "only slows learning.",
    measured=_MEASURED,
    exactness="The size of a step changes, not its direction. D and S do not change. Sequences "
    "with advantage 0 need a forward pass, too, because their weights count.",
)
