"""Least-squares fits of durations to the steps of a run, with confidence intervals.

A fit predicts the duration of some amount of work. The 95% confidence interval of the prediction
shows whether the steps determine it. It is the interval of ordinary least squares, although
coefficients are not allowed to be negative.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.stats import t as student_t

Values = NDArray[np.float64]
_RANK = 1e-9
"""Singular values of the scaled matrix of work count as 0 below this share of the largest."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The coefficients of a duration that is a sum of terms, such as seconds per batch and per
    token.
    """

    seconds: Mapping[str, float]
    """Name of a term -> its coefficient, in seconds per unit of work, at least 0."""
    covariance: Values
    """`[k, k]` covariance of the k coefficients, by the formula for least squares that does not
    force coefficients to be at least 0. Very large where the steps do not determine a coefficient.
    """
    freedom: int
    """Degrees of freedom: number of steps minus number of coefficients."""

    def predict(self, work: Mapping[str, float]) -> float:
        """Return the seconds that `work` takes. `work` maps each term to its amount."""
        return sum(each * work[name] for name, each in self.seconds.items())

    def half_width(self, work: Mapping[str, float], given: Collection[str] = ()) -> float:
        """Return the half-width, in seconds, of the 95% confidence interval of `predict(work)`.

        The coefficients of the terms in `given` count as known. The result is infinite if there are
        no more steps than coefficients.
        """
        amounts = np.array([0.0 if name in given else work[name] for name in self.seconds])
        if not amounts.any():
            return 0.0
        if self.freedom < 1:
            return float("inf")
        variance = max(0.0, float(amounts @ self.covariance @ amounts))
        return float(student_t.ppf(0.975, self.freedom)) * variance**0.5


def fit(seconds: Sequence[float], work: Sequence[Mapping[str, float]]) -> Fit:
    """Return the coefficients, none negative, that fit `seconds` by least squares.

    `seconds` has the duration of each step. `work` has the amount of each term in that step, by
    name. The coefficients are scaled, so that the durations predicted for all steps have the
    measured sum.

    >>> fit([3.0, 5.0, 7.0], [{"batch": 1, "token": tokens} for tokens in (1, 2, 3)]).seconds
    {'batch': 1.0, 'token': 2.0}
    """
    names = list(work[0])
    values = np.array(seconds)
    matrix = np.array([[float(each[name]) for name in names] for each in work])
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    scaled = matrix / norms
    coefficients = nnls(scaled, values)[0]
    total = float((scaled @ coefficients).sum())
    if total > 0:
        coefficients = coefficients * (values.sum() / total)
    freedom = len(values) - len(names)
    residuals = values - scaled @ np.linalg.lstsq(scaled, values, rcond=_RANK)[0]
    variance = float(residuals @ residuals) / max(1, freedom)
    _, sizes, right = np.linalg.svd(scaled, full_matrices=False)
    seen = sizes > _RANK * sizes.max(initial=0.0)
    # a direction in which the steps do not differ has no upper limit: a large number stands for it
    spread = np.where(seen, variance / np.where(seen, sizes, 1.0) ** 2, _UNKNOWN)
    covariance = (right.T * spread) @ right
    return Fit(
        seconds=dict(zip(names, (coefficients / norms).round(12).tolist(), strict=True)),
        covariance=covariance / np.outer(norms, norms),
        freedom=freedom,
    )


_UNKNOWN = 1e12
"""Variance, in seconds squared, of a coefficient that the steps do not determine. It is so large
that predictions get a wide interval.
"""
