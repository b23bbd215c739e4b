"""`snapshot_old`: the weights of every version that a token still needs are kept, and score it. Exact."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unstale.model.policy import Policy
from unstale.old_logps import Needs, Passive, Scoring, Weights, has_clean_behavior
from unstale.records import Batch, PendingPiece
from unstale.weights.store import VersionStore


class SnapshotOld(Passive):
    """`old_logp` from the weights of the version that sampled the token (algorithm.md, section 2).

    One movable model is moved from version to version, and only what differs between neighbours is kept beside it.
    For a version it runs the sequences that hold it, each cut after its last token of that version, and keeps that
    version's tokens only. While the policy is at its published version it scores that version itself.
    """

    needs = Needs(snapshots=True, resident_models=1)

    def __init__(
        self,
        policy: Policy,
        *,
        scoring: Scoring,
        make_store: Callable[[Mapping[str, Tensor]], VersionStore] = VersionStore,
    ) -> None:
        """`make_store` gets the tensors of the movable model."""
        self._policy = policy
        self._movable = policy.twin()
        self._scoring = scoring
        self.store = make_store(self._movable.weights())
        self._forward_tokens = 0
        self._restore_s = 0.0

    def published(self, policy: Policy, live: Collection[int]) -> None:
        self._policy = policy
        self.store.keep(
            live
        )  # before `put` too: what nobody needs must not count against the memory limit
        self.store.put(policy.version, policy.weights())
        self.store.keep(live)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """LookupError if a version of the batch was in no `live` since it was published."""
        values = torch.zeros_like(batch.behavior_logp)
        for version in self._tour(batch.version[batch.sampled].unique().tolist()):
            where = batch.sampled & (batch.version == version)
            scored = self._scoring(self._at(version), batch, where)
            values = torch.where(where, scored.logp, values)
            self._forward_tokens += scored.forward_tokens
        return values, has_clean_behavior(batch)

    def _tour(self, versions: list[int]) -> list[int]:
        """Along the chain, from the end that is nearer to where the movable model stands."""
        moves = sorted(version for version in versions if not self._is_current(version))
        if moves and abs(moves[-1] - self.store.at) < abs(moves[0] - self.store.at):
            moves.reverse()
        return moves + [version for version in versions if self._is_current(version)]

    def _is_current(self, version: int) -> bool:
        return self._policy.at_version and self._policy.version == version

    def _at(self, version: int) -> Policy:
        """A model with the weights of `version`."""
        if self._is_current(version):
            return self._policy
        began = time.perf_counter()
        self.store.move_to(version)
        self._restore_s += time.perf_counter() - began
        return self._movable

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._forward_tokens),
            "restore_s": self._restore_s,
            "encode_s": self.store.encode_s,
            "resident_bytes": float(self.store.bytes),
            "movable_bytes": float(self.store.movable_bytes),
            "versions": float(len(self.store.versions)),
            "bytes_per_version": self.store.encoded_bytes / max(1, len(self.store.versions) - 1),
        }
        self._forward_tokens, self._restore_s, self.store.encode_s = 0, 0.0, 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        return {"store": self.store.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.store.restore(state["store"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """The versions that its store lacks are newer than those it has: it had whatever was needed."""
        self.store.keep(past)  # what nobody needs must not count against the memory limit
        for version in sorted(past.keys() - set(self.store.versions)):
            self.store.put(version, weights(version))

    def close(self) -> None:
        self.store.close()
