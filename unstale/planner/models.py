"""How large a model is and what a token costs it, from its config.json or from words. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstale.config import SHIPPED_POLICY
from unstale.config.checks import ConfigError, nearest
from unstale.planner.assignments import parse_assignments

WORD = 2
"""Bytes of a weight, an activation and a key or value: bfloat16."""
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_READ_AS = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The sizes of a decoder with grouped-query attention and gated MLPs, some of them of experts.

    >>> model = Model.parse("4B")
    >>> model.parameters, model.kv_bytes
    (4022468096, 147456)
    """

    name: str = "model"
    layers: int
    hidden: int
    ffn: int
    """Width of a dense layer's MLP."""
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151936
    tied: bool = False
    experts: int = 0
    active: int = 0
    """Experts that a token passes through."""
    expert_ffn: int = 0
    dense: int = 0
    """Layers without experts, of a model that has them."""
    qk_norm: bool = True
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--model: {name} must be >= 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"--model: {self.heads} heads cannot share {self.kv_heads} kv_heads evenly"
            )
        if self.experts and not (0 < self.active <= self.experts and self.expert_ffn > 0):
            raise ConfigError(
                f"--model: {self.experts} experts need active (1 to {self.experts}) and expert_ffn"
            )

    @property
    def matrices(self) -> dict[str, int]:
        """Parameters by kind of matrix. Tied, the head is the embedding."""
        queries, keys, sparse = (
            self.heads * self.head_dim,
            self.kv_heads * self.head_dim,
            self._sparse,
        )
        return {
            "embedding": self.vocab * self.hidden,
            "head": 0 if self.tied else self.vocab * self.hidden,
            "attention": self.layers * self.hidden * 2 * (queries + keys),
            "mlp": (self.layers - sparse) * 3 * self.hidden * self.ffn,
            "experts": sparse * self.experts * 3 * self.hidden * self.expert_ffn,
            "router": sparse * self.experts * self.hidden,
            "norms": self.hidden
            + self.layers * (2 * self.hidden + 2 * self.head_dim * self.qk_norm),
            "biases": self.layers * (queries + 2 * keys) * self.qkv_bias,
        }

    @property
    def parameters(self) -> int:
        return sum(self.matrices.values())

    @property
    def active_parameters(self) -> int:
        """That a token is multiplied by: all but the embedding, which is looked up, and the experts it passes by."""
        idle = (
            self.matrices["experts"] // self.experts * (self.experts - self.active)
            if self.experts
            else 0
        )
        return self.parameters - idle - (0 if self.tied else self.matrices["embedding"])

    @property
    def copy_bytes(self) -> int:
        """Of one copy of the weights in bfloat16."""
        return WORD * self.parameters

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of one token of context."""
        return WORD * 2 * self.layers * self.kv_heads * self.head_dim

    def forward_flops(self, context: float) -> float:
        """Of one token that sees so many others: 2 a multiply-add, scores and values in each layer's attention."""
        return (
            2.0 * self.active_parameters + 4.0 * self.layers * self.heads * self.head_dim * context
        )

    def read_bytes(self, tokens: float) -> float:
        """Of the weights that a pass over so many tokens reads: an expert that nobody was sent to is left alone.

        Each token is taken to choose its experts evenly and apart from the others.
        """
        passed = (
            self.matrices["experts"] * (1 - self.active / self.experts) ** tokens
            if self.experts
            else 0.0
        )
        return WORD * (self.parameters - passed - (0 if self.tied else self.matrices["embedding"]))

    @property
    def _sparse(self) -> int:
        return self.layers - self.dense if self.experts else 0

    @classmethod
    def parse(cls, text: str) -> "Model":
        """A model folder, `base`, a preset, or sizes: `layers=36,hidden=2560,...`. ConfigError says what there is."""
        if text == "base":
            return cls.from_folder(SHIPPED_POLICY)
        if "=" in text:
            return cls._from_words(text)
        if text in PRESETS:
            return PRESETS[text]
        if (Path(text) / "config.json").is_file():
            return cls.from_folder(Path(text))
        raise ConfigError(
            f"--model {text} is no folder with a config.json, no sizes (layers=36,hidden=2560,ffn=9728,heads=32,"
            f"kv_heads=8) and no preset{nearest(text, list(PRESETS))}"
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Model":
        """ConfigError for an architecture whose parameters it cannot count."""
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        family = config.get("model_type")
        if (
            family not in _FAMILIES
            or config.get("mlp_bias")
            or (family != "qwen2" and config.get("attention_bias"))
        ):
            raise ConfigError(
                f"{folder}: a {family} with such layers cannot be counted; there are {', '.join(_FAMILIES)} without "
                "further biases, or give sizes (--model layers=...,hidden=...)"
            )
        missing = [key for key in _READ_AS.values() if key not in config]
        if missing:
            raise ConfigError(f"{folder}/config.json lacks {', '.join(missing)}")
        sizes = {name: config[key] for name, key in _READ_AS.items()}
        if family == "qwen3_moe":
            every, alone = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
            sparse = [i for i in range(sizes["layers"]) if i not in alone and (i + 1) % every == 0]
            sizes |= {"experts": config.get("num_experts", config.get("num_local_experts", 0))}
            sizes |= {
                "active": config["num_experts_per_tok"],
                "expert_ffn": config["moe_intermediate_size"],
            }
            sizes |= {"dense": sizes["layers"] - len(sparse)}
        return cls(
            **sizes, name=folder.name, head_dim=config.get("head_dim") or sizes["hidden"] // sizes["heads"],
            tied=config.get("tie_word_embeddings", False), qk_norm=family.startswith("qwen3"),
            qkv_bias=family == "qwen2",
        )  # fmt: skip

    @classmethod
    def _from_words(cls, text: str) -> "Model":
        sizes = {"name": text, **parse_assignments("--model", text.split(","), cls.__annotations__)}
        if missing := [
            name for name in ("layers", "hidden", "ffn", "heads", "kv_heads") if name not in sizes
        ]:
            raise ConfigError(f"--model {text} lacks {', '.join(missing)}")
        return cls(**sizes)


def _qwen3(
    name: str, layers: int, hidden: int, ffn: int, heads: tuple[int, int], **rest: Any
) -> Model:
    return Model(
        name=f"Qwen3-{name}",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads[0],
        kv_heads=heads[1],
        **rest,
    )


PRESETS = {
    "0.6B": _qwen3("0.6B", 28, 1024, 3072, (16, 8), tied=True),
    "1.7B": _qwen3("1.7B", 28, 2048, 6144, (16, 8), tied=True),
    "4B": _qwen3("4B", 36, 2560, 9728, (32, 8), tied=True),
    "8B": _qwen3("8B", 36, 4096, 12288, (32, 8)),
    "14B": _qwen3("14B", 40, 5120, 17408, (40, 8)),
    "32B": _qwen3("32B", 64, 5120, 25600, (64, 8)),
    "30B-A3B": _qwen3("30B-A3B", 48, 2048, 6144, (32, 4), experts=128, active=8, expert_ffn=768),
    "235B-A22B": _qwen3(
        "235B-A22B", 94, 4096, 12288, (64, 4), experts=128, active=8, expert_ffn=1536
    ),
}
"""Public shapes of Qwen3, from the config.json of each model; parameters as its model card has them (tested)."""
