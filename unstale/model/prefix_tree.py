"""Prefix trees."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

MIN_SHARED = 16
"""Tokens that siblings must have in common: a shorter beginning costs more to share than to run again."""

ROUND = 32
"""A pass runs a multiple of so many tokens."""


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
