"""Attention over a prefix tree by compiled kernels, on CPUs.

The keys of a query are divided into blocks by their positions in its sequence. So its value has
the same bits whatever it is packed with, and however its sequence is divided into segments.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstale.model.kernels import BLOCK, kernels
from unstale.model.prefix_tree import PrefixTree, Segment


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A prefix tree as the kernels read it. The tensors are int64."""

    segments: Tensor
    """`[segments, 4]`: start, end, depth and the index of the segment before, -1 at a root."""
    pieces: Tensor
    """`[blocks, 2]`: the segment and the first position of each block of queries."""
    roots: Tensor
    """`[roots + 1]`: the first block of each root, and the number of blocks."""


def tree_layout(run: PrefixTree) -> TreeLayout:
    """Return the layout of a prefix tree, which is made once for all layers."""
    if not run.layouts:
        run.layouts.append(_make_layout(run.segments))
    layout: TreeLayout = run.layouts[0]
    return layout


def _make_layout(segments: tuple[Segment, ...]) -> TreeLayout:
    index = {(segment.start, segment.end): i for i, segment in enumerate(segments)}
    rows = []
    pieces: list[tuple[int, int]] = []
    roots = []
    for i, segment in enumerate(segments):
        depth = segment.depth
        length = depth + segment.end - segment.start
        rows.append((segment.start, segment.end, depth, index[segment.path[-1]] if depth else -1))
        if not depth:
            roots.append(len(pieces))
        # Blocks end at multiples of BLOCK, counted in the sequence.
        starts = [depth, *range(depth // BLOCK * BLOCK + BLOCK, length, BLOCK)]
        pieces += [(i, start) for start in starts]
    return TreeLayout(
        torch.tensor(rows).view(-1, 4),
        torch.tensor(pieces).view(-1, 2),
        torch.tensor([*roots, len(pieces)]),
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention `[N, heads, width]` and the logarithm `[N, heads]` of the denominators.

    `query` is `[N, heads, width]`, `key` and `value` are `[N, key heads, width]`. The rows of
    `value` may be part of longer ones.
    """
    found = kernels()
    assert found
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:2])
    found.attend(
        query,
        key,
        value,
        value.stride(0),
        layout.segments,
        layout.pieces,
        len(layout.pieces),
        scale,
        out,
        lse,
        query.shape[1],
        key.shape[1],
        query.shape[2],
    )
    return out, lse


def attend_backward(  # noqa: PLR0913 - all that the forward pass had, and its results
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    layout: TreeLayout,
    scale: float,
    to_value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of query and key. Write that of the value to `to_value`.

    `to_value` has the strides of `value`.
    """
    found = kernels()
    assert found
    to_query = torch.empty_like(query)
    to_key = torch.zeros_like(key)
    to_value.zero_()
    found.attend_backward(
        query,
        key,
        value,
        value.stride(0),
        out,
        lse,
        grad,
        layout.segments,
        layout.pieces,
        layout.roots,
        len(layout.roots) - 1,
        scale,
        to_query,
        to_key,
        to_value,
        query.shape[1],
        key.shape[1],
        query.shape[2],
    )
    return to_query, to_key


class TreeAttention(torch.autograd.Function):
    """Attention `[N, heads, width]` over a prefix tree, with a gradient."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: tuple[TreeLayout, float]
    ) -> Tensor:
        query, key, value = (each.contiguous() for each in (query, key, value))
        out, lse = attend(query, key, value, *tree)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree = tree
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.tree
        to_value = torch.empty_like(value)
        to_query, to_key = attend_backward(
            query, key, value, out, lse, grad.contiguous(), layout, scale, to_value
        )
        return to_query, to_key, to_value, None
