"""The route `current_recompute`: compute `old_logp` with the weights before the training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unstale.config.routes import ALWAYS_ONE, Meaning, Needs, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps, has_clean_behavior

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch


class CurrentRecompute(OldLogps):
    """A method that computes `old_logp` with the current policy instead of the one that sampled.

    The ratio D = pi_old / mu then contains all staleness (mu is the policy that sampled). S = pi /
    pi_old contains only the changes within the step. Values are exact for tokens that the current
    version sampled.
    """

    needs = Needs(now=True, forwards="one")

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if now.shape != batch.sampled.shape:
            raise ValueError(
                f"current_recompute needs `now` for {len(batch.sampled)} tokens, "
                f"got {tuple(now.shape)}"
            )
        exact = batch.sampled & False
        if self._scorer.weights_match_version:
            exact = has_clean_behavior(batch) & (batch.version == self._scorer.version)
        return now.where(batch.sampled, 0.0), exact


@dataclass(frozen=True, kw_only=True)
class CurrentRecomputeSpec(OldLogpsConfig):
    """Options of the route `current_recompute`, which uses the weights before each step."""

    route: str = "current_recompute"
    makes: ClassVar[type[OldLogps]] = CurrentRecompute

    exactness: ClassVar = "for tokens of lag 0"
    # with one optimizer step per batch, S is always 1
    requires: ClassVar = {"old_logps.baseline": True}
    to_free_s: ClassVar = {"trainer.minibatches_per_batch": 2}
    docs: ClassVar = RouteDocs(
        policy="the trainer at the start of the step",
        exact="at lag 0",
        holds="nothing",
        costs="one forward pass",
        choose="as a baseline; S is 1 with one step per batch",
    )

    def weight_of_now(self, run: RunConfig) -> float:
        return 1.0

    def meaning(self, run: RunConfig) -> Meaning:
        moves = run.trainer.steps_per_batch > 1
        return Meaning(
            symbol="pi_now",
            policy="the trainer's weights at the start of the batch",
            d="numerics and all staleness",
            s="learning, but only by this batch's own optimizer steps" if moves else ALWAYS_ONE,
            cost="one more forward pass a batch",
        )
