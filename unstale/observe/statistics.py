"""Confidence intervals of shares and means, tests of paired differences, and their power.

scipy is imported by the functions that need it, because that takes a fifth of a second.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

POWER = 0.8
"""Probability with which a planned comparison should find a true difference.

0.8 is the convention.
"""

ROUNDING = 1e-9
"""Relative difference up to which values count as equal. Rounding errors of shares are about 1e-16,
and the smallest true differences of shares about 1e-4.
"""


def wilson(share: float, number: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share of successes among `number` trials (Wilson
    1927).

    `share` may also be a mean of numbers between 0 and 1. Then the interval is too wide, if
    anything.

    >>> low, high = wilson(0.5, 256)
    >>> round(low, 4), round(high, 4)
    (0.4392, 0.5608)
    """
    z2 = 1.959964**2
    half = math.sqrt(z2 * (share * (1 - share) / number + z2 / (4 * number * number)))
    centre = share + z2 / (2 * number)
    scale = 1 + z2 / number
    low = (centre - half) / scale if share > 0 else 0.0  # which rounding would miss
    return low, (centre + half) / scale if share < 1 else 1.0


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The mean difference between the two values of n pairs, and the differences' standard
    deviation `sd`.

    `n` is at least 2, and `sd` above 0. Tests and intervals are two-sided, by Student's t.
    """

    n: int
    mean: float
    sd: float

    @property
    def p(self) -> float:
        """The p-value of the hypothesis that the true mean is 0."""
        from scipy.special import stdtr

        t = abs(self.mean) * math.sqrt(self.n) / self.sd
        return min(1.0, 2 * float(stdtr(self.n - 1, -t)))

    def interval(self, alpha: float) -> tuple[float, float]:
        """Return the ends of the confidence interval of the mean, for the level 1 - `alpha`."""
        half = self._critical(alpha, self.n) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def detectable(self, alpha: float) -> float:
        """Return the smallest true mean that a test with `n` pairs finds with probability `POWER`.

        `alpha` is the significance level. The true standard deviation is assumed to be `sd`.
        """
        from scipy.special import nctdtrinc

        shift = float(nctdtrinc(self.n - 1, 1 - POWER, self._critical(alpha, self.n)))
        return shift * self.sd / math.sqrt(self.n)

    def pairs_needed(self, true: float, alpha: float) -> int:
        """Return the number of pairs for which a test finds the true mean `true` with probability
        `POWER`.

        `alpha` is the significance level. The true standard deviation is assumed to be `sd`.
        """

        def finds(pairs: int) -> bool:
            return replace(self, n=pairs).detectable(alpha) <= true

        enough = next(2**power for power in count(1) if finds(2**power))
        return bisect_left(range(enough), True, lo=enough // 2, key=finds)

    @staticmethod
    def _critical(alpha: float, n: int) -> float:
        from scipy.special import stdtrit

        return -float(stdtrit(n - 1, alpha / 2))


def paired_difference(values: Sequence[float]) -> PairedDifference | None:
    """Return mean and standard deviation of `values`, each the difference of the two values of a
    pair.

    None if no two differences differ by more than rounding errors, because a test would take the
    standard deviation to be 0.

    >>> paired_difference([0.1, 0.3 - 0.2]), paired_difference([0.1])
    (None, None)
    """
    n = len(values)
    if n < 2 or max(values) - min(values) <= ROUNDING * max(map(abs, values)):
        return None
    mean = sum(values) / n
    return PairedDifference(n, mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (n - 1)))


def holm(p_values: Sequence[float], number: int) -> list[float]:
    """Return p-values adjusted for a family of `number` tests (Holm 1979).

    A test is significant at 5% if its adjusted p-value is below 0.05. The chance of any false
    result in the family is then at most 5%, even if the tests depend on each other. Planned tests
    without a p-value yet (`number` minus `len(p_values)`) count with p = 1.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03, 0.005], 4)]
    [0.03, 0.06, 0.06, 0.02]
    """
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (number - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
