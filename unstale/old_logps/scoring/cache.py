"""A cache of log-probabilities, for routes that compute `old_logp` before a batch is formed.

A piece is a run of tokens of one episode that one version sampled. Scoring tokens means computing
their log-probabilities in a forward pass.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from unstale.kept_sets import KeptSets, join
from unstale.model.prefix_tree import Packed
from unstale.old_logps.scoring.queue import PieceKey, Pieces, PieceText, by_key, key_of
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.old_logps.scoring.second_model import Reply
from unstale.records import Batch, PendingPiece
from unstale.routed_experts import no_rows


def score_pieces(
    scorer: Scorer, pieces: Pieces, version: int | None = None
) -> dict[PieceKey, Tensor]:
    """Return the log-probabilities of sampled tokens, by the key of their piece (run of tokens).

    They are computed with the weights of `version`, or with the trainer's current weights if it is
    None. All pieces must be of one version. The pieces of one episode are computed in one sequence:
    the longest of their texts, which contains the others. The order of `pieces` does not affect the
    values.
    """
    if not pieces:
        return {}
    sequences: dict[int, PieceText] = {}
    for key, text in sorted(pieces.items(), key=lambda item: item[0]):
        longest = sequences.setdefault(key.episode, text)
        if len(text.tokens) > len(longest.tokens):
            sequences[key.episode] = text
    lengths = [len(text.tokens) for text in sequences.values()]
    offsets = tuple(accumulate(lengths, initial=0))
    begins = dict(zip(sequences, offsets[:-1], strict=True))
    flat = [token for text in sequences.values() for token in text.tokens]
    where = torch.zeros(len(flat), dtype=torch.bool)
    spans = {}
    for key, text in pieces.items():
        begin = begins[key.episode]
        spans[key] = slice(begin + key.start, begin + len(text.tokens))
        where[spans[key]] = True
    experts = stack_experts([*sequences.values()])
    kept_sets = stack_kept_sets([(spans[key], text) for key, text in pieces.items()], len(flat))
    packed = Packed(torch.tensor(flat), offsets, experts, kept_sets)
    scored = scorer.score(packed, where, version)
    return {key: scored.logp[span].clone() for key, span in spans.items()}


def answer(scorer: Scorer, pieces: Pieces) -> Reply:
    """Compute log-probabilities of sampled tokens with the scorer's current weights.

    Return them as the message that a second model sends to the trainer.
    """
    logps = score_pieces(scorer, pieces)
    rows = [[key, logp.tolist()] for key, logp in logps.items()]
    return {"op": "answers", "answers": rows, "forward_tokens": scorer.take_forward_tokens()}


def stack_experts(texts: Sequence[PieceText]) -> Tensor | None:
    """Return the experts that were recorded for all texts, concatenated: `[T, layers, k]`.

    Return None if no text has recorded experts. If only some have, the rows of the others are
    marked as not recorded.
    """
    example = next((text.routed_experts for text in texts if text.routed_experts), None)
    if example is None:
        return None
    parts = []
    for text in texts:
        count = len(text.tokens)
        recorded = text.routed_experts
        rows = torch.from_numpy(recorded.rows(count)) if recorded else no_rows(example, count)
        parts.append(rows)
    return torch.cat(parts)


def stack_kept_sets(pieces: Sequence[tuple[slice, PieceText]], count: int) -> KeptSets | None:
    """Return the set of tokens to which the sampling of each of `count` tokens was truncated.

    `pieces` has spans of the `count` tokens, each with the text that has their sets. Other tokens
    get no set. Return None if no text has sets.
    """
    parts: list[tuple[int, KeptSets | None]] = []
    done = 0
    for span, text in sorted(pieces, key=lambda each: each[0].start):
        parts += [(span.start - done, None), (span.stop - span.start, text.kept_sets)]
        done = span.stop
    return join([*parts, (count - done, None)])


class LogpCache:
    """A cache of log-probabilities of sampled tokens, which keeps them until a batch needs them.

    The first value of a token is never replaced, because a later value may differ by rounding. Not
    thread-safe.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._logps: dict[PieceKey, Tensor] = {}
        """Log-probabilities of runs of sampled tokens, by key, in the order of adding."""

    def add_rows(self, rows: Iterable[Any]) -> None:
        """Add log-probabilities that another process computed.

        A row is a pair for a run of tokens: its `PieceKey`, and the list of log-probabilities.
        """
        dtype = self._scorer.dtype
        for key, values in rows:
            self._add(PieceKey(*key), torch.tensor(values, dtype=dtype))

    def score(self, pieces: Pieces, version: int | None = None) -> None:
        """Compute and store log-probabilities of sampled tokens under the weights of `version`.

        If `version` is None, the current weights are used.
        """
        for key, logp in score_pieces(self._scorer, pieces, version).items():
            self._add(key, logp)

    def missing(self, pieces: Iterable[PendingPiece]) -> list[PendingPiece]:
        """Return those runs of sampled tokens whose log-probabilities are not in the cache."""
        return [piece for piece in pieces if key_of(piece) not in self._logps]

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Compute missing log-probabilities of tokens of past versions, after a resume.

        `past` has the tokens by version. `weights` reads the weights of a version from disk.
        """
        missing = {version: self.missing(pieces) for version, pieces in past.items()}
        if not any(missing.values()):
            return
        with self._scorer.reading(weights):
            for version, pieces in sorted(missing.items()):
                self.score(by_key(pieces), version)

    def lookup(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a batch's cached log-probabilities, and a mask of those that are known, `[T]`
        each.

        Unknown values of tokens of the current version are computed and stored, unless an optimizer
        step has changed the weights since this version.
        """
        values = torch.zeros(len(batch.tokens), dtype=self._scorer.dtype)
        known = torch.zeros_like(batch.sampled)
        of_episode: dict[int, list[tuple[PieceKey, Tensor]]] = {}
        for key, logp in reversed(self._logps.items()):  # the first one is written last
            of_episode.setdefault(key.episode, []).append((key, logp))
        for (begin, end), episode in zip(batch.spans(), batch.episodes, strict=True):
            for key, logp in of_episode.get(episode, ()):
                # Where text was removed, places of later tokens may lie after the sequence's end.
                span = slice(begin + key.start, end)
                own = batch.version[span][: len(logp)] == key.version
                values[span][: len(own)][own] = logp[: len(own)][own]
                known[span][: len(own)] |= own
        known &= batch.sampled
        current = batch.sampled & ~known & (batch.version == self._scorer.version)
        if self._scorer.weights_match_version and current.any():
            scored = self._scorer.score(batch, current)
            values = torch.where(current, scored.logp, values)
            known = known | current
            self._add_runs(batch, values, current)
        return torch.where(known, values, 0.0), known

    def _add(self, key: PieceKey, logp: Tensor) -> None:
        had = self._logps.get(key, logp[:0])
        if len(logp) > len(had):
            self._logps[key] = torch.cat([had, logp[len(had) :]])

    def _add_runs(self, batch: Batch, values: Tensor, where: Tensor) -> None:
        """Add the log-probabilities `values` `[T]` of the tokens in the mask `where`.

        All these tokens must have been sampled by the current version.
        """
        for (begin, end), episode in zip(batch.spans(), batch.episodes, strict=True):
            edges = torch.nn.functional.pad(where[begin:end], (1, 1)).int().diff()
            starts, stops = ((edges == sign).nonzero().flatten().tolist() for sign in (1, -1))
            for start, stop in zip(starts, stops, strict=True):
                key = PieceKey(self._scorer.version, episode, start)
                self._add(key, values[begin + start : begin + stop])

    def require(self, batch: Batch, *, why: str) -> Tensor:
        """Return the log-probabilities `[T]` of a batch's sampled tokens, as `lookup` does.

        Raises LookupError if a sampled token has none. `why` is a reason for its message.
        """
        values, known = self.lookup(batch)
        lost = batch.sampled & ~known
        if lost.any():
            versions = batch.version[lost].unique().tolist()
            raise LookupError(
                f"{int(lost.sum())} tokens of versions {versions} were never scored: {why}"
            )
        return values

    def keep(self, versions: Collection[int]) -> None:
        """Drop all values except those of tokens that one of `versions` sampled."""
        self._logps = {key: logp for key, logp in self._logps.items() if key.version in versions}

    def state(self) -> Mapping[str, Tensor]:
        """Return the cache's contents for a checkpoint: `logp` has all values, concatenated.

        `places` has a row `(version, episode, start, length)` for each run of tokens.
        """
        places = [(*key, len(logp)) for key, logp in self._logps.items()]
        return {
            "places": torch.tensor(places, dtype=torch.long).view(-1, 4),
            "logp": torch.cat([torch.empty(0), *self._logps.values()]),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        places = state["places"].tolist()
        logps = state["logp"].split([length for *_, length in places])
        self._logps = {PieceKey(*key): logp for (*key, _), logp in zip(places, logps, strict=True)}
