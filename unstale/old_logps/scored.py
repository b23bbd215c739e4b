"""Answers that are there before they are asked for: pieces scored while a model still held their version."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.old_logps import Scoring, Weights
from unstale.records import Batch, PendingPiece


class PieceKey(NamedTuple):
    """Whose tokens, and from which position of the episode on."""

    version: int
    episode: int
    start: int


def key_of(piece: PendingPiece) -> PieceKey:
    return PieceKey(piece.piece.version, piece.episode, piece.start)


def score_pieces(
    policy: Policy, pieces: Mapping[PieceKey, Sequence[int]], scoring: Scoring
) -> tuple[dict[PieceKey, Tensor], int]:
    """`old_logp` of pieces of the version that `policy` holds, and the tokens that were forwarded for them.

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
    scored = scoring(policy, packed, where)
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

    def take(self, max_tokens_per_microbatch: int) -> dict[PieceKey, Sequence[int]]:
        """Remove about one forward pass: all pieces of the episodes that have waited longest."""
        taken: dict[PieceKey, Sequence[int]] = {}
        for episode, pieces in list(self._episodes.items()):
            length = max(map(len, pieces.values()))
            if taken and length > max_tokens_per_microbatch:
                break
            taken |= self._episodes.pop(episode)
            max_tokens_per_microbatch -= length
        return taken


class LogpCache:
    """`old_logp` of pieces that were scored in time. For one thread."""

    def __init__(self, scoring: Scoring) -> None:
        self.scoring = scoring
        self._held: dict[PieceKey, Tensor] = {}
        self._forward_tokens = 0

    def hold(self, answers: Mapping[PieceKey, Tensor], forward_tokens: int) -> None:
        self._held.update(answers)
        self._forward_tokens += forward_tokens

    def score(self, policy: Policy, pieces: Mapping[PieceKey, Sequence[int]]) -> None:
        """Score pieces of the version that `policy` is at."""
        self.hold(*score_pieces(policy, pieces, self.scoring))

    def lacking(self, pieces: Iterable[PendingPiece]) -> list[PendingPiece]:
        """Those that have no answer."""
        return [piece for piece in pieces if key_of(piece) not in self._held]

    def recover(
        self, policy: Policy, past: Mapping[int, Sequence[PendingPiece]], weights: Weights
    ) -> None:
        """Score what has no answer, by a model made for it that holds the weights of each version in turn."""
        lacking = {
            version: pieces for version in sorted(past) if (pieces := self.lacking(past[version]))
        }
        movable = policy.twin() if lacking else policy
        for version, pieces in lacking.items():
            movable.load_weights(weights(version))
            self.score(movable, {key_of(piece): piece.tokens for piece in pieces})

    def ask(self, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
        """`(values [T], answered [T])`. What `policy` is still at it answers itself; 0 where nobody can answer."""
        values = torch.zeros(
            len(batch.tokens), dtype=torch.promote_types(policy.dtype, torch.float32)
        )
        answered = torch.zeros_like(batch.sampled)
        held: dict[int, list[tuple[int, Tensor]]] = {}
        for place, answer in self._held.items():
            held.setdefault(place.episode, []).append((place.start, answer))
        for (start, _), episode in zip(batch.spans(), batch.episodes, strict=True):
            for at, answer in held.get(episode, ()):
                values[start + at : start + at + len(answer)] = answer
                answered[start + at : start + at + len(answer)] = True
        answered &= batch.sampled
        current = batch.sampled & ~answered & (batch.version == policy.version)
        if policy.at_version and current.any():
            scored = self.scoring(policy, batch, current)
            values, answered = torch.where(current, scored.logp, values), answered | current
            self._forward_tokens += scored.forward_tokens
        return torch.where(answered, values, 0.0), answered

    def keep(self, live: Collection[int], newest: int) -> None:
        """Forget what no unconsumed piece can be asked about: versions that are neither live nor the newest."""
        needed = {newest, *live}
        self._held = {
            place: answer for place, answer in self._held.items() if place.version in needed
        }

    def spent(self) -> int:
        """Tokens forwarded since the last call."""
        spent, self._forward_tokens = self._forward_tokens, 0
        return spent

    def state(self) -> Mapping[str, Tensor]:
        """All answers end to end; a row of `places` is `(version, episode, start, length)`."""
        places = [(*place, len(answer)) for place, answer in self._held.items()]
        return {
            "places": torch.tensor(places, dtype=torch.long).view(-1, 4),
            "logp": torch.cat([torch.empty(0), *self._held.values()]),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        places = state["places"].tolist()
        answers = state["logp"].split([length for *_, length in places])
        self._held = {
            PieceKey(*place): answer for (*place, _), answer in zip(places, answers, strict=True)
        }


def require_answers(batch: Batch, answered: Tensor, *, why: str) -> None:
    """LookupError if an action token has none."""
    lost = batch.sampled & ~answered
    if lost.any():
        versions = batch.version[lost].unique().tolist()
        raise LookupError(
            f"{int(lost.sum())} tokens of versions {versions} were never scored: {why}"
        )
