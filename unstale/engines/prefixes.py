"""A record of the token prefixes that a server probably has in its cache."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

BLOCK = 16
"""Number of tokens in a block. Servers cache contexts in blocks of this length or a multiple."""
_MAX_BLOCKS = 1 << 17
"""Largest number of block hashes to remember. Beyond it, the older half is dropped."""


class EpisodeTokens(list[int]):
    """A list of the tokens of an episode, to which tokens may only be appended.

    It remembers the hashes of its blocks and which ids were checked, so that each token is hashed
    and checked only once. Pickling turns it into a plain list.
    """

    __slots__ = ("_blocks", "_num_valid", "_vocab_size")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        super().__init__(tokens)
        self._blocks: Sequence[int] = ()
        self._num_valid = 0
        self._vocab_size = 0

    def __reduce__(self) -> tuple[type[list[int]], tuple[tuple[int, ...]]]:
        return list, (tuple(self),)

    def hash_blocks(self) -> Sequence[int]:
        self._blocks = [*self._blocks, *_hashes(self, self._blocks)]
        return self._blocks

    def unchecked(self, vocab_size: int) -> list[int]:
        """Return the tokens that were not checked yet to be below this vocabulary size.

        They are checked by this call: if all are from 0 to below `vocab_size`, later calls do not
        return them again.
        """
        if vocab_size != self._vocab_size:
            self._num_valid, self._vocab_size = 0, vocab_size
        tokens = self[self._num_valid :]
        if tokens and 0 <= min(tokens) <= max(tokens) < vocab_size:
            self._num_valid = len(self)
        return tokens


class CachedPrefixes:
    """A set of prefixes of token sequences, in whole blocks of `BLOCK` tokens.

    Methods take a sequence as the hashes of its blocks (`hash_blocks`).

    >>> seen = CachedPrefixes()
    >>> seen.add(hash_blocks(range(100)))
    >>> [seen.length(hash_blocks(tokens)) for tokens in ([*range(70), 5, 5], [1, *range(99)])]
    [64, 0]
    """

    def __init__(self) -> None:
        self._newer: set[int] = set()
        """The hashes of recently added blocks and of all blocks before them in their sequences."""
        self._older: set[int] = set()

    def add(self, blocks: Sequence[int]) -> None:
        known = bisect_left(blocks, True, key=lambda block: block not in self._newer)
        self._newer.update(blocks[known:])
        self._forget()

    def update(self, others: "CachedPrefixes") -> None:
        """Add all prefixes of another set to this one."""
        self._older |= others._older
        self._newer |= others._newer
        self._forget()

    def length(self, blocks: Sequence[int]) -> int:
        """Return the number of tokens in the longest prefix of a sequence that is in the set.

        `blocks` are the hashes of the sequence's blocks.
        """
        return BLOCK * bisect_left(blocks, True, key=lambda block: block not in self)

    def __contains__(self, block: int) -> bool:
        return block in self._newer or block in self._older

    def _forget(self) -> None:
        if len(self._newer) > _MAX_BLOCKS // 2:
            self._older, self._newer = self._newer, set()


def hash_blocks(tokens: Sequence[int]) -> Sequence[int]:
    """Return one hash for each whole block of tokens. It depends on the block and all earlier
    blocks.

    >>> hash_blocks(range(40)) == hash_blocks(range(70))[:2]
    True
    >>> hash_blocks(EpisodeTokens(range(40))) == hash_blocks(range(40))
    True
    """
    return tokens.hash_blocks() if isinstance(tokens, EpisodeTokens) else _hashes(tokens, ())


def add_blocks(context: Sequence[int], reply: Sequence[int], known: Sequence[int]) -> list[int]:
    """Return the block hashes of a context followed by its reply.

    `known` are the block hashes of the context.

    >>> known = hash_blocks(range(40))
    >>> add_blocks(range(40), range(40, 70), known) == hash_blocks(range(70))
    True
    """
    rest = (*context[len(known) * BLOCK :], *reply)
    return [*known, *_hashes(rest, (), known[-1] if known else 0)]


def _hashes(tokens: Sequence[int], known: Sequence[int], before: int = 0) -> list[int]:
    """Return the hashes of the blocks of `tokens`, except of the first blocks, whose hashes are
    `known`.

    If `known` is empty, `before` is the hash of the block before `tokens`, or 0 at the start of a
    sequence.
    """
    number = known[-1] if known else before
    hashes = []
    for start in range(len(known) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        number = hash((number, *tokens[start : start + BLOCK]))
        hashes.append(number)
    return hashes
