"""The choice of tokens whose hidden states techniques read, and statistics of entropies."""

import torch
from torch import Tensor

from unstale.records import Batch


def last_tokens(batch: Batch, count: int) -> Tensor:
    """Return a mask `[T, 2]` bool of the last `count` tokens of each prompt and of each reply.

    Column 0 marks tokens of prompts, column 1 tokens of replies. A prompt is the text before the
    first reply of a sequence.
    """
    size = len(batch.tokens)
    owner = torch.stack([batch.sequence, batch.turn], 1)
    starts = torch.ones(size, dtype=torch.bool)
    starts[1:] = (owner[1:] != owner[:-1]).any(1)
    run = starts.cumsum(0) - 1
    ends = torch.zeros(int(starts.sum()), dtype=torch.long).index_add(0, run, torch.ones_like(run))
    to_end = ends.cumsum(0)[run] - torch.arange(size)
    first = torch.tensor([start for start, end in batch.spans() if end > start])
    opening = torch.zeros(len(ends), dtype=torch.bool).index_fill(0, run[first], True)[run]
    last = to_end <= count
    return torch.stack([last & opening & ~batch.sampled, last & batch.sampled], 1)


def statistics(entropy: Tensor, batch: Batch) -> Tensor:
    """Return mean, deviation and maximum of the entropies of each of n sequences, `[n, 3]`.

    `entropy` is `[T]`, and only sampled tokens count. A sequence without sampled tokens has NaN.
    """
    rows = []
    for start, end in batch.spans():
        values = entropy[start:end][batch.sampled[start:end]]
        if len(values):
            spread = values.std(correction=0)
            rows.append(torch.stack([values.mean(), spread, values.max()]))
        else:
            rows.append(entropy.new_full((3,), torch.nan))
    return torch.stack(rows)
