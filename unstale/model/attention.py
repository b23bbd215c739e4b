"""Attention along a prefix tree."""

from collections.abc import Sequence
from contextvars import ContextVar
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
"""Queries on a processor that attend at once: above the diagonal, at most so much is computed in vain."""


running: ContextVar[PrefixTree | None] = ContextVar("the forest that this pass runs", default=None)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # or every forest would be compiled
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention along the paths of the forest; outside a packed pass, transformers' own SDPA."""
    run = running.get()
    if run is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    unknown = [
        name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None
    ]
    if unknown:
        raise NotImplementedError(
            f"packed attention has no {', '.join(unknown)}, which {type(module).__name__} asks for"
        )
    window, scale = options.get("sliding_window"), options.get("scaling")
    if window is not None and all(s.depth + s.end - s.start <= window for s in run.segments):
        window = None
    if (
        window is None
        and query.device.type == "cpu"
        and query.shape[-1] == value.shape[-1]
        and _flash()
    ):
        out = _Attend.apply(query, key, value, (run.segments, scale))
    else:
        out = _attend_by_segment(query, key, value, run, (scale, window))
    return out.transpose(1, 2).contiguous(), None


def packed_mask(**options: Any) -> Tensor | None:
    return sdpa_mask(**options) if running.get() is None else None


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)


@cache
def _flash() -> tuple[Any, ...]:
    """Attention on a processor that tells its denominators, and its gradient. Nothing from a torch without them."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    known = [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward")]
    return tuple(known) if all(known) else ()


class _Attend(torch.autograd.Function):
    """On a processor: the softmax of each part comes with the logarithm of its denominator, which is what adds them up.

    The gradient of each part is formed from the sums, as in ring attention (arXiv 2310.01889).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        how: tuple[tuple[Segment, ...], float | None],
    ) -> Tensor:
        (segments, scale), (flash, _) = how, _flash()
        wide = torch.promote_types(query.dtype, torch.float32)
        batch, heads, length, width = query.shape
        out = query.new_empty(batch, length, heads, width, dtype=wide).transpose(1, 2)
        lse = query.new_empty(batch, length, heads, dtype=wide).transpose(1, 2)
        for queries, keys, num, causal in _parts(segments, heads > 1):
            given = _blocks(query, queries, num), _blocks(key, keys, num), _blocks(value, keys, num)
            part, weight = (
                _flat(each).to(wide) for each in flash(*given, 0.0, causal, scale=scale)
            )
            if causal:
                out[:, :, queries], lse[:, :, queries] = part, weight
                continue
            before = lse[:, :, queries]
            total = torch.logaddexp(before, weight)
            kept, added = (before - total).exp_()[..., None], (weight - total).exp_()[..., None]
            out[:, :, queries].mul_(kept).addcmul_(part, added)
            lse[:, :, queries] = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        (segments, scale), (_, flash_backward) = ctx.how, _flash()
        given = query, key, value
        grads = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in given]
        for queries, keys, num, causal in _parts(segments, query.shape[1] > 1):
            q, k, v = (
                _blocks(query, queries, num),
                _blocks(key, keys, num),
                _blocks(value, keys, num),
            )
            asked, *said = (_blocks(tensor, queries, num) for tensor in (grad, out, lse))
            found = flash_backward(asked, q, k, v, *said, 0.0, causal, scale=scale)
            for total, part, where in zip(grads, found, (queries, keys, keys), strict=True):
                total[:, :, where] += _flat(part)
        return *(total.to(tensor.dtype) for total, tensor in zip(grads, given, strict=True)), None


def _blocks(tensor: Tensor, where: slice | Tensor, num: int) -> Tensor:
    """Of `[1, heads, N, ...]`, so many of one length as `[num, heads, L, ...]`."""
    return tensor[0, :, where].unflatten(1, (num, -1)).transpose(0, 1)


def _flat(blocks: Tensor) -> Tensor:
    return blocks.transpose(0, 1).flatten(1, 2)[None]


@lru_cache(maxsize=4)
def _parts(
    segments: tuple[Segment, ...], together: bool
) -> list[tuple[slice | Tensor, slice | Tensor, int, bool]]:
    """`(queries, keys, num, causal)`: blocks on themselves, each on its segment before it, what follows on that.

    The first alone are many at once: what adds up the others rounds differently at the end of a tensor, and a query
    shall get the same with whatever else it is packed. With one head each block is a call of its own: one alone would
    be divided among the threads, and its products round differently.
    """
    blocks = [
        (s, slice(at, min(at + BLOCK, s.end)))
        for s in segments
        for at in range(s.start, s.end, BLOCK)
    ]
    alike: dict[int, list[int]] = {}
    for _, block in blocks:
        alike.setdefault(block.stop - block.start, []).append(block.start)
    calls = (
        alike.items()
        if together
        else [(length, [s]) for length, starts in alike.items() for s in starts]
    )
    own = [(where := _where(at, length), where, len(at), True) for length, at in calls]
    before = [
        (block, slice(s.start, block.start), 1, False)
        for s, block in blocks
        if block.start > s.start
    ]
    return (
        own
        + before
        + [
            (slice(s.end, s.last), slice(s.start, s.end), 1, False)
            for s in segments
            if s.last > s.end
        ]
    )


def _where(starts: Sequence[int], length: int) -> slice | Tensor:
    """The spans of this length that start there."""
    if all(after - before == length for before, after in pairwise(starts)):
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


def _attend_by_segment(
    query: Tensor, key: Tensor, value: Tensor, run: PrefixTree, how: tuple[float | None, int | None]
) -> Tensor:
    """On any device, and with a window: segment after segment, the keys of its path before its own."""
    (scale, window), outputs = how, []
    for s in run.segments:
        spans = [slice(*span) for span in (*s.path, (s.start, s.end))]
        q, (k, v) = (
            query[:, :, s.start : s.end],
            (torch.cat([x[:, :, at] for at in spans], 2) for x in (key, value)),
        )
        mask, times = None, q.shape[1] // k.shape[1]
        if s.depth or (window is not None and k.shape[2] > window):
            mask = run.mask(q.shape[2], s.depth, window, q.device)
            if times > 1:  # no fused kernel has both a mask and groups of heads
                k, v, times = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), 1
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=times > 1
            )
        )
    return torch.cat(outputs, 2)
