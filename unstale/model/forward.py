"""Forward passes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from unstale.config import ConfigError, TrainerConfig
from unstale.model.attention import running
from unstale.model.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """How a pass is run. None of it changes what is computed, beyond the rounding of sums."""

    share_prompts: bool = True
    """What sequences of a pass have in common at their beginning is run once."""
    gradient_checkpointing: bool = False
    """The layers keep their inputs alone for the gradient, and run again for it."""
    compile: bool = False
    """By torch.compile."""

    @classmethod
    def of(cls, config: TrainerConfig) -> "ForwardOptions":
        return cls(config.share_prompts, config.gradient_checkpointing, config.compile)


@dataclass(frozen=True, slots=True)
class Scored:
    """`logp` is `[T]` on the CPU, 0 where nobody asked; `forward_tokens` were computed for it."""

    logp: Tensor
    forward_tokens: int


def run_model(body: Callable[..., Any], run: PrefixTree, rows: Tensor, plain_head: bool) -> Tensor:
    """Final hidden states `[rows, H]`, or logits `[rows, V]` of a model whose head is more than one linear map."""
    token = running.set(run)
    try:
        given = {
            "input_ids": run.tokens[None].to(rows.device),
            "position_ids": run.positions[None].to(rows.device),
        }
        out = body(**given, use_cache=False)
        return (out.last_hidden_state if plain_head else out.logits)[0, rows]
    finally:
        running.reset(token)


def recompute_layers(model: nn.Module) -> None:
    """Keep the inputs of the model's layers alone for the gradient. ConfigError if transformers marks no layer."""
    layers: list[Any] = [
        module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ConfigError(
            f"trainer.gradient_checkpointing: {type(model).__name__} has no layers that can be run again"
        )
    for layer in layers:
        layer.forward = partial(_again, layer.forward)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _again(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    run = running.get()
    if run is None or not torch.is_grad_enabled():
        return forward(*args, **options)

    def in_this_pass(*args: Any) -> Any:
        token = running.set(
            run
        )  # the gradient comes when the pass is over, in a thread of its own on a GPU
        try:
            return forward(*args, **options)
        finally:
            running.reset(token)

    return checkpoint(in_this_pass, *args, use_reentrant=False, preserve_rng_state=False)
