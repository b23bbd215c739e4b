"""`interrupt_sync`: the trainer scores what its weights sampled, with generation paused. Exact."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from unstale.old_logps import Needs, Passive, has_clean_behavior
from unstale.old_logps.scoring.cache import LogpCache, key_of, require_scored
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.records import Batch, PendingPiece


class InterruptSync(Passive):
    """Score tokens by the trained weights before these leave their version (algorithm.md, section 2).

    Costs no memory but pauses generation. `stall_s` runs from `closing`, through all optimizer steps
    of the batch, until generation resumes with the next version. It is known when that is published,
    and so is reported with the batch after.
    """

    needs = Needs(closing=True)

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._cache = LogpCache(scorer)
        self._paused_at: float | None = None
        self._stall_s = 0.0
        self._closing_s = 0.0

    def published(self, live: Collection[int]) -> None:
        if self._paused_at is not None:
            self._stall_s += time.perf_counter() - self._paused_at
            self._paused_at = None
        self._cache.keep({*live, self._scorer.version})

    def closing(self, unscored: Sequence[PendingPiece]) -> None:
        self._paused_at = began = time.perf_counter()
        missing = self._cache.missing(unscored)
        self._cache.score({key_of(piece): piece.tokens for piece in missing})
        self._closing_s += time.perf_counter() - began

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """LookupError if a token's piece was not among the unscored when its version was closed."""
        values, scored = self._cache.lookup(batch)
        require_scored(batch, scored, why="their pieces were missing when their version was closed")
        return values, has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._cache.take_forward_tokens()),
            "closing_s": self._closing_s,
            "stall_s": self._stall_s,
        }
        self._stall_s = 0.0
        self._closing_s = 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        return {"answers": self._cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cache.restore(state["answers"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        self._cache.recover(past, weights)
