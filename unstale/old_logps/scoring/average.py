"""A moving average of weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms import proximal


class Average:
    """Exponentially weighted, bias-corrected mean of the weights (arXiv 2110.00641; algorithm.md, section 3).

        w_k = beta * w_{k-1} + 1 ;   ewma_k = ewma_{k-1} + (theta_k - ewma_{k-1}) / w_k

    Float32 at least: in bfloat16 an update is below the spacing of the numbers and would be lost. `age` is the mean
    age of what it holds, in updates; it tends to beta / (1 - beta).
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.age = 0.0
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, theta: Mapping[str, Tensor], *, beta: float) -> None:
        """Add weights with decay `beta`. The first become the average."""
        if not self.tensors:
            self.reset(theta)
            return
        self.weight, self.age = proximal.averaged(self.weight, self.age, beta=beta)
        for name, held in self.tensors.items():
            mean = self.tensors[name] = held.to(
                theta[name].device
            )  # a checkpoint's are in main memory
            mean += (_wide(theta[name]) - mean) / self.weight

    @torch.no_grad()
    def reset(self, theta: Mapping[str, Tensor]) -> None:
        """`ewma <- theta`, of weight 1 and age 0."""
        self.weight, self.age = 1.0, 0.0
        self.tensors = {name: _wide(tensor).clone() for name, tensor in theta.items()}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state(self) -> Mapping[str, Any]:
        return {
            "weight": self.weight,
            "age": self.age,
            "tensors": {k: v.clone() for k, v in self.tensors.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.weight, self.age = state["weight"], state["age"]
        self.tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.detach().float()
