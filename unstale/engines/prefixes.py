"""A record of the token prefixes that a server probably has in its cache."""

from collections.abc import Sequence

BLOCK = 16
"""Number of tokens in a block. The blocks of a server's cache have this length or a multiple of
it.
"""
_MAX_BLOCKS = 1 << 17
"""Largest number of blocks to remember, which limits memory. The oldest are dropped first."""


class CachedPrefixes:
    """A set of prefixes of token sequences, in whole blocks of `BLOCK` tokens.

    A sequence is given by its blocks, see `hash_blocks`.

    >>> seen = CachedPrefixes()
    >>> seen.add(hash_blocks(range(100)))
    >>> [seen.length(hash_blocks(tokens)) for tokens in ([*range(70), 5, 5], [1, *range(99)])]
    [64, 0]
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks.pop(block, None)
            self._blocks[block] = None
        self._forget()

    def update(self, others: "CachedPrefixes") -> None:
        """Add all prefixes of another set to this one."""
        self._blocks.update(others._blocks)
        self._forget()

    def length(self, blocks: Sequence[int]) -> int:
        """Return the length, in tokens, of the longest prefix that is in the set."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            count += BLOCK
        return count

    def _forget(self) -> None:
        while len(self._blocks) > _MAX_BLOCKS:
            del self._blocks[next(iter(self._blocks))]


def hash_blocks(tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """Return one hash per whole block of tokens. It depends on all blocks before it.

    `known` are the hashes of the first blocks, which are then not computed again.

    >>> known = hash_blocks(range(40))
    >>> len(known), hash_blocks(range(70), known) == hash_blocks(range(70))
    (2, True)
    """
    blocks = [*known]
    number = blocks[-1] if blocks else 0
    for start in range(len(blocks) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        number = hash((number, *tokens[start : start + BLOCK]))
        blocks.append(number)
    return blocks
