"""Attention over a prefix tree: by compiled kernels on CPUs, by torch's flash attention on GPUs.

On CPUs the keys of a query are divided into blocks by their positions in the query's sequence. So
the bits of the result do not depend on how sequences are packed, or divided into segments.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor

from unstale.model.context import ContextGroup
from unstale.model.kernels import BLOCK, kernels
from unstale.model.prefix_tree import PrefixTree, Segment
from unstale.records import token_positions

WIDEST = 192
"""Largest head size for which torch's flash attention can compute a gradient on every GPU."""

WIDEST_OF = {(8, 0): 256, (9, 0): 256}
"""Largest head size on GPUs that support more than `WIDEST`, by compute capability."""

HOPPER = (9, 0)
"""The compute capability for which FlashAttention 3 has kernels with a gradient."""

MOST_KEYS = 8
"""Largest number of keys in a `FlashLayout`, as a multiple of the pass's tokens. Each layer copies
the keys, which takes memory.
"""


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """A prefix tree in the form that the attention kernels for CPUs read. All tensors are int64."""

    segments: Tensor
    """`[segments, 4]`: start, end, depth, and the index of the parent segment (-1 for a root)."""
    pieces: Tensor
    """`[blocks, 2]`: for each block of queries, its segment and the position of its first query."""
    roots: Tensor
    """`[roots + 1]`: the index of each root segment's first block. The last element is the number
    of blocks.
    """

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output `[N, heads, width]`, and a tensor for `attend_backward`.

        `query` is `[N, heads, width]`. `key` and `value` are `[N, key heads, width]`. The rows of
        `value` may be slices of longer rows. The second result `[N, heads]` has the logarithms of
        the softmax's denominators.
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
            self.segments,
            self.pieces,
            len(self.pieces),
            scale,
            out,
            lse,
            query.shape[1],
            key.shape[1],
            query.shape[2],
        )
        return out, lse

    def attend_backward(  # noqa: PLR0913 - all that the forward pass had, and its results
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        scale: float,
        to_value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of query and key. Write the gradient of the value to `to_value`.

        `results` are the two results of `attend`, and the gradient of its first result. `to_value`
        must have the strides of `value`.
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
            *results,
            self.segments,
            self.pieces,
            self.roots,
            len(self.roots) - 1,
            scale,
            to_query,
            to_key,
            to_value,
            query.shape[1],
            key.shape[1],
            query.shape[2],
        )
        return to_query, to_key


@dataclass(frozen=True, slots=True)
class FlashLayout:
    """A prefix tree in the form that torch's flash attention reads, on GPUs.

    Each segment is one sequence for flash attention. Its queries are the segment's own tokens. Its
    keys are these tokens and those of all segments before it. The last query attends to all keys.
    """

    keys: Tensor | None
    """`[K]` int64: the index of the token of each key, segment after segment. None if no prefix is
    shared.
    """
    query_starts: Tensor
    """`[segments + 1]` int32: the index of each segment's first query. The last element is the
    number of queries.
    """
    key_starts: Tensor
    """`[segments + 1]` int32: the index of each segment's first key. The last element is the number
    of keys.
    """
    longest: tuple[int, int]
    """The largest number of queries of a segment, and the largest number of keys."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the results of `TreeLayout.attend`."""
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query,
            self._gathered(key),
            self._gathered(value),
            self.query_starts,
            self.key_starts,
            *self.longest,
            0.0,
            True,
            False,
            scale=scale,
        )
        return out, lse

    def attend_backward(  # noqa: PLR0913 - all that the forward pass had, and its results
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        scale: float,
        to_value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return and write the gradients that `TreeLayout.attend_backward` does."""
        out, lse, grad = results
        no_dropout = torch.empty(2, dtype=torch.uint64, device=query.device)
        to_query, to_key, to_values = torch.ops.aten._flash_attention_backward(
            grad,
            query,
            self._gathered(key),
            self._gathered(value),
            out,
            lse,
            self.query_starts,
            self.key_starts,
            *self.longest,
            0.0,
            True,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        to_value.copy_(self._summed(to_values, len(value)))
        return to_query, self._summed(to_key, len(key))

    def _gathered(self, rows: Tensor) -> Tensor:
        """Return the rows `[K, ...]` of all K keys, given those of the N tokens."""
        return rows if self.keys is None else rows[self.keys]

    def _summed(self, rows: Tensor, count: int) -> Tensor:
        """Return for each of `count` tokens the sum of the rows of its keys, `[count, ...]`."""
        if self.keys is None:
            return rows
        sums = rows.new_zeros(count, *rows.shape[1:], dtype=torch.float32)
        return sums.index_add_(0, self.keys, rows.float()).to(rows.dtype)


@dataclass(frozen=True, slots=True)
class DividedLayout:
    """A prefix tree whose tokens are divided among ranks (a context group).

    Each rank provides its tokens, and computes attention of all tokens for its share of the heads.
    """

    layout: TreeLayout | FlashLayout
    group: ContextGroup

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens of the attention output, and a tensor for `attend_backward`.

        The second result has the softmax's denominators of this rank's heads.
        """
        queries, keys, values = map(self.group.to_heads, (query, key, value))
        out, lse = self.layout.attend(queries, keys, values, scale)
        return self.group.to_tokens(out, query.shape[1]), lse

    def attend_backward(  # noqa: PLR0913 - all that the forward pass had, and its results
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
        scale: float,
        to_value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return and write the gradients that `TreeLayout.attend_backward` does.

        The ranks exchange the inputs again, because keeping them since the forward pass would need
        memory.
        """
        group, (out, lse, grad) = self.group, results
        queries, keys, values = map(group.to_heads, (query, key, value))
        of_heads = group.to_heads(out), lse, group.to_heads(grad)
        to_values = torch.empty_like(values)
        to_query, to_key = self.layout.attend_backward(
            queries, keys, values, of_heads, scale, to_values
        )
        to_value.copy_(group.to_tokens(to_values, key.shape[1]))
        return group.to_tokens(to_query, query.shape[1]), group.to_tokens(to_key, key.shape[1])


Layout = TreeLayout | FlashLayout | DividedLayout


def can_attend(run: PrefixTree, x: Tensor, width: int) -> bool:
    """Return True if this module supports the prefix tree `run` with heads of size `width`.

    `x` has the device and dtype of queries, keys and values. `kernels.fits(x)` must be True.
    """
    if not x.is_cuda:
        return True
    if torch.version.hip is not None or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    capability = torch.cuda.get_device_capability(x.device)
    widest = WIDEST_OF.get(capability, WIDEST)
    num_keys = sum(segment.depth + segment.end - segment.start for segment in run.segments)
    has_kernel = capability >= (8, 0) and width % 8 == 0 and width <= widest
    if has_kernel and capability == HOPPER:
        uses_flash_attention_3()
    return has_kernel and num_keys <= MOST_KEYS * len(run.tokens)


@cache
def uses_flash_attention_3() -> bool:
    """Make torch's flash attention use FlashAttention 3 in this process, if it is installed.

    Return True if torch uses its kernels from then on. Otherwise return False, with a warning if
    FlashAttention 3 is installed but torch cannot use it.
    """
    if not find_spec("flash_attn_interface"):
        return False
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError) as error:
        warnings.warn(
            f"FlashAttention 3 is installed, but torch {torch.__version__} cannot use it "
            f"({error}): attention runs torch's own kernels",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def layout_of(run: PrefixTree, device: torch.device) -> TreeLayout | FlashLayout:
    """Return a prefix tree in the form that attention kernels on `device` read.

    It is created once for each tree and used by all layers.
    """
    key = str(device)
    if key not in run.layouts:
        is_gpu = device.type == "cuda"
        made = flash_layout(run.segments, device) if is_gpu else _tree_layout(run.segments)
        run.layouts[key] = made
    layout: TreeLayout | FlashLayout = run.layouts[key]
    return layout


def flash_layout(segments: tuple[Segment, ...], device: torch.device) -> FlashLayout:
    """Return a prefix tree's segments in the form that torch's flash attention reads."""
    queries = [segment.end - segment.start for segment in segments]
    keys = [segment.depth + own for segment, own in zip(segments, queries, strict=True)]
    index = None
    if any(segment.depth for segment in segments):
        spans = [(*segment.path, (segment.start, segment.end)) for segment in segments]
        index = token_positions(span for path in spans for span in path).to(device)
    query_starts, key_starts = (
        torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=device)
        for lengths in (queries, keys)
    )
    return FlashLayout(index, query_starts, key_starts, (max(queries), max(keys)))


def _tree_layout(segments: tuple[Segment, ...]) -> TreeLayout:
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


class TreeAttention(torch.autograd.Function):
    """The autograd operation of attention over a prefix tree. The result is `[N, heads, width]`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: tuple[Layout, float]
    ) -> Tensor:
        query, key, value = (each.contiguous() for each in (query, key, value))
        layout, scale = tree
        out, lse = layout.attend(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree = tree
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        layout, scale = ctx.tree
        to_value = torch.empty_like(value)
        results = (out, lse, grad.contiguous())
        to_query, to_key = layout.attend_backward(query, key, value, results, scale, to_value)
        return to_query, to_key, to_value, None
