"""`novelty`: larger advantages for correct replies that are unlikely.

A sequence is correct if its reward is at least `success_at`. The advantage A of a correct sequence
i becomes A + min(max(scale (1 - eta_i), 0), cap A), with eta_i = exp(s_i - mean s). s is the mean
of log pi over the sampled tokens of a sequence, under the current policy, and `mean s` the mean of
s over the sequences of the task. So sequences with s below the mean get a larger advantage, up to
(1 + cap) A, and the others keep theirs. From XRPO, without its allocation of episodes and its
exemplars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unstale.config.checks import NonNegative, Section
from unstale.config.techniques import Entry
from unstale.records import group_of
from unstale.research.techniques.sequences import mean_of
from unstale.research.techniques.success import SuccessThreshold
from unstale.techniques.hooks import Shaped, Signals

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class NoveltyConfig(Section, SuccessThreshold):
    """Larger advantages for correct replies that are unlikely (XRPO)."""

    scale: NonNegative = 2.5
    """Coefficient of the bonus, which is scale (1 - eta) before it is limited. eta is the
    likelihood of a reply relative to the other replies to its task.
    """
    cap: NonNegative = 0.5
    """Largest bonus, as a share of the advantage to which it is added."""


class Novelty:
    """A technique that raises the positive advantages of correct but improbable sequences."""

    def __init__(self, options: NoveltyConfig) -> None:
        self._options = options

    def shape(self, batch: Batch, signals: Signals) -> Shaped:
        """Return the advantages with the bonus added.

        Raises ValueError if the batch has no groups or rewards.
        """
        import torch

        options, advantage = self._options, batch.advantage
        if len(batch.reward) != batch.num_sequences:
            raise ValueError("this batch does not have the reward of each sequence")
        correct = torch.tensor(batch.reward) >= options.success_at
        eta = relative_likelihood(signals.logp, batch)
        bonus = torch.where(correct, options.scale * (1 - eta).clamp(min=0), 0.0)
        limit = options.cap * advantage.clamp(min=0)
        added = torch.minimum(bonus.to(advantage.dtype)[batch.sequence], limit)
        return Shaped(torch.where(batch.sampled, advantage + added, advantage), batch.trained)


def relative_likelihood(logp: Tensor, batch: Batch) -> Tensor:
    """Return eta of each sequence, `[n]` in float64: its likelihood relative to the mean of its
    task.

    `logp` are log-probabilities `[T]`. log eta is the mean log-probability of the sequence's
    sampled tokens, minus the mean of this over the sequences of its task. Sequences without a
    sampled token are not counted in that mean.
    """
    import torch

    group = group_of(batch)
    score = mean_of(logp, batch)
    present = score.new_zeros(batch.num_sequences)
    present[batch.sequence[batch.sampled]] = 1.0
    size = int(group.max()) + 1
    total, count = (
        torch.zeros(size, dtype=score.dtype).index_add(0, group, values)
        for values in (score * present, present)
    )
    return (score - (total / count.clamp(min=1))[group]).exp()


def _describe(options: NoveltyConfig) -> str:
    return (
        f"advantages A of sequences with a reward of at least {options.success_at:g} plus "
        f"min({options.scale:g} (1 - exp(s - mean s)), {options.cap:g} A), at least 0, where s is "
        "the mean log pi of a sequence; one more forward pass per batch"
    )


_MEASURED = """
A softmax over 20 arms of which 8 are right, random initial logits, groups of 8, learning rate 0.1,
128 seeds with paired differences. The claim is that rare right answers survive longer. Diversity is
the entropy of the policy within the right arms, in nats.

| initial logits | steps | success: without, with it | diversity: without, with | difference |
|---|---|---|---|---|
| normal, size 1.5 | 150 | 0.911, 0.912 | 0.535, 0.613 | 0.077 (standard error 0.008) |
| normal, size 1.5 | 300 | 0.976, 0.974 | 0.288, 0.358 | 0.070 (0.007) |
| normal, size 1 | 150 | 0.890, 0.879 | 0.769, 0.908 | 0.139 (0.009) |

Right answers still disappear, only later. With a learning rate of 1 the difference is within two
standard errors. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="novelty",
    slot="shaper",
    rows=(7,),
    makes=Novelty,
    options=NoveltyConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    by_group=lambda options: True,
    use="Tasks have several right answers, and the policy keeps only the likeliest of them.",
    measured=_MEASURED,
    exactness="The gradient is biased towards unlikely correct sequences by a factor of at most "
    "1 + cap, so the advantages of a group no longer have the mean 0. D and S do not change. The "
    "constants are from notes on the paper. That the bonus is added, and s under the current "
    "policy, are our own reading.",
    requires=frozenset({"siblings"}),
    evidence="notes",
)
