"""Small random models of many transformer architectures.

On request they have huge activations in one dimension and an attention sink, as trained models do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from unstale.config.run import SHIPPED_POLICY
from unstale.model.loading import load_tokenizer, no_progress_bars

MASSIVE_DIMENSION = 5
"""Index of the dimension of the hidden states in which `plant` makes activations huge."""
MASSIVE = 1000.0
"""Factor by which `plant` enlarges this dimension. In trained networks it is 100 to 10,000 (arXiv
2402.17762).
"""
_SINK_WEIGHTS = {False: 0.6, True: 3.0}
"""Weight of `MASSIVE_DIMENSION` in queries and keys, which raises the attention score of the first
token by 8 to 10 nats. The key is True for models that normalise queries and keys.
"""
_SIZES: Mapping[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A transformer architecture, and the sizes of its small test model."""

    model_type: str
    """The value of `model_type` in the model's `config.json`."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Values of the model's configuration that replace or extend the common small sizes."""
    apart: bool = False
    """True if sequences cannot be packed, so that each needs a forward pass of its own."""
    has_sinks: bool = True
    """True if `plant` works for the model. It needs layers that project queries and keys."""

    def make(self, *, seed: int = 0) -> PreTrainedModel:
        """Return the small model in float32. Its weights are random and depend on `seed`."""
        config = AutoConfig.for_model(self.model_type, **{**_SIZES, **self.sizes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return cast(PreTrainedModel, made).eval()


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HALF = ["sliding_attention", "full_attention"] * 2
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "Llama": Architecture("llama"),
    "Mistral": Architecture("mistral", {"sliding_window": None}),
    "Mixtral": Architecture(
        "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    ),
    "Qwen2": Architecture("qwen2"),
    "Qwen2-MoE": Architecture("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen3": Architecture("qwen3", {"tie_word_embeddings": True}),
    "Qwen3-MoE": Architecture("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "Gemma 3": Architecture(
        "gemma3_text", {"layer_types": _HALF, "sliding_window": 32, "query_pre_attn_scalar": 32}
    ),
    "GLM-4.5": Architecture(
        "glm4_moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "Phi-3": Architecture("phi3", {"original_max_position_embeddings": 1024}),
    "Llama 4": Architecture(
        "llama4_text",
        {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64},
    ),
    "DeepSeek-V3": Architecture(
        "deepseek_v3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 32,
        },
        has_sinks=False,
    ),
    "MiniMax-M2": Architecture("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Gemma 4": Architecture(
        "gemma4_text",
        {
            "layer_types": _HALF,
            "sliding_window": 32,
            "vocab_size_per_layer_input": 1024,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "Gemma 2": Architecture("gemma2", {"layer_types": _HALF}, apart=True),
    "gpt-oss": Architecture(
        "gpt_oss",
        {"layer_types": _HALF, "num_local_experts": 4, "num_experts_per_tok": 2},
        apart=True,
    ),
    "Bloom": Architecture("bloom", {"n_layer": 2, "n_head": 4}, apart=True, has_sinks=False),
    "Qwen3.5": Architecture("qwen3_5_text", _DELTA, apart=True),
    "Qwen3.5-MoE": Architecture(
        "qwen3_5_moe_text",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16},
        apart=True,
    ),
    "Qwen3-Next": Architecture(
        "qwen3_next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16}, apart=True
    ),
    "OLMo-hybrid": Architecture("olmo_hybrid", apart=True),
    "LFM2": Architecture("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, apart=True),
    "Granite 4": Architecture(
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        apart=True,
    ),
    "Falcon-H1": Architecture(
        "falcon_h1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
        },
        apart=True,
    ),
    "Nemotron-H": Architecture(
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
        apart=True,
    ),
    "Jamba": Architecture(
        "jamba",
        {
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 4,
        },
        apart=True,
    ),
    "Mamba": Architecture("mamba", apart=True, has_sinks=False),
    "Mamba 2": Architecture(
        "mamba2",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1},
        apart=True,
        has_sinks=False,
    ),
}
"""Name in docs/models.md -> architecture. All architectures that the page names are included."""


def save_architecture(architecture: Architecture, folder: Path, *, planted: bool) -> None:
    """Save the small model of an architecture to `folder`, with the tokenizer of the package's base
    policy.

    With `planted`, the model has massive activations and an attention sink (see `plant`).
    """
    tokenizer = load_tokenizer(SHIPPED_POLICY)
    model = architecture.make()
    if planted:
        first: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hello."}], tokenize=True, return_dict=False
        )
        plant(model, sink=int(first[0]))
    with no_progress_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@torch.no_grad()
def plant(model: PreTrainedModel, *, sink: int) -> None:
    """Give a random model massive activations and an attention sink, as trained models have.

    One dimension of the embeddings is `MASSIVE` times as large as the others, and has the other
    sign in the token `sink`, with which a sequence must begin. The residual stream carries this
    dimension through all layers. Norms get weights with which the other dimensions still count.
    Queries and keys get weights with which all tokens attend to the sink. Raises ValueError for a
    model without norms or projections of queries and keys.
    """
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    embedding[:, MASSIVE_DIMENSION] = MASSIVE * embedding.std()
    embedding[sink, MASSIVE_DIMENSION] *= -1
    found = [module for module in model.modules() if _projects(module)]
    for module in found:
        _attend_to_sink(module, model.config.get_text_config())
    width = embedding.shape[1]
    norms = [module for module in model.modules() if _is_norm(module, width)]
    if not (found and norms):
        raise ValueError(f"{type(model).__name__} has no norms, or no projections, to plant in")
    last = norms[-1]
    hooks = [
        norm.register_forward_pre_hook(_calibrated(0.0 if norm is last else 1.0)) for norm in norms
    ]
    model(input_ids=torch.tensor([[sink, *range(3, 35)]]), use_cache=False)
    for hook in hooks:
        hook.remove()


def _projects(module: nn.Module) -> bool:
    """Return True for an attention module. Recurrent modules may have such projections, but no
    `head_dim`.
    """
    has_both = hasattr(module, "q_proj") and hasattr(module, "k_proj")
    return hasattr(module, "head_dim") and (hasattr(module, "qkv_proj") or has_both)


def _attend_to_sink(module: Any, config: Any) -> None:
    """Set weights of an attention module with which all tokens attend to the first one, the sink.

    The sink has another sign than other tokens in `MASSIVE_DIMENSION`, which the last component of
    queries and keys reads. With rotary embeddings this component has the lowest frequency, so the
    distance to the sink hardly matters.
    """
    width = module.head_dim
    if hasattr(module, "qkv_proj"):
        weight, rows = module.qkv_proj.weight, config.num_attention_heads * width
        queries, keys = weight[:rows], weight[rows : rows + config.num_key_value_heads * width]
    else:
        queries, keys = module.q_proj.weight, module.k_proj.weight
    size = _SINK_WEIGHTS[hasattr(module, "q_norm")]
    queries[width - 1 :: width, MASSIVE_DIMENSION] = size
    keys[width - 1 :: width, MASSIVE_DIMENSION] = -size


def _is_norm(module: nn.Module, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__.endswith("Norm") and weight is not None and weight.shape == (width,)
    )


def _calibrated(massive: float) -> Callable[[Any, tuple[Tensor, ...]], None]:
    """Return a hook that sets the weights of a norm whose input is huge in `MASSIVE_DIMENSION`.

    With these weights the mean square of the norm's other outputs is 1. `massive` is the weight of
    that dimension.
    """

    def set_weight(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        hidden = inputs[0].flatten(0, -2)
        normed = hidden / hidden.square().mean(-1, keepdim=True).sqrt()
        others = [i for i in range(hidden.shape[1]) if i != MASSIVE_DIMENSION]
        size = float(normed[:, others].square().mean().sqrt())
        if size > 0.1:
            return
        offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
        norm.weight[others] = 1 / size - offset
        norm.weight[MASSIVE_DIMENSION] = massive - offset

    return set_weight
