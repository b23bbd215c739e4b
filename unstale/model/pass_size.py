"""The largest forward pass, in tokens, that fits into memory.

It follows from the free memory, and from the bytes that layers keep for each token until the
backward pass.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unstale.routed_experts import num_experts

if TYPE_CHECKING:  # `unstale plan` imports this file without torch
    import torch
    from torch import nn

_WORD = 2
_FREE_SHARE = 0.75
"""Share of a GPU's free memory that activations may take. The rest is for fragmentation and for the
logits of the output head.
"""
_CPU_SHARE = 0.25
"""Share of free main memory that activations may take. Other processes need some of the rest."""
_STEP = 256
"""The number of tokens in a pass is a multiple of this."""
MOST = {"cuda": 65_536, "cpu": 8_192}
"""Largest number of tokens of a forward pass, by kind of device. Longer passes are not faster."""


class DecoderSizes(Protocol):
    """The sizes of a decoder model with gated MLPs or experts.

    They are counts of layers, heads and experts, and widths in features.
    """

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
    """Return the bytes of activations that a layer keeps for each token until its backward pass.

    `word` is the size of an activation in bytes. The formula was found by counting, for Qwen3 and
    Qwen3-MoE of transformers in bfloat16. For each norm, a layer keeps its input in float32, and
    its output twice. Queries and keys are kept in the same way if they have norms, otherwise once.
    Values are kept once, and the attention output twice. An MLP keeps four times its width. Each
    expert of a token keeps its input, its output and four times its width.
    """
    each = 4 if sizes.qk_norm else 1
    queries = (each + 2) * sizes.heads
    keys = (each + 1) * sizes.kv_heads
    mlp = 4 * sizes.ffn
    if sizes.experts:
        mlp = sizes.active * (2 * sizes.hidden + 4 * sizes.expert_ffn)
    return word * (8 * sizes.hidden + (queries + keys) * sizes.head_dim + mlp)


def token_bytes(sizes: DecoderSizes, *, checkpointing: bool, word: int = _WORD) -> int:
    """Return the bytes of activations that all layers keep for each token until the backward pass.

    `word` is the size of an activation in bytes. With gradient checkpointing, one layer at a time
    keeps all its activations, and the others keep only their input.
    """
    layer = layer_bytes(sizes, word=word)
    return sizes.layers * word * sizes.hidden + layer if checkpointing else sizes.layers * layer


def largest_pass(
    model: "nn.Module", *, free: float, word: int, checkpointing: bool, trains: bool
) -> int:
    """Return the number of tokens in the largest pass whose activations need at most `free` bytes.

    The result is at least 256, and at most the device's number in `MOST`. `word` is the size of an
    activation in bytes. `checkpointing` is as in `token_bytes`. A pass without gradient (`trains`
    False) keeps the activations of one layer at a time.
    """
    sizes = _sizes_of(model)
    one = token_bytes(sizes, checkpointing=checkpointing, word=word)
    if not trains:
        one = layer_bytes(sizes, word=word) + 2 * word * sizes.hidden
    device = next(model.parameters()).device.type
    tokens = min(int(free / one), MOST.get(device, MOST["cpu"]))
    return max(_STEP, tokens // _STEP * _STEP)


def free_bytes(device: "torch.device", *, reserved: float, ranks: int) -> float:
    """Return the number of bytes of a device's memory that activations may take.

    `reserved` bytes are kept free for other data. The main memory is shared by `ranks` processes,
    each of which reserves as many. The result may be negative.
    """
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return _FREE_SHARE * (torch.cuda.mem_get_info(device)[0] + unused - reserved)
    return _CPU_SHARE * (_free_main_memory() / ranks - reserved)


def total_bytes(device: "torch.device") -> int:
    import torch

    return torch.cuda.mem_get_info(device)[1]


def _free_main_memory(root: Path = Path("/")) -> int:
    """Return the free bytes of main memory, or of the container's memory limit if that is less.

    Cached files count as free memory.
    """
    free = 1024 * _numbers(root / "proc/meminfo")["MemAvailable:"]
    limit, used = root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        stat = _numbers(root / "sys/fs/cgroup/memory.stat")
        cached = stat["active_file"] + stat["inactive_file"]
        free = min(free, int(limit.read_text()) - int(used.read_text()) + cached)
    return max(0, free)


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file, such as /proc/meminfo, by the name at the start of the line."""
    lines = map(str.split, path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


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
