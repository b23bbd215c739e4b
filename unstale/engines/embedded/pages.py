"""The paged KV cache: the pages of each sequence, and the index arrays for a step's attention.

The cache is a pool of pages. A page holds the keys and values of `PAGE` successive tokens of one
sequence. Sequences can share pages. This module computes indices on the CPU with NumPy. For each
step, they are sent to the device as one flat array.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstale.engines.embedded.runner import Step

PAGE = 64
"""Number of tokens in a page of the KV cache."""
RUN = 8
"""Largest number of successive prompt tokens whose attention is computed together, so that the
cached keys and values are read once for all of them.
"""
_FIRST_PAGES = 64
"""Initial number of pages in the cache. It is doubled when all pages are used."""
BLOCK = 32
"""Number of prompt tokens whose queries form one block in batched attention."""
SPLIT_PAGES = 8
"""Number of cache pages that one block of GPU threads reads in attention."""
TILE = 8
"""Numbers of tokens are padded to a multiple of this, so that fewer CUDA graphs are needed."""

Ints = NDArray[np.int64]


class Pages:
    """The cache pages of all slots. A slot is the part of the cache that holds one sequence.

    Slots can share full pages, but never a page to which one of them still writes. Padding is
    written to page 0, which belongs to no slot. Pages with low numbers are used first, so that the
    pool stays small.
    """

    def __init__(self, max_slots: int, max_context: int) -> None:
        each = -(-max_context // PAGE)
        self.of = np.zeros((max_slots, each), dtype=np.int64)
        """`[slots, pages]`: the page numbers of each slot's sequence in order, then zeros."""
        self.count = np.zeros(max_slots, dtype=np.int64)
        self.users = np.zeros(max_slots * each + 1, dtype=np.int64)
        """`[pages]`: the number of slots that use each page."""
        self._free = list(range(1, max_slots * each + 1))

    @property
    def span(self) -> int:
        """The number of pages that the pool must have: the highest used page number plus 1."""
        used = np.flatnonzero(self.users)
        return int(used[-1]) + 1 if len(used) else 1

    def hold(self, slot: int, length: int) -> tuple[int, int] | None:
        """Give `slot` exactly the pages that `length` tokens need.

        If the slot's last page is not full and is shared, it is replaced by a new page. The result
        is then (old page, new page), and the caller must copy the contents. Otherwise the result is
        None.
        """
        wanted = -(-length // PAGE)
        had = int(self.count[slot])
        for index in range(wanted, had):
            self._release(int(self.of[slot, index]))
            self.of[slot, index] = 0
        moved = None
        if length % PAGE and wanted <= had and self.users[self.of[slot, wanted - 1]] > 1:
            shared = int(self.of[slot, wanted - 1])
            self._release(shared)
            moved = shared, self._take(slot, wanted - 1)
        for index in range(had, wanted):
            self._take(slot, index)
        self.count[slot] = wanted
        return moved

    def share(self, source: int, target: int, length: int) -> tuple[int, int] | None:
        """Make slot `target` begin with the first `length` tokens of slot `source`.

        Full pages are shared. If the last page is not full, the result is (source page, target
        page), and the caller must copy the contents. Otherwise the result is None.
        """
        if source == target:
            return self.hold(target, length)
        self.hold(target, 0)
        whole = length // PAGE
        self.of[target, :whole] = self.of[source, :whole]
        self.users[self.of[target, :whole]] += 1
        self.count[target] = whole
        self.hold(target, length)
        return (int(self.of[source, whole]), int(self.of[target, whole])) if length % PAGE else None

    def _take(self, slot: int, index: int) -> int:
        page = heapq.heappop(self._free)
        self.of[slot, index] = page
        self.users[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            heapq.heappush(self._free, page)


class PagedCache:
    """The keys and values of all layers, in pages, and the pages of each slot.

    `keys[layer]` is `[pages, kv_heads, width, PAGE]` and `values[layer]` is `[pages, kv_heads,
    PAGE, width]`. With these layouts, neither matrix product of attention sums over the last
    dimension, whose elements are adjacent in memory.
    """

    def __init__(  # noqa: PLR0913 - the limits and where the tensors are
        self,
        layers: Sequence[tuple[int, int]],
        max_slots: int,
        max_context: int,
        *,
        dtype: torch.dtype,
        device: torch.device | None = None,
        on_growth: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an empty cache. `layers` has a pair (kv_heads, width) for each layer.

        `on_growth` is called before the tensors are replaced by larger ones.
        """
        self.pages = Pages(max_slots, max_context)
        self.num_pages = 0
        self._on_growth = on_growth
        shapes = [((heads, width, PAGE), (heads, PAGE, width)) for heads, width in layers]
        self.keys = [torch.empty(0, *key, dtype=dtype, device=device) for key, _ in shapes]
        self.values = [torch.empty(0, *value, dtype=dtype, device=device) for _, value in shapes]
        self.reserve()

    def keep(self, slot: int, count: int) -> None:
        """Keep the first `count` tokens of a slot, as `Runner.keep` does."""
        self._copy(self.pages.hold(slot, count))

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """Begin a slot with tokens of another slot, as `Runner.copy_prefix` does."""
        self._copy(self.pages.share(source, target, count))

    @property
    def layout(self) -> str:
        """A text that is equal for caches whose tokens have the same bytes in the same order."""
        shapes = [tuple(keys.shape[1:3]) for keys in self.keys]
        return f"{self.keys[0].dtype} {shapes}"

    @property
    def token_bytes(self) -> int:
        """Size in bytes of the keys and values of one token in all layers."""
        return sum(2 * each.shape[1] * each.shape[2] * each.element_size() for each in self.keys)

    def read(self, slot: int, count: int) -> Tensor:
        """Return the keys and values of a slot's first `count` tokens as one buffer of bytes.

        The buffer is in main memory and contiguous, without pages: for each layer the keys
        `[kv_heads, width, count]`, then the values `[kv_heads, count, width]`.
        """
        pages = self._pages_of(slot, count)
        parts = []
        for keys, values in zip(self.keys, self.values, strict=True):
            key = keys[pages].permute(1, 2, 0, 3).flatten(2)
            value = values[pages].transpose(0, 1).flatten(1, 2)
            parts += [key[:, :, :count].flatten(), value[:, :count].flatten()]
        return torch.cat(parts).cpu().view(torch.uint8)

    def write(self, slot: int, count: int, data: Tensor) -> None:
        """Begin a slot with `count` tokens. `data` is the result of `read`, in any process."""
        self.pages.hold(slot, 0)
        self.pages.hold(slot, count)
        self.reserve()
        pages = self._pages_of(slot, count)
        rest = data.view(self.keys[0].dtype).to(self.keys[0].device)
        for keys, values in zip(self.keys, self.values, strict=True):
            _, heads, width, _ = keys.shape
            key, value, rest = rest.tensor_split((heads * width * count, 2 * heads * width * count))
            padded = keys.new_zeros(heads, width, len(pages) * PAGE)
            padded[:, :, :count] = key.view(heads, width, count)
            keys[pages] = padded.view(heads, width, len(pages), PAGE).permute(2, 0, 1, 3)
            padded = values.new_zeros(heads, len(pages) * PAGE, width)
            padded[:, :count] = value.view(heads, count, width)
            values[pages] = padded.view(heads, len(pages), PAGE, width).transpose(0, 1)

    def _pages_of(self, slot: int, count: int) -> Tensor:
        """Return the numbers of the pages with a slot's first `count` tokens."""
        return torch.from_numpy(self.pages.of[slot, : -(-count // PAGE)]).to(self.keys[0].device)

    def reserve(self) -> None:
        """Enlarge the tensors, if needed, to hold all pages that are in use."""
        needed = self.pages.span
        if needed <= self.num_pages:
            return
        self._on_growth()
        most = len(self.pages.users)
        self.num_pages = max(min(max(_FIRST_PAGES, 2 * self.num_pages), most), needed)
        for pools in (self.keys, self.values):
            for index, old in enumerate(pools):
                pools[index] = old.new_zeros(self.num_pages, *old.shape[1:])
                pools[index][: len(old)] = old

    def _copy(self, moved: tuple[int, int] | None) -> None:
        self.reserve()
        if moved is not None:
            old, new = moved
            for pool in (*self.keys, *self.values):
                pool[new] = pool[old]


class StepShape(NamedTuple):
    """The sizes of the index arrays (`Inputs`) of one forward pass, with padding.

    A row is the newest token of a sequence that is being sampled. A chunk is a part of a prompt.
    """

    rows: int
    reach: int
    """Number of pages of the longest sequence that has a row, rounded up to a multiple of
    `SPLIT_PAGES`.
    """
    tokens: int = 0
    """Number of prompt tokens in the forward pass."""
    blocks: int = 0
    prompt_reach: int = 0
    """Number of pages of the longest sequence that has a chunk."""
    ends: int = 0
    """Number of tokens after which logits are computed. 0 in a pass without chunks, which computes
    logits after all tokens.
    """

    def fields(self) -> dict[str, tuple[int, ...]]:
        width = self.rows + self.tokens
        return {
            "tokens": (width,),
            "positions": (width,),
            "cells": (width,),
            "tables": (self.rows, self.reach),
            "lanes": (self.blocks, BLOCK),
            "reached": (self.blocks, self.prompt_reach),
            "spots": (self.tokens,),
            "ends": (self.ends,),
        }


class Inputs(NamedTuple):
    """The index arrays of one forward pass: views of one flat `int64` tensor on the device.

    A row is the newest token of a sequence that is being sampled. A chunk is a part of a prompt.
    """

    tokens: Tensor
    """`[rows + chunk tokens]`: the token ids. `positions` (in the sequence) and `cells` have the
    same shape.
    """
    positions: Tensor
    cells: Tensor
    """The index of each token's key and value in the cache: page * PAGE + offset in the page."""
    tables: Tensor
    """`[rows, reach]`: for each row, the pages of its sequence in order, then zeros."""
    lanes: Tensor
    """`[blocks, BLOCK]`: the prompt tokens of each attention block, as indices in `tokens`."""
    reached: Tensor
    """`[blocks, prompt_reach]`: the cache pages to which each attention block attends."""
    spots: Tensor
    """`[chunk tokens]`: the index of each prompt token in `lanes`, when `lanes` is flattened."""
    ends: Tensor
    """`[ends]`: the tokens after which logits are computed, as indices in `tokens`: each row, and
    the last token of each chunk.
    """

    @classmethod
    def of(cls, flat: Tensor, shape: StepShape) -> "Inputs":
        fields = shape.fields()
        parts = flat.split([int(np.prod(size)) for size in fields.values()])
        return cls(
            **{
                name: part.view(size)
                for (name, size), part in zip(fields.items(), parts, strict=True)
            }
        )


def placed(step: Step, pages: Pages) -> Ints:
    """Assign the cache pages that a forward pass needs. Return the cache index of each token,
    `[T]`.

    The index is page * PAGE + offset in the page.
    """
    rows = step.rows.numpy()
    at = step.positions.numpy()
    for chunk in step.chunks:
        pages.hold(chunk.slot, chunk.end)
    for index in np.flatnonzero(at[: len(rows)] // PAGE >= pages.count[rows]):
        pages.hold(int(rows[index]), int(at[index]) + 1)
    counts = [chunk.end - chunk.start for chunk in step.chunks]
    slots = np.concatenate(
        [rows, np.repeat([chunk.slot for chunk in step.chunks], counts).astype(np.int64)]
    )
    return pages.of[slots, at // PAGE] * PAGE + at % PAGE


def runs(step: Step, pages: Pages, most: int) -> Tensor:
    """Cut the tokens of a forward pass into runs: up to `most` successive tokens of one sequence.

    Return an array `[4, runs]`. A column has the run's start in `step.tokens`, its length, its
    slot, and its start in the sequence. Runs of sequences that share their first page are adjacent,
    so that the page stays in the CPU's cache.
    """
    count = len(step.rows)
    rows = step.rows.numpy()
    at = step.positions.numpy()[:count]
    parts = [np.stack([np.arange(count), np.ones(count, np.int64), rows, at])]
    for chunk, span in step.spans():
        offsets = np.arange(0, chunk.end - chunk.start, most)
        counts = np.minimum(chunk.end - chunk.start - offsets, most)
        slots = np.full(len(counts), chunk.slot)
        parts.append(np.stack([span.start + offsets, counts, slots, chunk.start + offsets]))
    table = np.concatenate(parts, axis=1).astype(np.int64, copy=False)
    order = np.argsort(pages.of[table[2], 0], kind="stable")
    return torch.from_numpy(np.take(table, order, axis=1))


def plan(step: Step, pages: Pages) -> tuple[StepShape, Tensor]:
    """Assign the cache pages that a forward pass needs.

    Return the sizes of its index arrays, and the arrays themselves (`Inputs`) in one flat tensor.
    """
    cells = placed(step, pages)
    rows = step.rows.numpy()
    at = step.positions.numpy()
    num_rows = len(rows)
    wide = tiled(num_rows)
    num_tokens = len(at) - num_rows
    fields: dict[str, Ints] = {}
    for name, values in (("tokens", step.tokens.numpy()), ("positions", at), ("cells", cells)):
        of_rows = _padded(values[:num_rows], wide)
        of_chunks = _padded(values[num_rows:], tiled(num_tokens))
        fields[name] = np.concatenate([of_rows, of_chunks])
    reach = -(-step.longest // (PAGE * SPLIT_PAGES)) * SPLIT_PAGES
    tables = fields["tables"] = np.zeros((wide, reach), dtype=np.int64)
    held = pages.of[rows, :reach]
    tables[:num_rows, : held.shape[1]] = held
    shape = StepShape(wide, reach)
    if step.chunks:
        fields |= _blocks(step, pages, start=wide)
        blocks, prompt_reach = fields["reached"].shape
        ends = num_rows + len(step.chunks)
        shape = StepShape(wide, reach, tiled(num_tokens), blocks, prompt_reach, ends)
    return shape, torch.from_numpy(_flat(shape, fields))


def _blocks(step: Step, pages: Pages, *, start: int) -> dict[str, Ints]:
    """Cut prompt chunks into attention blocks. Return the arrays of `Inputs` that are about chunks.

    `start` is the index in `Inputs.tokens` of the first token of a chunk.
    """
    lanes = []
    reached = []
    spots = []
    ends = [*range(len(step.rows))]
    reach = max(-(-chunk.end // PAGE) for chunk in step.chunks)
    num_blocks = 0
    for chunk in step.chunks:
        count = chunk.end - chunk.start
        blocks = -(-count // BLOCK)
        lanes.append(start + np.minimum(np.arange(blocks * BLOCK), count - 1))
        reached.append(np.tile(pages.of[chunk.slot, :reach], (blocks, 1)))
        spots.append(num_blocks * BLOCK + np.arange(count))
        num_blocks += blocks
        start += count
        ends.append(start - 1)
    flat = np.concatenate(spots)
    return {
        "lanes": np.concatenate(lanes).reshape(-1, BLOCK),
        "reached": np.concatenate(reached),
        "spots": _padded(flat, tiled(len(flat))),
        "ends": np.array(ends),
    }


def _flat(shape: StepShape, fields: Mapping[str, Ints]) -> Ints:
    parts = [fields[name].ravel() for name, size in shape.fields().items() if np.prod(size)]
    return np.concatenate(parts).astype(np.int64, copy=False)


def _padded(values: Ints, size: int) -> Ints:
    return np.concatenate([values, np.zeros(size - len(values), dtype=np.int64)])


def tiled(size: int) -> int:
    """Return `size`, rounded up to a multiple of `TILE`.

    >>> tiled(33), tiled(64)
    (40, 64)
    """
    return -(-size // TILE) * TILE
