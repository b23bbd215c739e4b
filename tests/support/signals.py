"""Signals of shapers, and batches with given log-ratios, for tests of techniques."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unstale.records import Batch, collate
from unstale.techniques import Signals
from unstale.testing import episode


def made(batch: Batch, **values: Any) -> Signals:
    """Return signals of a batch. What is not given is empty."""
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


def one_token_each(groups: Sequence[int], advantage: Tensor) -> Batch:
    """Return sequences of two context tokens and one sampled token, in groups of these sizes."""
    count = sum(groups)
    batch = collate([episode(i, [2, (1, 0)]) for i in range(count)])
    number = [k for k, size in enumerate(groups) for _ in range(size)]
    return replace(batch, group=tuple(number), advantage=at_sampled(batch, advantage))


def at_sampled(batch: Batch, values: Tensor) -> Tensor:
    """Return `values`, one per sampled token, as a float64 tensor `[T]` with 0 elsewhere."""
    whole = torch.zeros(len(batch.tokens), dtype=torch.float64)
    whole[batch.sampled] = values.double().flatten()
    return whole
