"""An estimate of gradient noise, from the gradients of two halves of a step's groups."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unstale.records import Batch, group_of


class GradientNoiseScale:
    """An estimator of the gradient's noise from the gradients of two halves of a step's groups.

    The gradient of a step is a sum over groups, which are independent of each other. Episodes of
    one group are not, because their rewards are compared with each other.
    """

    def __init__(self) -> None:
        self._sizes = (0, 0)
        self._first: dict[str, Tensor] = {}

    def split(self, batch: Batch, members: Sequence[int]) -> list[list[int]]:
        """Divide sequences into two halves: those of every second group, and the rest.

        `members` are the indices of the sequences in the batch. A half may be empty. Raises
        ValueError if the batch does not say which group a sequence belongs to.
        """
        group = group_of(batch).tolist()
        numbers = {number: i for i, number in enumerate(dict.fromkeys(group[i] for i in members))}
        self._sizes = (len(numbers) - len(numbers) // 2, len(numbers) // 2)
        self._first = {}
        return [[i for i in members if numbers[group[i]] % 2 == half] for half in (0, 1)]

    def keep_first(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the gradients of the weights, after the backward passes of the first half."""
        self._first = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}

    def noise(self, weights: Mapping[str, Tensor]) -> float:
        """Return an estimate of the variance of the whole gradient, summed over all weights.

        The estimate is m k |a / m - b / k|^2, where a and b are the gradients of halves with m and
        k groups. It is unbiased if the groups are drawn independently. The result is NaN with fewer
        than two groups. The copy of the first half's gradient is freed.
        """
        (m, k), first = self._sizes, self._first
        self._sizes, self._first = (0, 0), {}
        if not k:
            return math.nan
        total = 0.0
        for name, weight in weights.items():
            assert weight.grad is not None
            a = first.get(name, torch.zeros_like(weight.grad)).double()
            difference = a / m - (weight.grad.double() - a) / k
            total += float(difference.square().sum())
        return m * k * total
