"""Forward passes over packed sequences, and their options. Sequences may share prefixes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from unstale.config import ConfigError, RunConfig
from unstale.model.attention import running
from unstale.model.pictures import PictureInputs, decoder_of
from unstale.model.prefix_tree import PrefixTree

before_layer: ContextVar[Callable[[], object]] = ContextVar(
    "called before each layer of a pass, forward and backward", default=lambda: None
)
"""A function that is called before each layer of a pass. The trainer's thread uses it to change its
number of CPU cores during a pass, which may take seconds.
"""


_last_states: ContextVar[list[Tensor] | None] = ContextVar("hidden states of passes", default=None)


@contextmanager
def last_states() -> Iterator[list[Tensor]]:
    """Return a context with a list, to which each pass appends its last hidden states `[R, H]`.

    These are the R states from which the pass computes log-probabilities. They have a gradient if
    gradients are enabled.
    """
    found: list[Tensor] = []
    token = _last_states.set(found)
    try:
        yield found
    finally:
        _last_states.reset(token)


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """Options of a forward pass.

    Except for `quantise`, they change results only by rounding errors.
    """

    share_prompts: bool = True
    """Compute a prefix that several sequences have in common only once."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of layers in memory, and compute the layers again in the backward pass.
    """
    compile: bool = False
    """Compile the model with torch.compile before its first forward pass."""
    quantise: str = "none"
    """The number format (a name in `quantisation.FORMATS`) to which weights and activations are
    rounded. "none" rounds nothing.
    """
    published_dtype: str = "float32"
    """The dtype in which engines receive weights. Weights are rounded to it first, then to the
    format of `quantise`.
    """
    bitwise: bool = False
    """Compute log-probabilities that equal the embedded engine's bit for bit (`model.bitwise`)."""

    @classmethod
    def of(cls, config: RunConfig) -> "ForwardOptions":
        options = config.trainer
        return cls(
            options.share_prompts,
            options.gradient_checkpointing,
            options.compile,
            options.quantise,
            config.engine.dtype,
            config.engine.bitwise,
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probabilities of T tokens, `logp` `[T]` on the CPU, without a gradient.

    A token whose log-probability was not requested has 0. `entropy` `[T]` is in nats, or empty if
    entropies were not requested. `forward_tokens` counts the tokens in the forward passes.
    """

    logp: Tensor
    forward_tokens: int
    entropy: Tensor = field(default_factory=lambda: torch.empty(0))


def run_model(
    body: Any,
    run: PrefixTree,
    rows: Tensor,
    plain_head: bool,
    pictures: PictureInputs | None = None,
) -> Tensor:
    """Run a forward pass on a prefix tree (packed sequences in which shared prefixes appear once).

    Return the last hidden states `[R, H]` of the tokens with the indices `rows` `[R]`. The indices
    count the tree's tokens, or if ranks divide the tokens, those of this rank's slice.

    `body` is the model without its output head. If the head is more than one linear map
    (`plain_head` False), `body` is the whole model, and the result has logits `[R, V]` instead.
    `pictures` computes the inputs of a vision-language model.
    """
    tokens = run.own_tokens
    if pictures:  # before the tree is set: the vision tower has attention of its own
        inputs = pictures.packed(body, run)
        body = decoder_of(body)
    else:
        inputs = {
            "input_ids": run.tokens[None, tokens].to(rows.device),
            "position_ids": run.positions[None, tokens].to(rows.device),
            "use_cache": False,
        }
    token = running.set(run)
    try:
        out = body(**inputs)
        chosen: Tensor = (out.last_hidden_state if plain_head else out.logits)[0, rows]
    finally:
        running.reset(token)
    keep_states(chosen)
    return chosen


def keep_states(states: Tensor) -> None:
    """Append the last hidden states of a pass, `[R, H]`, to the list of `last_states`.

    Outside of that context, do nothing.
    """
    if (found := _last_states.get()) is not None:
        found.append(states)


def announce_layers(model: nn.Module) -> None:
    """Make each layer of a model call `before_layer` before its forward and its backward pass."""
    for layer in _layers(model):
        layer.register_forward_pre_hook(_before_forward)
        layer.register_forward_hook(_before_backward)


def _before_forward(layer: nn.Module, arguments: Any) -> None:
    if not torch.compiler.is_compiling():
        before_layer.get()()


def _before_backward(layer: nn.Module, arguments: Any, output: Any) -> None:
    """Call `before_layer` as soon as the gradient of the layer's output is known."""
    hidden = output[0] if isinstance(output, tuple) else output
    if not torch.compiler.is_compiling() and isinstance(hidden, Tensor) and hidden.requires_grad:
        hidden.register_hook(partial(_call_before, before_layer.get()))


def _call_before(function: Callable[[], object], gradient: Tensor) -> None:
    function()


def _layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def checkpoint_layers(model: nn.Module) -> None:
    """Turn on gradient checkpointing for all layers.

    Raises ConfigError if transformers does not support it for this model.
    """
    layers = _layers(model)
    if not layers:
        raise ConfigError(
            "trainer.gradient_checkpointing must be false: "
            f"{type(model).__name__} has no layers that can be run again"
        )
    for layer in layers:
        layer.forward = partial(_checkpointed, layer.forward)


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def _checkpointed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    run = running.get()
    if run is None or not torch.is_grad_enabled():
        return forward(*args, **options)

    def forward_in_run(*args: Any) -> Any:
        # The backward pass computes the layer again after `run_model` has returned, on a GPU in
        # another thread.
        token = running.set(run)
        try:
            return forward(*args, **options)
        finally:
            running.reset(token)

    return checkpoint(forward_in_run, *args, use_reentrant=False, preserve_rng_state=False)
