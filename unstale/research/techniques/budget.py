"""The best group sizes with a given mean, for techniques that allocate episodes.

A group has a utility for each size that it may have. At a given price of an episode, a group gets
the size with the largest utility minus price times size. No other sizes with the same total or a
smaller one have a larger total utility (Everett, Operations Research 11, 1963). This holds for
every utility, even where one more episode is worth more than the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from math import ceil, sqrt

ROUNDING = 1e-9
"""A constant subtracted before rounding up, so that a float's rounding error does not add an
episode.
"""


@dataclass(frozen=True, slots=True)
class Segment:
    """Further episodes of a group: `width` of them, each of which adds the utility `slope`."""

    slope: float
    width: int


def segments(utility: Sequence[float]) -> list[Segment]:
    """Return the upper concave hull of a utility, up to its maximum, in segments of constant slope.

    `utility[k]` is the utility with k more episodes than the smallest size.

    >>> segments([0.0, 1.0, 4.0, 5.0, 5.0])
    [Segment(slope=2.0, width=2), Segment(slope=1.0, width=1)]
    """
    hull: list[Segment] = []
    for before, after in pairwise(utility):
        rise, width = after - before, 1
        while hull and rise / width >= hull[-1].slope:
            last = hull.pop()
            rise += last.slope * last.width
            width += last.width
        hull.append(Segment(rise / width, width))
    return [each for each in hull if each.slope > 0]


def num_further(hull: Sequence[Segment], price: float) -> int:
    """Return the number of further episodes of a group that each add more utility than `price`."""
    return sum(each.width for each in hull if each.slope > price)


def find_price(hulls: Sequence[Sequence[Segment]], budget: float) -> float:
    """Return the lowest price at which all groups together get at most `budget` further episodes.

    `hulls` has the utility of each group, as `segments` returns it. The price is 0 if all further
    episodes fit into the budget.
    """
    left = budget
    for each in sorted((one for hull in hulls for one in hull), key=lambda one: -one.slope):
        left -= each.width
        if left < 0:
            return each.slope
    return 0.0


def dars_further(size: int, p: float, *, by_hardness: bool = False, std: bool = False) -> int:
    """Return the number of episodes that DARS adds to `size` episodes with success rate p.

    The sum of |A| over n episodes is n S, where S = 2 p (1 - p), or 2 sqrt(p (1 - p)) if `std`
    divides the advantage. Episodes are added until the sum reaches that of `size` episodes with p =
    1/2, or with `by_hardness` this times 2 (1 - p). No episodes are added for p >= 1/2.
    """
    if p >= 0.5:
        return 0
    p = p or 0.5 / size
    mass = 2 * (sqrt(p * (1 - p)) if std else p * (1 - p))
    aim = size * (1.0 if std else 0.5) * (2 * (1 - p) if by_hardness else 1.0)
    return max(0, ceil((aim - size * mass) / mass - ROUNDING))


def v0_utility(size: int, p: float) -> float:
    """Return the utility of `size` episodes of a task with success rate p, as the paper V0 defines
    it.
    """
    return size * (1 - p) * (1 - (1 - p) ** (size - 1))


def mean_utility(size: int, p: float) -> float:
    """Return the negative variance of the mean of `size` rewards of 0 or 1 with the mean `p`.

    As a utility, it makes a group's size proportional to the standard deviation of its rewards.
    """
    return -p * (1 - p) / size


def half_width(size: int, deviation: float, level: float) -> float:
    """Return half the width of Student's confidence interval of the mean of `size` rewards.

    `deviation` is the standard deviation of the rewards, and `level` the confidence, below 1.
    """
    return _quantile(size - 1, level) * deviation / sqrt(size)


@lru_cache(maxsize=4096)
def interval_segments(size: int, further: int, deviation: float, *, level: float) -> list[Segment]:
    """Return XRPO's utility of up to `further` episodes beyond `size`, as concave segments.

    The utility of the n-th episode is the amount by which it narrows the confidence interval.
    """
    utility = [0.0]
    for n in range(size, size + further):
        narrower = half_width(n, deviation, level) - half_width(n + 1, deviation, level)
        utility.append(utility[-1] + narrower)
    return segments(utility)


@cache
def _quantile(degrees: int, level: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1 + level) / 2))


def mixed_error(size: int, mean: float, forecast: float) -> float:
    """Return the estimated squared error of V0.5's baseline, which mixes a mean and a forecast.

    `mean` is over `size` rewards. All rewards and the forecast are between -1 and 1. The baseline
    is w mean + (1 - w) forecast, w = D / (D + 1 / size), D = max(0, (mean - forecast)^2 - 1 /
    size).
    """
    noise = 1 / size
    distance = max(0.0, (mean - forecast) ** 2 - noise)
    return distance * noise / (distance + noise)
