"""A record of the token prefixes that a server probably has in its cache."""

from collections.abc import Iterator, Sequence

BLOCK = 16
"""Number of tokens in a block. The blocks of a server's cache have this length or a multiple of
it.
"""
_MAX_BLOCKS = 1 << 17
"""Largest number of blocks to remember, which limits memory. The oldest are dropped first."""


class CachedPrefixes:
    """A set of prefixes of token sequences, in whole blocks of `BLOCK` tokens.

    >>> seen = CachedPrefixes()
    >>> seen.add(range(100))
    >>> seen.length([*range(70), 5, 5, 5]), seen.length([1, *range(99)])
    (64, 0)
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def add(self, tokens: Sequence[int]) -> None:
        for block in _chain(tokens):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        self._forget()

    def update(self, others: "CachedPrefixes") -> None:
        """Add all prefixes of another set to this one."""
        self._blocks.update(others._blocks)
        self._forget()

    def length(self, tokens: Sequence[int]) -> int:
        """Return the length, in tokens, of the longest prefix of `tokens` that is in the set."""
        count = 0
        for block in _chain(tokens):
            if block not in self._blocks:
                break
            count += BLOCK
        return count

    def _forget(self) -> None:
        while len(self._blocks) > _MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]


def _chain(tokens: Sequence[int]) -> Iterator[int]:
    """Yield one hash per whole block of tokens. It depends on all blocks before it."""
    number = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        number = hash((number, *tokens[start : start + BLOCK]))
        yield number
