"""Signals of shapers, and batches with given log-ratios, for tests of techniques."""

from typing import Any

import torch
from torch import Tensor

from unstale.records import Batch
from unstale.techniques.hooks import Signals


def made(batch: Batch, **values: Any) -> Signals:
    """Return signals of a batch. Tensors that are not given are empty."""
    empty = batch.behavior_logp.new_empty(0)

    def no_gradients(*args: object, **options: object) -> Tensor:
        raise AssertionError("no gradient was expected")

    signals: dict[str, Any] = {
        "old_logp": empty,
        "logp": empty,
        "reference_logp": empty,
        "entropy": empty,
        "gradient_norms": no_gradients,
        "progress": 0.0,
    }
    return Signals(**{**signals, **values})


def at_sampled(batch: Batch, values: Tensor) -> Tensor:
    """Return `values`, one per sampled token, as a float64 tensor `[T]` with 0 elsewhere."""
    whole = torch.zeros(len(batch.tokens), dtype=torch.float64)
    whole[batch.sampled] = values.double().flatten()
    return whole


def packed(sequences: int, length: int, *, group_size: int = 1) -> Batch:
    """Return sequences of one context token and `length` sampled tokens, without advantages."""
    size = length + 1
    row = torch.arange(size) > 0
    sampled = row.repeat(sequences)
    number = sampled.long() - 1
    zeros = torch.zeros(sequences * size, dtype=torch.float64)
    return Batch(
        tokens=torch.full((sequences * size,), 5),
        offsets=tuple(range(0, sequences * size + 1, size)),
        sampled=sampled,
        behavior_logp=zeros,
        version=number,
        turn=number,
        provenance=sampled.long(),
        clean=torch.ones_like(sampled),
        advantage=zeros,
        episodes=tuple(range(sequences)),
        group=tuple(i // group_size for i in range(sequences)),
    )
