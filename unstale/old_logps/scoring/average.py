"""The moving average of the weights with which some routes compute `old_logp`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms import proximal
from unstale.model.sharding import host_copy


class Average:
    """A moving average of weights, without a bias towards the first weights (arXiv 2110.00641).

        w_k = beta * w_{k-1} + 1 ;   ewma_k = ewma_{k-1} + (theta_k - ewma_{k-1}) / w_k

    theta_k are the weights of update k. The average is kept in float32 or float64, because bfloat16
    would round most updates to nothing. `weight` is w_k. `age` is the mean age of the averaged
    weights, in updates. It approaches beta / (1 - beta).

    With `in_main_memory` the averaged weights are in main memory. An update copies one tensor at a
    time to the device of the weights, and back.
    """

    def __init__(self, *, in_main_memory: bool = False) -> None:
        self._in_main_memory = in_main_memory
        self.weight = 0.0
        self.age = 0.0
        self.tensors: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, theta: Mapping[str, Tensor], *, beta: float) -> None:
        """Update the average with the weights `theta` and the decay `beta`.

        At the first update, the average is set to `theta`.
        """
        if not self.tensors:
            self.reset(theta)
            return
        self.weight, self.age = proximal.averaged(self.weight, self.age, beta=beta)
        for name, tensor in self.tensors.items():
            # the average is on the CPU after a checkpoint was loaded
            mean = tensor.to(theta[name].device)
            mean += (_wide(theta[name]) - mean) / self.weight
            self.tensors[name] = tensor.copy_(mean) if self._in_main_memory else mean

    @torch.no_grad()
    def reset(self, theta: Mapping[str, Tensor]) -> None:
        """Set the average to the weights `theta`, with weight 1 and age 0."""
        self.weight = 1.0
        self.age = 0.0
        if self._in_main_memory:
            self.tensors = {
                name: host_copy(_wide(tensor), pinned=True) for name, tensor in theta.items()
            }
        else:
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
        self.weight = state["weight"]
        self.age = state["age"]
        self.tensors = {name: tensor.clone() for name, tensor in state["tensors"].items()}


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.detach().float()
