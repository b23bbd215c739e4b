"""The number of tokens of the largest forward pass that fits into memory.

It follows from the bytes that the layers keep of each token, and from the memory that is free.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unstale.routed_experts import num_experts

if TYPE_CHECKING:  # `unstale plan` imports this file without torch
    import torch
    from torch import nn

_WORD = 2
_FREE_SHARE = 0.75
"""Share of the free memory for activations. The rest is for fragments and for the head's tiles."""
_CPU_SHARE = 0.25
"""The same on a CPU, whose memory other processes use, too."""
_STEP = 256
"""The result is a multiple of this many tokens, and at least as many."""
MOST = {"cuda": 65_536, "cpu": 8_192}
"""Largest results by kind of device. Longer passes compute no faster."""


class DecoderSizes(Protocol):
    """The sizes of a decoder model with gated MLPs or experts, as `planner.models.Model` has."""

    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def active(self) -> int: ...
    @property
    def expert_ffn(self) -> int: ...


class _Sizes(NamedTuple):
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    experts: int
    active: int
    expert_ffn: int


def layer_bytes(sizes: DecoderSizes, *, word: int = _WORD) -> int:
    """Return the bytes that a layer keeps of each token until its backward pass.

    A number of the model has `word` bytes. They were counted in a pass of transformers' Qwen3 and
    Qwen3-MoE in bfloat16. Per norm: its input in float32, twice its output. Queries and keys: the
    same, or once without norms of their own. Values; the attention output twice. In an MLP: four
    times its width. In experts: for each that the token uses, its input, its output and four times
    its width.
    """
    each = 4 if sizes.qk_norm else 1
    queries = (each + 2) * sizes.heads
    keys = (each + 1) * sizes.kv_heads
    mlp = 4 * sizes.ffn
    if sizes.experts:
        mlp = sizes.active * (2 * sizes.hidden + 4 * sizes.expert_ffn)
    return word * (8 * sizes.hidden + (queries + keys) * sizes.head_dim + mlp)


def token_bytes(sizes: DecoderSizes, *, checkpointing: int, word: int = _WORD) -> int:
    """Return the bytes that all layers keep of each token until their backward passes.

    With gradient checkpointing of each Nth layer, one of these layers at a time keeps everything
    that its backward pass needs, and the others keep only their input. 0 is no checkpointing.
    """
    layer = layer_bytes(sizes, word=word)
    again = math.ceil(sizes.layers / checkpointing) if checkpointing else 0
    return again * word * sizes.hidden + (sizes.layers - again + bool(again)) * layer


def largest_pass(
    model: "nn.Module", *, free: float, word: int, checkpointing: int, trains: bool
) -> int:
    """Return the number of tokens of the largest pass whose activations take `free` bytes.

    A pass that does not train keeps the activations of one layer at a time.
    """
    sizes = _sizes_of(model)
    one = token_bytes(sizes, checkpointing=checkpointing, word=word)
    if not trains:
        one = layer_bytes(sizes, word=word) + 2 * word * sizes.hidden
    device = next(model.parameters()).device.type
    tokens = min(int(free / one), MOST.get(device, MOST["cpu"]))
    return max(_STEP, tokens // _STEP * _STEP)


def free_bytes(device: "torch.device", *, reserved: float, ranks: int) -> float:
    """Return the bytes of memory that activations on a device may take.

    `reserved` bytes will be taken by others than activations. The main memory is shared by `ranks`
    processes, each of which reserves as many. The result may be negative.
    """
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return _FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused - reserved)
    return _CPU_SHARE * (_free_main_memory() / ranks - reserved)


def total_bytes(device: "torch.device") -> int:
    """Return the bytes of memory of a GPU."""
    import torch

    return torch.cuda.mem_get_info(device)[1]


def _free_main_memory(root: Path = Path("/")) -> int:
    """Return the free bytes of main memory, of this machine or of its container if that is less."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    found = {
        name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)
    }
    free = 1024 * found["MemAvailable"]
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(0, free)


def _sizes_of(model: "nn.Module") -> DecoderSizes:
    whole: Any = model.config
    config = whole.get_text_config()
    heads = config.num_attention_heads

    def size(*names: str, default: int = 0) -> int:
        return next((found for name in names if (found := getattr(config, name, None))), default)

    hidden = config.hidden_size
    return _Sizes(
        layers=config.num_hidden_layers,
        hidden=hidden,
        ffn=size("intermediate_size", default=4 * hidden),
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=hidden // heads),
        qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        experts=num_experts(whole.to_dict()),
        active=size("num_experts_per_tok", default=1),
        expert_ffn=size("moe_intermediate_size", "intermediate_size"),
    )
