"""Read the hidden states of one layer during a forward pass."""

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
    """Means of one layer's hidden states in n sequences, and entropies of T tokens, on the CPU."""

    means: Tensor
    """`[n, m, H]`: for each sequence and each of m given sets of tokens, the mean over the set's
    tokens in the sequence. NaN if there are none.
    """
    entropy: Tensor
    """`[T]`: for each sampled token, the entropy in nats of the distribution that it was drawn
    from. 0 for other tokens.
    """
    forward_tokens: int
    """Number of tokens in the forward passes that computed these values."""


def find_layer(model: PreTrainedModel, depth: float) -> nn.Module:
    """Return the layer at the share `depth` (0 to 1) of the model's depth. 1 is the last layer.

    Raises ConfigError for a model whose layers are not one list of modules.
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
    """Return a context with a list, to which each pass appends the layer's output `[N, H]`."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        found.append(hidden[0].detach())

    handle = layer.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()
