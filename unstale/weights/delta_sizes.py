"""Estimates of the size of a delta between two versions, and of the time to compute it.

A delta is the difference of the weights: the positions that an optimizer step changed, and the XOR
of their old and new bits. The estimates rest on measurements with 20,193,600 bfloat16 weights under
AdamW, rounded to nearest, on one core: see benchmarks/results/routes-planner.md.
"""

import math
from bisect import bisect
from typing import NamedTuple

WORD = 2
"""Size in bytes of a weight, an activation, a key or a value in bfloat16."""

_MEASURED_WORDS = 20_193_600


class DeltaMeasurement(NamedTuple):
    """Measurements of deltas at one learning rate.

    Each value is the middle of the measured range.
    """

    rate: float
    changed: float
    """Share of the bfloat16 weights that one optimizer step changes, 0 to 1."""
    encode_s: float
    apply_s: float


TABLE = (
    DeltaMeasurement(1e-6, 0.012, 0.05, 0.01),
    DeltaMeasurement(3e-6, 0.033, 0.06, 0.01),
    DeltaMeasurement(1e-5, 0.104, 0.09, 0.02),
    DeltaMeasurement(1e-4, 0.502, 0.26, 0.07),
)


STOCHASTIC_RATE = 3.4e-5
"""Learning rate at which a delta takes 0.21 bytes for each weight, with rounding to nearest. With
stochastic rounding, deltas have this size at all lower learning rates (docs/rounding.md): each
version is rounded with other random numbers, so even after a tiny update a third of the weights
differ.
"""


def delta_rate(rate: float, rounding: str) -> float:
    """Return the learning rate to pass to `delta_bytes` and the other estimates of this module.

    `rate` is the trainer's learning rate. With stochastic rounding (`trainer.rounding`) the result
    is at least `STOCHASTIC_RATE`, because deltas are not smaller then.
    """
    return max(rate, STOCHASTIC_RATE) if rounding == "stochastic" else rate


def delta_bytes(words: float, rate: float) -> float:
    """Return the size in bytes of the delta between two consecutive versions of `words` weights.

    `rate` is a result of `delta_rate`. The formula adds the entropy of the distances between
    changed weights, and 3.3 bits or more for each XOR. It is within 3% of the measured sizes. The
    example shows the size of four deltas (for five versions) as a share of a copy of the model, for
    each learning rate of the table:

    >>> [round(4 * delta_bytes(1, row.rate) / 2, 3) for row in TABLE]
    [0.033, 0.08, 0.212, 0.79]
    """
    share = changed_share(rate)
    if share == 1:
        return WORD * words
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return min(WORD * words, words * (entropy + share * (3.3 + 2 * share)) / 8)


def changed_share(rate: float) -> float:
    """Return the share of bfloat16 weights that a step at learning rate `rate` changes.

    Below the lowest measured rate, the share is taken as proportional to the rate.

    >>> [round(changed_share(rate), 4) for rate in (1e-7, 1e-6, 2e-6, 1.0)]
    [0.0012, 0.012, 0.0227, 1.0]
    """
    if rate <= TABLE[0].rate:
        return TABLE[0].changed * rate / TABLE[0].rate
    return min(1.0, _interpolate(rate, "changed"))


def encode_s(words: float, rate: float) -> float:
    """Return the seconds in which one core computes the delta of `words` weights.

    `rate` is a result of `delta_rate`.
    """
    return words / _MEASURED_WORDS * _interpolate(max(rate, TABLE[0].rate), "encode_s")


def apply_s(words: float, rate: float) -> float:
    """Return the seconds in which one core applies the delta of `words` weights.

    `rate` is a result of `delta_rate`.
    """
    return words / _MEASURED_WORDS * _interpolate(max(rate, TABLE[0].rate), "apply_s")


def _interpolate(rate: float, column: str) -> float:
    """Return the value of a column of `TABLE` at a learning rate, interpolated on log-log scales.

    Above the highest measured rate, the line through the last two rows is extended.
    """
    place = min(max(bisect([row.rate for row in TABLE], rate), 1), len(TABLE) - 1)
    low, high = TABLE[place - 1 : place + 1]
    part = math.log(rate / low.rate) / math.log(high.rate / low.rate)
    return float(getattr(low, column) ** (1 - part) * getattr(high, column) ** part)
