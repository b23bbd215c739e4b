"""Test that models whose long sequences cannot be packed are found: computed apart, or refused."""

from copy import copy
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from unstale.config import ConfigError
from unstale.model.attention import ATTENTION
from unstale.model.packing_check import check_length, check_packing
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def made(kind: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config).eval()
    model.set_attn_implementation(ATTENTION)
    return model


def llama4() -> PreTrainedModel:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64}
    return made(
        Llama4ForCausalLM, Llama4TextConfig(**SIZES, **experts, head_dim=8, attention_chunk_size=64)
    )


def test_chunks_are_refused_from_the_length_on_at_which_they_differ() -> None:
    model = llama4()
    check_length(model, 64)
    message = (
        r"Llama4ForCausalLM cannot be packed with 65 tokens \(engine.max_context\): a layer's mask "
        r"is neither causal nor a sliding window. Lower engine.max_context"
    )
    with pytest.raises(ConfigError, match=message):
        check_length(model, 65)


def test_frequencies_that_depend_on_the_longest_position_are_refused() -> None:
    config = Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=LONG)
    model = made(Phi3ForCausalLM, config)
    check_packing(model)
    check_length(model, 64)
    message = "with 65 tokens .* its position embedding depends on the longest position of a pass"
    with pytest.raises(ConfigError, match=message):
        check_length(model, 65)


def test_a_policy_computes_chunks_apart_from_that_length_on() -> None:
    policy = Policy(llama4(), None)  # type: ignore[arg-type]
    policy.check_length(64)
    assert not policy.computes_apart
    with pytest.warns(RuntimeWarning, match=r"in a forward pass of its own.* with 65 tokens"):
        policy.check_length(65)
    tokens = torch.arange(100) % 60
    with torch.no_grad():
        logits = policy.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        found = policy.logps(Packed(tokens, (0, 100)), temperature=1.0)
    expected = logits.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
    assert policy.computes_apart
    torch.testing.assert_close(found[1:], expected, atol=1e-5, rtol=0)


def test_a_policy_with_frequencies_of_the_longest_position_is_refused() -> None:
    config = Phi3Config(**SIZES, original_max_position_embeddings=64, rope_parameters=LONG)
    policy = Policy(made(Phi3ForCausalLM, config), None)  # type: ignore[arg-type]
    policy.check_length(64)
    with (
        pytest.warns(RuntimeWarning, match="forward pass of its own"),
        pytest.raises(ConfigError, match=r"cannot be used with 65 tokens .* the longest position"),
    ):
        policy.check_length(65)


def test_frequencies_that_grow_beyond_the_positions_of_the_model_are_accepted() -> None:
    """The linter refuses a longer context."""
    sizes = {**SIZES, "max_position_embeddings": 128}
    model = made(LlamaForCausalLM, LlamaConfig(**sizes, rope_parameters=DYNAMIC))
    check_length(model, 128)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (LlamaForCausalLM, LlamaConfig(**SIZES)),
        (
            LlamaForCausalLM,
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                },
            ),
        ),
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=100)),
        (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, sliding_window=100, head_dim=8)),
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8
            ),
        ),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_causal_and_sliding_attention_is_accepted(kind: type[PreTrainedModel], config: Any) -> None:
    check_length(made(kind, config), 4096)


def test_a_layer_whose_window_is_only_in_its_mask_is_refused() -> None:
    model = made(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=100))
    for layer in model.model.layers:
        layer.self_attn.config = copy(model.config)
        layer.self_attn.config.sliding_window = None
    with pytest.raises(ConfigError, match=r"mask has a window of 100 .* its attention 4096"):
        check_length(model, 4096)
