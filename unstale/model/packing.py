"""Packing: sequences end to end without padding, each token that siblings share run once, attention apart.

A forward pass runs a forest of segments. A sequence is a path from a root to the end of a segment; siblings share the
segments that they begin with. Segments lie in the order of a walk that goes down first, so that all which follow one in
some sequence follow it immediately in the packing too: one span of queries attends to it.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from unstale.model.prefix_tree import Packed, build_prefix_tree

HEAD_ROWS = 4
"""Times its budget of tokens, a pass asks for at most so many log-probabilities: siblings may ask about one token."""


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Positions grouped so that each group's lengths sum to at most `budget`: first fit, longest first.

    A single item longer than the budget gets a group of its own.

    >>> pack([3, 8, 5, 2], budget=8)
    [[1], [2, 0], [3]]
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for g, free in enumerate(room):
            if lengths[i] <= free:
                groups[g].append(i)
                room[g] -= lengths[i]
                break
        else:
            groups.append([i])
            room.append(budget - lengths[i])
    return groups


def pack_shared(packed: Packed, budget: int, wanted: Sequence[int]) -> list[list[int]]:
    """`pack` for sequences that share, none of them empty: what a pass runs once counts once. Siblings stay together.

    A tree that is larger than the budget is cut between two of its sequences, and its trunk is run on both sides. So
    is one whose `wanted` tokens (of each sequence) are more than `HEAD_ROWS` times the budget.
    """
    rows = (
        build_prefix_tree(packed, share=True).place.split(packed.lengths)
        if len(packed.tokens)
        else ()
    )
    units: list[list[int]] = []
    sizes: list[tuple[int, int]] = []
    before = torch.empty(0, dtype=torch.long)
    for i in sorted(range(len(rows)), key=lambda i: int(rows[i][-1])):  # as the walk goes
        length = min(len(rows[i]), len(before))
        new = len(rows[i]) - int((rows[i][:length] == before[:length]).sum())
        grown = (sizes[-1][0] + new, sizes[-1][1] + wanted[i]) if sizes else (0, 0)
        if new < len(rows[i]) and grown[0] <= budget and grown[1] <= HEAD_ROWS * budget:
            units[-1].append(i)
            sizes[-1] = grown
        else:
            units.append([i])
            sizes.append((len(rows[i]), wanted[i]))
        before = rows[i]
    costs = [max(run, -(-asked // HEAD_ROWS)) for run, asked in sizes]
    return [[i for unit in group for i in units[unit]] for group in pack(costs, budget)]


def wanted_spans(spans: Sequence[tuple[int, int]], where: Tensor) -> list[tuple[int, int]]:
    """The spans that hold a wanted token, each cut after its last."""
    last = [
        int(wanted[-1]) if len(wanted := where[start:end].nonzero()) else -1 for start, end in spans
    ]
    return [(start, start + at + 1) for (start, _), at in zip(spans, last, strict=True) if at >= 0]


def cut(tokens: Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Packed, Tensor]:
    """These spans as sequences, and the index of their tokens."""
    index = torch.cat([torch.empty(0, dtype=torch.long), *(torch.arange(*span) for span in spans)])
    return Packed(
        tokens[index], tuple(accumulate((end - start for start, end in spans), initial=0))
    ), index
