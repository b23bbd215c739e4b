"""Parameters, bytes and operations per token of a model, computed from its sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unstale.analysis.planner.assignments import parse_assignments, value_kinds
from unstale.config import SHIPPED_POLICIES
from unstale.config.checks import ConfigError
from unstale.config.files import read_mapping
from unstale.config.gguf import converted_folder, gguf_file
from unstale.config.hub import cached_folder, is_hub_name
from unstale.config.names import nearest
from unstale.model import pass_size
from unstale.weights.delta_sizes import WORD

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
}
_REQUIRED = ("layers", "hidden", "ffn", "heads", "kv_heads")


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder model with grouped-query attention and gated MLPs or experts.

    >>> model = Model.parse("4B")
    >>> model.parameters, model.kv_bytes
    (4022468096, 147456)
    """

    layers: int
    hidden: int
    ffn: int
    """Width of the MLP in a dense layer."""
    heads: int
    kv_heads: int
    name: str = "model"
    head_dim: int = 128
    vocab: int = 151936
    tied: bool = False
    """True if the output head shares the weights of the embedding."""
    experts: int = 0
    active: int = 0
    """Number of experts that process a token."""
    expert_ffn: int = 0
    dense: int = 0
    """Number of layers without experts in a model with experts."""
    qk_norm: bool = True
    qkv_bias: bool = False
    apart: bool = False
    """True if sequences cannot be packed, so that each needs a forward pass of its own."""

    def __post_init__(self) -> None:
        for name in (*_REQUIRED, "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--model: {name} must be >= 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            heads = f"{self.heads} and {self.kv_heads}"
            raise ConfigError(f"--model: heads must be a multiple of kv_heads, got {heads}")
        if self.experts and not (0 < self.active <= self.experts and self.expert_ffn > 0):
            raise ConfigError(
                f"--model: {self.experts} experts need active (1 to {self.experts}) and expert_ffn"
            )

    @cached_property
    def matrices(self) -> Mapping[str, int]:
        """Kind of matrix -> number of parameters. A head that shares the embedding's weights has
        none.
        """
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        sparse = self.layers - self.dense if self.experts else 0
        layer_norms = 2 * self.hidden + 2 * self.head_dim * self.qk_norm
        return {
            "embedding": self.vocab * self.hidden,
            "head": 0 if self.tied else self.vocab * self.hidden,
            "attention": self.layers * self.hidden * 2 * (queries + keys),
            "mlp": (self.layers - sparse) * 3 * self.hidden * self.ffn,
            "experts": sparse * self.experts * 3 * self.hidden * self.expert_ffn,
            "router": sparse * self.experts * self.hidden,
            "norms": self.hidden + self.layers * layer_norms,
            "biases": self.layers * (queries + 2 * keys) * self.qkv_bias,
        }

    @cached_property
    def parameters(self) -> int:
        return sum(self.matrices.values())

    @cached_property
    def active_parameters(self) -> int:
        """Number of parameters that process a token. Embedding lookup and unused experts do not
        count.
        """
        idle = 0
        if self.experts:
            idle = self.matrices["experts"] // self.experts * (self.experts - self.active)
        return self.parameters - idle - self._lookup_parameters

    @property
    def copy_bytes(self) -> int:
        """Bytes of all weights in bfloat16."""
        return WORD * self.parameters

    def padding(self, devices: int) -> float:
        """Return the factor by which the weights grow when `devices` devices divide the experts.

        Each device gets the same number of experts, so some are padding. The result is 1 without
        experts.

        >>> [round(PRESETS["30B-A3B"].padding(devices), 2) for devices in (32, 36, 256)]
        [1.0, 1.12, 1.95]
        """
        if not self.experts:
            return 1.0
        padded = math.ceil(self.experts / devices) * devices / self.experts
        return 1 + (padded - 1) * self.matrices["experts"] / self.parameters

    def lora_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of rank `rank`, with which the model is
        trained.

        All linear layers have adapters, except the head and experts.

        >>> PRESETS["4B"].lora_parameters(16)
        33030144
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 4 * self.hidden + 2 * queries + 2 * keys
        dense = self.dense if self.experts else self.layers
        mlp = dense * 3 * (self.hidden + self.ffn)
        return rank * (self.layers * attention + mlp)

    def gathered_bytes(self, layers: int, *, experts: bool = True) -> int:
        """Return the bytes in bfloat16 of the embedding, the head and the `layers` largest layers.

        With `experts` False, the experts of these layers do not count.

        >>> round(PRESETS["30B-A3B"].gathered_bytes(2) / 1e9, 1)
        3.7
        """
        counts = self.matrices
        sparse = self.layers - self.dense if self.experts else 0
        routed = (counts["experts"] * experts + counts["router"]) // max(1, sparse)
        mlp = counts["mlp"] // max(1, self.layers - sparse)
        rest = (counts["attention"] + counts["norms"] + counts["biases"]) // self.layers
        largest = rest + max(routed, mlp)
        return WORD * (counts["embedding"] + counts["head"] + layers * largest)

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one token of context."""
        return WORD * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of bfloat16 activations that one layer keeps for a token until its backward
        pass.
        """
        return pass_size.layer_bytes(self)

    def forward_flops(self, context: float) -> float:
        """Return the operations of a forward pass for one token that attends to `context` others.

        A multiply-add counts as 2 operations. Attention takes 4 per layer, head, dimension and
        attended token: 2 for the score and 2 for the weighted value.
        """
        attention = 4.0 * self.layers * self.heads * self.head_dim * context
        return 2.0 * self.active_parameters + attention

    def read_bytes(self, tokens: float) -> float:
        """Return the expected bytes of weights that a forward pass over `tokens` tokens reads.

        Experts that no token uses are not read. Each token's experts are assumed to be drawn at
        random, uniformly and independently.
        """
        unread = 0.0
        if self.experts:
            unread = self.matrices["experts"] * (1 - self.active / self.experts) ** tokens
        return WORD * (self.parameters - unread - self._lookup_parameters)

    @cached_property
    def _lookup_parameters(self) -> int:
        """Number of parameters of the embedding. 0 if the head shares them."""
        return 0 if self.tied else self.matrices["embedding"]

    @classmethod
    def parse(cls, text: str) -> "Model":
        """Return the model that `text`, the value of `--model` on the command line, names.

        `text` is a preset, a model folder, a GGUF file, the hub name of a model in the local cache,
        sizes (`layers=36,hidden=2560,...`), or the name of a small model of this package, such as
        `base`. Raises `ConfigError` for anything else.
        """
        if text in SHIPPED_POLICIES:
            return cls.from_folder(SHIPPED_POLICIES[text])
        if file := gguf_file(text):
            return replace(cls.from_folder(converted_folder(file)), name=file.stem)
        if "=" in text:
            return cls._from_sizes(text)
        if text in PRESETS:
            return PRESETS[text]
        if (Path(text) / "config.json").is_file():
            return cls.from_folder(Path(text))
        if is_hub_name(text):
            try:
                folder = cached_folder(text, "config")
            except ConfigError as error:
                raise ConfigError(f"--model: {error}; or give sizes (layers=36,...)") from error
            return replace(cls.from_folder(folder), name=text)
        raise ConfigError(
            f"--model {text} must be a folder with a config.json, org/name, sizes (layers=36,"
            f"hidden=2560,ffn=9728,heads=32,kv_heads=8) or a preset{nearest(text, list(PRESETS))}"
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Model":
        """Return the model that the file config.json in `folder` describes.

        Raises `ConfigError` for an architecture whose parameters cannot be counted.
        """
        config = read_mapping(folder / "config.json")
        family = config.get("model_type")
        has_other_biases = config.get("mlp_bias") or (
            family != "qwen2" and config.get("attention_bias")
        )
        if family not in _FAMILIES or has_other_biases:
            raise ConfigError(
                f"{folder}: the parameters of this {family} cannot be counted. Supported are "
                f"{', '.join(_FAMILIES)} without further biases; or give sizes "
                "(--model layers=...,hidden=...)"
            )
        missing = [key for key in _CONFIG_KEYS.values() if key not in config]
        if missing:
            raise ConfigError(f"{folder}/config.json lacks {', '.join(missing)}")
        sizes = {name: config[key] for name, key in _CONFIG_KEYS.items()}
        if family == "qwen3_moe":
            sizes |= _expert_sizes(config, sizes["layers"])
        return cls(
            **sizes,
            name=folder.name,
            head_dim=config.get("head_dim") or sizes["hidden"] // sizes["heads"],
            tied=config.get("tie_word_embeddings", False),
            qk_norm=family.startswith("qwen3"),
            qkv_bias=family == "qwen2",
        )

    @classmethod
    def _from_sizes(cls, text: str) -> "Model":
        sizes = parse_assignments("--model", text.split(","), value_kinds(cls))
        if missing := [name for name in _REQUIRED if name not in sizes]:
            raise ConfigError(f"--model {text} lacks {', '.join(missing)}")
        return cls(**{"name": text, **sizes})


def _expert_sizes(config: dict[str, Any], layers: int) -> dict[str, int]:
    period = config.get("decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or ()
    sparse = [i for i in range(layers) if i not in dense_layers and (i + 1) % period == 0]
    return {
        "experts": config.get("num_experts", config.get("num_local_experts", 0)),
        "active": config["num_experts_per_tok"],
        "expert_ffn": config["moe_intermediate_size"],
        "dense": layers - len(sparse),
    }


PRESETS = {  # layers, hidden, ffn, heads and kv_heads
    "0.6B": Model(28, 1024, 3072, 16, 8, name="Qwen3-0.6B", tied=True),
    "1.7B": Model(28, 2048, 6144, 16, 8, name="Qwen3-1.7B", tied=True),
    "4B": Model(36, 2560, 9728, 32, 8, name="Qwen3-4B", tied=True),
    "8B": Model(36, 4096, 12288, 32, 8, name="Qwen3-8B"),
    "14B": Model(40, 5120, 17408, 40, 8, name="Qwen3-14B"),
    "32B": Model(64, 5120, 25600, 64, 8, name="Qwen3-32B"),
    "30B-A3B": Model(
        48, 2048, 6144, 32, 4, name="Qwen3-30B-A3B", experts=128, active=8, expert_ffn=768
    ),
    "235B-A22B": Model(
        94, 4096, 12288, 64, 4, name="Qwen3-235B-A22B", experts=128, active=8, expert_ffn=1536
    ),
}
"""Qwen3 models, from each model's config.json. Tests compare their parameters with the model
cards.
"""
