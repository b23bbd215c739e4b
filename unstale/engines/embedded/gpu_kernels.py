"""Triton kernels for the norms, attention and activation of a decoder layer, with a paged KV cache.

Sums are in float32. The result for a token does not depend on the other sequences of the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unstale.engines.embedded.layer_parts import Cache
from unstale.engines.embedded.pages import PAGE, SPLIT_PAGES, Inputs
from unstale.model.gpu_kernels import GpuKernels, device_of

MIN_ROWS = 16
"""Smallest number of rows in a matrix product of Triton. The query heads that share a key head are
padded to this number of rows.
"""


class TritonParts:
    """The parts of a decoder layer besides the matrix products (`LayerParts`), by Triton."""

    def __init__(self, kv_heads: int, rotations: Tensor, eps: float) -> None:
        self._kv_heads = kv_heads
        self._rotations = torch.view_as_real(rotations)
        self._eps = eps
        self._kernels = GpuKernels()

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(x)
        with device_of(x):
            _add_norm[(rows,)](
                x,
                x if more is None else more,
                weight,
                self._eps,
                out,
                width,
                ADDS=more is not None,
                WIDTH=triton.next_power_of_2(width),
            )
        return out

    def place(self, qkv: Tensor, norm: Tensor, inputs: Inputs, cache: Cache) -> Tensor:
        turned, head_dim = norm.shape
        heads = turned - self._kv_heads
        query = qkv.new_empty(len(qkv), heads, head_dim)
        with device_of(qkv):
            _place[(len(qkv), heads + 2 * self._kv_heads)](
                qkv,
                norm,
                self._rotations,
                inputs.positions,
                inputs.cells,
                query,
                *cache,
                self._eps,
                HEADS=heads,
                KV_HEADS=self._kv_heads,
                HALF=head_dim // 2,
                WIDE=triton.next_power_of_2(head_dim // 2),
                PAGE=PAGE,
                num_warps=1,
            )
        return query

    def attend_rows(self, query: Tensor, inputs: Inputs, cache: Cache) -> Tensor:
        rows, heads, head_dim = query.shape
        group = heads // self._kv_heads
        reach = inputs.tables.shape[1]
        splits = -(-reach // SPLIT_PAGES)
        out = query.new_empty(rows, heads * head_dim)
        parts = tops = out
        if splits > 1:
            parts = query.new_empty(rows, splits, heads, head_dim, dtype=torch.float32)
            tops = query.new_empty(2, rows, splits, heads, dtype=torch.float32)
        wide = triton.next_power_of_2(head_dim)
        with device_of(query):
            _attend_rows[(rows, self._kv_heads, splits)](
                query,
                *cache,
                inputs.tables,
                inputs.positions,
                out,
                parts,
                tops,
                reach,
                rows,
                splits,
                KV_HEADS=self._kv_heads,
                GROUP=group,
                GROUPS=max(MIN_ROWS, triton.next_power_of_2(group)),
                HEAD=head_dim,
                WIDE=max(wide, MIN_ROWS),
                PAGE=PAGE,
                SPLIT=SPLIT_PAGES,
                ONE_SPLIT=splits == 1,
                num_warps=4,
            )
            if splits > 1:
                _join_splits[(rows, heads)](
                    parts, tops, out, rows, splits, HEADS=heads, HEAD=head_dim, WIDE=wide
                )
        return out

    def gated(self, both: Tensor) -> Tensor:
        rows, width = both.shape
        out = both.new_empty(rows, width // 2)
        self._kernels.swiglu(both, out, rows, width // 2)
        return out


@triton.jit
def _add_norm(x, more, weight, eps, out, width, ADDS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    place = row * width + at
    kind = x.dtype.element_ty
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(kind)
        tl.store(x + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    root = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (values * root * scale).to(kind), mask=inside)


@triton.jit
def _place(
    qkv,
    norm,
    rotations,
    positions,
    cells,
    query,
    keys,
    values,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, WIDE)
    inside = at < HALF
    even = 2 * at
    first = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF
    left = tl.load(first + even, mask=inside, other=0.0)
    right = tl.load(first + even + 1, mask=inside, other=0.0)
    kind = query.dtype.element_ty
    cell = tl.load(cells + row)
    page = cell // PAGE * KV_HEADS
    place = cell % PAGE
    if head < HEADS + KV_HEADS:
        a = left.to(tl.float32)
        b = right.to(tl.float32)
        root = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / (2 * HALF) + eps)
        a = a * root * tl.load(norm + head * 2 * HALF + even, mask=inside, other=0.0)
        b = b * root * tl.load(norm + head * 2 * HALF + even + 1, mask=inside, other=0.0)
        turn = rotations + tl.load(positions + row) * 2 * HALF + even
        cosine = tl.load(turn, mask=inside, other=0.0)
        sine = tl.load(turn + 1, mask=inside, other=0.0)
        left = (a * cosine - b * sine).to(kind)
        right = (a * sine + b * cosine).to(kind)
        if head < HEADS:
            to = query + (row * HEADS + head) * 2 * HALF
            tl.store(to + even, left, mask=inside)
            tl.store(to + even + 1, right, mask=inside)
        else:
            to = keys + (page + head - HEADS) * 2 * HALF * PAGE + place
            tl.store(to + even * PAGE, left, mask=inside)
            tl.store(to + (even + 1) * PAGE, right, mask=inside)
    else:
        to = values + ((page + head - HEADS - KV_HEADS) * PAGE + place) * 2 * HALF
        tl.store(to + even, left, mask=inside)
        tl.store(to + even + 1, right, mask=inside)


@triton.jit
def _attend_rows(
    query,
    keys,
    values,
    tables,
    positions,
    out,
    parts,
    tops,
    reach,
    rows,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(2)
    head = tl.arange(0, GROUPS)
    at = tl.arange(0, WIDE)
    token = tl.arange(0, PAGE)
    in_head = at < HEAD
    place = (row * KV_HEADS * GROUP + kv * GROUP + head)[:, None] * HEAD + at[None, :]
    inside = (head < GROUP)[:, None] & in_head[None, :]
    asked = tl.load(query + place, mask=inside, other=0.0)
    length = tl.load(positions + row) + 1
    first = split * SPLIT
    last = tl.minimum(first + SPLIT, tl.cdiv(length, PAGE))
    top = tl.full([GROUPS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([GROUPS], dtype=tl.float32)
    mixed = tl.zeros([GROUPS, WIDE], dtype=tl.float32)
    for index in range(first, last):
        page = (tl.load(tables + row * reach + index) * KV_HEADS + kv) * HEAD * PAGE
        its_keys = tl.load(
            keys + page + at[:, None] * PAGE + token[None, :], mask=in_head[:, None], other=0.0
        )
        scores = tl.dot(asked, its_keys, input_precision="ieee")
        scores = tl.where((index * PAGE + token < length)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fall = tl.exp(top - higher)
        total = total * fall + tl.sum(weights, 1)
        its_values = tl.load(
            values + page + token[:, None] * HEAD + at[None, :], mask=in_head[None, :], other=0.0
        )
        more = tl.dot(weights.to(its_values.dtype), its_values, input_precision="ieee")
        mixed = mixed * fall[:, None] + more
        top = higher
    if ONE_SPLIT:
        tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        number = (row * splits + split) * KV_HEADS * GROUP + kv * GROUP + head
        tl.store(parts + number[:, None] * HEAD + at[None, :], mixed, mask=inside)
        tl.store(tops + number, top, mask=head < GROUP)
        tl.store(tops + rows * splits * KV_HEADS * GROUP + number, total, mask=head < GROUP)


@triton.jit
def _join_splits(
    parts,
    tops,
    out,
    rows,
    splits,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    at = tl.arange(0, WIDE)
    inside = at < HEAD
    top = -float("inf")
    total = 0.0
    mixed = tl.zeros([WIDE], dtype=tl.float32)
    for split in range(splits):
        number = (row * splits + split) * HEADS + head
        its_top = tl.load(tops + number)
        higher = tl.maximum(top, its_top)
        fall = tl.exp(top - higher)
        share = tl.exp(its_top - higher)
        its_total = tl.load(tops + rows * splits * HEADS + number)
        total = total * fall + its_total * share
        mixed = mixed * fall + tl.load(parts + number * HEAD + at, mask=inside, other=0.0) * share
        top = higher
    to = out + (row * HEADS + head) * HEAD + at
    tl.store(to, (mixed / total).to(out.dtype.element_ty), mask=inside)
