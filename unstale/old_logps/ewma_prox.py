"""`ewma_prox`: a bias-corrected moving average of the weights, about as old as the data, stands for the old policy."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from unstale.model.policy import Policy
from unstale.old_logps import Needs, Passive, Scoring
from unstale.old_logps.average import Average
from unstale.records import Batch


class EwmaProx(Passive):
    """`prox` from an average of the weights: of every published version, or after every optimizer step. Never exact."""

    needs = Needs(resident_models=1)

    def __init__(
        self, policy: Policy, *, beta: float, scoring: Scoring, every_step: bool = False
    ) -> None:
        self.average = Average()
        self._beta = beta
        self._every_step = every_step
        self._movable = policy.twin()
        self._current = False
        self._version: int | None = None
        self._scoring = scoring
        self._forward_tokens = 0

    def published(self, policy: Policy, live: Collection[int]) -> None:
        if policy.version == self._version:
            return
        self._version = policy.version
        if not (self._every_step and self.average.tensors):
            self._take(policy)

    def trained(self, policy: Policy, kept: float) -> None:
        if self._every_step:
            self._take(policy)

    def _take(self, policy: Policy) -> None:
        self.average.update(policy.weights(), beta=self._beta)
        self._current = False

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if not self.average.tensors:
            raise LookupError("ewma_prox has no weights to average: no version was published")
        if not self._current:
            self._movable.load_weights(self.average.tensors)
            self._current = True
        scored = self._scoring(self._movable, batch, batch.sampled)
        self._forward_tokens += scored.forward_tokens
        return scored.logp, torch.zeros_like(batch.sampled)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._forward_tokens),
            "resident_bytes": float(self.average.bytes),
            "ewma_age": self.average.age,
        }
        self._forward_tokens = 0
        return spent

    def state(self) -> Mapping[str, Any]:
        return {"average": self.average.state(), "version": self._version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.average.restore(state["average"])
        self._version, self._current = state["version"], False
