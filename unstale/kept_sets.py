"""Kept sets: the tokens among which an engine drew a token, with top-p, top-k or min-p.

A truncated distribution is renormalised over its kept set. Only the engine knows the set: other
weights, or other rounding, would keep other tokens. So it is recorded with each token, and every
log-probability of that token, by any weights, is taken over the recorded set.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # environments and the command line import records without torch and numpy
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Sizes = NDArray[np.int64]
    Ids = NDArray[np.int32]


class Truncation(NamedTuple):
    """The part of a distribution from which tokens are drawn. Each limit applies after the last.

    `min_p` keeps the tokens with at least this share of the highest probability, `top_k` the k most
    probable of these (0: all), and `top_p` the fewest of those, in the order of their probability,
    whose probabilities have at least this share of the sum.

    >>> bool(Truncation()), bool(Truncation(top_p=0.95))
    (False, True)
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __bool__(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


WHOLE = Truncation()
"""Tokens are drawn from the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept sets of n tokens.

    Token i was drawn from the `sizes[i]` ids of its set, which ascend. The sets are one after the
    other in `ids`. The size 0 stands for the whole vocabulary.
    """

    sizes: "Sizes"
    ids: "Ids"

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.sizes.nbytes + self.ids.nbytes

    @property
    def any_whole(self) -> bool:
        """True if one of the tokens was drawn from the whole vocabulary."""
        return not self.sizes.all()

    def at(self, index: Any) -> "KeptSets":
        """Return the sets of the tokens at some positions, an array or tensor `[m]`, or a slice."""
        import numpy as np

        places = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        sizes = self.sizes[places]
        starts = (np.cumsum(self.sizes) - self.sizes)[places]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return KeptSets(sizes, self.ids[np.repeat(starts, sizes) + within])

    def split(self, counts: Sequence[int]) -> "list[KeptSets]":
        """Return the sets of successive runs of tokens, of which `counts` has the lengths."""
        ends = [*accumulate(counts)]
        return [self.at(slice(end - n, end)) for n, end in zip(counts, ends, strict=True)]

    def to_tensors(self) -> "tuple[Tensor, Tensor]":
        """Return sizes and ids as tensors, without a copy."""
        import torch

        return torch.from_numpy(self.sizes), torch.from_numpy(self.ids)

    @classmethod
    def of_tensors(cls, sizes: "Tensor", ids: "Tensor") -> "KeptSets":
        return cls(sizes.numpy(), ids.numpy())

    def pack(self, tokens: "Sequence[int] | NDArray[Any]") -> bytes:
        """Return the sets as bytes, without the drawn tokens, which all sets contain.

        The bytes are the sizes, then for each set the differences of its other ids, in LEB128, all
        compressed by deflate. Raises ValueError if a set lacks its token of `tokens`.
        """
        import numpy as np

        own = np.repeat(np.asarray(tokens, np.int64), self.sizes)
        others = self.ids != own
        if len(self.ids) - np.count_nonzero(others) != np.count_nonzero(self.sizes):
            raise ValueError("a kept set lacks the token that was drawn from it")
        ids = self.ids[others].astype(np.int64)
        first = np.zeros(len(ids), np.bool_)
        counts = self.sizes - (self.sizes > 0)
        starts = (np.cumsum(counts) - counts)[counts > 0]
        first[starts] = True
        steps = np.diff(ids, prepend=0)
        steps[first] = ids[first]
        numbers = _leb128(np.concatenate([self.sizes, steps]))
        return zlib.compress(numbers, 6, _RAW)

    @classmethod
    def unpack(cls, data: bytes, tokens: "Sequence[int] | NDArray[Any]") -> "KeptSets":
        """Return the sets that `pack` packed. Raises ValueError for other bytes."""
        import numpy as np

        try:
            numbers = _from_leb128(zlib.decompress(data, _RAW))
        except zlib.error as error:
            raise ValueError(f"the kept sets are damaged: {error}") from error
        sizes, steps = numbers[: len(tokens)], numbers[len(tokens) :]
        counts = sizes - (sizes > 0)
        if len(sizes) != len(tokens) or counts.sum() != len(steps):
            raise ValueError(f"the kept sets of {len(tokens)} tokens are damaged")
        total = np.cumsum(steps)
        starts = np.cumsum(counts) - counts
        before = np.concatenate([[0], total])[starts]
        others = total - np.repeat(before, counts)
        drawn = np.asarray(tokens, np.int64)[sizes > 0]
        rows = np.concatenate([np.repeat(np.arange(len(sizes)), counts), np.flatnonzero(sizes)])
        ids = np.concatenate([others, drawn])
        order = np.lexsort((ids, rows))
        return cls(sizes, ids[order].astype(np.int32))


def join(parts: Sequence[tuple[int, KeptSets | None]]) -> KeptSets | None:
    """Return the sets of several runs of tokens, one run after the other.

    A run is its number of tokens, and their sets or None: the whole vocabulary. Return None if no
    run has sets.
    """
    import numpy as np

    if all(kept is None for _, kept in parts):
        return None
    sizes = [np.zeros(n, np.int64) if kept is None else kept.sizes for n, kept in parts]
    ids = [kept.ids for _, kept in parts if kept is not None]
    return KeptSets(np.concatenate(sizes), np.concatenate(ids))


_RAW = -15
"""zlib's `wbits` for deflate without a header and a checksum."""
_LEB_BYTES = 5


def _leb128(numbers: "NDArray[np.int64]") -> bytes:
    """Return numbers below 2**35 as LEB128: 7 bits a byte, the lowest first."""
    import numpy as np

    digits = np.arange(_LEB_BYTES) * 7
    counts = np.maximum(1, (numbers[:, None] >> digits > 0).sum(1))
    more = np.arange(_LEB_BYTES) < counts[:, None] - 1
    parts = (numbers[:, None] >> digits & 0x7F) | more * 0x80
    kept: NDArray[np.uint8] = parts[np.arange(_LEB_BYTES) < counts[:, None]].astype(np.uint8)
    return kept.tobytes()


def _from_leb128(data: bytes) -> "NDArray[np.int64]":
    """Return the numbers in LEB128. Raises ValueError if the last one is incomplete."""
    import numpy as np

    parts = np.frombuffer(data, np.uint8).astype(np.int64)
    ends = np.flatnonzero(parts < 0x80)
    if len(parts) and (not len(ends) or ends[-1] != len(parts) - 1):
        raise ValueError("the kept sets are damaged")
    if not len(ends):
        return ends
    starts = np.concatenate([[0], ends[:-1] + 1])
    digit = np.arange(len(parts)) - np.repeat(starts, ends - starts + 1)
    if digit.max() >= _LEB_BYTES:
        raise ValueError("the kept sets are damaged")
    numbers: NDArray[np.int64] = np.add.reduceat((parts & 0x7F) << 7 * digit, starts)
    return numbers
