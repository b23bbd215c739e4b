"""Packing: sequences end to end without padding, each token that siblings share run once, attention apart.

A forward pass runs a forest of segments. A sequence is a path from a root to the end of a segment; siblings share the
segments that they begin with. Segments lie in the order of a walk that goes down first, so that all which follow one in
some sequence follow it immediately in the packing too: one span of queries attends to it.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from unstale.config import ConfigError

ATTENTION = "unstale_packed"
"""Name of the attention function that a packed model uses."""

MIN_SHARED = 16
"""Tokens that siblings must have in common: a shorter beginning costs more to share than to run again."""

HEAD_ROWS = 4
"""Times its budget of tokens, a pass asks for at most so many log-probabilities: siblings may ask about one token."""

ROUND = 32
"""A pass runs a multiple of so many tokens."""

BLOCK = 128
"""Queries on a processor that attend at once: above the diagonal, at most so much is computed in vain."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences end to end: sequence `i` is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: Tensor
    offsets: tuple[int, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, end)` of a pass. `[end, last)` are all that follow it in some sequence."""

    start: int
    end: int
    last: int
    path: tuple[tuple[int, int], ...] = ()
    """The spans that precede it in its sequences."""

    @property
    def depth(self) -> int:
        return sum(end - start for start, end in self.path)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """What a pass runs: `[N]` tokens and their positions. Of `[T]` packed ones, `t` is run at `place[t]`.

    `follows` are those that are not the first of their sequence. `N` is rounded up to `ROUND`, so that the shapes of
    passes repeat: the last segment may be nobody's.
    """

    tokens: Tensor
    positions: Tensor
    place: Tensor
    follows: Tensor
    segments: tuple[Segment, ...]
    num_tokens: int
    """Without what was added to round."""
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict, compare=False)
    """Made for the first layer that asks: of so many queries after so many tokens, within a window."""

    def mask(self, queries: int, depth: int, window: int | None, device: torch.device) -> Tensor:
        """`[queries, depth + queries]`: which keys each query attends to."""
        key = queries, depth, window
        if key not in self.masks:
            seen = torch.ones(queries, depth + queries, dtype=torch.bool, device=device).tril(depth)
            self.masks[key] = seen if window is None else seen.triu(depth + 1 - window)
        return self.masks[key]


running: ContextVar[PrefixTree | None] = ContextVar("the forest that this pass runs", default=None)


_Path = tuple[tuple[int, int], ...]
_Branch = tuple[list[int], _Path, int]
"""Sequences that go on alike, the spans before that, and the tokens in those."""


@dataclass(slots=True)
class _Growing:
    rows: list[Tensor]
    place: list[Tensor]
    tokens: list[Tensor] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    size: int = 0

    def grow(self) -> None:
        """All segments. What is to do is a stack: branches may nest as deep as they like."""
        todo: list[int | _Branch] = self._branches(range(len(self.rows)), (), 0)
        while todo:
            at = todo.pop()
            if isinstance(at, int):  # all that follows this segment is there
                self.segments[at] = replace(self.segments[at], last=self.size)
                continue
            kin, path, depth = at
            common = _common(self.rows, kin, depth)
            start, end = self.size, self.size + common
            self.size = end
            self.tokens.append(self.rows[kin[0]][depth : depth + common])
            for i in kin:
                self.place[i][depth : depth + common] = torch.arange(start, end)
            self.segments.append(Segment(start, end, end, path))
            if len(kin) > 1:
                todo += [
                    len(self.segments) - 1,
                    *self._branches(kin, (*path, (start, end)), depth + common),
                ]

    def _branches(self, members: Sequence[int], path: _Path, depth: int) -> "list[int | _Branch]":
        """Of sequences that are alike up to `depth`, the last first."""
        return [(kin, path, depth) for kin in reversed(_kin(self.rows, members, depth))]


def build_prefix_tree(packed: Packed, *, share: bool) -> PrefixTree:
    """Without `share` every sequence is a tree of its own. Trees and branches are in the order of the sequences."""
    tokens, place = packed.tokens.cpu(), torch.arange(len(packed.tokens))
    follows = torch.ones(len(place), dtype=torch.bool)
    follows[[start for start, end in packed.spans() if end > start]] = False
    if share:
        growing = _Growing(list(tokens.split(packed.lengths)), list(place.split(packed.lengths)))
        growing.grow()
        tokens, segments = torch.cat([tokens[:0], *growing.tokens]), growing.segments
    else:
        segments = [Segment(start, end, end) for start, end in packed.spans() if end > start]
    run = len(tokens)
    if more := -run % ROUND:
        tokens = torch.cat([tokens, tokens.new_zeros(more)])
        segments.append(Segment(run, run + more, run + more))
    positions = torch.cat(
        [tokens[:0], *(torch.arange(s.end - s.start) + s.depth for s in segments)]
    )
    return PrefixTree(tokens, positions, place, follows, tuple(segments), run)


def _kin(rows: Sequence[Tensor], members: Sequence[int], depth: int) -> list[list[int]]:
    """Those among sequences alike up to `depth` that go on alike for at least `MIN_SHARED` tokens, in order."""
    kin: dict[object, list[int]] = {}
    for i in members:
        opening = rows[i][depth : depth + MIN_SHARED]
        if len(opening):
            kin.setdefault(
                opening.numpy().tobytes() if len(opening) == MIN_SHARED else i, []
            ).append(i)
    return list(kin.values())


def _common(rows: Sequence[Tensor], kin: Sequence[int], depth: int) -> int:
    """Tokens that all of them have in common from `depth` on."""
    length = min(len(rows[i]) for i in kin) - depth
    first = rows[kin[0]][depth : depth + length]
    for i in kin[1:]:
        differ = (rows[i][depth : depth + len(first)] != first).nonzero()
        first = first[: int(differ[0])] if len(differ) else first
    return len(first)


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


def recompute_layers(model: nn.Module) -> None:
    """Keep the inputs of the model's layers alone for the gradient. ConfigError if transformers marks no layer."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ConfigError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that can be run again"
        )
    for layer in layers:
        layer.forward = partial(_again, layer.forward)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _again(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    run = running.get()
    if run is None or not torch.is_grad_enabled():
        return forward(*args, **options)

    def in_this_pass(*args: Any) -> Any:
        token = running.set(
            run
        )  # the gradient comes when the pass is over, in a thread of its own on a GPU
        try:
            return forward(*args, **options)
        finally:
            running.reset(token)

    return checkpoint(in_this_pass, *args, use_reentrant=False, preserve_rng_state=False)
