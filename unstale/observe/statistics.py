"""Confidence intervals of shares and means."""

import math

from scipy.special import stdtrit


def wilson(share: float, number: int) -> tuple[float, float]:
    """Return the 95% interval of a share of `number` trials (Wilson 1927).

    If the share is a mean of numbers between 0 and 1, the true interval is at most as wide.

    >>> low, high = wilson(0.5, 256)
    >>> round(low, 4), round(high, 4)
    (0.4392, 0.5608)
    """
    z2 = 1.959964**2
    half = math.sqrt(z2 * (share * (1 - share) / number + z2 / (4 * number * number)))
    centre = share + z2 / (2 * number)
    scale = 1 + z2 / number
    return (centre - half) / scale, (centre + half) / scale


def student_t975(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t distribution with `freedom` degrees of freedom.

    >>> round(student_t975(4), 4)
    2.7764
    """
    return float(stdtrit(freedom, 0.975))
