"""Attention for prefix trees: each token attends to the tokens before it in its own sequences.

transformers calls it for models with the attention implementation `ATTENTION`.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from unstale.model.prefix_tree import PrefixTree, Segment

ATTENTION = "unstale_packed"
"""Name of the attention function that a packed model uses."""

BLOCK = 128
"""Queries of one causal block on a CPU. Half of a block's products are masked and wasted."""

running: ContextVar[PrefixTree | None] = ContextVar("the tree of the current pass", default=None)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # or every tree would be compiled
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend within the sequences of the current prefix tree. Without a tree call SDPA."""
    run = running.get()
    if run is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = [
        name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None
    ]
    if unknown:
        raise NotImplementedError(
            f"packed attention has no {', '.join(unknown)}, which {type(module).__name__} needs"
        )
    scale = options.get("scaling")
    window = options.get("sliding_window")
    if window is not None and all(s.depth + s.end - s.start <= window for s in run.segments):
        window = None
    on_cpu = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    if window is None and on_cpu and _flash():
        out = attend_by_block(query, key, value, run.segments, scale)
    else:
        out = attend_by_segment(query, key, value, run, scale, window)
    return out.transpose(1, 2).contiguous(), None


def packed_mask(**options: Any) -> Tensor | None:
    return sdpa_mask(**options) if running.get() is None else None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)


def attend_by_block(
    query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float | None
) -> Tensor:
    """Return attention `[1, heads, N, width]` on a CPU, by flash attention over blocks."""
    out: Tensor = _BlockAttention.apply(query, key, value, (segments, scale))
    return out


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of flash attention: `num` blocks of queries, each on its block of keys."""

    queries: slice | Tensor
    keys: slice | Tensor
    num: int
    causal: bool


@lru_cache(maxsize=4)
def attention_calls(segments: tuple[Segment, ...], batched: bool) -> list[AttentionCall]:
    """Return calls of flash attention that together are causal attention in every sequence.

    Each token attends to (1) its own block causally, (2) its segment before the block, and (3) all
    earlier segments of its sequence. (1) comes first: it covers every token, and the results of (2)
    and (3) are added to it.

    With `batched`, all blocks of one length are one call. This must not change how a result rounds,
    because a token's value may not depend on what it is packed with. So calls (2) and (3) are never
    batched, and with a single attention head `batched` is False.
    """
    own_blocks: dict[int, list[int]] = {}
    """Starts of the blocks by length."""
    before_block = []
    for segment in segments:
        for start in range(segment.start, segment.end, BLOCK):
            end = min(start + BLOCK, segment.end)
            own_blocks.setdefault(end - start, []).append(start)
            if start > segment.start:
                earlier = slice(segment.start, start)
                before_block.append(AttentionCall(slice(start, end), earlier, 1, causal=False))
    own = []
    for length, starts in own_blocks.items():
        for together in [starts] if batched else [[start] for start in starts]:
            index = _blocks_index(together, length)
            own.append(AttentionCall(index, index, len(together), causal=True))
    on_path = []
    for segment in segments:
        if segment.last > segment.end:  # all that continues a segment is one span
            queries = slice(segment.end, segment.last)
            keys = slice(segment.start, segment.end)
            on_path.append(AttentionCall(queries, keys, 1, causal=False))
    return own + before_block + on_path


def _blocks_index(starts: Sequence[int], length: int) -> slice | Tensor:
    """Return an index that selects all blocks of one length: a slice if they are adjacent."""
    if all(after - before == length for before, after in pairwise(starts)):
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


@cache
def _flash() -> tuple[Any, ...]:
    """Return flash attention for CPUs, which also returns log denominators, and its gradient.

    Empty for a version of torch that has none.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    functions = [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward")]
    return tuple(functions) if all(functions) else ()


class _BlockAttention(torch.autograd.Function):
    """Flash attention summed over `attention_calls`.

    Each call returns its softmax and the log of its denominator (lse), by which results are
    combined. The gradient of each call is formed from the combined values, as in ring attention
    (arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tree: tuple[tuple[Segment, ...], float | None],
    ) -> Tensor:
        segments, scale = tree
        flash, _ = _flash()
        wide = torch.promote_types(query.dtype, torch.float32)
        batch, heads, length, width = query.shape
        out = query.new_empty(batch, length, heads, width, dtype=wide).transpose(1, 2)
        lse = query.new_empty(batch, length, heads, dtype=wide).transpose(1, 2)
        for call in attention_calls(segments, heads > 1):
            results = flash(
                _to_blocks(query, call.queries, call.num),
                _to_blocks(key, call.keys, call.num),
                _to_blocks(value, call.keys, call.num),
                0.0,
                call.causal,
                scale=scale,
            )
            part, part_lse = (_from_blocks(result).to(wide) for result in results)
            if call.causal:  # the first result of these queries
                out[:, :, call.queries] = part
                lse[:, :, call.queries] = part_lse
                continue
            before = lse[:, :, call.queries]
            total = torch.logaddexp(before, part_lse)
            kept = (before - total).exp_()[..., None]
            added = (part_lse - total).exp_()[..., None]
            out[:, :, call.queries].mul_(kept).addcmul_(part, added)
            lse[:, :, call.queries] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tree = tree
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        segments, scale = ctx.tree
        _, flash_backward = _flash()
        inputs = query, key, value
        totals = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in inputs]
        for call in attention_calls(segments, query.shape[1] > 1):
            gradients = flash_backward(
                _to_blocks(grad, call.queries, call.num),
                _to_blocks(query, call.queries, call.num),
                _to_blocks(key, call.keys, call.num),
                _to_blocks(value, call.keys, call.num),
                _to_blocks(out, call.queries, call.num),
                _to_blocks(lse, call.queries, call.num),
                0.0,
                call.causal,
                scale=scale,
            )
            places = call.queries, call.keys, call.keys
            for total, gradient, place in zip(totals, gradients, places, strict=True):
                total[:, :, place] += _from_blocks(gradient)
        cast = (total.to(tensor.dtype) for total, tensor in zip(totals, inputs, strict=True))
        return *cast, None


def _to_blocks(tensor: Tensor, index: slice | Tensor, num: int) -> Tensor:
    """Select tokens of `[1, heads, N, ...]` and return them as `[num, heads, length, ...]`."""
    return tensor[0, :, index].unflatten(1, (num, -1)).transpose(0, 1)


def _from_blocks(blocks: Tensor) -> Tensor:
    """Return `[num, heads, length, ...]` as `[1, heads, num * length, ...]`."""
    return blocks.transpose(0, 1).flatten(1, 2)[None]


def attend_by_segment(  # noqa: PLR0913 - attention and its tree
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: PrefixTree,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return attention `[1, heads, N, width]` on any device, one call for each segment."""
    outputs = []
    for segment in run.segments:
        spans = [slice(*span) for span in (*segment.path, (segment.start, segment.end))]
        queries = query[:, :, segment.start : segment.end]
        keys = torch.cat([key[:, :, span] for span in spans], 2)
        values = torch.cat([value[:, :, span] for span in spans], 2)
        mask = None
        groups = queries.shape[1] // keys.shape[1]
        if segment.depth or (window is not None and keys.shape[2] > window):
            mask = run.mask(queries.shape[2], segment.depth, window, queries.device)
            if groups > 1:  # no fused kernel has both a mask and groups of heads
                keys = keys.repeat_interleave(groups, 1)
                values = values.repeat_interleave(groups, 1)
                groups = 1
        outputs.append(
            F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=groups > 1,
            )
        )
    return torch.cat(outputs, 2)
