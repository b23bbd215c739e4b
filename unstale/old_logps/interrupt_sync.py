"""The route `interrupt_sync`: pause generation to compute `old_logp` of all tokens of a version.

The values are computed with this version's weights, so they are exact.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unstale.config.routes import ExactSpec, Needs, RouteDocs
from unstale.old_logps import OldLogps, has_clean_behavior
from unstale.old_logps.scoring.cached_route import CachedRoute
from unstale.old_logps.scoring.queue import by_key

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch, PendingPiece


class InterruptSync(CachedRoute):
    """A method that computes `old_logp` with the trainer's weights before a step changes them.

    The values are exact, and no memory for past weights is needed. But generation is paused from
    the call of `before_update` until the next version is published. The metric `stall_s` is the
    length of this pause in seconds, and is reported with the next batch.
    """

    needs = Needs(closing=True, forwards="versions")

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        self._paused_at: float | None = None
        self._stall_s = 0.0
        self._closing_s = 0.0

    def on_published(self, live: Collection[int]) -> None:
        if self._paused_at is not None:
            self._stall_s += time.perf_counter() - self._paused_at
            self._paused_at = None
        super().on_published(live)

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        self._paused_at = began = time.perf_counter()
        self.cache.score(by_key(self.cache.missing(unscored)))
        self._closing_s += time.perf_counter() - began

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch's `old_logp`, which `before_update` computed, and a mask of exact values.

        Raises LookupError if a token of the batch was not passed to `before_update`.
        """
        why = "their pieces were missing when their version was closed"
        return self.cache.require(batch, why=why), has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._scorer.take_forward_tokens()),
            "closing_s": self._closing_s,
            "stall_s": self._stall_s,
        }
        self._stall_s = 0.0
        self._closing_s = 0.0
        return spent


@dataclass(frozen=True, kw_only=True)
class InterruptSyncSpec(ExactSpec):
    """Options of the route `interrupt_sync`, which pauses generation to compute `old_logp`."""

    route: str = "interrupt_sync"
    makes: ClassVar[type[OldLogps]] = InterruptSync

    docs: ClassVar = RouteDocs(
        policy="the trainer, before the step that changes the version",
        exact="yes",
        holds="nothing",
        costs="generation is paused during a step",
        choose="if no memory is left, and steps are short compared with rollouts",
    )

    def cost(self, run: RunConfig) -> str:
        return (
            "generation stands still from before a batch's first optimizer step to the publication"
        )
