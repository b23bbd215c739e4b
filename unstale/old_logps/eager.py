"""`eager`: tokens are scored while their version still is the trainer's, in time it would spend waiting for data."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unstale.old_logps import OldLogps, Passive, has_clean_behavior
from unstale.old_logps.scoring.cache import LogpCache, ScoreQueue, key_of
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.records import Batch, PendingPiece


class Eager(Passive):
    """Exact for what arrived in time and for what the trainer still is at; `fallback` answers the rest.

    Finished turns stream in. What is sampled after the first optimizer step of a batch never is in time. Which share
    of the tokens asked about was, is reported as `old_logps/scored_in_time_share`; a trainer that never waits covers those of lag
    0, which it scores when it is asked, and about none beside.
    """

    def __init__(self, scorer: Scorer, *, fallback: OldLogps) -> None:
        self.fallback = fallback
        self.needs = replace(fallback.needs, idle=True)
        self._scorer = scorer
        self._cache = LogpCache(scorer)
        self._arrived: deque[PendingPiece] = deque()
        self._waiting: dict[int, ScoreQueue] = {}
        """By version."""
        self._asked = self._covered = 0

    def publishing(self) -> None:
        self.fallback.publishing()

    def published(self, live: Collection[int]) -> None:
        self._cache.keep({*live, self._scorer.version})
        self._sort()
        self._waiting = {
            version: waiting
            for version, waiting in self._waiting.items()
            if version >= self._scorer.version
        }
        self.fallback.published(live)

    def arrived(self, piece: PendingPiece) -> None:
        self._arrived.append(piece)
        self.fallback.arrived(piece)

    def idle(self) -> bool:
        self._sort()
        waiting = self._waiting.get(self._scorer.version)
        if not self._scorer.at_version or not waiting:
            return self.fallback.idle()
        self._cache.score(waiting.take(self._scorer.max_tokens))
        return True

    def closing(self, unscored: Sequence[PendingPiece]) -> None:
        self.fallback.closing(self._cache.missing(unscored))

    def trained(self, kept: float) -> None:
        self.fallback.trained(kept)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        values, covered = self._cache.lookup(batch)
        exact = covered & has_clean_behavior(batch)
        rest = batch.sampled & ~covered
        self._asked += int(batch.sampled.sum())
        self._covered += int(exact.sum())
        left = [i for i, (start, end) in enumerate(batch.spans()) if rest[start:end].any()]
        if left:
            part, index = replace(batch, sampled=rest).select(left)
            theirs, claims = self.fallback.logps(part, now[index] if len(now) else now)
            values = values.index_put((index,), torch.where(part.sampled, theirs, values[index]))
            exact = exact.index_put((index,), torch.where(part.sampled, claims, exact[index]))
        return values, exact

    def costs(self) -> Mapping[str, float]:
        theirs = self.fallback.costs()
        spent = {
            **theirs,
            "forward_tokens": theirs.get("forward_tokens", 0.0) + self._cache.take_forward_tokens(),
            "scored_in_time_share": self._covered / max(1, self._asked),
        }
        self._asked = self._covered = 0
        return spent

    def events(self) -> list[dict[str, Any]]:
        return self.fallback.events()

    def state(self) -> Mapping[str, Any]:
        return {"answers": self._cache.state(), "fallback": self.fallback.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cache.restore(state["answers"])
        self.fallback.restore(state["fallback"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """What it has no answer to itself is the fallback's, as it is when a version is closed."""
        lacking = {version: self._cache.missing(pieces) for version, pieces in past.items()}
        self.fallback.recover(
            {version: pieces for version, pieces in lacking.items() if pieces}, weights
        )

    def close(self) -> None:
        self.fallback.close()

    def _sort(self) -> None:
        """What the event loop has handed over, by version."""
        while self._arrived:
            piece = self._arrived.popleft()
            self._waiting.setdefault(piece.piece.version, ScoreQueue()).put(
                key_of(piece), piece.tokens
            )
