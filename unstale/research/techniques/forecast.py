"""Forecasts of success rates from the texts of tasks and the results of similar ones."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from math import log
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DIMENSIONS = 512
"""Length of the vector of word features of a text."""
TEMPERATURES = (0.01, 10.0)
"""Limits of the temperature T of the calibration sigmoid(logit(rate) / T + b) of forecasts, as in
DOTS.
"""
MAX_SHIFT = 1.0
"""Limit of the absolute shift b of the calibration sigmoid(logit(rate) / T + b) of forecasts, as in
DOTS.
"""


def embed(texts: Sequence[str], *, dimensions: int = DIMENSIONS) -> Array:
    """Return a vector of word features for each text, `[n, dimensions]`, normalised to length 1.

    A word has the weight log(1 + n / number of texts that have it). Its index in the vector is a
    hash, so two words may share an index. A text without words has the vector 0.
    """
    words = [Counter(re.findall(r"\w+|[^\w\s]", text.lower())) for text in texts]
    shared = Counter(word for each in words for word in each)
    vectors = np.zeros((len(texts), dimensions))
    for row, counts in enumerate(words):
        for word, count in counts.items():
            place = crc32(word.encode()) % dimensions
            vectors[row, place] += count * log(1 + len(texts) / shared[word])
    return normalised(vectors)


def normalised(vectors: Array) -> Array:
    """Return vectors `[n, d]` with length 1. The vector 0 stays as it is."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1.0))


def weighted_rates(weights: Array, solved: Array, sizes: Array, *, prior: float) -> Array:
    """Return forecast success rates of n tasks, `[n]`: weighted means over h groups with known
    results.

    `weights[i, j]` is the weight of each episode of group j in the forecast for task i. `solved`
    `[h]` is the number of successes of each group, and `sizes` `[h]` the number of its episodes.
    `prior` more episodes with the mean success of all groups are added. A task whose weights are
    all 0 gets that mean. With equal sizes, weights exp(cosine / width) and no prior, this is
    attention.
    """
    mean = solved.sum() / sizes.sum()
    total = weights @ sizes + prior
    rates = (weights @ solved + prior * mean) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, rates, mean)


def fit_calibration(rates: Array, solved: Array, sizes: Array) -> tuple[float, float]:
    """Fit a calibration of forecast rates to results (Platt scaling). Return temperature T and
    shift b.

    The calibrated rate is sigmoid(logit(rate) / T + b). For each rate, `solved` of `sizes` episodes
    succeeded. A penalty as strong as one episode keeps T near 1 and b near 0 while there are few
    results. Both are limited as in DOTS.
    """
    x = logit(rates)
    slope, shift = 1.0, 0.0
    design = np.stack([x, np.ones_like(x)], axis=1)
    for _ in range(25):
        p = sigmoid(slope * x + shift)
        gradient = design.T @ (solved - sizes * p) - np.array([slope - 1, shift])
        curvature = (design * (sizes * p * (1 - p))[:, None]).T @ design + np.eye(2)
        change = np.linalg.solve(curvature, gradient)
        slope, shift = slope + change[0], shift + change[1]
        if np.abs(change).max() < 1e-9:
            break
    low, high = TEMPERATURES
    temperature = min(max(1 / slope, low), high) if slope > 0 else high
    return float(temperature), float(min(max(shift, -MAX_SHIFT), MAX_SHIFT))


def calibrated(rates: Array, temperature: float, shift: float) -> Array:
    """Return sigmoid(logit(rate) / temperature + shift)."""
    return sigmoid(logit(rates) / temperature + shift)


def logit(rates: Array) -> Array:
    """Return log(p / (1 - p)) of rates p, which are first limited to 0.001 to 0.999."""
    p = np.clip(rates, 1e-3, 1 - 1e-3)
    return np.asarray(np.log(p) - np.log1p(-p))


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))
