"""Test that models whose packed sequences affect each other are not packed, however they do it.

In float32 and bfloat16, plain and with massive activations, dense and with experts. Unchanged
models are accepted in each case. Those whose sequences are causal can be computed apart.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.config.run import SHIPPED_POLICY
from unstale.model.apart import check_apart
from unstale.model.attention import ATTENTION
from unstale.model.loading import load_tokenizer
from unstale.model.packing_check import check_packing
from unstale.testing.architectures import ARCHITECTURES, plant

TOKENIZER = load_tokenizer(SHIPPED_POLICY)


def made(name: str, dtype: torch.dtype, *, planted: bool) -> PreTrainedModel:
    model = ARCHITECTURES[name].make()
    if planted:
        plant(model, sink=1)
    model.set_attn_implementation(ATTENTION)
    return model.to(dtype)


def _before(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change the hidden states `[1, T, H]` that a module receives."""
    forward = module.forward
    module.forward = lambda hidden, *args, **options: forward(change(hidden), *args, **options)


def short_convolution(model: Any) -> None:
    """A causal convolution over adjacent tokens in one layer."""
    kernel = torch.tensor([0.1, 0.2, 0.7])

    def convolve(hidden: Tensor) -> Tensor:
        padded = F.pad(hidden, (0, 0, 2, 0))
        return sum(
            weight.to(hidden) * padded[:, i : i + hidden.shape[1]]
            for i, weight in enumerate(kernel)
        )  # type: ignore[return-value]

    _before(model.model.layers[1].mlp, convolve)


def convolution_of_last_layer(model: Any) -> None:
    """Only the first tokens of a sequence are affected, because no attention follows."""
    _before(model.model.layers[-1].mlp, lambda x: x + 0.3 * F.pad(x, (0, 0, 1, 0))[:, :-1])


def running_mean(model: Any) -> None:
    """A recurrent state over all earlier tokens of the pass."""

    def average(hidden: Tensor) -> Tensor:
        count = torch.arange(1, hidden.shape[1] + 1).to(hidden)[:, None]
        return hidden + 0.3 * hidden.cumsum(1) / count

    _before(model.model.layers[0].mlp, average)


def statistics_of_batch(model: Any) -> None:
    """Normalisation by the mean and deviation of all tokens of the pass."""
    _before(model.model.norm, lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True))


def first_token_of_pass(model: Any) -> None:
    """A register: every token reads the first one of the pass."""
    _before(model.model.norm, lambda x: x + 0.3 * x[:, :1])


def attention_over_whole_pass(model: Any) -> None:
    """Causal attention that calls torch, so it ignores where sequences begin."""
    attention: Any = model.model.layers[1].self_attn

    def forward(hidden_states: Tensor, **options: Any) -> tuple[Tensor, None]:
        rows = (*hidden_states.shape[:-1], -1, attention.head_dim)
        query, key, value = (
            project(hidden_states).view(rows).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attention.o_proj(out.transpose(1, 2).flatten(2)), None

    attention.forward = forward


def absolute_index(model: Any) -> None:
    """A learned embedding of the index in the pass."""
    noise = torch.Generator().manual_seed(0)
    table = torch.randn(1024, 64, generator=noise)
    embedding: Any = model.model.embed_tokens
    forward = embedding.forward

    def add(tokens: Tensor) -> Tensor:
        hidden: Tensor = forward(tokens)
        return hidden + 0.2 * table[: tokens.shape[1]].to(hidden)

    embedding.forward = add


def scale_by_index(model: Any) -> None:
    """Queries that grow with the logarithm of the index in the pass, as in long-context models."""

    def scale(hidden: Tensor) -> Tensor:
        index = torch.arange(hidden.shape[1]).to(hidden)
        return hidden * (1 + 0.1 * torch.log1p(index / 4)).to(hidden)[:, None]

    _before(model.model.layers[1].self_attn.q_proj, scale)


def length_of_pass(model: Any) -> None:
    """Queries that grow with the number of tokens in the pass."""
    _before(
        model.model.layers[1].self_attn.q_proj, lambda x: x * (1 + 0.1 * float(x.shape[1]) ** 0.5)
    )


def slots_of_pass(model: Any) -> None:
    """A layer with room for half of the tokens: it drops those with the smallest norms."""

    def keep(hidden: Tensor) -> Tensor:
        size = hidden.double().norm(dim=-1, keepdim=True)
        return torch.where(size >= size.median(1, keepdim=True).values, hidden, 0.0)

    _before(model.model.layers[1].mlp, keep)


VIOLATORS = [
    short_convolution,
    convolution_of_last_layer,
    running_mean,
    statistics_of_batch,
    first_token_of_pass,
    attention_over_whole_pass,
    absolute_index,
    scale_by_index,
    length_of_pass,
    slots_of_pass,
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_unchanged_models_are_accepted(name: str, dtype: torch.dtype, planted: bool) -> None:
    check_packing(made(name, dtype, planted=planted), TOKENIZER)


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
@pytest.mark.parametrize("spoil", VIOLATORS)
def test_violators_are_refused(
    spoil: Callable[[Any], None],
    name: str,
    dtype: torch.dtype,
    planted: bool,
) -> None:
    model = made(name, dtype, planted=planted)
    spoil(model)
    with pytest.raises(ConfigError, match=r"affect each other|of single ones"):
        check_packing(model, TOKENIZER)


CAUSAL = {
    short_convolution,
    convolution_of_last_layer,
    running_mean,
    first_token_of_pass,
    attention_over_whole_pass,
    absolute_index,
    scale_by_index,
}


@pytest.mark.costly(cases=10)
@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoil", VIOLATORS)
def test_apart_they_are_accepted_only_if_no_token_changes_earlier_ones(
    spoil: Callable[[Any], None], dtype: torch.dtype, planted: bool
) -> None:
    model = made("Llama", dtype, planted=planted)
    model.set_attn_implementation("sdpa")
    spoil(model)
    if spoil in CAUSAL:
        assert check_apart(model, TOKENIZER).noise == 0.0
    else:
        with pytest.raises(ConfigError, match="a token changes the logits of earlier tokens"):
            check_apart(model, TOKENIZER)
