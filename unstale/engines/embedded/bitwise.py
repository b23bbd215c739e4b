"""A decoder for CPUs whose log-probabilities equal the trainer's bit for bit.

The decoder calls the functions of the trainer's packed passes (`unstale/model/bitwise.py`): the
same matrix products, norms, rotary angles and sums. Attention reads the keys of a sequence from
cache pages, which have the same positions as the blocks of keys in the trainer's attention. So a
log-probability depends only on the weights, the token and the tokens before it. It does not depend
on the other sequences of the batch, on the parts in which a prompt is computed, or on shared pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from unstale.engines.embedded.pages import PAGE, RUN, PagedCache, placed, runs
from unstale.engines.embedded.runner import Step, check_update, tied_parameters
from unstale.engines.embedded.sampling import Drawn, Sampler
from unstale.kept_sets import Truncation
from unstale.model import bitwise, fused, rowwise
from unstale.model.kernels import BLOCK, Kernels, kernels
from unstale.model.loading import load_model
from unstale.model.rowwise import Panels


@dataclass(frozen=True, slots=True)
class _Sizes:
    heads: int
    kv_heads: int
    width: int
    scale: float
    eps: float
    head_eps: float


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of a layer: matrices as `Panels` (`rowwise.pack`), vectors in float32."""

    norm_1: Tensor
    qkv: Panels
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor | None, Tensor | None]
    """The norm weights of queries and of keys. None in models without these norms."""
    out: Panels
    out_bias: Tensor | None
    norm_2: Tensor
    gate_up: Panels
    down: Panels


class BitwiseRunner:
    """A `Runner` for the dense models of `bitwise.ARCHITECTURES`. Its KV cache grows as needed."""

    warning = ""
    adapters = None
    keeps_beginnings = True

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, max_slots: int, max_context: int
    ) -> None:
        """Read the sizes of the model in `folder`.

        Raises ConfigError for a model that is not supported.
        """
        assert PAGE == BLOCK, "pages are the blocks of the trainer's attention"
        model: Any = load_model(folder, dtype).eval()
        bitwise.require_supported(model, max_context)
        self.name = f"bitwise {type(model).__name__}"
        self.vocab_size = int(model.config.vocab_size)
        self._dtype = dtype
        self._shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
        self._tied = tied_parameters(model)
        self._num_layers = len(model.base_model.layers)
        self._sizes = _sizes_of(model)
        self._angles = bitwise.angles(model.base_model.rotary_emb, max_context)
        found = kernels()
        assert found, "require_supported compiled them"
        self._kernels: Kernels = found
        self._layers: list[_Layer] = []
        shapes = [(self._sizes.kv_heads, self._sizes.width)] * self._num_layers
        self.cache = PagedCache(shapes, max_slots, max_context, dtype=torch.float32)

    def load(self, update: Mapping[str, Tensor]) -> None:
        check_update(update, self._shapes, self._tied)
        self._layers = []  # the old weights are freed before the new ones take memory
        prefix = "model."
        self._embed = update[f"{prefix}embed_tokens.weight"].to(self._dtype, copy=True)
        head = update.get("lm_head.weight", self._embed)
        self._head = rowwise.pack(head.to(self._dtype))
        self._norm = self._vector(update, f"{prefix}norm.weight")
        for index in range(self._num_layers):
            self._layers.append(self._layer(update, f"{prefix}layers.{index}."))

    def _layer(self, update: Mapping[str, Tensor], prefix: str) -> _Layer:
        def joined(*names: str) -> Panels:
            found = [update[f"{prefix}{name}.weight"].to(self._dtype) for name in names]
            return rowwise.pack(torch.cat(found))

        def vectors(*names: str) -> Tensor | None:
            found = [f"{prefix}{name}" for name in names]
            if found[0] not in self._shapes:
                return None
            return torch.cat([self._vector(update, name) for name in found])

        inputs = [f"self_attn.{name}_proj" for name in "qkv"]
        return _Layer(
            norm_1=self._vector(update, f"{prefix}input_layernorm.weight"),
            qkv=joined(*inputs),
            qkv_bias=vectors(*(f"{name}.bias" for name in inputs)),
            head_norms=(vectors("self_attn.q_norm.weight"), vectors("self_attn.k_norm.weight")),
            out=joined("self_attn.o_proj"),
            out_bias=vectors("self_attn.o_proj.bias"),
            norm_2=self._vector(update, f"{prefix}post_attention_layernorm.weight"),
            gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
            down=joined("mlp.down_proj"),
        )

    def _vector(self, update: Mapping[str, Tensor], name: str) -> Tensor:
        """Return the weight `name` as a float32 copy, rounded to the model's precision."""
        return update[name].to(self._dtype, copy=True).float()

    def forward(self, step: Step) -> Tensor:
        """Return the float32 logits `[R + C, V]` of a forward pass, as `Runner.forward` does."""
        cells = torch.from_numpy(placed(step, self.cache.pages))
        self.cache.reserve()
        table = runs(step, self.cache.pages, RUN)
        angles = (self._angles[0][step.positions], self._angles[1][step.positions])
        eps = self._sizes.eps
        x = F.embedding(step.tokens, self._embed).float()
        for index, layer in enumerate(self._layers):
            h, _ = fused.norm_rows(x, layer.norm_1, eps)
            qkv = rowwise.product(h, layer.qkv, layer.qkv_bias)
            mixed = self._attend(index, qkv, angles, cells, table)
            x = x + rowwise.product(mixed, layer.out, layer.out_bias)
            h, _ = fused.norm_rows(x, layer.norm_2, eps)
            inner = fused.swiglu(rowwise.product(h, layer.gate_up))
            x = x + rowwise.product(inner, layer.down)
        ends = [*range(len(step.rows)), *(span.stop - 1 for _, span in step.spans())]
        h, _ = fused.norm_rows(x[ends], self._norm, eps)
        return rowwise.product(h, self._head)

    def _attend(
        self,
        index: int,
        qkv: Tensor,
        angles: tuple[Tensor, Tensor],
        cells: Tensor,
        table: Tensor,
    ) -> Tensor:
        """Write the keys and values of T tokens in one layer to the cache. Return the attention
        output.

        The output is `[T, heads * width]`. `qkv` has the queries, keys and values. `cells` are the
        tokens' indices in the cache. `table` is the result of `pages.runs`: the groups of tokens
        whose attention is computed together.
        """
        sizes = self._sizes
        heads, kv_heads, width = sizes.heads, sizes.kv_heads, sizes.width
        layer = self._layers[index]
        parts = qkv.split([heads * width, kv_heads * width, kv_heads * width], 1)
        query, key = (
            fused.turn_heads(part, norm, angles, width, sizes.head_eps)[0]
            for part, norm in zip(parts[:2], layer.head_norms, strict=True)
        )
        keys, values = self.cache.keys[index], self.cache.values[index]
        count = len(cells)
        value = parts[2]
        self._kernels.place(
            key, value, value.stride(0), cells, keys, values, count, kv_heads, width
        )
        mixed = torch.empty(count, heads * width)
        pages = torch.from_numpy(self.cache.pages.of)
        self._kernels.attend_pages(
            query,
            keys,
            values,
            pages,
            pages.shape[1],
            table,
            table.shape[1],
            sizes.scale,
            mixed,
            heads,
            kv_heads,
            width,
        )
        return mixed

    def keep(self, slot: int, count: int) -> None:
        self.cache.keep(slot, count)

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        self.cache.copy_prefix(source, target, count)

    def take_experts(self) -> Tensor:
        raise RuntimeError("a dense model has no experts")


def _sizes_of(model: Any) -> _Sizes:
    layer = model.base_model.layers[0]
    attention = layer.self_attn
    width = attention.head_dim
    norm = getattr(attention, "q_norm", None)
    return _Sizes(
        heads=attention.q_proj.out_features // width,
        kv_heads=attention.k_proj.out_features // width,
        width=width,
        scale=attention.scaling,
        eps=model.base_model.norm.variance_epsilon,
        head_eps=0.0 if norm is None else norm.variance_epsilon,
    )


class BitwiseSampler(Sampler):
    """A `Sampler` whose log-probabilities equal the trainer's bit for bit.

    Those of truncated rows, which only evaluations have, are a `Sampler`'s.
    """

    def __call__(
        self,
        logits: Tensor,
        temperature: NDArray[np.float32],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int64],
        truncations: Sequence[Truncation] = (),
    ) -> Drawn:
        tokens, drawn, kept = super().__call__(logits, temperature, seeds, positions, truncations)
        own = temperature == 0  # rows that the trainer never scores
        if any(truncations):
            own = own | np.array([bool(each) for each in truncations])
        heat = torch.from_numpy(np.where(own, np.float32(1), temperature))
        logp, _, _ = rowwise.score(logits, torch.from_numpy(tokens), heat)
        return Drawn(tokens, np.where(own, drawn, logp.numpy()), kept)
