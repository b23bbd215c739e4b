"""Where the tokens of every slot lie in the cache, and what a step's attention needs to know of that.

The cache is a pool of pages of `PAGE` tokens. Each page belongs to one slot, so that one batched product over the pages
as they lie attends all rows at once, and a long sequence costs nobody but itself. Everything here happens on the host,
in numpy; what a step needs on the device is one flat array.
"""

import heapq
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstale.engines.embedded.runner import Step

PAGE = 64
"""Tokens."""
BLOCK = 32
"""Chunks are attended in blocks of so many tokens."""
TILE = 8
"""Sizes that change from step to step are rounded up: kernels and graphs are made anew for every shape."""

Ints = NDArray[np.int64]


class Pages:
    """Which pages each slot has. Page 0 belongs to nobody: what pads a step is written there. Low ones are taken first,
    so that those in use lie together.

    Whole pages may be those of several slots; the one that a slot writes to next is its own.
    """

    def __init__(self, max_slots: int, max_context: int) -> None:
        each = -(-max_context // PAGE)
        self.of = np.zeros((max_slots, each), dtype=np.int64)
        """`[slots, pages]`, in the order of the sequence; 0 where there is none."""
        self.count = np.zeros(max_slots, dtype=np.int64)
        self.users = np.zeros(max_slots * each + 1, dtype=np.int64)
        """`[pages]`, how many slots have it."""
        self.owner = np.full(max_slots * each + 1, -1, dtype=np.int64)
        """`[pages]`, which slot took it."""
        self.first = np.zeros(max_slots * each + 1, dtype=np.int64)
        """`[pages]`, the place of a page's first token in its sequence."""
        self._free = list(range(1, max_slots * each + 1))

    @property
    def span(self) -> int:
        """How many pages, from the first, there are up to the last in use."""
        used = np.flatnonzero(self.users)
        return int(used[-1]) + 1 if len(used) else 1

    def hold(self, slot: int, length: int) -> tuple[int, int] | None:
        """Give `slot` the pages that `length` tokens need, and take back all others. If it shares the last of them, in
        the middle of which it goes on, it gets its own, to which the first of the returned two is to be copied."""
        wanted, had = -(-length // PAGE), int(self.count[slot])
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
        """Let `target` begin with `length` tokens of `source`: whole pages are those of both. The rest of a page is to
        be copied, from the first of the returned two to the second."""
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
        self.of[slot, index], self.users[page] = page, 1
        self.owner[page], self.first[page] = slot, index * PAGE
        return page

    def _release(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            self.owner[page] = -1
            heapq.heappush(self._free, page)


class Shape(NamedTuple):
    """All that varies in size from step to step."""

    rows: int
    pages: int
    gathered: bool
    """The pages that are attended are few of those in use, and copied together first."""
    tokens: int = 0
    """In chunks."""
    blocks: int = 0
    reach: int = 0
    """Pages of the longest chunk's sequence."""
    ends: int = 0
    """Rows and chunks, where there are chunks; rows alone end where they are."""

    def fields(self) -> dict[str, tuple[int, ...]]:
        width = self.rows + self.tokens
        return {
            "tokens": (width,),
            "positions": (width,),
            "cells": (width,),
            "page_ids": (self.pages if self.gathered else 0,),
            "page_rows": (self.pages,),
            "visible": (self.pages,),
            "order": (self.pages,),
            "bags": (self.rows + 1,),
            "lanes": (self.blocks, BLOCK),
            "reached": (self.blocks, self.reach),
            "spots": (self.tokens,),
            "ends": (self.ends,),
        }


class Inputs(NamedTuple):
    """A step as the device sees it: views of one flat `int64` tensor."""

    tokens: Tensor
    """`[rows + chunk tokens]`, as `positions` and `cells`."""
    positions: Tensor
    cells: Tensor
    """Where in the pool a token's key and value go."""
    page_ids: Tensor
    """Which pages are attended, if not the first ones as they lie."""
    page_rows: Tensor
    """`[pages]`, the row whose query attends it; any where `visible` is 0."""
    visible: Tensor
    """`[pages]`, how many of its tokens are attended."""
    order: Tensor
    """`[pages]`, sorted by row."""
    bags: Tensor
    """`[rows + 1]`, where in `order` each row's begin, and then those of no row."""
    lanes: Tensor
    """`[blocks, BLOCK]`, which of `tokens` ask."""
    reached: Tensor
    """`[blocks, reach]`, the pages that they ask."""
    spots: Tensor
    """`[chunk tokens]`, each one's lane, counted through all blocks."""
    ends: Tensor
    """Which of `tokens` get logits."""

    @classmethod
    def of(cls, flat: Tensor, shape: Shape) -> "Inputs":
        fields = shape.fields()
        parts = flat.split([int(np.prod(size)) for size in fields.values()])
        return cls(
            **{
                name: part.view(size)
                for (name, size), part in zip(fields.items(), parts, strict=True)
            }
        )


def placed(step: Step, pages: Pages) -> Ints:
    """The cell of every token, in pages that are there from now on."""
    rows, at = step.rows.numpy(), step.positions.numpy()
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
    """`[4, runs]`: rows, and chunks cut into runs of up to `most` tokens. Where in `tokens` each begins, how many, of
    which slot, and how many come before it in its sequence. Those that begin with the same page follow each other."""
    num_rows = len(step.rows)
    parts = [
        np.stack(
            [
                np.arange(num_rows),
                np.ones(num_rows),
                step.rows.numpy(),
                step.positions.numpy()[:num_rows],
            ]
        )
    ]
    for chunk, span in step.spans():
        offsets = np.arange(0, chunk.end - chunk.start, most)
        counts = np.minimum(chunk.end - chunk.start - offsets, most)
        parts.append(
            np.stack(
                [
                    span.start + offsets,
                    counts,
                    np.full(len(counts), chunk.slot),
                    chunk.start + offsets,
                ]
            )
        )
    found = np.concatenate(parts, axis=1).astype(np.int64)
    order = np.argsort(pages.of[found[2], 0], kind="stable")
    return torch.from_numpy(np.take(found, order, axis=1))


def plan(step: Step, pages: Pages) -> tuple[Shape, Tensor]:
    """What to compute where, once every token of the step has its cell."""
    cells = placed(step, pages)
    rows, at = step.rows.numpy(), step.positions.numpy()
    num_rows, counts = len(rows), [chunk.end - chunk.start for chunk in step.chunks]
    fields, gathered = _attended(rows, at[:num_rows], pages)
    wide, num_tokens = tiled(num_rows), len(at) - num_rows
    for name, values in (("tokens", step.tokens.numpy()), ("positions", at), ("cells", cells)):
        fields[name] = _apart(values, num_rows, wide)
    shape = Shape(wide, len(fields["visible"]), gathered)
    if step.chunks:
        fields |= _blocks(step, pages, start=wide)
        blocks, reach = fields["reached"].shape
        shape = Shape(
            wide, shape.pages, gathered, tiled(num_tokens), blocks, reach, num_rows + len(counts)
        )
    return shape, torch.from_numpy(_flat(shape, fields))


def _apart(values: Ints, num_rows: int, wide: int) -> Ints:
    """Rows, zeros up to `wide` of them, and then the chunks, padded as well."""
    found = np.zeros(wide + tiled(len(values) - num_rows), dtype=np.int64)
    found[:num_rows], found[wide : wide + len(values) - num_rows] = (
        values[:num_rows],
        values[num_rows:],
    )
    return found


def _attended(rows: Ints, at: Ints, pages: Pages) -> tuple[dict[str, Ints], bool]:
    """The pages that rows of one token attend to, and whether they are to be copied together."""
    if not len(rows):
        none = np.zeros(0, dtype=np.int64)
        return {
            "page_rows": none,
            "visible": none,
            "order": none,
            "bags": np.zeros(1, dtype=np.int64),
        }, False
    span = pages.span
    row_of = np.full(
        len(pages.count) + 1, -1, dtype=np.int64
    )  # the last for what belongs to no slot: -1
    row_of[rows] = np.arange(len(rows))
    row = row_of[pages.owner[:span]]
    ids = np.flatnonzero(row >= 0)
    gathered = 3 * len(ids) < span
    if not gathered:
        ids = np.arange(span)
    size, wide = _roomy(len(ids)), tiled(len(rows))
    mine = np.full(size, -1, dtype=np.int64)
    mine[: len(ids)] = row[ids]
    held = np.where(mine >= 0, at[mine] + 1, 0)
    held[: len(ids)] -= pages.first[ids]
    bag = np.where(mine >= 0, mine, wide)
    order = np.argsort(bag, kind="stable")
    fields = {
        "page_rows": np.maximum(mine, 0),
        "visible": np.where(mine >= 0, held, 0).clip(0, PAGE),
        "order": order,
        "bags": np.searchsorted(bag[order], np.arange(wide + 1)),
    }
    if gathered:
        fields["page_ids"] = _padded(ids, size)
    return fields, gathered


def _blocks(step: Step, pages: Pages, *, start: int) -> dict[str, Ints]:
    """Chunks cut into blocks; the first token of the first chunk is number `start`."""
    lanes, reached, spots, ends = [], [], [], [*range(len(step.rows))]
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


def _flat(shape: Shape, fields: Mapping[str, Ints]) -> Ints:
    parts = [fields[name].ravel() for name, size in shape.fields().items() if np.prod(size)]
    return np.concatenate(parts).astype(np.int64, copy=False)


def _padded(values: Ints, size: int) -> Ints:
    return np.concatenate([values, np.zeros(size - len(values), dtype=np.int64)])


def tiled(size: int) -> int:
    """
    >>> tiled(33), tiled(64)
    (40, 64)
    """
    return -(-size // TILE) * TILE


def _roomy(size: int) -> int:
    """A little more, so that there are few different ones: sixteen sizes in every octave.

    >>> _roomy(100), _roomy(1000)
    (104, 1024)
    """
    tile = max(TILE, 2 ** max(size.bit_length() - 5, 0))
    return -(-size // tile) * tile
