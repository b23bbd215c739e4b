"""A queue of tokens to be scored. Importing this module does not import torch."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from unstale.expert_routes import ExpertRoutes
    from unstale.records import PendingPiece


class PieceKey(NamedTuple):
    """The key of a piece (a run of sampled tokens): version, episode and start offset in it."""

    version: int
    episode: int
    start: int


def key_of(piece: "PendingPiece") -> PieceKey:
    return PieceKey(piece.piece.version, piece.episode, piece.start)


class PieceText(NamedTuple):
    """The episode's tokens up to the end of a piece."""

    tokens: Sequence[int]
    routes: "ExpertRoutes | None" = None
    """The experts that the piece's version chose for them."""


Pieces = dict[PieceKey, PieceText]
"""Pieces to be scored."""


def text_of(piece: "PendingPiece") -> PieceText:
    return PieceText(piece.tokens, piece.piece.routes)


def by_key(pieces: "Iterable[PendingPiece]") -> Pieces:
    return {key_of(piece): text_of(piece) for piece in pieces}


class ScoreQueue:
    """A queue of the pieces (runs of sampled tokens) of one version that are to be scored."""

    def __init__(self) -> None:
        self._episodes: dict[int, Pieces] = {}

    def __bool__(self) -> bool:
        return bool(self._episodes)

    def put(self, key: PieceKey, text: PieceText) -> None:
        self._episodes.setdefault(key.episode, {})[key] = text

    def take(self, max_tokens: int) -> Pieces:
        """Remove and return the pieces of one forward pass, longest waiting episodes first.

        The pieces of an episode are taken together, so a single episode may have more than
        `max_tokens`.
        """
        taken: Pieces = {}
        for episode, pieces in list(self._episodes.items()):
            length = max(len(text.tokens) for text in pieces.values())
            if taken and length > max_tokens:
                break
            taken |= self._episodes.pop(episode)
            max_tokens -= length
        return taken
