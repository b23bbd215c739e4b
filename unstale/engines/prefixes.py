"""Openings of contexts that were seen lately, in whole blocks, as the cache of a server holds them."""

from collections.abc import Iterator, Sequence

BLOCK = 16
"""Tokens. The blocks of a server's cache are as long or a multiple, so it holds no more of a context than was added."""
_MAX_BLOCKS = 1 << 17


class CachedPrefixes:
    """Remembers what was added, and forgets the oldest.

    >>> seen = Prefixes()
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
        """Add what they remember."""
        self._blocks.update(others._blocks)
        self._forget()

    def length(self, tokens: Sequence[int]) -> int:
        """Tokens of the longest opening of `tokens` that was added."""
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
    """One number for each whole block, which depends on all before it."""
    number = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        number = hash((number, *tokens[start : start + BLOCK]))
        yield number
