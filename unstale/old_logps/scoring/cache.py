"""Answers that are there before they are asked for: pieces scored while a model still held their version."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unstale.model.prefix_tree import Packed
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.records import Batch, PendingPiece


class PieceKey(NamedTuple):
    """Whose tokens, and from which position of the episode on."""

    version: int
    episode: int
    start: int


def key_of(piece: PendingPiece) -> PieceKey:
    return PieceKey(piece.piece.version, piece.episode, piece.start)


def score_pieces(
    scorer: Scorer, pieces: Mapping[PieceKey, Sequence[int]], version: int | None = None
) -> tuple[dict[PieceKey, Tensor], int]:
    """Return log-probabilities of pieces at the weights of `version`, and the tokens forwarded.

    Each piece comes with all tokens of its episode up to its own end. Those of one episode share one sequence: the
    longest begins with all the others. How they are packed does not depend on the order in which they came.
    """
    if not pieces:
        return {}, 0
    longest: dict[int, Sequence[int]] = {}
    for place, tokens in sorted(pieces.items()):
        longest[place.episode] = max(longest.get(place.episode, ()), tokens, key=len)
    offsets = tuple(accumulate(map(len, longest.values()), initial=0))
    begins = dict(zip(longest, offsets[:-1], strict=True))
    packed = Packed(
        torch.tensor([token for tokens in longest.values() for token in tokens]), offsets
    )
    where = torch.zeros(len(packed.tokens), dtype=torch.bool)
    spans = {
        place: slice(begins[place.episode] + place.start, begins[place.episode] + len(tokens))
        for place, tokens in pieces.items()
    }
    for span in spans.values():
        where[span] = True
    scored = scorer.score(packed, where, version)
    return {
        place: scored.logp[span].clone() for place, span in spans.items()
    }, scored.forward_tokens


class ScoreQueue:
    """Pieces of one version that wait to be scored, by episode: what an episode has is scored in one sequence."""

    def __init__(self) -> None:
        self._episodes: dict[int, dict[PieceKey, Sequence[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._episodes)

    def put(self, place: PieceKey, tokens: Sequence[int]) -> None:
        self._episodes.setdefault(place.episode, {})[place] = tokens

    def take(self, max_tokens: int) -> dict[PieceKey, Sequence[int]]:
        """Remove about one forward pass: all pieces of the episodes that have waited longest."""
        taken: dict[PieceKey, Sequence[int]] = {}
        for episode, pieces in list(self._episodes.items()):
            length = max(map(len, pieces.values()))
            if taken and length > max_tokens:
                break
            taken |= self._episodes.pop(episode)
            max_tokens -= length
        return taken


class LogpCache:
    """Log-probabilities of pieces that were scored in time. Not thread-safe."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._logps: dict[PieceKey, Tensor] = {}
        self._forward_tokens = 0

    def add(self, logps: Mapping[PieceKey, Tensor], forward_tokens: int) -> None:
        self._logps.update(logps)
        self._forward_tokens += forward_tokens

    def score(self, pieces: Mapping[PieceKey, Sequence[int]], version: int | None = None) -> None:
        """Score pieces by the weights of `version`, or by the trained weights if it is None."""
        logps, forward_tokens = score_pieces(self._scorer, pieces, version)
        self.add(logps, forward_tokens)

    def missing(self, pieces: Iterable[PendingPiece]) -> list[PendingPiece]:
        """Return the pieces that are not scored."""
        return [piece for piece in pieces if key_of(piece) not in self._logps]

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Score missing pieces of past versions by their weights from disk."""
        missing = {version: self.missing(pieces) for version, pieces in past.items()}
        if not any(missing.values()):
            return
        with self._scorer.reading(weights):
            for version, pieces in sorted(missing.items()):
                self.score({key_of(piece): piece.tokens for piece in pieces}, version)

    def lookup(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return log-probabilities `[T]`, and where they are known (`[T]` bool); 0 elsewhere.

        Tokens of the current version that were not scored yet are scored now, while the trained
        weights still are that version.
        """
        values = torch.zeros(len(batch.tokens), dtype=self._scorer.dtype)
        known = torch.zeros_like(batch.sampled)
        of_episode: dict[int, list[tuple[int, Tensor]]] = {}
        for key, logp in self._logps.items():
            of_episode.setdefault(key.episode, []).append((key.start, logp))
        for (begin, _), episode in zip(batch.spans(), batch.episodes, strict=True):
            for start, logp in of_episode.get(episode, ()):
                span = slice(begin + start, begin + start + len(logp))
                values[span] = logp
                known[span] = True
        known &= batch.sampled
        current = batch.sampled & ~known & (batch.version == self._scorer.version)
        if self._scorer.at_version and current.any():
            scored = self._scorer.score(batch, current)
            values = torch.where(current, scored.logp, values)
            known = known | current
            self._forward_tokens += scored.forward_tokens
        return torch.where(known, values, 0.0), known

    def keep(self, versions: Collection[int]) -> None:
        """Drop pieces of all other versions."""
        self._logps = {key: logp for key, logp in self._logps.items() if key.version in versions}

    def take_forward_tokens(self) -> int:
        """Return the tokens forwarded since the last call."""
        forward_tokens, self._forward_tokens = self._forward_tokens, 0
        return forward_tokens

    def state(self) -> Mapping[str, Tensor]:
        """Return all log-probabilities end to end, and rows `(version, episode, start, length)`."""
        places = [(*key, len(logp)) for key, logp in self._logps.items()]
        return {
            "places": torch.tensor(places, dtype=torch.long).view(-1, 4),
            "logp": torch.cat([torch.empty(0), *self._logps.values()]),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        places = state["places"].tolist()
        logps = state["logp"].split([length for *_, length in places])
        self._logps = {PieceKey(*key): logp for (*key, _), logp in zip(places, logps, strict=True)}


def require_scored(batch: Batch, known: Tensor, *, why: str) -> None:
    """Raise LookupError if a token of the batch was not scored."""
    lost = batch.sampled & ~known
    if lost.any():
        versions = batch.version[lost].unique().tolist()
        raise LookupError(
            f"{int(lost.sum())} tokens of versions {versions} were never scored: {why}"
        )
