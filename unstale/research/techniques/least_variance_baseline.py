"""`least_variance_baseline`: the baseline with the least variance of the gradient under stale data.

The advantage A_i of a sequence becomes A_i - b, b = sum_j w_j^2 g_j^2 A_j / sum_j w_j^2 g_j^2 over
the sequences of its group. w is pi / mu of a sequence: current over engine's policy, the product of
the ratios of its sampled tokens. g is the norm of the gradient of its log-probability under the
current policy. Where A_i is the reward minus the group's mean, divided by its standard deviation or
not, this is the reward minus the paper's baseline, divided in the same way. From OPOB of VCPO
(arXiv 2602.17616).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unstale.config.checks import ConfigError, Section
from unstale.config.techniques import Entry, chosen, require_value
from unstale.records import group_of
from unstale.research.techniques.sequences import mean_of, sum_of
from unstale.techniques.hooks import GradientPart, Shaped, Signals

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastVarianceBaselineConfig(Section):
    """The baseline with the least variance of the gradient under stale data (OPOB of VCPO)."""

    scope: Literal["group", "batch"] = "group"
    """The sequences that have one baseline: those of a task, or all of a batch."""
    norm: GradientPart = "full"
    """The gradient whose norm g is used: by all trained weights, or only by the output head, which
    costs no backward pass through the layers.
    """


class LeastVarianceBaseline:
    """A technique that subtracts one baseline per group or batch from the
    advantages of sequences.
    """

    def __init__(self, options: LeastVarianceBaselineConfig) -> None:
        self._options = options

    def shape(self, batch: Batch, signals: Signals) -> Shaped:
        import torch

        options = self._options
        mean = mean_of(batch.advantage, batch)
        spread = (batch.advantage - mean[batch.sequence])[batch.sampled].abs()
        if len(spread) and spread.max() > 1e-5 * mean.abs().max():
            raise ValueError(
                "least_variance_baseline needs one advantage per sequence, got several in one "
                "sequence"
            )
        count = batch.num_sequences
        scope = group_of(batch) if options.scope == "group" else torch.zeros(count).long()
        log_weight = sum_of(signals.logp - batch.behavior_logp, batch)
        # A sequence without sampled tokens has no gradient, so it has no part in a baseline.
        active = batch.sequence[batch.sampled].unique()
        reduced = mean.clone()
        if len(active):
            values, scope = mean[active], scope[active]
            wanted = _differing(values, scope).nonzero().squeeze(1)
            norms = torch.ones_like(values)
            norms[wanted] = signals.gradient_norms(active[wanted].tolist(), options.norm)
            log_squares = 2 * (log_weight[active] + norms.log())
            reduced[active] = values - baseline(values, log_squares, scope)
        advantage = torch.where(batch.sampled, reduced[batch.sequence], 0.0)
        return Shaped(advantage.to(batch.advantage.dtype), batch.trained)


def baseline(values: Tensor, log_weight: Tensor, scope: Tensor) -> Tensor:
    """Return for each value the weighted mean of the values with the same scope, `[n]`.

    The weights are exp(`log_weight`). `scope` has for each value a number, such as that of its
    group. If all weights of a scope are 0, its values have equal weights.
    """
    size = int(scope.max()) + 1
    peak = log_weight.new_full((size,), -float("inf")).scatter_reduce(0, scope, log_weight, "amax")
    # Only ratios of weights count. Without the largest one, exp could overflow.
    weight = (log_weight - peak[scope]).masked_fill(peak[scope].isneginf(), 0.0).exp()
    total = weight.new_zeros(size).index_add(0, scope, weight)
    return (weight.new_zeros(size).index_add(0, scope, weight * values) / total)[scope]


def _differing(values: Tensor, scope: Tensor) -> Tensor:
    """Return a mask `[n]`: True for values whose scope (a group of values) has several different
    values.
    """
    size = int(scope.max()) + 1
    high = values.new_full((size,), -float("inf")).scatter_reduce(0, scope, values, "amax")
    low = values.new_full((size,), float("inf")).scatter_reduce(0, scope, values, "amin")
    return (high > low)[scope]


def _check(options: LeastVarianceBaselineConfig, config: RunConfig) -> None:
    if options.scope == "group" and config.schedule.group_size < 2:
        raise ConfigError(
            "least_variance_baseline.scope = group needs schedule.group_size >= 2, got "
            f"{config.schedule.group_size}. Set least_variance_baseline.scope batch"
        )
    if options.norm == "head" and config.trainer.lora_rank:
        raise ConfigError(
            "least_variance_baseline.norm = head needs trainer.lora_rank = 0, got "
            f"{config.trainer.lora_rank}: with adapters, the head is not trained. Set "
            "least_variance_baseline.norm full"
        )
    if config.advantage.estimator == "turn_level":
        raise ConfigError(
            "the technique least_variance_baseline needs one advantage per episode, got "
            "advantage.estimator = turn_level. Set advantage.estimator grpo"
        )
    reason = "the advantage of placed text would become 0"
    require_value(
        "least_variance_baseline", "objective.placed", config.objective.placed, ["mask"], reason
    )
    before = config.techniques.split()
    before = before[: before.index("least_variance_baseline")]
    for entry in chosen(config.techniques):
        if entry.slot == "recredit" or (entry.slot == "shaper" and entry.name in before):
            raise ConfigError(
                "the technique least_variance_baseline needs one advantage per episode, got "
                f"{entry.name}, which may give tokens different ones. In the option techniques, "
                "write least_variance_baseline before shapers, and leave out recredits"
            )


def _describe(options: LeastVarianceBaselineConfig) -> str:
    cost = "backward" if options.norm == "full" else "forward"
    gradient = "" if options.norm == "full" else " of the output head"
    return (
        f"the advantages of a {options.scope} minus their mean, weighted by w^2 g^2 (w = pi / mu, "
        f"g the norm of the gradient{gradient}); one more {cost} pass per sequence of a "
        f"{options.scope} whose rewards differ"
    )


_MEASURED = """
Groups of 8 sequences of 6 tokens with 4 words, rewards 0 and 1, policies whose logits differ by
normal noise; the mean over 40 pairs of the variance of a group's gradient, and the norm of its
mean.

| size of the noise | group's mean | this baseline | without w | without g |
|---|---|---|---|---|
| 0 | 0.095, 0.189 | 0.094, 0.189 | 0.094, 0.189 | 0.095, 0.189 |
| 0.3 | 0.137, 0.189 | 0.104, 0.175 | 0.135, 0.189 | 0.106, 0.175 |
| 0.6 | 0.370, 0.180 | 0.118, 0.135 | 0.377, 0.181 | 0.119, 0.135 |
| 1.0 | 2.29, 0.168 | 0.092, 0.080 | 2.32, 0.169 | 0.094, 0.081 |

The mean is smaller, too, because a sequence with a large weight is its own baseline. Relative to
the squared mean, the variance falls from 11 to 6 at 0.6, and from 81 to 14 at 1.0. The norm of the
gradient hardly matters here. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="least_variance_baseline",
    slot="shaper",
    rows=(16,),
    makes=LeastVarianceBaseline,
    options=LeastVarianceBaselineConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: options.scope == "group",
    check=_check,
    use="Tokens are many versions old and the loss weights whole sequences, as with "
    "`correction.unit sequence`. It makes a step about half as fast.",
    measured=_MEASURED,
    exactness="A baseline that contains the sequence's own reward biases the gradient, as the "
    "group's mean does. D and S do not change. `norm head` is not in the paper.",
    requires=frozenset({"trajectory_gradients"}),
)
