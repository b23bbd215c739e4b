"""The optimizer and its float32 weights, which may be in main memory between optimizer steps."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unstale.config import RunConfig
from unstale.model.policy import Policy
from unstale.model.sharding import by_mesh, gather_whole, local
from unstale.trainer.masters import Masters
from unstale.trainer.offload import MainMemory
from unstale.trainer.optimizer import make_optimizer

PART = 1 << 26
"""Number of weights that an optimizer step changes at a time, if they are offloaded to main memory.
A larger tensor is changed by itself.
"""


class WeightUpdate:
    """The optimizer of a policy, with its float32 weights.

    With `trainer.offload_optimizer`, the optimizer's state and the float32 weights that passes do
    not use are in main memory. They are on the device only while an optimizer step changes them,
    part by part. The result is the same, bit for bit, because no optimizer of torch combines two
    weights.
    """

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self.masters = Masters(policy, config)
        self._peers = policy.peers
        self._name = config.trainer.optimizer
        self._weights = self.masters.tensors
        self.optimizer = make_optimizer(config.trainer, list(self._weights.values()))
        self._memory = MainMemory()
        self._groups = by_mesh(self._weights)
        self._parts = self._groups
        """The parts of an optimizer step: for each, the names of the weights that are changed
        together.
        """
        self._offloads = config.trainer.offload_optimizer
        if self._offloads:
            self._parts = [
                part
                for names in self._groups
                for part in parts_of({name: self._weights[name] for name in names}, PART)
            ]
            self._put_away(self._weights)

    def clip(self, limit: float) -> float:
        """Scale the gradients down if their norm exceeds `limit`.

        Return the norm before scaling.
        """
        groups = [[self._weights[name] for name in names] for names in self._groups]
        if len(groups) == 1:
            return float(gather_whole(nn.utils.clip_grad_norm_(groups[0], limit)))
        gradients = [
            local(each.grad) for group in groups for each in group if each.grad is not None
        ]
        norm = nn.utils.get_total_norm(gradients).double().cpu()
        total = (self._peers.sum(norm.square()) / self._peers.replicas).sqrt()
        torch._foreach_mul_(gradients, min(1.0, limit / (float(total) + 1e-6)))
        return float(total)

    def apply(self, step: int) -> Tensor:
        """Take optimizer step number `step`, and round the weights into the policy.

        The gradients are freed. Return the three sums of `Masters.moved`.
        """
        gradients = {name: weight.grad for name, weight in self._weights.items()}
        self.drop_gradients()
        moved = torch.zeros(3, dtype=torch.float64)
        for names in self._parts:
            with self._on_device(names):
                for name in names:  # an optimizer leaves out weights without a gradient
                    self._weights[name].grad = gradients.pop(name)
                self.masters.watch(names)
                self.optimizer.step()
                self.drop_gradients()
                self.masters.round(step, names)
                moved += self.masters.moved()
        return moved

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> Mapping[str, Any]:
        """Return the weights and the optimizer's state for a checkpoint, without a copy."""
        read = self._memory.numbers
        optimizer = self.optimizer.state_dict()
        optimizer["state"] = {
            number: {key: read(value) for key, value in values.items()}
            for number, values in optimizer["state"].items()
        }
        return {
            "weights": {name: read(weight.detach()) for name, weight in self._weights.items()},
            "optimizer": optimizer,
            "optimizer_name": self._name,
            "rounded_at": self.masters.rounded_at,
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint.

        The optimizer keeps its tensors without a copy, unless they are offloaded. Raises ValueError
        if the state belongs to another optimizer.
        """
        # torch loads the state of another optimizer without an error, and fails at the next step
        used = state.get("optimizer_name", self._name)
        if used != self._name:
            raise ValueError(f"the optimizer was {used}, and trainer.optimizer is now another one")
        for names in self._parts:
            with self._on_device(names):
                self.masters.restore(state["weights"], state.get("rounded_at", 0), names)
        if self._offloads:
            for values in self.optimizer.state.values():
                for value in filter(_is_offloaded, values.values()):
                    self._memory.forget(value)
        self.optimizer.load_state_dict(state["optimizer"])
        if self._offloads:
            self._put_away_copies()

    @contextmanager
    def _on_device(self, names: Collection[str]) -> Iterator[None]:
        if not self._offloads:
            yield
            return
        for name in names:
            for tensor in self._offloaded(name):
                self._memory.bring(tensor)
        yield
        self._put_away(names)

    def _put_away_copies(self) -> None:
        """Replace the optimizer's state by a copy, because others may read the original.

        The copy's large tensors are in main memory.
        """
        for values in self.optimizer.state.values():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    values[key] = value.clone()
                    if _is_offloaded(values[key]):
                        self._memory.put(values[key])
        self._memory.wait()

    def _put_away(self, names: Collection[str]) -> None:
        for name in names:
            for tensor in self._offloaded(name):
                self._memory.put(tensor)
        self._memory.wait()

    def _offloaded(self, name: str) -> Iterator[Tensor]:
        """Yield the tensors of a weight that are in main memory between optimizer steps."""
        weight = self._weights[name]
        if name in self.masters.separate:
            yield weight.detach()
        yield from filter(_is_offloaded, self.optimizer.state.get(weight, {}).values())


def _is_offloaded(value: Any) -> bool:
    """Return True for a value of an optimizer's state that is as large as its weight."""
    return isinstance(value, Tensor) and value.dim() > 0


def parts_of(weights: Mapping[str, Tensor], size: int) -> list[list[str]]:
    """Divide weights into the parts of a step, of at most `size` numbers each. Return their names.

    A larger weight forms a part by itself. Every rank has the same parts, because they follow from
    the sizes of whole weights.

    >>> parts_of({"a": torch.empty(3), "b": torch.empty(2), "c": torch.empty(9)}, size=5)
    [['a', 'b'], ['c']]
    """
    parts: list[list[str]] = []
    room = 0
    for name, weight in weights.items():
        if not parts or weight.numel() > room:
            parts.append([])
            room = size
        parts[-1].append(name)
        room -= weight.numel()
    return parts
