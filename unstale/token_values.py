"""Ratios, weights and advantages with which a step trained on an episode, for the journal."""

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads journals without numpy
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float32]
    Flags = NDArray[np.uint8]

STORED = "stored"
"""The route of a replayed episode: its `old_logp` was stored when it was first trained on."""


class TokenFlag(IntFlag):
    """Flags of a trained token: how its values were computed and used. Several may be set."""

    EXACT = 1
    """`old_logp` is exact. Otherwise the route approximated it."""
    VETOED = 2
    """`correction.token_veto_threshold` dropped the token's sequence."""
    MASKED = 4
    """`correction.mode` dropped the token. The token veto did not."""
    DROPPED = 8
    """A technique dropped the token. The correction had kept it."""
    CLIPPED_LOW = 16
    """The staleness ratio of the token's unit was below the trust region of the objective."""
    CLIPPED_HIGH = 32
    """The staleness ratio of the token's unit was above the trust region of the objective."""
    CAPPED = 64
    """`objective.ratio_cap` made the weight of the token smaller."""


OUTCOMES = {
    "vetoed": TokenFlag.VETOED,
    "masked": TokenFlag.MASKED,
    "dropped": TokenFlag.DROPPED,
    "clipped_low": TokenFlag.CLIPPED_LOW,
    "clipped_high": TokenFlag.CLIPPED_HIGH,
    "capped": TokenFlag.CAPPED,
}
"""The outcomes of a token, each with its flag. Of several flags, the first in this order counts."""

SKIPPED, KEPT = "skipped", "kept"
"""The outcomes of tokens without a flag of `OUTCOMES`. `skipped`: no optimizer step trained on the
episode. `kept`: all others.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """The values of the `n` sampled tokens of an episode in one step, in the order of its pieces.

    The arrays are `[n]`. Log-probabilities and entropies are in nats.
    """

    group: int
    episode: int
    route: str
    """The route that computed `old_logp`: a value of `old_logps.route`, or "stored" for a replayed
    episode.
    """
    minibatch: int | None
    """The optimizer step within the batch that trained on the episode, from 0. None if the episode
    was skipped, because none of its tokens could have a gradient: the correction dropped them, or
    their advantages are 0.
    """
    log_d: "Values"
    """`old_logp - behavior_logp`. NaN if no `old_logp` was computed."""
    log_s: "Values"
    """`logp - old_logp`, with the weights before the optimizer step `minibatch`. NaN if the episode
    was skipped.
    """
    weight: "Values"
    """The factor by which the correction multiplies the token's loss. 0 if the correction dropped
    the token. NaN if no `old_logp` was computed.
    """
    advantage: "Values"
    """The advantage in the loss, after all techniques."""
    entropy: "Values"
    """Entropy of the trainer's distribution of the token. NaN if not computed: without an entropy
    bonus it is computed for some tokens of a batch.
    """
    flags: "Flags"
    """A sum of values of `TokenFlag` for each token."""

    def has(self, flag: TokenFlag) -> "NDArray[np.bool_]":
        """Return `[n]` bool: True for the tokens that have the flag."""
        found: NDArray[np.bool_] = (self.flags & int(flag)) != 0
        return found

    @property
    def outcome(self) -> list[str]:
        """The outcome of each token: a name of `OUTCOMES`, `skipped` or `kept`."""
        other = SKIPPED if self.minibatch is None else KEPT
        return [
            next((name for name, flag in OUTCOMES.items() if flag & value), other)
            for value in self.flags.tolist()
        ]


_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio. Multiples of this number, modulo 2^64, are spread evenly."""


def keeps_tokens(group: int, share: float) -> bool:
    """Return True if the journal keeps the token values of the group with number `group`.

    Of any consecutive groups, about the share `share` is kept. The choice depends only on the
    number. A larger share keeps the same groups and more. Groups without a number (-1) are not
    kept.

    >>> [number for number in range(12) if keeps_tokens(number, 0.25)]
    [0, 2, 5, 10]
    """
    return group >= 0 and group * _MULTIPLIER % 2**64 < share * 2**64
