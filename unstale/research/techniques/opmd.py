"""`opmd`: the loss -A log pi / (1 + tau), without a ratio.

A is the advantage and pi the current policy. The loss is that of REINFORCE, divided by 1 + tau.
It needs no log-probability of the policy that sampled a token, so it can also be used where that
log-probability is not known. OPMD's advantage is the reward minus the task's mean reward, not
divided by a standard deviation: choose `advantage.estimator grpo_no_std`. From OPMD (online policy
mirror descent), as R3L uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, NonNegative, Section
from unstale.config.techniques import Entry, chosen, require_value

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.algorithms.objectives import Surrogate
    from unstale.config import ObjectiveConfig, RunConfig
    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class OpmdConfig(Section):
    """The loss -A log pi / (1 + tau), without a ratio (OPMD)."""

    tau: NonNegative = 1.0
    """Strength of the regularisation towards the policy before the step: the loss is divided by
    1 + tau.
    """


class Opmd:
    """An objective whose loss uses no ratio of policies."""

    def __init__(self, options: OpmdConfig) -> None:
        self._options = options

    def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
        """Return the loss of each token, `[T]`.

        `log_ratio` is used in place of log pi. The two differ by a constant, so their gradients are
        equal.
        """
        import torch

        from unstale.algorithms.objectives import Surrogate

        advantage = torch.where(batch.trained, batch.advantage, 0.0)
        log_ratio = torch.where(batch.trained, log_ratio, 0.0)
        nowhere = torch.zeros_like(batch.sampled)
        return Surrogate(-advantage * log_ratio / (1 + self._options.tau), nowhere, nowhere)


def _check(options: OpmdConfig, config: RunConfig) -> None:
    objective = config.objective
    reason = "its loss has no ratio"
    require_value("opmd", "objective.loss_type", objective.loss_type, ["none"], reason)
    require_value("opmd", "objective.unit", objective.unit, ["token"], reason)
    if ratios := [each.name for each in chosen(config.techniques) if each.slot == "ratio"]:
        raise ConfigError(
            f"techniques has opmd and {ratios[0]}, which changes the ratio; opmd's loss has no "
            f"ratio. Remove {ratios[0]} from --techniques"
        )


def _describe(options: OpmdConfig) -> str:
    return (
        f"the loss -A log pi / {1 + options.tau:g}: S is not in it, so stale tokens count as fresh "
        "ones"
    )


_MEASURED = """
A bandit of 10 positions with 10 arms, noisy rewards, 100 steps, 24 seeds: the mean probability of
the best arm at the end, with a standard error of at most 0.02. The learning rate of `opmd` is
doubled, which makes up for tau = 1.

| lag in versions | ratio without a limit | `ppo_clip` | `opmd` |
|---|---|---|---|
| 0 | 0.61 | 0.61 | 0.61 |
| 4 | 0.61 | 0.43 | 0.60 |
| 16 | 0.60 | 0.20 | 0.54 |
| 64 | 0.57 | 0.14 | 0.39 |

So under lag it loses to the ratio that it leaves out, and nothing in this toy breaks by a large
ratio. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="opmd",
    slot="objective",
    rows=(34,),
    makes=Opmd,
    options=OpmdConfig,
    changes=frozenset({"objective"}),
    describe=_describe,
    check=_check,
    use="Ratios are large or unknown. With fresh tokens it only halves the learning rate.",
    measured=_MEASURED,
    exactness="With stale tokens the gradient is biased: it is that of the policy which sampled "
    "them, weighted by its own probabilities. D stays a weight, as `correction.mode` says; set "
    "it to none for the loss of the paper.",
)
