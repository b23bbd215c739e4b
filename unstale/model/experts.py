"""Routed experts of an MoE model: record which ones its routers choose, or replay recorded ones.

The weights of replayed experts are the router's current probabilities, so the router gets a
gradient.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.model.attention import running
from unstale.model.sharding import gather_whole


def find_routers(model: nn.Module) -> list[nn.Module]:
    """Return the router modules of a model, in the order of its layers.

    A router returns `(logits [N, experts], weights [N, k], indices [N, k])`, or the reverse order.
    Raises ConfigError if the model has no router.
    """
    routers = [
        module
        for module in model.modules()
        if type(module).__name__.lower().endswith("topkrouter") and hasattr(module, "top_k")
    ]
    if not routers:
        raise ConfigError(
            f"trainer.routing_replay must be false: {type(model).__name__} has no routers of "
            "experts that can be replayed"
        )
    return routers


class ExpertRecorder:
    """A recorder of the experts that a model's routers choose in forward passes."""

    def __init__(self, model: nn.Module) -> None:
        routers = find_routers(model)
        self._chosen: list[list[Tensor]] = [[] for _ in routers]
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._record, layer))

    def _record(self, layer: int, router: nn.Module, inputs: Any, output: Any) -> None:
        self._chosen[layer].append(_parts(output)[2])

    def take(self) -> Tensor:
        """Return the experts `[N, layers, k]` of the N tokens in all passes since the last call.

        Only layers with a router count.
        """
        rows = torch.stack([torch.cat(chosen) for chosen in self._chosen], 1)
        for chosen in self._chosen:
            chosen.clear()
        return rows


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The layers of a model that have routed experts, and the number of experts per token."""

    num_layers: int
    routed: tuple[int, ...]
    """The indices of the layers that have a router."""
    k: int
    """Number of experts that a token uses in each of these layers."""

    def select(self, rows: Tensor) -> Tensor | None:
        """Return recorded experts for the layers with a router, `[N, routed layers, k]`.

        `rows` `[N, layers, k]` may also have rows for the other layers, as some servers send them.
        Return None if `rows` has no layers, which means that nothing was recorded. Raises
        ValueError for any other shape.
        """
        if not rows.shape[1]:
            return None
        if rows.shape[2] == self.k and rows.shape[1] == len(self.routed):
            return rows
        if rows.shape[2] == self.k and rows.shape[1] == self.num_layers:
            return rows[:, list(self.routed)]
        raise ValueError(
            f"the engine recorded {rows.shape[2]} experts in {rows.shape[1]} layers; the policy "
            f"has {self.k} in {len(self.routed)} of its {self.num_layers} layers"
        )


def replay_experts(model: PreTrainedModel) -> ExpertLayers:
    """Make a model's routers choose the experts that were recorded for the current pass, if any.

    Return the layers that have routers. If the model is divided among ranks, all ranks must call
    this. Raises ConfigError unless each router weights experts by their softmax probabilities, as
    they are or normalised over the chosen experts.
    """
    routers = find_routers(model)
    for place, router in enumerate(routers):
        _check_weights(router)
        router.register_forward_hook(partial(_replay, place))
    layers = routed_layers(model)
    routed = [i for i, has_router in enumerate(layers) if has_router]
    k: Any = routers[0].top_k
    return ExpertLayers(len(layers), tuple(routed), k)


def routed_layers(model: PreTrainedModel) -> tuple[bool, ...]:
    """Return one bool for each layer of a model: True if the layer has a router.

    Raises ConfigError if no layer has one.
    """
    routers = find_routers(model)
    layers: Any = model.base_model.layers
    return tuple(any(module in routers for module in layer.modules()) for layer in layers)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # or every tree would be compiled
def _replay(place: int, router: nn.Module, inputs: Any, output: Any) -> Any:
    """Replace the experts that a router chose by the recorded ones, as a forward hook.

    `place` is the index of the router among the model's routers. A token without recorded experts
    keeps the router's choice.
    """
    run = running.get()
    if run is None or run.routed_experts is None:
        return None
    logits, weights, own = _parts(output)
    recorded = run.routed_experts[run.own_tokens, place].to(own.device, non_blocking=True)
    absent = recorded == torch.iinfo(recorded.dtype).max
    experts = torch.where(absent, own, recorded.to(own.dtype))
    replayed = logits, _weights(router, logits, experts).to(weights.dtype), experts
    return replayed if output[0] is logits else replayed[::-1]


def _parts(output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return a router's output in the order logits, weights, experts.

    Some families of transformers 5.19, such as Granite-MoE, return them in the reverse order.
    """
    first, weights, last = output
    return (first, weights, last) if first.is_floating_point() else (last, weights, first)


def _weights(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Return the router's weights `[N, k]` for given experts, from its current logits."""
    chosen = logits.softmax(-1, dtype=torch.float32).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen


@torch.no_grad()
def _check_weights(router: nn.Module) -> None:
    """Raise ConfigError unless `_weights` computes the same weights of experts as the router.

    If the router is divided among ranks, all ranks must call this.
    """
    tensors = {name: gather_whole(tensor) for name, tensor in router.state_dict().items()}
    noise = torch.Generator().manual_seed(0)
    weight = tensors["weight"]
    hidden = 10 * torch.randn(8, weight.shape[1], generator=noise).to(weight)
    logits, weights, experts = _parts(functional_call(router, tensors, hidden))
    expected = _weights(router, logits, experts).to(weights.dtype)
    if weights.shape != expected.shape or not torch.allclose(weights, expected):
        raise ConfigError(
            f"trainer.routing_replay must be false: {type(router).__name__} weights its experts "
            "by a rule that cannot be replayed"
        )
