"""`snapshot_old`: the weights of every version that a token still needs are kept, and score it. Exact."""

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from afterimage.old_logps import Needs, Passive, Scoring, has_clean_behavior
from afterimage.policy import Policy
from afterimage.trajectory import Batch
from afterimage.versions import VersionStore


class SnapshotOld(Passive):
    """`old_logp` from the weights of the version that sampled the token (algorithm.md, section 2).

    One movable model receives the weights of one version after the other. For a version it runs the sequences that
    hold it, each cut after its last token of that version, and keeps that version's tokens only. While the policy is
    at its published version it scores that version itself.
    """

    needs = Needs(snapshots=True, resident_models=1)

    def __init__(self, policy: Policy, *, scoring: Scoring) -> None:
        self._policy = policy
        self._movable = policy.twin()
        self._movable_at: int | None = None
        self._scoring = scoring
        self._store = VersionStore()
        self._forward_tokens = 0
        self._restore_s = 0.0

    def published(self, policy: Policy, live: Collection[int]) -> None:
        self._policy = policy
        self._store.put(policy.version, policy.weights())
        self._store.keep(live)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """LookupError if a version of the batch was in no `live` since it was published."""
        values = torch.zeros_like(batch.behavior_logp)
        for version in batch.version[batch.sampled].unique().tolist():
            where = batch.sampled & (batch.version == version)
            scored = self._scoring(self._at(version), batch, where)
            values = torch.where(where, scored.logp, values)
            self._forward_tokens += scored.forward_tokens
        return values, has_clean_behavior(batch)

    def _at(self, version: int) -> Policy:
        """A model with the weights of `version`."""
        if self._policy.at_version and self._policy.version == version:
            return self._policy
        if self._movable_at != version:
            began = time.perf_counter()
            self._movable.load_weights(self._store.tensors(version))
            self._movable_at = version
            self._restore_s += time.perf_counter() - began
        return self._movable

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._forward_tokens),
            "restore_s": self._restore_s,
            "resident_bytes": float(self._store.bytes),
            "versions": float(len(self._store.versions)),
        }
        self._forward_tokens, self._restore_s = 0, 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        return {"store": self._store.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._store.restore(state["store"])
        self._movable_at = None
