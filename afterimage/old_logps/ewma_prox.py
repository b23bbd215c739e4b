"""`ewma_prox`: a bias-corrected moving average of the weights, about as old as the data, stands for the old policy."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from afterimage.old_logps import Needs, Passive, Scoring
from afterimage.policy import Policy
from afterimage.trajectory import Batch


class Average:
    """Exponentially weighted, bias-corrected mean of the weights (arXiv 2110.00641; algorithm.md, section 3).

        w_k = beta * w_{k-1} + 1 ;   ewma_k = ewma_{k-1} + (theta_k - ewma_{k-1}) / w_k

    Float32 at least: in bfloat16 an update is below the spacing of the numbers and would be lost. `age` is the mean
    age of what it holds, in updates; it tends to beta / (1 - beta).
    """

    def __init__(self, *, beta: float) -> None:
        self.beta = beta
        self.weight = 0.0
        self.age = 0.0
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, theta: Mapping[str, Tensor]) -> None:
        """One more set of weights."""
        if not self.tensors:
            self.weight, self.age = 1.0, 0.0
            self.tensors = {name: _wide(tensor).clone() for name, tensor in theta.items()}
            return
        before, self.weight = self.weight, self.beta * self.weight + 1
        self.age = self.beta * before * (self.age + 1) / self.weight
        for name, mean in self.tensors.items():
            mean += (_wide(theta[name]) - mean) / self.weight

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> Mapping[str, Any]:
        return {"weight": self.weight, "age": self.age, "tensors": {k: v.clone() for k, v in self.tensors.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.weight, self.age = state["weight"], state["age"]
        self.tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.detach().float()


class EwmaProx(Passive):
    """`prox` from an average of the published versions, updated once per version. Never exact."""

    needs = Needs(resident_models=1)

    def __init__(self, policy: Policy, *, beta: float, scoring: Scoring) -> None:
        self.average = Average(beta=beta)
        self._movable = policy.twin()
        self._current = False
        self._version: int | None = None
        self._scoring = scoring
        self._forward_tokens = 0

    def published(self, policy: Policy, live: Collection[int]) -> None:
        if policy.version == self._version:
            return
        self.average.update(policy.weights())
        self._version, self._current = policy.version, False

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
