"""Values of single trained tokens for the journal: ratios, weights and advantages of a step."""

from dataclasses import dataclass
from enum import IntFlag
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads journals without numpy
    import numpy as np
    from numpy.typing import NDArray

    Values = NDArray[np.float32]
    Flags = NDArray[np.uint8]

STORED = "stored"
"""The value of `TokenValues.route` for a replayed episode, whose `old_logp` was stored when it was
first trained on.
"""


class TokenFlag(IntFlag):
    """Flags that say how the values of a trained token were computed and used.

    Several may be set.
    """

    EXACT = 1
    """`old_logp` is exact. Without this flag it is an approximation."""
    VETOED = 2
    """The token veto (`correction.token_veto_threshold`) dropped the token's sequence."""
    MASKED = 4
    """The correction (`correction.mode`) dropped the token. The token veto did not."""
    DROPPED = 8
    """A technique dropped the token. The correction had kept it."""
    CLIPPED_LOW = 16
    """The ratio S = pi / pi_old was below the lower limit of the objective."""
    CLIPPED_HIGH = 32
    """The ratio S = pi / pi_old was above the upper limit of the objective."""
    CAPPED = 64
    """The limit on pi / mu (`objective.ratio_cap`) made the weight of the token smaller."""


OUTCOMES = {
    "vetoed": TokenFlag.VETOED,
    "masked": TokenFlag.MASKED,
    "dropped": TokenFlag.DROPPED,
    "clipped_low": TokenFlag.CLIPPED_LOW,
    "clipped_high": TokenFlag.CLIPPED_HIGH,
    "capped": TokenFlag.CAPPED,
}
"""Outcomes of a token in training, each with its flag. If a token has several flags, the first in
this order counts.
"""

SKIPPED, KEPT = "skipped", "kept"
"""Outcomes of a token without a flag of `OUTCOMES`. `skipped`: no optimizer step trained on its
episode. `kept`: a step trained on it.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """The values of an episode's n sampled tokens in one step, in the order of the episode.

    The arrays are `[n]`. Log-probabilities and entropies are in nats.
    """

    group: int
    episode: int
    route: str
    """The method that computed `old_logp`: a value of `old_logps.route`, or "stored" for a replayed
    episode.
    """
    minibatch: int | None
    """The number, within the batch, of the optimizer step that trained on the episode, from 0. None
    if no token of the episode could have a gradient, because all were dropped or all advantages are
    0.
    """
    log_d: "Values"
    """`old_logp - behavior_logp`. NaN if no `old_logp` was computed."""
    log_s: "Values"
    """`logp - old_logp`, with `logp` from the weights before the optimizer step. NaN if no step
    trained on the episode.
    """
    weight: "Values"
    """The factor of the correction on the token's loss, 0 for a dropped token. NaN if no `old_logp`
    was computed.
    """
    advantage: "Values"
    """The advantage in the loss, after all techniques."""
    entropy: "Values"
    """Entropy of the trainer's distribution at the token. NaN if it was not computed: without an
    entropy bonus it is computed only for some tokens of a batch.
    """
    flags: "Flags"
    """For each token, the sum of its flags (`TokenFlag`)."""

    def has(self, flag: TokenFlag) -> "NDArray[np.bool_]":
        """Return a mask `[n]` of the tokens that have the flag."""
        found: NDArray[np.bool_] = (self.flags & int(flag)) != 0
        return found

    @property
    def outcome(self) -> list[str]:
        """The outcome of each token in training: a name of `OUTCOMES`, "skipped" or "kept"."""
        other = SKIPPED if self.minibatch is None else KEPT
        return [
            next((name for name, flag in OUTCOMES.items() if flag & value), other)
            for value in self.flags.tolist()
        ]


_MULTIPLIER = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio. Multiples of this number, modulo 2^64, are spread evenly."""


def keeps_tokens(group: int, share: float) -> bool:
    """Return True if the journal keeps the token values of the group with the number `group`.

    About the share `share` of all groups is kept, spread evenly. The choice depends only on the
    number. A larger share keeps the same groups and more. The number -1 (unknown) gives False.

    >>> [number for number in range(12) if keeps_tokens(number, 0.25)]
    [0, 2, 5, 10]
    """
    return group >= 0 and group * _MULTIPLIER % 2**64 < share * 2**64
