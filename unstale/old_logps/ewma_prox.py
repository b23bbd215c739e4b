"""`ewma_prox`: a bias-corrected moving average of the weights, about as old as the data, stands for the old policy."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from unstale.old_logps import Needs, Passive
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch


class EwmaProx(Passive):
    """`prox` from an average of the weights: of every published version, or after every optimizer step. Never exact."""

    needs = Needs(resident_models=1)

    def __init__(self, scorer: Scorer, *, beta: float, every_step: bool = False) -> None:
        self.average = scorer.make_average()
        self._scorer = scorer
        self._beta = beta
        self._every_step = every_step
        self._version: int | None = None
        self._forward_tokens = 0

    def published(self, live: Collection[int]) -> None:
        if self._scorer.version == self._version:
            return
        self._version = self._scorer.version
        if not (self._every_step and self.average.weight):
            self.average.update(self._beta)

    def trained(self, kept: float) -> None:
        if self._every_step:
            self.average.update(self._beta)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if not self.average.weight:
            raise LookupError("ewma_prox has no weights to average: no version was published")
        scored = self.average.score(batch, batch.sampled)
        self._forward_tokens += scored.forward_tokens
        return scored.logp, torch.zeros_like(batch.sampled)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._forward_tokens),
            "memory_bytes": float(self.average.bytes),
            "ewma_age": self.average.age,
        }
        self._forward_tokens = 0
        return spent

    def state(self) -> Mapping[str, Any]:
        return {"average": self.average.state(), "version": self._version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.average.restore(state["average"])
        self._version = state["version"]
