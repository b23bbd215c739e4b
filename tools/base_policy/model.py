"""The architecture and the initial weights of the shipped policies."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from unstale.model import expert_products

HEAD = 32
STD = 0.06
GAIN = 1.5
"""Initial norm weight of queries and keys: sharp attention learns look-ups sooner."""
EXPERT = 256
"""Width of an expert in the shape with experts. A token has one, weighted by its probability."""


def make_model(tokenizer: Any, seed: int, *, experts: int = 0) -> PreTrainedModel:
    """Return a seeded Qwen3 of 1.1 million parameters with two heads that attend backwards.

    With `experts` it is a Qwen3-MoE with as many experts in each layer, one of them for a token.

    To look up the number behind a name, a model needs a head that attends one token back and, in a
    higher layer, one that attends to its own token. The first takes long to form from noise. Qwen3
    has no biases, so every embedding has the same large value in one dimension. Two heads of the
    first layer have queries and keys of that dimension alone; they attend one and two tokens back.
    Training may change all of it.
    """
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    model: PreTrainedModel
    if experts:
        routed: dict[str, Any] = {
            "num_experts": experts,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": EXPERT,
            "norm_topk_prob": False,
        }
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **routed))
        expert_products.use(model)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    # On a CPU, the backward pass through short sequences is much faster with eager attention.
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=STD, generator=generator)
            elif "q_norm" in name or "k_norm" in name:
                parameter.fill_(GAIN)
        body: Any = model.base_model
        body.embed_tokens.weight[:, 0] = 5 * STD
        attention = body.layers[0].self_attn
        key = torch.zeros(HEAD)
        key[:6] = 1.0
        attention.k_proj.weight[:HEAD] *= 0.1
        attention.q_proj.weight[: 2 * HEAD] *= 0.1
        attention.k_proj.weight[:HEAD, 0] = key
        attention.q_proj.weight[:HEAD, 0] = _rotate(key, -1)
        attention.q_proj.weight[HEAD : 2 * HEAD, 0] = _rotate(key, -2)
    return model


def adopt(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Take the weights of the model in `folder`, which has another tokenizer.

    The embeddings go by the text of tokens. Tokens that are new keep their embedding.
    """
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = AutoTokenizer.from_pretrained(folder).get_vocab()
    both = [(place, rows[text]) for text, place in tokenizer.get_vocab().items() if text in rows]
    embedding: Any = model.get_input_embeddings()
    weight = embedding.weight.detach().clone()
    weights = source.state_dict()
    old = weights["model.embed_tokens.weight"]
    weight[[place for place, _ in both]] = old[[place for _, place in both]]
    tied = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), weight)
    model.load_state_dict({**weights, **tied})


def _rotate(vector: Tensor, places: int) -> Tensor:
    """Rotate a vector as rotary positions do for a shift by `places`."""
    half = HEAD // 2
    angle = places / 10000.0 ** (torch.arange(half) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
    )
