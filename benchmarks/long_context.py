"""Count the memory that a long pass keeps for its backward pass, by model, ranks and recomputation.

    python -m benchmarks.long_context     # minutes on one core; no GPU, nothing is downloaded

Tensors that autograd saves are counted, not the memory of the process. The first table is a real
forward and backward pass of a tiny model. The second counts layers at the real widths of Qwen3
models: torch's fake tensors have shapes but no values, so nothing is computed.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from benchmarks.tables import CONSOLE, columns, row, write
from unstale.analysis.planner.models import PRESETS, Model
from unstale.model.attention import ATTENTION
from unstale.model.context import ContextGroup
from unstale.model.forward import checkpoint_layers, run_model
from unstale.model.prefix_tree import Packed, PrefixTree, build_prefix_tree

TOKENS = 131_072
TINY = Model(2, 32, 64, 4, 2, name="tiny", head_dim=8, vocab=64, tied=True)
COUNTED = 4096
"""Tokens of the passes that are counted without values. What they keep is proportional to them."""
_GB = 1e9


def shape_of(model: Model, layers: int) -> PretrainedConfig:
    """Return the configuration of a Qwen3 model with a few layers and words."""
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "tie_word_embeddings": True,
    }
    if not model.experts:
        return Qwen3Config(**shape)
    return Qwen3MoeConfig(
        **shape,
        num_experts=model.experts,
        num_experts_per_tok=model.active,
        moe_intermediate_size=model.expert_ffn,
        norm_topk_prob=True,
    )


def saved_bytes(
    config: PretrainedConfig,
    tokens: int,
    *,
    gradient_checkpointing: bool = False,
    context: int = 1,
    fake: bool = True,
) -> int:
    """Return the bytes that the layers keep for the backward pass of one sequence, on one rank.

    With `fake`, in bfloat16 and without values; otherwise computed, in float32.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    packed = Packed(torch.zeros(tokens, dtype=torch.long), (0, tokens))
    tree = build_prefix_tree(packed, share=False)
    with mode, _first_of(context) as group:
        dtype = torch.bfloat16 if fake else torch.float32
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION
        ).eval()
        if gradient_checkpointing:
            checkpoint_layers(model)
        return _count(model, replace(tree, context=group))


@contextmanager
def _first_of(context: int) -> Iterator[ContextGroup | None]:
    """Yield the group of `context` ranks as its first rank sees it. The others do not exist."""
    if context == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=context)
    try:
        assert dist.group.WORLD
        yield ContextGroup.of(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _count(model: nn.Module, tree: PrefixTree) -> int:
    """Run the layers. Return the bytes of the memory that autograd saves.

    Memory that several tensors share counts once, and weights do not count.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no later tensor gets the memory of one that was counted

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and storage._cdata not in sizes:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    body: Any = model.base_model
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        hidden = run_model(body, tree, torch.tensor([-1]), True)
    assert hidden.requires_grad
    return sum(sizes.values())


def token_bytes(model: Model, *, context: int, checkpointing: bool) -> float:
    """Return the bytes per token of all layers of a model, counted with one and with two layers."""
    one, two = (
        saved_bytes(
            shape_of(model, layers), COUNTED, context=context, gradient_checkpointing=checkpointing
        )
        for layers in (1, 2)
    )
    return (one + (model.layers - 1) * (two - one)) / COUNTED


def tiny_rows(tokens: int) -> list[str]:
    lines = columns(
        "gradient checkpointing", "ranks that divide the pass", "MB kept", "per token", "seconds"
    )
    for checkpointing in (False, True):
        for context in (1, 4):
            began = time.perf_counter()
            kept = saved_bytes(
                shape_of(TINY, TINY.layers),
                tokens,
                gradient_checkpointing=checkpointing,
                context=context,
                fake=False,
            )
            seconds = time.perf_counter() - began
            cells = f"{kept / 1e6:,.1f}", f"{kept / tokens:,.0f} B", f"{seconds:,.0f}"
            lines.append(row("yes" if checkpointing else "no", context, *cells))
            CONSOLE.print(lines[-1], markup=False)
    return lines


def model_rows(names: Sequence[str], tokens: int) -> list[str]:
    lines = columns(
        "model",
        "ranks that divide the pass",
        "kept, GB a rank",
        "with gradient checkpointing, GB",
        "and one layer computed again, GB",
    )
    for name in names:
        model = PRESETS[name]
        for context in (1, 2, 4, 8):
            kept = [
                tokens * token_bytes(model, context=context, checkpointing=checkpointing)
                for checkpointing in (False, True)
            ]
            layer = model.layer_bytes * tokens / context
            cells = f"{kept[0] / _GB:,.1f}", f"{kept[1] / _GB:.1f}", f"{layer / _GB:.1f}"
            lines.append(row(f"Qwen3-{name}", context, *cells))
            CONSOLE.print(lines[-1], markup=False)
    return lines


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--computed", type=int, default=TOKENS, help="tokens of the tiny model")
    parser.add_argument("--models", nargs="*", choices=list(PRESETS), default=["4B", "30B-A3B"])
    chosen = parser.parse_args(words)
    tokens = chosen.tokens
    lines = [
        "Memory that one pass keeps until its backward pass, on each rank. Weights, gradients and "
        "logits are not included.",
        "",
        f"## A tiny model ({TINY.layers} layers of width {TINY.hidden}, float32): computed passes "
        f"of {chosen.computed:,} tokens",
        "",
        "This process is the first rank. With 4 ranks, the exchanges with the others carry no "
        "values.",
        "",
        *tiny_rows(chosen.computed),
        "",
        f"## Real widths in bfloat16, counted: {tokens:,} tokens",
        "",
        f"Passes of {COUNTED:,} tokens with one and two layers were counted without values. Their "
        "difference is taken for each further layer, and the sum is scaled to the length. The last "
        "column is from the planner's formula.",
        "",
        *model_rows(chosen.models, tokens),
    ]
    return write("long-context", "Memory of a long pass", lines)


if __name__ == "__main__":
    main()
