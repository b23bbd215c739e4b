"""The base class of routes that compute `old_logp` of tokens before their batch exists."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unstale.old_logps import OldLogps

if TYPE_CHECKING:
    from unstale.old_logps.scoring.scorer import Scorer, Weights
    from unstale.records import PendingPiece


class CachedRoute(OldLogps):
    """A method that computes `old_logp` of tokens early, and keeps it until their batch comes."""

    def __init__(self, scorer: Scorer) -> None:
        from unstale.old_logps.scoring.cache import LogpCache  # it imports torch

        self.cache = LogpCache(scorer)
        self._scorer = scorer

    def on_published(self, live: Collection[int]) -> None:
        self.cache.keep({*live, self._scorer.version})

    def state(self) -> Mapping[str, Any]:
        return {"answers": self.cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cache.restore(state["answers"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Compute missing `old_logp` of tokens of past versions, with weights read from disk."""
        self.cache.recover(past, weights)
