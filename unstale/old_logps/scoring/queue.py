"""A queue of sampled tokens whose log-probabilities are still to be computed.

A piece is a run of tokens of one episode that one version sampled. This module does not import
torch.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from unstale.kept_sets import KeptSets
    from unstale.records import PendingPiece
    from unstale.routed_experts import RoutedExperts


class PieceKey(NamedTuple):
    """The key of a run of sampled tokens. `start` is the position of the first in the episode."""

    version: int
    episode: int
    start: int


def key_of(piece: "PendingPiece") -> PieceKey:
    return PieceKey(piece.piece.version, piece.episode, piece.start)


class PieceText(NamedTuple):
    """The tokens of an episode up to the end of a run of sampled tokens.

    A model reads them to compute the log-probabilities of this run.
    """

    tokens: Sequence[int]
    routed_experts: "RoutedExperts | None" = None
    """The experts that an MoE model used for `tokens`, under the weights that sampled the run."""
    kept_sets: "KeptSets | None" = None
    """The kept set of each token of the piece, which is the end of `tokens`. None without truncated
    sampling.
    """


Pieces = dict[PieceKey, PieceText]
"""Key of a run of tokens whose log-probabilities are to be computed -> the tokens to read for
them.
"""


def text_of(piece: "PendingPiece") -> PieceText:
    return PieceText(piece.tokens, piece.piece.routed_experts, piece.piece.kept_sets)


def by_key(pieces: "Iterable[PendingPiece]") -> Pieces:
    return {key_of(piece): text_of(piece) for piece in pieces}


class ScoreQueue:
    """A queue of sampled tokens of one version whose log-probabilities are to be computed."""

    def __init__(self) -> None:
        self._episodes: dict[int, Pieces] = {}

    def __bool__(self) -> bool:
        return bool(self._episodes)

    def __contains__(self, episode: int) -> bool:
        return episode in self._episodes

    def put(self, key: PieceKey, text: PieceText) -> None:
        self._episodes.setdefault(key.episode, {})[key] = text

    def take(self, max_tokens: int) -> Pieces:
        """Remove and return runs of tokens for one forward pass. The longest waiting run comes
        first.

        All runs of an episode are taken together. So the result has more than `max_tokens` tokens
        if the first episode is longer.
        """
        taken: Pieces = {}
        for episode, pieces in list(self._episodes.items()):
            length = max(len(text.tokens) for text in pieces.values())
            if taken and length > max_tokens:
                break
            taken |= self._episodes.pop(episode)
            max_tokens -= length
        return taken

    def take_all(self) -> Pieces:
        """Remove and return all runs of sampled tokens."""
        taken, self._episodes = self._episodes, {}
        return {key: text for pieces in taken.values() for key, text in pieces.items()}

    def discard(self, episodes: Iterable[int]) -> None:
        """Remove all pieces of these episodes."""
        for episode in episodes:
            self._episodes.pop(episode, None)


class ScoringOrder:
    """The order of a second model's work: score a version's tokens, then load the next version.

    `max_tokens` is the largest number of tokens in a forward pass.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._loaded = -1
        self._pieces: dict[int, ScoreQueue] = {}
        self._versions: deque[tuple[int, Any]] = deque()
        """Versions to be loaded, oldest first, with their weights."""

    def __bool__(self) -> bool:
        """Return True if there are versions to load, or tokens of the loaded version to score."""
        return bool(self._versions) or bool(self._pieces.get(self._loaded))

    def add_pieces(self, pieces: Pieces) -> None:
        """Add sampled tokens whose log-probabilities are to be computed.

        Raises `RuntimeError` for tokens of an older version than the loaded one.
        """
        for key, text in pieces.items():
            if key.version < self._loaded:
                raise RuntimeError(
                    f"a piece of version {key.version} came when version {self._loaded} was loaded"
                )
            self._pieces.setdefault(key.version, ScoreQueue()).put(key, text)

    def add_version(self, version: int, weights: Any) -> None:
        self._versions.append((version, weights))

    def take_pieces(self) -> Pieces:
        """Remove and return tokens of the loaded version for one forward pass. Empty if none."""
        queue = self._pieces.get(self._loaded)
        return queue.take(self._max_tokens) if queue else {}

    def take_version(self) -> tuple[int, Any]:
        """Remove and return the next version to load: its number and its weights."""
        self._pieces.pop(self._loaded, None)
        self._loaded, weights = self._versions.popleft()
        return self._loaded, weights
