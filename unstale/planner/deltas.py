"""The size of the delta between two versions, and the time to encode and apply it.

Measured with 20,193,600 bfloat16 weights under AdamW on one core: see
benchmarks/results/2026-11-21-routes.md.
"""

import math
from bisect import bisect
from typing import NamedTuple

from unstale.planner.models import WORD

_MEASURED_WORDS = 20_193_600


class DeltaMeasurement(NamedTuple):
    """The measurement at one learning rate: the middle of its range."""

    rate: float
    changed: float
    """Share of the words that one optimizer step changes."""
    encode_s: float
    walk_s: float
    """Seconds to apply the delta."""


TABLE = (
    DeltaMeasurement(1e-6, 0.012, 0.05, 0.01),
    DeltaMeasurement(3e-6, 0.033, 0.06, 0.01),
    DeltaMeasurement(1e-5, 0.104, 0.09, 0.02),
    DeltaMeasurement(1e-4, 0.502, 0.26, 0.07),
)


def delta_bytes(words: float, rate: float) -> float:
    """Return the bytes of the delta between two consecutive versions at a learning rate.

    The positions of changed words take the entropy of their gaps, as in the compressed codec. Their
    values (XORs of mostly close numbers) take 3.3 bits, and more for larger steps. This is fitted
    to the table within 3%. Five versions need this many model copies in addition:

    >>> [round(4 * delta_bytes(1, row.rate) / 2, 3) for row in TABLE]
    [0.033, 0.08, 0.212, 0.79]
    """
    share = changed_share(rate)
    if share == 1:
        return WORD * words
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    return min(WORD * words, words * (entropy + share * (3.3 + 2 * share)) / 8)


def changed_share(rate: float) -> float:
    """Return the share of bfloat16 words that a step at this learning rate changes.

    Below the table it is proportional to the rate.

    >>> [round(changed_share(rate), 4) for rate in (1e-7, 1e-6, 2e-6, 1.0)]
    [0.0012, 0.012, 0.0227, 1.0]
    """
    if rate <= TABLE[0].rate:
        return TABLE[0].changed * rate / TABLE[0].rate
    return min(1.0, _interpolate(rate, "changed"))


def encode_s(words: float, rate: float) -> float:
    """Return the seconds that one core takes to encode a delta."""
    return words / _MEASURED_WORDS * _interpolate(max(rate, TABLE[0].rate), "encode_s")


def walk_s(words: float, rate: float) -> float:
    """Return the seconds that one core takes to apply a delta."""
    return words / _MEASURED_WORDS * _interpolate(max(rate, TABLE[0].rate), "walk_s")


def _interpolate(rate: float, column: str) -> float:
    """Interpolate linearly on logarithmic scales. The last line is extended."""
    place = min(max(bisect([row.rate for row in TABLE], rate), 1), len(TABLE) - 1)
    low, high = TABLE[place - 1 : place + 1]
    part = math.log(rate / low.rate) / math.log(high.rate / low.rate)
    return float(getattr(low, column) ** (1 - part) * getattr(high, column) ** part)
