"""Attention for packed sequences that share prefixes: a token attends only to its own sequence.

transformers calls `packed_attention` in models whose attention implementation is named `ATTENTION`.
"""

from collections.abc import Callable, Sequence
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

from unstale.model.kernels import fits
from unstale.model.prefix_tree import PrefixTree, Segment
from unstale.model.tree_attention import TreeAttention, can_attend, layout_of

ATTENTION = "unstale_packed"
"""The name of `packed_attention` among the attention implementations of transformers."""

BLOCK = 128
"""Number of queries in one causal block on a CPU. It is small, because half of the products within
a block are masked and wasted.
"""

running: ContextVar[PrefixTree | None] = ContextVar("the tree of the current pass", default=None)
checked_length: ContextVar[int] = ContextVar("the length for which masks are checked", default=0)
"""The number of tokens for which the current pass checks the masks of the model's layers
(`packing_check.check_length`). They must equal those of packed attention. 0 in any other pass.
"""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # or every tree would be compiled
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the attention output `[1, N, heads, width]` of a layer for the N tokens of a pass.

    In a pass over a prefix tree (packed sequences whose shared prefixes are stored once), each
    token attends only to its own sequence. In any other pass, this calls torch's scaled dot-product
    attention. Raises NotImplementedError for an unsupported kind of attention, such as soft caps.
    """
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
    if (length := checked_length.get()) and attention_mask is not None:
        _require_window(attention_mask, min(window or length, length))
    if sees_all(run, window):
        window = None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        same_width = query.shape[-1] == value.shape[-1]
        can_run = same_width and window is None and fits(query, key, value)
        if can_run and can_attend(run, query, query.shape[-1]):
            return attend_by_tree(query, key, value, run, scale)
        on_cpu = query.device.type == "cpu" and same_width
        if window is None and on_cpu and _flash():
            out = attend_by_block(query, key, value, run.segments, scale)
        else:
            out = attend_by_segment(query, key, value, run, scale, window)
        return out.transpose(1, 2).contiguous()

    if run.context:
        return run.context.exchange(attend, query, key, value), None
    return attend(query, key, value), None


def sees_all(run: PrefixTree, window: int | None) -> bool:
    """Return True if a sliding window of `window` tokens excludes no token of any sequence.

    `run` has the sequences. `window` None means that there is no window, so the result is True.
    """
    return window is None or all(s.depth + s.end - s.start <= window for s in run.segments)


def packed_mask(
    mask_function: Callable[..., Tensor], device: torch.device | str = "cpu", **options: Any
) -> Tensor | None:
    """Return the attention mask of a layer, as transformers asks for it.

    In a packed pass, return None, because `packed_attention` needs no mask. In a pass of
    `packing_check.check_length`, return the layer's window in tokens, as a tensor `[1, 1, 1, 1]`.
    In any other pass, return transformers' own mask.
    """
    if running.get() is None:
        return sdpa_mask(mask_function=mask_function, device=device, **options)
    if length := checked_length.get():
        return torch.full((1, 1, 1, 1), window_of(mask_function, length, device))
    return None


def window_of(
    mask_function: Callable[..., Tensor], length: int, device: torch.device | str = "cpu"
) -> int:
    """Return the number of tokens to which the last of `length` tokens attends, its own included.

    `mask_function` is a mask function of transformers. Raises NotImplementedError if it is neither
    causal nor a sliding window of that number of tokens.
    """
    last = length - 1
    queries = sorted({*(min(2**power, last) for power in range(24)), 0, max(last - 1, 0), last})
    query = torch.tensor(queries, device=device)[:, None]
    keys = torch.arange(length, device=device)[None]
    zero = torch.tensor(0, device=device)
    visible = mask_function(zero, zero, query, keys).expand(len(queries), -1)
    seen = int(visible[-1].sum())
    if not torch.equal(visible, (keys <= query) & (keys > query - seen)):
        raise NotImplementedError("a layer's mask is neither causal nor a sliding window")
    return seen


def _require_window(mask: Tensor, of_layer: int) -> None:
    if mask.numel() != 1:
        raise NotImplementedError("a layer's mask is not made by transformers' mask functions")
    if int(mask) != of_layer:
        raise NotImplementedError(
            f"a layer's mask has a window of {int(mask)} tokens, and its attention {of_layer}"
        )


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, packed_mask)


def attend_by_tree(
    query: Tensor, key: Tensor, value: Tensor, run: PrefixTree, scale: float | None
) -> Tensor:
    """Return the attention output `[1, N, heads, width]` of the tokens of the prefix tree `run`,
    computed by compiled kernels.

    Call this only if `tree_attention.can_attend` returns True for these inputs.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    inputs = (each[0].transpose(0, 1) for each in (query, key, value))
    out: Tensor = TreeAttention.apply(*inputs, (layout_of(run, query.device), scale))
    return out[None]


def attend_by_block(
    query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float | None
) -> Tensor:
    """Return the attention output `[1, heads, N, width]`, by flash attention on blocks.

    For CPUs only.
    """
    out: Tensor = _BlockAttention.apply(query, key, value, (segments, scale))
    return out


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of flash attention, on `num` blocks of queries and one block of keys for each."""

    queries: slice | Tensor
    keys: slice | Tensor
    num: int
    causal: bool


@lru_cache(maxsize=4)
def attention_calls(segments: tuple[Segment, ...], batched: bool) -> list[AttentionCall]:
    """Return the calls of flash attention that together are causal attention in every sequence.

    A segment is a span of tokens that the same sequences have in common. Each token attends (1)
    within its own block, causally, (2) to the part of its segment before the block, and (3) to all
    earlier segments of its sequence. The calls for (1) come first, because they cover every token.
    The results of (2) and (3) are added to their results.

    With `batched`, all blocks of equal length are one call in (1). Calls of (2) and (3) are never
    combined, and with a single head `batched` must be False, because a combined call may round
    differently. A token's value must not depend on the other packed sequences.
    """
    own_blocks: dict[int, list[int]] = {}
    """The start positions of all blocks, by the length of the block."""
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
        if segment.last > segment.end:  # all tokens that continue a segment are adjacent
            queries = slice(segment.end, segment.last)
            keys = slice(segment.start, segment.end)
            on_path.append(AttentionCall(queries, keys, 1, causal=False))
    return own + before_block + on_path


def _blocks_index(starts: Sequence[int], length: int) -> slice | Tensor:
    """Return the index of all tokens in blocks of one length.

    It is a slice if the blocks are adjacent.
    """
    if all(after - before == length for before, after in pairwise(starts)):
        return slice(starts[0], starts[-1] + length)
    return (torch.tensor(starts)[:, None] + torch.arange(length)).flatten()


@cache
def _flash() -> tuple[Any, ...]:
    """Return torch's flash attention for CPUs, and the function that computes its gradient.

    Return an empty tuple if this version of torch lacks one of the two functions.
    """
    name = "_scaled_dot_product_flash_attention_for_cpu"
    functions = [getattr(torch.ops.aten, each, None) for each in (name, f"{name}_backward")]
    return tuple(functions) if all(functions) else ()


class _BlockAttention(torch.autograd.Function):
    """The sum of several calls of flash attention, with a gradient.

    Each call returns its output and the logarithm of the softmax's denominator, which gives the
    weight of the output in the sum. The gradient of each call is computed from the combined values,
    as in ring attention (arXiv 2310.01889).
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
            if call.causal:  # these queries have no result yet
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
    """Select blocks of tokens of `[1, heads, N, ...]`. Return `[num, heads, length, ...]`."""
    return tensor[0, :, index].unflatten(1, (num, -1)).transpose(0, 1)


def _from_blocks(blocks: Tensor) -> Tensor:
    return blocks.transpose(0, 1).flatten(1, 2)[None]


def attend_by_segment(  # noqa: PLR0913 - attention and its tree
    query: Tensor,
    key: Tensor,
    value: Tensor,
    run: PrefixTree,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Return the attention output `[1, heads, N, width]` of the tokens of the prefix tree `run`.

    It works on any device, and calls torch's attention function once for each segment. A segment is
    a span of tokens that the same sequences have in common. `window` is the size of a sliding
    window: the number of tokens to which a query attends, its own included. None means no limit.
    """
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
            if groups > 1:  # no fused kernel supports a mask together with grouped heads
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
