"""`hint_entropy_weights`: less weight for tokens of a hint that the policy is unusually sure or
unsure of.

The advantage of a token of a hint is multiplied by exp(-|H - m|). H is the entropy of the policy at
the token, in nats, and m the mean entropy at the tokens that the policy sampled after the hint. A
token with the entropy m keeps its weight. From ADHint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, Section
from unstale.config.techniques import Entry, chosen
from unstale.research.techniques.sequences import mean_of
from unstale.techniques.hooks import Shaped, Signals

if TYPE_CHECKING:
    from unstale.config import RunConfig
    from unstale.records import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HintEntropyWeightsConfig(Section):
    """Less weight for hint tokens whose entropy differs from that of the continuation (ADHint)."""


class HintEntropyWeights:
    """A technique that weights the tokens of hints by the policy's entropy at them."""

    def __init__(self, options: HintEntropyWeightsConfig) -> None: ...

    def shape(self, batch: Batch, signals: Signals) -> Shaped:
        import torch

        if batch.placed is None:
            return Shaped(batch.advantage, batch.trained)
        mean = mean_of(signals.entropy, batch)[batch.sequence]
        weight = torch.exp(-(signals.entropy.double() - mean).abs()).to(batch.advantage.dtype)
        advantage = batch.advantage * weight.where(batch.placed.trained, 1.0)
        return Shaped(advantage, batch.trained)


def _check(options: HintEntropyWeightsConfig, config: RunConfig) -> None:
    if "hints" not in [entry.name for entry in chosen(config.techniques)]:
        raise ConfigError(
            "the technique hint_entropy_weights needs the technique hints, whose tokens it weighs. "
            f"Set --techniques '{config.techniques} hints'"
        )


_MEASURED = """
The weights are checked by hand (`tests/techniques/test_hints.py`). Their effect on learning has not
been measured.
"""

ENTRY = Entry(
    name="hint_entropy_weights",
    slot="shaper",
    rows=(37,),
    makes=HintEntropyWeights,
    options=HintEntropyWeightsConfig,
    changes=frozenset({"advantage"}),
    describe=lambda options: (
        "the tokens of a hint have less weight the further their entropy is from that of the "
        "continuation; one more forward pass per batch, with entropies"
    ),
    by_group=lambda options: True,
    check=_check,
    use="With `hints`, as in ADHint: parts of solutions are very unlike what the policy writes.",
    measured=_MEASURED,
    exactness="Sampled tokens keep their advantages, D and S. The loss of hints stays weighted "
    "imitation (docs/placed.md), with other weights. The function exp(-|H - m|) is our own "
    "reading.",
    requires=frozenset({"entropy"}),
    evidence="own reading",
)
