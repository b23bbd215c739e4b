"""Sums and means over the sequences of a batch, for techniques that act on tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch


def sum_of(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of `values` `[T]` over each sequence's sampled tokens, `[n]` in float64."""
    total = values.new_zeros(batch.num_sequences).double()
    return total.index_add(0, batch.sequence[batch.sampled], values[batch.sampled].double())


def mean_of(values: Tensor, batch: Batch) -> Tensor:
    """Return the mean of `values` `[T]` over each sequence's sampled tokens, `[n]` in float64.

    The mean is 0 for a sequence without sampled tokens.
    """
    rows = batch.sequence[batch.sampled]
    return sum_of(values, batch) / rows.bincount(minlength=batch.num_sequences).clamp(min=1)
