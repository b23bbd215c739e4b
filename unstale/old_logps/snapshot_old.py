"""`snapshot_old`: kept weights of every version that a token still needs score it. Exact."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from unstale.old_logps import Needs, Passive, has_clean_behavior
from unstale.old_logps.scoring.scorer import MakeStore, Scorer, Weights, score_versions
from unstale.records import Batch, PendingPiece
from unstale.weights.store import VersionStore


class SnapshotOld(Passive):
    """Score each token by the weights of the version that sampled it (algorithm.md, section 2).

    One movable model is moved from version to version. Only the differences between neighbouring
    versions are kept beside it. For a version it runs the sequences that hold it, each cut after its
    last token of that version. The current version is scored by the trained weights while they still
    are that version.
    """

    needs = Needs(snapshots=True, resident_models=1)

    def __init__(self, scorer: Scorer, *, make_store: MakeStore = VersionStore) -> None:
        scorer.keep_versions(make_store)
        self.scorer = scorer
        self._forward_tokens = 0

    def published(self, live: Collection[int]) -> None:
        self.scorer.keep(live)  # before `put` too: dropped versions must not count as memory
        self.scorer.put()
        self.scorer.keep(live)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """LookupError if a version of the batch was in no `live` since it was published."""
        current = self.scorer.version if self.scorer.at_version else None
        scored = score_versions(self.scorer, batch, batch.sampled, current=current)
        self._forward_tokens += scored.forward_tokens
        return scored.logp, has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        forward_tokens, self._forward_tokens = self._forward_tokens, 0
        return {"forward_tokens": float(forward_tokens), **self.scorer.costs()}

    def state(self) -> Mapping[str, Any]:
        return {"store": self.scorer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.scorer.restore(state["store"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        self.scorer.recover(past, weights)

    def close(self) -> None:
        self.scorer.close()
