"""A queue of pieces to score. Importing this module does not import torch."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from unstale.records import PendingPiece


class PieceKey(NamedTuple):
    """The key of a scored piece: version, episode and start offset in the episode."""

    version: int
    episode: int
    start: int


def key_of(piece: "PendingPiece") -> PieceKey:
    return PieceKey(piece.piece.version, piece.episode, piece.start)


Pieces = dict[PieceKey, Sequence[int]]
"""Pieces to score: by key, the tokens of the episode from its start to the end of the piece."""


def by_key(pieces: "Iterable[PendingPiece]") -> Pieces:
    return {key_of(piece): piece.tokens for piece in pieces}


class ScoreQueue:
    """A queue of the pieces of one version that are to be scored."""

    def __init__(self) -> None:
        self._episodes: dict[int, Pieces] = {}

    def __bool__(self) -> bool:
        return bool(self._episodes)

    def put(self, key: PieceKey, tokens: Sequence[int]) -> None:
        self._episodes.setdefault(key.episode, {})[key] = tokens

    def take(self, max_tokens: int) -> Pieces:
        """Remove and return pieces for one forward pass, from the episodes that waited longest.

        All pieces of an episode are taken together. One episode may exceed `max_tokens`.
        """
        taken: Pieces = {}
        for episode, pieces in list(self._episodes.items()):
            length = max(map(len, pieces.values()))
            if taken and length > max_tokens:
                break
            taken |= self._episodes.pop(episode)
            max_tokens -= length
        return taken
