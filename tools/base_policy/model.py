"""The shipped policy's architecture and its first weights."""

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

HEAD = 32
STD = 0.06
GAIN = 1.5
"""Of queries and keys: attention that is sharp from the start finds what it looks for sooner."""


def make_model(tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 of 1.1 million parameters with seeded weights, two heads of which begin by looking back.

    Looking up the number behind a name needs a head that looks one token back and, above it, one that looks for its
    own token; the first is what takes long to appear from noise. Qwen3 has no biases, so every embedding begins with
    the same large value in one place, which serves as one; and two heads of the first layer begin with queries and
    keys, made from that value alone, that meet one and two tokens back. Training is free to change all of it.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.set_attn_implementation(
        "eager"
    )  # backward through short sequences is much faster so, on a CPU
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=STD, generator=generator)
            elif "q_norm" in name or "k_norm" in name:
                parameter.fill_(GAIN)
        model.model.embed_tokens.weight[:, 0] = 5 * STD
        attention = model.model.layers[0].self_attn
        key = torch.zeros(HEAD)
        key[:6] = 1.0
        attention.k_proj.weight[:HEAD] *= 0.1
        attention.q_proj.weight[: 2 * HEAD] *= 0.1
        attention.k_proj.weight[:HEAD, 0] = key
        attention.q_proj.weight[:HEAD, 0] = _turned(key, -1)
        attention.q_proj.weight[HEAD : 2 * HEAD, 0] = _turned(key, -2)
    return model


def _turned(vector: Tensor, places: int) -> Tensor:
    """The vector as rotary positions turn it when it moves by so many places."""
    half = HEAD // 2
    angle = places / 10000.0 ** (torch.arange(half) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    )
