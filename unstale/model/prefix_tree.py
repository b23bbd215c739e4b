"""Prefix trees: packed sequences in which a prefix that several sequences share appears once.

The nodes of the tree are segments, which are runs of tokens. A sequence is a path from a root to a
node. Segments are stored depth first. So all tokens that continue a segment are one contiguous
span, which attends to the segment in one call.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstale.kept_sets import KeptSets
from unstale.model.context import ContextGroup
from unstale.records import token_positions

MIN_SHARED = 16
"""Least number of tokens of a shared prefix. Sharing fewer takes longer than computing them
twice.
"""

ROUND = 32
"""The number of tokens in a pass is padded to a multiple of this, so that few different shapes
occur.
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences packed end to end: sequence `i` is `tokens[offsets[i]:offsets[i + 1]]`."""

    tokens: Tensor
    offsets: tuple[int, ...]
    routed_experts: Tensor | None = None
    """`[T, layers, k]`: the recorded experts that a forward pass uses for each token. None means
    that the model's routers choose experts.
    """
    kept_sets: KeptSets | None = None
    """The sets of tokens over which the T log-probabilities are normalised, because sampling was
    truncated to them. None means the whole vocabulary.
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in self.spans())

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that the same sequences have in common: `[start, end)` of a pass.

    The tokens that follow it, in any of these sequences, are `[end, last)` of the pass.
    """

    start: int
    end: int
    last: int
    path: tuple[tuple[int, int], ...] = ()
    """Spans `(start, end)` of the earlier segments of the same sequences, from the root on."""

    @property
    def depth(self) -> int:
        """The number of tokens before this segment in its sequences."""
        return sum(end - start for start, end in self.path)


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The N tokens of one forward pass, for sequences with a total of T tokens.

    N may be smaller than T, because shared prefixes appear once. N is a multiple of `ROUND`, so the
    last tokens may be padding.
    """

    tokens: Tensor
    positions: Tensor
    place: Tensor
    """`[T]`: the index among the N tokens of each token of the sequences."""
    follows: Tensor
    """`[T]` bool: False for the first token of each sequence, which has no log-probability."""
    segments: tuple[Segment, ...]
    num_tokens: int
    """The number of tokens without padding."""
    routed_experts: Tensor | None = None
    """`[N, layers, k]`: the recorded experts that the pass uses for each token. None means that the
    model's routers choose experts.
    """
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict, compare=False)
    """A cache of attention masks for all layers, by `(queries, depth, window)`. `mask` fills it."""
    layouts: dict[str, Any] = field(default_factory=dict, compare=False)
    """A cache of the tree in the form that attention kernels read, by device.
    `tree_attention.layout_of` fills it.
    """
    kept_sets: KeptSets | None = None
    """The sets of tokens over which the T log-probabilities are normalised. None means the whole
    vocabulary.
    """
    context: ContextGroup | None = None
    """The ranks that divide the N tokens of the pass. None if this process runs all tokens."""

    @property
    def own_tokens(self) -> slice:
        """The slice of the N tokens that this process runs."""
        return self.context.slice_of(len(self.tokens)) if self.context else slice(None)

    def mask(self, queries: int, depth: int, window: int | None, device: torch.device) -> Tensor:
        """Return an attention mask `[queries, depth + queries]`: True for attended keys.

        The queries are the tokens of one segment, which has `depth` tokens before it. `window` is
        the number of tokens to which a query attends, its own included. None means all earlier
        tokens.
        """
        key = queries, depth, window
        if key not in self.masks:
            causal = torch.ones(queries, depth + queries, dtype=torch.bool, device=device)
            causal = causal.tril(depth)
            self.masks[key] = causal if window is None else causal.triu(depth + 1 - window)
        return self.masks[key]


def build_prefix_tree(packed: Packed, *, share: bool) -> PrefixTree:
    """Return packed sequences as a prefix tree. Without `share`, no prefix is shared.

    Sequences share a token only if their recorded experts for it are the same, too.
    """
    tokens = packed.tokens.cpu()
    routed_experts = packed.routed_experts
    place = torch.arange(len(tokens))
    follows = torch.ones(len(place), dtype=torch.bool)
    follows[[start for start, end in packed.spans() if end > start]] = False
    if share:
        keys = tokens
        if (
            routed_experts is not None
        ):  # bytes: as whole numbers they would take eight times the memory
            keys = torch.cat([_as_bytes(tokens), _as_bytes(routed_experts)], 1)
        builder = _Builder(keys.numpy(), place.numpy(), packed.spans())
        builder.build()
        source = token_positions(builder.sources)
        tokens = tokens[source]
        routed_experts = routed_experts if routed_experts is None else routed_experts[source]
        segments = builder.segments
    else:
        segments = [Segment(start, end, end) for start, end in packed.spans() if end > start]
    num_tokens = len(tokens)
    if padding := -num_tokens % ROUND:
        tokens = torch.cat([tokens, tokens.new_zeros(padding)])
        if routed_experts is not None:
            absent = torch.iinfo(routed_experts.dtype).max
            routed_experts = torch.cat(
                [
                    routed_experts,
                    routed_experts.new_full((padding, *routed_experts.shape[1:]), absent),
                ]
            )
        segments.append(Segment(num_tokens, num_tokens + padding, num_tokens + padding))
    positions = token_positions((s.depth, s.depth + s.end - s.start) for s in segments)
    return PrefixTree(
        tokens,
        positions,
        place,
        follows,
        tuple(segments),
        num_tokens,
        routed_experts,
        kept_sets=packed.kept_sets,
    )


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().reshape(len(rows), -1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Branch:
    """A sequence, or several that agree in at least `depth` + `MIN_SHARED` tokens."""

    members: list[int]
    path: tuple[tuple[int, int], ...]
    depth: int


class _Builder:
    """A depth-first walk over a prefix tree, which stores segments and the index of each token."""

    def __init__(
        self, keys: np.ndarray, place: np.ndarray, spans: Sequence[tuple[int, int]]
    ) -> None:
        """Start without segments.

        `keys` are `[T]` or `[T, n]`: one or n numbers for each packed token. Sequences share tokens
        with equal keys. `build` writes the index of each token in the tree to `place` `[T]`.
        `spans` are the sequences' spans `(start, end)`.
        """
        self._sequences = [keys[start:end] for start, end in spans]
        self._places = [place[start:end] for start, end in spans]
        self._starts = [start for start, _ in spans]
        self.sources: list[tuple[int, int]] = []
        """For each segment: the span `(start, end)` of packed tokens from which its tokens are
        taken.
        """
        self.segments: list[Segment] = []
        self._size = 0

    def build(self) -> None:
        # A stack, because the tree may be deeper than Python's recursion limit. A number on the
        # stack is a segment: when the walk reaches it again, all its continuations are stored.
        stack: list[_Branch | int] = []
        stack += self._branches(range(len(self._sequences)), (), 0)
        while stack:
            item = stack.pop()
            if isinstance(item, int):
                self.segments[item] = replace(self.segments[item], last=self._size)
                continue
            segment = self._add_segment(item)
            if len(item.members) > 1:
                stack.append(len(self.segments) - 1)
                path = (*item.path, (segment.start, segment.end))
                depth = item.depth + segment.end - segment.start
                stack += self._branches(item.members, path, depth)

    def _add_segment(self, branch: _Branch) -> Segment:
        """Add a segment with the longest prefix that all sequences of the branch share."""
        begin = branch.depth
        end = begin + self._shared_length(branch)
        segment = Segment(
            self._size, self._size + end - begin, self._size + end - begin, branch.path
        )
        self._size = segment.end
        first = self._starts[branch.members[0]]
        self.sources.append((first + begin, first + end))
        places = np.arange(segment.start, segment.end)
        for member in branch.members:
            self._places[member][begin:end] = places
        self.segments.append(segment)
        return segment

    def _branches(
        self, members: Iterable[int], path: tuple[tuple[int, int], ...], depth: int
    ) -> list[_Branch]:
        """Group sequences that have more than `depth` tokens by their next `MIN_SHARED` tokens.

        A sequence with fewer tokens left is a group of its own. The groups are in reverse order,
        because the caller puts them on a stack.
        """
        groups: dict[object, list[int]] = {}
        for member in members:
            opening = self._sequences[member][depth : depth + MIN_SHARED]
            if not len(opening):
                continue
            key = opening.tobytes() if len(opening) == MIN_SHARED else member
            groups.setdefault(key, []).append(member)
        return [_Branch(group, path, depth) for group in reversed(groups.values())]

    def _shared_length(self, branch: _Branch) -> int:
        """Return the number of tokens after `depth` that all sequences of the branch share."""
        first, *others = (self._sequences[member][branch.depth :] for member in branch.members)
        length = len(first)
        for other in others:
            length = min(length, len(other))
            differs = (other[:length] != first[:length]).reshape(length, -1).any(1)
            if differs.any():
                length = int(differs.argmax())
        return length
