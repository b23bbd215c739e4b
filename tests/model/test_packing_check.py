"""Test which models the check of packing refuses: those whose packed sequences differ, only those.

Every violator is refused in each precision, also with massive activations, and the message names
the property. A model with massive activations, which rounds a hundred times as much, is accepted.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from unstale.config import ConfigError
from unstale.model.attention import ATTENTION
from unstale.model.packing_check import check_packing
from unstale.testing import tiny_policy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama(dtype: torch.dtype, *, massive: bool) -> LlamaForCausalLM:
    """Return a random model. With `massive` one dimension of its hidden states is a thousandfold,
    as in trained networks (arXiv 2402.17762)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    if massive:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 5] *= 1000
    model.set_attn_implementation(ATTENTION)
    return model.to(dtype).eval()


def ignore_positions(model: nn.Module) -> None:
    """Let the model count positions over the whole pass."""
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    forward = rotary.forward

    def count(hidden: Tensor, position_ids: Tensor) -> Any:
        return forward(hidden, torch.arange(position_ids.shape[1])[None])

    rotary.forward = count


def shift_tokens(model: nn.Module) -> None:
    """Let each token see the one before it in the pass, as a short convolution does."""
    mlp: Any = model.model.layers[1].mlp  # type: ignore[union-attr,index]
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden + 0.1 * hidden.roll(1, dims=1))


def add_mean(model: nn.Module) -> None:
    """Let each token see the mean of the pass."""
    norm: Any = model.model.norm  # type: ignore[union-attr]
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden + 0.1 * hidden.mean(1, keepdim=True))


def count_from_the_end(model: nn.Module) -> None:
    """Let positions count from the last token of the pass."""
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    forward = rotary.forward
    rotary.forward = lambda hidden, position_ids: forward(
        hidden, (position_ids - position_ids.max()) ** 2 // 8
    )


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ordinary_models_are_accepted(dtype: torch.dtype, massive: bool) -> None:
    found = check_packing(llama(dtype, massive=massive))
    assert found.plain_head and found.noise == 0.0


@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (ignore_positions, "of single ones.* which is not rounding .*ignores position_ids"),
        (shift_tokens, "affect each other in LlamaForCausalLM.*mixes adjacent tokens"),
        (add_mean, "affect each other in LlamaForCausalLM"),
        (count_from_the_end, "affect each other|of single ones"),
    ],
)
def test_violators_are_refused_with_the_property(
    spoil: Callable[[nn.Module], None], message: str, dtype: torch.dtype, massive: bool
) -> None:
    model = llama(dtype, massive=massive)
    spoil(model)
    with pytest.raises(ConfigError, match=message):
        check_packing(model)


def test_packed_pass_that_rounds_coarsely_is_refused() -> None:
    model = llama(torch.float32, massive=False)

    def coarse(forward: Any, hidden: Tensor) -> Tensor:
        is_packed = hidden.shape[1] % 32 == 0 and hidden.dtype == torch.float32
        return forward(hidden.half().float() if is_packed else hidden)

    model.model.norm.forward = partial(coarse, model.model.norm.forward)
    with pytest.raises(ConfigError, match=r"rounds more in a packed pass than alone in float32"):
        check_packing(model)


def test_logits_beyond_the_range_of_a_dtype_are_refused() -> None:
    model = llama(torch.float16, massive=False)
    with torch.no_grad():
        model.lm_head.weight *= 60_000
    with pytest.raises(ConfigError, match=r"not finite in float16, packed or not"):
        check_packing(model)


def test_check_leaves_the_weights_as_they_were() -> None:
    model = llama(torch.bfloat16, massive=True)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    check_packing(model)
    after = model.state_dict()
    assert all(
        torch.equal(after[name], weight) and after[name].dtype == weight.dtype
        for name, weight in before.items()
    )


def test_tokenizer_that_knows_no_english_is_replaced_by_token_ids() -> None:
    policy = tiny_policy()
    assert len(set(policy.tokenizer("It is a small town.")["input_ids"])) < 4
    assert check_packing(policy.model, policy.tokenizer) == check_packing(policy.model)
