"""Our own decoder for the Qwen3 architecture: few, large operations, because at these sizes overhead is the cost.

Query, key and value are one matrix, gate and up another; the cache is preallocated; rows of one token are one batched
attention over the slots as they lie, without gathering. Within a head the two halves of the rotary embedding are
interleaved at load time, which turns the rotation into one complex multiplication and leaves every inner product as
it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afterimage.engines.runner import Step, check_update

_GROWTH = 64
"""The cache gets longer by so many tokens at a time."""
_TILE = 32
"""Sizes that change from step to step are rounded up to this: bfloat16 kernels are compiled anew for every shape."""


def supports(config: Mapping[str, Any]) -> bool:
    """Whether this decoder computes exactly the model that this `config.json` describes."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return (
        config.get("model_type") == "qwen3"
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias", False)
        and not config.get("use_sliding_window", False)
        and set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and rope.get("rope_type", "default") == "default"
    )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers of a `config.json` that this decoder needs."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    theta: float
    eps: float
    tied: bool

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Sizes":
        rope = config.get("rope_parameters") or {}
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by the name that transformers gives it."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (query, self.hidden),
            "self_attn.k_proj": (key, self.hidden),
            "self_attn.v_proj": (key, self.hidden),
            "self_attn.o_proj": (self.hidden, query),
            "self_attn.q_norm": (self.head_dim,),
            "self_attn.k_norm": (self.head_dim,),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_1: Tensor
    qkv: Tensor
    qk_norm: Tensor
    """`[heads + kv_heads, head_dim]` float32; the query part carries the softmax scale."""
    out: Tensor
    norm_2: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class _Window:
    """What the one-token rows of a step attend to: the first `num_slots` slots, `length` tokens of each."""

    num_slots: int
    length: int
    dense: bool
    """Row `i` is slot `i`: queries need not be spread over the slots."""
    mask: Tensor
    """`[num_slots * kv_heads, 1, length]`, to be added to the scores."""

    @classmethod
    def of(cls, step: Step, *, kv_heads: int, max_slots: int, length: int, dtype: torch.dtype) -> "_Window":
        num_rows = len(step.rows)
        num_slots = min(max_slots, _tiled(int(step.rows.max()) + 1, _TILE // 4)) if num_rows else 0
        last = torch.zeros(num_slots, dtype=torch.long)
        last[step.rows] = step.positions[:num_rows]
        mask = torch.zeros(num_slots, length, dtype=dtype).masked_fill_(_after(last, length), -torch.inf)
        dense = num_slots == num_rows
        return cls(num_slots, length, dense, mask.repeat_interleave(kv_heads, 0)[:, None])


class Qwen3Runner:
    """`Runner` for Qwen3. The cache grows in length as sequences do, up to `max_context`."""

    name = "qwen3 decoder"

    def __init__(self, config: Mapping[str, Any], *, dtype: torch.dtype, max_slots: int, max_context: int) -> None:
        self.sizes = sizes = Sizes.read(config)
        self.vocab_size = sizes.vocab
        self._dtype = dtype
        self._max_context = max_context
        self._max_slots = max_slots
        self._layers: list[_Layer] = []
        frequencies = 1.0 / sizes.theta ** (torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim)
        angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
        self._rotations = torch.polar(torch.ones_like(angles), angles)
        self._length = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._reserve(_GROWTH)

    def _reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens. Keys lie `[slots, kv, head_dim, length]`, values transposed."""
        if length <= self._length:
            return
        sizes, old = self.sizes, self._length
        self._length = min(self._max_context, _tiled(length, _GROWTH))
        keys, values = self._keys, self._values
        lead = (self._max_slots, sizes.kv_heads)
        self._keys, self._values = [], []
        for layer in range(sizes.layers):
            key = torch.zeros(*lead, sizes.head_dim, self._length, dtype=self._dtype)
            value = torch.zeros(*lead, self._length, sizes.head_dim, dtype=self._dtype)
            if old:
                key[..., :old] = keys[layer]
                value[:, :, :old] = values[layer]
            self._keys.append(key)
            self._values.append(value)

    def _span(self, needed: int) -> int:
        """How much of the cache to attend to so that `needed` tokens are in it.

        bfloat16 products copy whatever is not contiguous, so all of it is cheaper than most of it.
        """
        tiled = min(self._length, _tiled(needed))
        whole = self._dtype == torch.bfloat16 and 4 * tiled >= 3 * self._length
        return self._length if whole else tiled

    def load(self, update: Mapping[str, Tensor]) -> None:
        sizes = self.sizes
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if sizes.tied else {}
        check_update(update, sizes.shapes(), tied)
        weights = {name: update[name].to(self._dtype, copy=True) for name in sizes.shapes()}
        self._embed = weights["model.embed_tokens.weight"]
        self._head = self._embed if sizes.tied else weights["lm_head.weight"]
        self._norm = weights["model.norm.weight"]
        self._layers = [self._layer(weights, f"model.layers.{index}.") for index in range(sizes.layers)]

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> _Layer:
        sizes = self.sizes
        half = sizes.head_dim // 2
        order = torch.arange(sizes.head_dim).view(2, half).t().flatten()

        def weight(name: str) -> Tensor:
            return weights[f"{prefix}{name}.weight"]

        def interleaved(name: str) -> Tensor:
            return weight(name).view(-1, sizes.head_dim, sizes.hidden)[:, order].reshape(-1, sizes.hidden)

        query_norm = weight("self_attn.q_norm").float()[order] * sizes.head_dim**-0.5
        key_norm = weight("self_attn.k_norm").float()[order]
        return _Layer(
            norm_1=weight("input_layernorm"),
            qkv=torch.cat(
                [interleaved("self_attn.q_proj"), interleaved("self_attn.k_proj"), weight("self_attn.v_proj")]
            ),
            qk_norm=torch.stack([query_norm] * sizes.heads + [key_norm] * sizes.kv_heads),
            out=weight("self_attn.o_proj"),
            norm_2=weight("post_attention_layernorm"),
            gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
            down=weight("mlp.down_proj"),
        )

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        for key, value in zip(self._keys, self._values, strict=True):
            key[target, :, :, :count] = key[source, :, :, :count]
            value[target, :, :count] = value[source, :, :count]

    def forward(self, step: Step) -> Tensor:
        sizes = self.sizes
        self._reserve(max([step.longest, *(chunk.end for chunk in step.chunks)]))
        rotations = self._rotations[_padded(step.positions)][:, None]
        window = _Window.of(
            step,
            kv_heads=sizes.kv_heads,
            max_slots=self._max_slots,
            length=self._span(step.longest),
            dtype=self._dtype,
        )
        x = F.embedding(_padded(step.tokens), self._embed)
        for index, layer in enumerate(self._layers):
            h = F.rms_norm(x, (sizes.hidden,), layer.norm_1, sizes.eps)
            qkv = F.linear(h, layer.qkv).view(len(x), sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
            qk, value = qkv[:, : -sizes.kv_heads].float(), qkv[:, -sizes.kv_heads :]
            qk = F.rms_norm(qk, (sizes.head_dim,), None, sizes.eps) * layer.qk_norm
            turned = torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2)) * rotations
            qk = torch.view_as_real(turned).flatten(2).to(self._dtype)
            self._store(index, qk[:, sizes.heads :], value, step)
            mixed = self._attend(index, qk[:, : sizes.heads], step, window)
            x = x + F.linear(mixed, layer.out)
            h = F.rms_norm(x, (sizes.hidden,), layer.norm_2, sizes.eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        x = F.rms_norm(x[step.last], (sizes.hidden,), self._norm, sizes.eps)
        return F.linear(x, self._head).float()

    def _store(self, index: int, key: Tensor, value: Tensor, step: Step) -> None:
        """Cache this step's keys and values of one layer."""
        keys, values = self._keys[index], self._values[index]
        if num_rows := len(step.rows):
            at = step.positions[:num_rows]
            keys[step.rows, :, :, at] = key[:num_rows]
            values[step.rows, :, at] = value[:num_rows]
        for chunk, span in step.spans():
            keys[chunk.slot, :, :, chunk.start : chunk.end] = key[span].permute(1, 2, 0)
            values[chunk.slot, :, chunk.start : chunk.end] = value[span].transpose(0, 1)

    def _attend(self, index: int, query: Tensor, step: Step, window: _Window) -> Tensor:
        """`[T, heads * head_dim]` of one layer, whose cache already holds this step."""
        sizes, keys, values = self.sizes, self._keys[index], self._values[index]
        num_rows, mixed = len(step.rows), []
        padding = len(query) - len(step.tokens)
        if num_rows:
            mixed.append(self._attend_rows(query[:num_rows], keys, values, rows=step.rows, window=window))
        for chunk, span in step.spans():
            mixed.append(self._attend_chunk(query[span], keys[chunk.slot], values[chunk.slot], start=chunk.start))
        if padding:
            mixed.append(query.new_zeros(padding, sizes.heads * sizes.head_dim))
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]

    def _attend_rows(self, query: Tensor, keys: Tensor, values: Tensor, *, rows: Tensor, window: _Window) -> Tensor:
        """One query per row, against the slots as they lie. Slots without a row are computed and thrown away."""
        sizes = self.sizes
        if not window.dense:
            spread = query.new_zeros(window.num_slots, *query.shape[1:])
            spread[rows] = query
            query = spread
        batch = window.num_slots * sizes.kv_heads
        keys = keys.flatten(0, 1)[:batch, :, : window.length]
        values = values.flatten(0, 1)[:batch, : window.length]
        scores = torch.baddbmm(window.mask, query.reshape(batch, -1, sizes.head_dim), keys)
        mixed = torch.bmm(scores.softmax(-1), values).view(window.num_slots, -1)
        return mixed if window.dense else mixed[rows]

    def _attend_chunk(self, query: Tensor, keys: Tensor, values: Tensor, *, start: int) -> Tensor:
        """`query [n, heads, head_dim]` are the tokens from `start` on of the slot that `keys` and `values` are."""
        sizes, count = self.sizes, len(query)
        length = self._span(start + count)
        padded = _padded(query)
        folded = padded.transpose(0, 1).reshape(sizes.kv_heads, -1, sizes.head_dim)
        scores = torch.bmm(folded, keys[..., :length])
        hidden = _after(torch.arange(start, start + len(padded)), length)
        weights = scores.view(sizes.heads, -1, length).masked_fill_(hidden, -torch.inf).softmax(-1)
        mixed = torch.bmm(weights.view(sizes.kv_heads, -1, length), values[:, :length])
        return mixed.view(sizes.heads, -1, sizes.head_dim)[:, :count].transpose(0, 1).flatten(1)


def _tiled(size: int, tile: int = _TILE) -> int:
    """
    >>> _tiled(33), _tiled(64)
    (64, 64)
    """
    return -(-size // tile) * tile


def _padded(rows: Tensor) -> Tensor:
    """`rows [n, ...]` with zeros up to a whole tile."""
    missing = _tiled(len(rows), _TILE // 4) - len(rows)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _after(last: Tensor, length: int) -> Tensor:
    """`[len(last), length]`, True where a position lies after `last`."""
    return torch.arange(length) > last[:, None]
