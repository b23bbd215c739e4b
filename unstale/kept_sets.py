"""Kept sets: the tokens among which an engine drew a token, with top-p, top-k or min-p sampling.

A truncated distribution is renormalised over its kept set. Only the engine knows the set: other
weights, or other rounding, would keep other tokens. So it is recorded with each token, and every
log-probability of that token, by any weights, is taken over the recorded set.
"""

from collections import deque
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
    """The limits that choose the kept set, from which sampling draws. They apply in this order.

    `min_p` keeps the tokens with at least this share of the highest probability. `top_k` keeps the
    k most probable of these (0: all). `top_p` keeps the fewest of those, the most probable first,
    whose probabilities add up to at least this share.

    >>> bool(Truncation()), bool(Truncation(top_p=0.95))
    (False, True)
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __bool__(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


WHOLE = Truncation()
"""The `Truncation` that keeps the whole vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept sets of n tokens: for each token, the ids of the tokens among which it was drawn.

    The set of token i has `sizes[i]` ids in ascending order. `ids` has the sets one after the
    other. The size 0 stands for the whole vocabulary.
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
        """Return the sets of some of the n tokens.

        `index` is an array or tensor `[m]`, or a slice.
        """
        import numpy as np

        places = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        sizes = self.sizes[places]
        starts = (np.cumsum(self.sizes) - self.sizes)[places]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return KeptSets(sizes, self.ids[np.repeat(starts, sizes) + within])

    def contain(self, tokens: Sequence[int]) -> bool:
        """Return True if each token is in its set, exactly once."""
        import numpy as np

        found = self.ids == np.repeat(np.array(tokens, np.int32), self.sizes)
        owner = np.repeat(np.arange(len(self)), self.sizes)
        return bool((np.bincount(owner[found], minlength=len(self)) == 1).all())

    def split(self, counts: Sequence[int]) -> "list[KeptSets]":
        """Divide the sets into those of successive runs of tokens.

        `counts` has the lengths of the runs.
        """
        ends = [*accumulate(counts)]
        return [self.at(slice(end - n, end)) for n, end in zip(counts, ends, strict=True)]

    def to_tensors(self) -> "tuple[Tensor, Tensor]":
        """Return sizes and ids as tensors, without a copy."""
        import torch

        return torch.from_numpy(self.sizes), torch.from_numpy(self.ids)

    @classmethod
    def of_lists(cls, sets: "Sequence[Sequence[int]]") -> "KeptSets":
        """Return sets whose ids are in any order."""
        import numpy as np

        ids = [np.sort(np.array(each, np.int32)) for each in sets]
        sizes = np.array([len(each) for each in sets], np.int64)
        return cls(sizes, np.concatenate([np.empty(0, np.int32), *ids]))

    @classmethod
    def of_tensors(cls, sizes: "Tensor", ids: "Tensor") -> "KeptSets":
        return cls(sizes.numpy(), ids.numpy())

    def tobytes(self) -> bytes:
        """Return the sets as bytes, not compressed. `frombuffer` reads them."""
        return self.sizes.tobytes() + self.ids.tobytes()

    @classmethod
    def frombuffer(cls, data: "bytes | bytearray", count: int) -> "KeptSets":
        """Return the sets of `count` tokens, given the bytes from `tobytes`."""
        import numpy as np

        sizes = np.frombuffer(data, np.int64, count)
        return cls(sizes, np.frombuffer(data, np.int32, int(sizes.sum()), sizes.nbytes))

    def pack(self, tokens: "Sequence[int] | NDArray[Any]") -> bytes:
        """Return the sets as compressed bytes.

        `tokens` are the drawn tokens, which are left out of the sets. Sets of one text resemble
        each other. So a set of `_LEAST` or more ids may refer to an earlier one: a bit for each id
        of that set says whether this set has it too, and only further ids follow. Ids are written
        as differences. Raises ValueError if a set lacks its drawn token.
        """
        import lzma

        import numpy as np

        distances: list[int] = []
        counts: list[int] = []
        bits: list[NDArray[np.bool_]] = []
        steps: list[NDArray[np.int64]] = []
        past: deque[Ids] = deque(maxlen=_WINDOW)
        for token, size, ids in zip(tokens, self.sizes.tolist(), self._each(), strict=True):
            others = ids[ids != token].astype(np.int64)
            if len(others) + 1 != size and size:
                raise ValueError("a kept set lacks the token that was drawn from it")
            if size >= _LEAST:
                distances.append(_best_reference(others, past))
                if distances[-1]:
                    bits.append(np.isin(past[-distances[-1]], others, assume_unique=True))
                    others = np.setdiff1d(others, past[-distances[-1]], assume_unique=True)
                    counts.append(len(others))
                past.append(ids)
            steps.append(np.diff(others, prepend=0))
        marks = np.packbits(np.concatenate([np.empty(0, np.bool_), *bits])).tobytes()
        head = np.array([*distances, *counts], np.int64)
        data = _leb128(np.concatenate([self.sizes, head, *steps]))
        packed = len(marks).to_bytes(4, "little") + marks + data
        return _LZMA + lzma.compress(packed, lzma.FORMAT_RAW, filters=_FILTERS)

    @classmethod
    def unpack(cls, data: bytes, tokens: "Sequence[int] | NDArray[Any]") -> "KeptSets":
        """Return the sets, given the bytes from `pack` and the same tokens.

        Raises ValueError for other bytes.
        """
        import lzma

        try:
            if not data.startswith(_LZMA):
                raise ValueError("another format")
            body = lzma.decompress(data[1:], lzma.FORMAT_RAW, filters=_FILTERS)
            start = 4 + int.from_bytes(body[:4], "little")
            return cls._read(body[4:start], _from_leb128(body[start:]), tokens)
        except (lzma.LZMAError, ValueError, IndexError) as error:
            raise ValueError(f"the kept sets of {len(tokens)} tokens are damaged") from error

    @classmethod
    def _read(
        cls, marks: bytes, numbers: "NDArray[np.int64]", tokens: "Sequence[int] | NDArray[Any]"
    ) -> "KeptSets":
        """Return the sets from the parts that `pack` wrote.

        Raises ValueError or IndexError for others.
        """
        import numpy as np

        bits = np.unpackbits(np.frombuffer(marks, np.uint8)).astype(np.bool_)
        sizes, rest = np.split(numbers, [len(tokens)])
        distances, rest = np.split(rest, [np.count_nonzero(sizes >= _LEAST)])
        counts, steps = np.split(rest, [np.count_nonzero(distances)])
        references, extras = iter(distances.tolist()), iter(counts.tolist())
        found: list[Ids] = []
        past: deque[Ids] = deque(maxlen=_WINDOW)
        for token, size in zip(tokens, sizes.tolist(), strict=True):
            parts = [np.full(min(size, 1), token)]
            number = max(size - 1, 0)
            if size >= _LEAST and (distance := next(references)):
                before = past[-distance]
                parts.append(before[bits[: len(before)]])
                bits, number = bits[len(before) :], next(extras)
            parts.append(np.cumsum(steps[:number]))
            steps = steps[number:]
            found.append(np.sort(np.concatenate(parts)).astype(np.int32))
            if len(found[-1]) != size:
                raise ValueError("a set has another size than its ids")
            if size >= _LEAST:
                past.append(found[-1])
        if len(steps):
            raise ValueError("there are ids of no set")
        return cls(sizes, np.concatenate([np.empty(0, np.int32), *found]))

    def _each(self) -> "list[Ids]":
        import numpy as np

        return np.split(self.ids, np.cumsum(self.sizes)[:-1]) if len(self) else []


def join(parts: Sequence[tuple[int, KeptSets | None]]) -> KeptSets | None:
    """Return the kept sets of several runs of tokens, one run after the other.

    A run is given by its number of tokens and their sets. The sets are None if the run was drawn
    from the whole vocabulary. Return None if no run has sets.
    """
    import numpy as np

    if all(kept is None for _, kept in parts):
        return None
    sizes = [np.zeros(n, np.int64) if kept is None else kept.sizes for n, kept in parts]
    ids = [kept.ids for _, kept in parts if kept is not None]
    return KeptSets(np.concatenate(sizes), np.concatenate(ids))


_LZMA = b"\x07"
"""The first byte of packed sets, which names the format."""
_FILTERS = ({"id": 0x4000000000000001, "preset": 6, "lc": 1, "lp": 0, "pb": 0, "dict_size": 2**16},)
"""LZMA1 without a header, with the options that made sets of SmolLM2 shortest."""
_LEAST = 8
"""Least number of ids with which a set may refer to another set. A reference costs as much as a few
ids.
"""
_WINDOW = 64
"""Number of earlier sets to which a set may refer. If it could refer to all sets of a reply, those
of SmolLM2 would become less than 1% shorter.
"""
_LEB_BYTES = 5


def _best_reference(ids: "NDArray[np.int64]", past: "Sequence[Ids]") -> int:
    """Return the distance to the earlier set that saves most bits as a reference. 0 if no set saves
    any.

    The last set has the distance 1. An id in common saves about the logarithm of the mean
    difference of ids, and each id of the earlier set costs a bit.
    """
    import numpy as np

    if not past:
        return 0
    sizes = np.array([len(each) for each in past])
    common = np.isin(np.concatenate(past), ids)
    shared = np.add.reduceat(common, np.cumsum(sizes) - sizes, dtype=np.int64)
    saved = shared * np.log2(ids[-1] / len(ids) + 1) - sizes
    best = int(saved.argmax())
    return len(past) - best if saved[best] > _REFERENCE_BITS else 0


_REFERENCE_BITS = 24
"""Bits that a reference costs: its distance, and the number of further ids."""


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
