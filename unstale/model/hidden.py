"""Hidden states of one layer, read during a forward pass."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from unstale.config import ConfigError


@dataclass(frozen=True, slots=True)
class HiddenMeans:
    """Mean hidden states of n sequences, and entropies of their `[T]` tokens, on the CPU."""

    means: Tensor
    """`[n, m, H]`: the means over the tokens of each of m marks. NaN where a sequence has none."""
    entropy: Tensor
    """`[T]`: the entropy, in nats, of the distribution from which a sampled token was chosen. 0 for
    other tokens.
    """
    forward_tokens: int
    """Number of tokens in the forward passes."""


def find_layer(model: PreTrainedModel, depth: float) -> nn.Module:
    """Return the layer after which the share `depth` of all layers has been run.

    Raises ConfigError for a model whose layers are not one list.
    """
    config: Any = model.config.get_text_config()
    count = config.num_hidden_layers
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    layers = next((each for each in lists if len(each) == count), None)
    if layers is None:
        raise ConfigError(
            f"policy: the hidden states of {type(model).__name__} cannot be read, because its "
            f"{count} layers are not one list of modules"
        )
    return layers[max(math.ceil(depth * count), 1) - 1]


@contextmanager
def outputs_of(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Return a context in which each pass adds the layer's hidden states `[N, H]` to a list."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        found.append(hidden[0].detach())

    handle = layer.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
