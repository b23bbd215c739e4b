"""The route `snapshot_old`: keep the weights of each version, to compute exact `old_logp`.

Each token's log-probability is computed with the weights of the version that sampled it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unstale.config.routes import ExactSpec, HasPlacement, Needs, RouteDocs, live_versions
from unstale.old_logps import OldLogps, has_clean_behavior

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import MakeStore, Scorer, Weights
    from unstale.records import Batch, PendingPiece


class SnapshotOld(OldLogps):
    """A method that computes `old_logp` with kept weights of the version that sampled the token.

    It keeps one further copy of the model, and the differences between consecutive versions.
    Applying these turns the copy into one version after the other. With the weights of a version,
    the copy computes the sequences that contain tokens of this version, up to the last such token.
    The trainer's model computes the values of tokens of the current version, until an optimizer
    step changes the model. A thread computes the difference of a new version from the previous one,
    while the trainer continues.
    """

    needs = Needs(snapshots=True, resident_models=1, forwards="versions")

    def __init__(
        self,
        scorer: Scorer,
        *,
        make_store: MakeStore | None = None,
        placement: Literal["twin", "own"] = "twin",
    ) -> None:
        self.needs = self.needs.placed(placement)
        scorer.keep_versions(make_store, placement=placement)
        self.scorer = scorer

    def on_published(self, live: Collection[int]) -> None:
        self.scorer.begin_put(live)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the old log-probabilities of a batch with kept weights.

        Return them, and a mask of exact values, `[T]` each. Raises LookupError if the weights of a
        version in the batch were dropped.
        """
        scored = self.scorer.score_versions(batch, batch.sampled, use_trained=True)
        return scored.logp, has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        forward_tokens = self.scorer.take_forward_tokens()
        return {"forward_tokens": float(forward_tokens), **self.scorer.costs()}

    def state(self) -> Mapping[str, Any]:
        return {"store": self.scorer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scorer.restore(state["store"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        self.scorer.recover(past, weights)

    def close(self) -> None:
        self.scorer.close()


@dataclass(frozen=True, kw_only=True)
class SnapshotOldSpec(HasPlacement, ExactSpec):
    """Options of the route `snapshot_old`, which keeps the weights of past versions."""

    route: str = "snapshot_old"
    makes: ClassVar[type[OldLogps]] = SnapshotOld

    docs: ClassVar = RouteDocs(
        policy="the kept weights of the version that sampled the token",
        exact="yes",
        holds="one scoring copy and the deltas between versions",
        costs="one forward pass of each trajectory per version in it",
        choose="by default",
    )

    @property
    def shares_deltas(self) -> bool:
        return True

    def cost(self, run: RunConfig) -> str:
        copy = "one scoring copy" if self.placement == "twin" else "a copy in main memory"
        return (
            f"the weights of up to {live_versions(run)} versions (lossless differences)"
            f" and {copy}; a forward pass over each trajectory for every version in it"
        )
