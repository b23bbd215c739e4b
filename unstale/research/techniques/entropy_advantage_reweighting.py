"""`entropy_advantage_reweighting`: larger advantages for replies of low entropy.

The advantages of a sequence are multiplied by 1 + (H_group - H) / H_group. H is the mean entropy of
the policy over the sequence's sampled tokens, and H_group the mean of H over its group. Sequences
without sampled tokens keep their advantages and have no part in H_group. The change is limited to
+-`limit`, so that no advantage changes its sign. From EAR, the entropy-based advantage reshaping of
ETTRL (arXiv 2508.11356).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from unstale.config.checks import Range, Section
from unstale.config.techniques import Entry
from unstale.records import group_of
from unstale.research.techniques.sequences import mean_of
from unstale.techniques.hooks import Shaped, Signals

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyAdvantageReweightingConfig(Section):
    """Larger advantages for replies of low entropy (EAR of ETTRL)."""

    limit: Annotated[float, Range(0, 0.99)] = 0.5
    """Largest change of an advantage, as a share of it. It is below 1, to keep the sign."""


class EntropyAdvantageReweighting:
    """A technique that multiplies a sequence's advantages by a factor of the sequence's entropy."""

    def __init__(self, options: EntropyAdvantageReweightingConfig) -> None:
        self._options = options

    def shape(self, batch: Batch, signals: Signals) -> Shaped:
        import torch

        mean, group = mean_of(signals.entropy, batch), group_of(batch)
        # A sequence without sampled tokens, such as a retry, has no entropy.
        active = batch.sequence[batch.sampled].unique()
        factor = torch.ones_like(mean)
        if len(active):
            limit = self._options.limit
            factor[active] = relative_factor(mean[active], group[active], limit=limit)
        factor = factor.to(batch.advantage.dtype)[batch.sequence]
        return Shaped(batch.advantage * factor, batch.trained)


def relative_factor(entropy: Tensor, group: Tensor, *, limit: float) -> Tensor:
    """Return the factor 1 + (mean - entropy) / mean for each of n sequences, `[n]`.

    `entropy` `[n]` has the mean entropy of each sequence, and `group` `[n]` the number of its
    group. The mean is that of the group. The difference from 1 is limited to +-`limit`, and is 0 in
    a group of entropy 0.
    """
    import torch

    total = entropy.new_zeros(int(group.max()) + 1).index_add(0, group, entropy)
    mean = (total / torch.bincount(group))[group]
    change = torch.where(mean > 0, (mean - entropy) / mean, 0.0)
    return 1 + change.clamp(-limit, limit)


def _describe(options: EntropyAdvantageReweightingConfig) -> str:
    return (
        "advantages times 1 + (mean entropy of the group - entropy of the sequence) / mean, at "
        f"most {1 + options.limit:g} and at least {1 - options.limit:g}; one more forward pass per "
        "batch, with entropies"
    )


_MEASURED = """
Random entropies and advantages, 24 groups of 8: the share of sum |A| of the replies with low
entropy rises by more than 0.1. A choice of two answers, of which one is confident, with 30% of the
rewards wrong, 60 steps, 200 runs: the right answer has 0.954 with `entropy_advantage_reweighting`
and 0.973 without where the right one is confident, 0.981 and 0.973 where the wrong one is (standard
error 0.001). So the claim that it helps a confident right answer did not show. It has not been
measured on the desks.
"""

ENTRY = Entry(
    name="entropy_advantage_reweighting",
    slot="shaper",
    rows=(43,),
    makes=EntropyAdvantageReweighting,
    options=EntropyAdvantageReweightingConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: True,
    use="Rewards are noisy, as those of a vote are, and confident replies are right more often. It "
    "lowers the entropy.",
    measured=_MEASURED,
    exactness="The advantages of a group no longer have the mean 0: the gradient of a task is not "
    "that of its expected reward. D and S do not change. The default of `limit` is our own choice.",
    requires=frozenset({"siblings", "entropy"}),
    evidence="notes",
)
