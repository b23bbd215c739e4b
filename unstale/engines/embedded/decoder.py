"""A fast decoder for models of the Qwen3 architecture, and on CPUs of the Qwen3-MoE architecture.

It uses few, large operations, because for small models the overhead of each operation dominates:
query, key and value are one matrix, gate and up another. Sequences with the same first tokens share
the cache pages of these tokens.

On a CPU, `decoder.c` computes a step of a dense model in one call. For models with experts, and for
bfloat16 on CPUs with instructions for it, torch computes the matrix products and `kernels.c`
everything else, experts included. On a GPU, torch computes the matrix products and Triton the rest
(`gpu_kernels.py`). Without Triton, torch computes everything. The attention of all sequences that
sample one token is one batched operation. Prompts are cut into blocks, whose attention is a second
batched operation. On CUDA, steps without prompts replay a recorded graph.

When weights are loaded, the two halves of each head's rotary embedding are interleaved. The
rotation is then one complex multiplication, and inner products stay the same.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unstale.engines.embedded.graphs import Graphs
from unstale.engines.embedded.kernels import Kernels, divided
from unstale.engines.embedded.layer_parts import LayerParts, TorchParts, attend_blocks, mask_later
from unstale.engines.embedded.one_call import SOURCE, OneCall, StepSizes, StepTokens
from unstale.engines.embedded.pages import (
    PAGE,
    RUN,
    Inputs,
    PagedCache,
    StepShape,
    placed,
    plan,
    runs,
    tiled,
)
from unstale.engines.embedded.runner import Step, check_update, warning_with_gpu
from unstale.model import linear
from unstale.model.kernels import gpu_kernels
from unstale.model.packed_weights import RoundedWeights
from unstale.model.quantisation import FORMATS, Format, quantised
from unstale.native import NotCompiled
from unstale.routed_experts import num_experts

MIN_CAPABILITY = (8, 0)
"""The lowest CUDA compute capability for Triton kernels, that of the first GPUs with bfloat16."""
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
"""Keys of `config.json` for sizes that the decoder needs of every model."""
_SIZES_WITHOUT = ("intermediate_size", "head_dim")
"""Keys of `config.json` for further sizes that the decoder needs of a dense model."""
_SIZES_WITH_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
"""Keys of `config.json` for further sizes that the decoder needs of a model with experts. The key
for the number of experts is missing, because models name it differently.
"""


def supports(config: Mapping[str, Any]) -> bool:
    """Return True if this decoder can compute the model whose `config.json` is `config`."""
    rope = _rope(config)
    return (
        (config.get("model_type") == "qwen3" or _has_experts(config))
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias", False)
        and not config.get("use_sliding_window", False)
        and set(config.get("layer_types") or ["full_attention"]) == {"full_attention"}
        and rope.get("rope_type", rope.get("type", "default")) == "default"
    )


def names_sizes(config: Mapping[str, Any]) -> bool:
    """Return True if `config`, the content of a `config.json`, has all sizes that the decoder
    reads.

    If it lacks some, the caller must add the defaults of transformers' configuration class.
    """
    routed = _has_experts(config)
    more = _SIZES_WITH_EXPERTS if routed else _SIZES_WITHOUT
    has_all = all(config.get(name) is not None for name in (*_SIZES, *more))
    return has_all and (num_experts(config) > 0 or not routed)


def runs_on_gpu(config: Mapping[str, Any]) -> bool:
    """Return True if this decoder can compute the model of `config` (a `config.json`) on a GPU.

    Models with experts, and other architectures than Qwen3, run only on the CPU.
    """
    return supports(config) and num_experts(config) == 0


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the rotary embedding in a `config.json`.

    As in transformers, `rope_scaling` takes precedence over `rope_parameters`.
    """
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _has_experts(config: Mapping[str, Any]) -> bool:
    """Return True for a Qwen3-MoE model in which all layers have experts."""
    return (
        config.get("model_type") == "qwen3_moe"
        and config.get("decoder_sparse_step", 1) == 1
        and not config.get("mlp_only_layers")
    )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes from a model's `config.json` that the decoder needs."""

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
    experts: int
    """Number of experts in each layer, each with `inner` hidden units. 0 in a dense model."""
    choices: int
    """Number of experts that each token uses. 0 in a dense model."""
    normed: bool
    """True if the router's weights of the experts that a token uses are scaled to a sum of 1."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "ModelSizes":
        """Return the sizes in a `config.json`. It must have all of them (`names_sizes`)."""
        rope = _rope(config)
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        experts = num_experts(config)
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            inner=int(config["moe_intermediate_size" if experts else "intermediate_size"]),
            heads=heads,
            kv_heads=int(config["num_key_value_heads"]),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            experts=experts,
            choices=int(config["num_experts_per_tok"]) if experts else 0,
            normed=bool(config.get("norm_topk_prob", False)),
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the model, by its name in transformers."""
        query = self.heads * self.head_dim
        key = self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (query, self.hidden),
            "self_attn.k_proj.weight": (key, self.hidden),
            "self_attn.v_proj.weight": (key, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, query),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
        }
        if self.experts:
            layer |= {
                "mlp.gate.weight": (self.experts, self.hidden),
                "mlp.experts.gate_up_proj": (self.experts, 2 * self.inner, self.hidden),
                "mlp.experts.down_proj": (self.experts, self.hidden, self.inner),
            }
        else:
            layer |= {
                "mlp.gate_proj.weight": (self.inner, self.hidden),
                "mlp.up_proj.weight": (self.inner, self.hidden),
                "mlp.down_proj.weight": (self.hidden, self.inner),
            }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for index in range(self.layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, self.hidden)
        return shapes


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_1: Tensor
    qkv: Tensor
    qk_norm: Tensor
    """`[heads + kv_heads, head_dim]` float32: the norm weights of the query heads, times the
    softmax scale, then those of the key heads.
    """
    out: Tensor
    norm_2: Tensor
    router: Tensor
    """`[experts, hidden]`: the router's weights. Empty in a dense model."""
    gate_up: Tensor
    down: Tensor
    """The down projection. With experts, it and `gate_up` are in the layout of `_panels`."""

    def in_one_call(self) -> tuple[Tensor, ...]:
        """Return the layer's weights in the order of the C struct `layer_` of `decoder.c`."""
        products = (self.qkv, self.out, self.gate_up, self.down)
        return (self.norm_1, self.norm_2, self.qk_norm, *products)


class CannotDecode(ValueError):
    """Error: this machine cannot run the decoder for a model with experts, for the given reason."""


class Qwen3Runner:
    """A `Runner` for Qwen3 and Qwen3-MoE models. Its KV cache grows as needed."""

    name = "qwen3 decoder"
    adapters = None
    keeps_beginnings = True

    def __init__(  # noqa: PLR0913 - the limits and the number formats
        self,
        config: Mapping[str, Any],
        *,
        dtype: torch.dtype,
        max_slots: int,
        max_context: int,
        device: str = "cpu",
        quantise: str = "none",
    ) -> None:
        self.sizes = sizes = ModelSizes.read(config)
        self.vocab_size = sizes.vocab
        self._dtype = dtype
        self._device = torch.device(device)
        self._linear, self._packed = _linear_for(self._device, dtype)
        self._quantise = quantise
        self._project = self._linear
        """A function that rounds activations to the format `quantise`, then multiplies them by a
        layer's weight.
        """
        if quantise != "none":
            product, rounded = self._linear, FORMATS[quantise].activations
            self._project = lambda x, weight: product(rounded(x), weight)
        self._lanes = math.gcd(16, sizes.head_dim)
        self._kernels, self.warning = _kernels_for(self._device, dtype, sizes, quantise)
        if sizes.experts and self._kernels is None:
            raise CannotDecode(self.warning)
        if sizes.experts:
            self.warning = warning_with_gpu("Qwen3-MoE")
        self._chosen: list[Tensor] = []
        self._one_call = self._one_call_for(self._kernels)
        if self._one_call:
            self._packed = self._one_call.pack
        self._pages_given = 0
        """The number of cache pages when the cache was last passed to `_one_call`. 0 if it must be
        passed again.
        """
        self._helpers = ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1))
        self._layers: list[_Layer] = []
        frequencies = 1.0 / sizes.theta ** (
            torch.arange(0, sizes.head_dim, 2, dtype=torch.float32) / sizes.head_dim
        )
        angles = torch.arange(max_context, dtype=torch.float32)[:, None] * frequencies
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(self._device)
        self._graphs = Graphs(self._device, self._run)
        self._parts = _parts_for(self._rotations, sizes)
        self.cache = PagedCache(
            [(sizes.kv_heads, sizes.head_dim)] * sizes.layers,
            max_slots,
            max_context,
            dtype=dtype,
            device=self._device,
            on_growth=self._graphs.clear,
        )

    def load(self, update: Mapping[str, Tensor]) -> None:
        sizes = self.sizes
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if sizes.tied else {}
        check_update(update, sizes.shapes(), tied)

        kind = "none" if isinstance(update, RoundedWeights) else self._quantise

        def weight(name: str) -> Tensor:
            converted = update[name].to(self._device, self._dtype, copy=True)
            return quantised(name, converted, kind)

        self._graphs.clear()
        self._layers = []  # the old weights are freed before the new ones take memory
        self._embed = self._head = self._norm = torch.empty(0)
        self._embed = weight("model.embed_tokens.weight")
        self._head = self._packed(self._embed if sizes.tied else weight("lm_head.weight"))
        self._norm = self._norm_weight(weight("model.norm.weight"))
        if self._one_call:
            self._one_call.load(self._embed, self._head, self._norm, self._rotations)
        for index in range(sizes.layers):
            self._layers.append(self._layer(weight, f"model.layers.{index}."))
        self._pages_given = 0

    def _layer(self, weights: Callable[[str], Tensor], prefix: str) -> _Layer:
        sizes = self.sizes
        half = sizes.head_dim // 2
        order = torch.arange(sizes.head_dim).view(2, half).t().flatten()

        def weight(name: str) -> Tensor:
            return weights(f"{prefix}{name}.weight")

        def interleaved(name: str) -> Tensor:
            heads = weight(name).view(-1, sizes.head_dim, sizes.hidden)
            return heads[:, order].reshape(-1, sizes.hidden)

        query_norm = weight("self_attn.q_norm").float()[order] * sizes.head_dim**-0.5
        key_norm = weight("self_attn.k_norm").float()[order]
        qkv = [
            interleaved("self_attn.q_proj"),
            interleaved("self_attn.k_proj"),
            weight("self_attn.v_proj"),
        ]
        if sizes.experts:
            router = weight("mlp.gate")
            gate, up = weights(f"{prefix}mlp.experts.gate_up_proj").chunk(2, 1)
            lanes = self._lanes
            gate_up = torch.cat([_panels(gate, lanes), _panels(up, lanes)], 1)
            down = weights(f"{prefix}mlp.experts.down_proj")
            down = _panels(F.pad(down, (0, -sizes.inner % lanes)), lanes)
        else:
            router = torch.empty(0)
            gate, up = weight("mlp.gate_proj"), weight("mlp.up_proj")
            down = self._packed(weight("mlp.down_proj"))
            if self._one_call:
                gate_up = self._one_call.pack_gated(gate, up)
            else:
                gate_up = self._packed(torch.cat([gate, up]))
        return _Layer(
            norm_1=self._norm_weight(weight("input_layernorm")),
            qkv=self._packed(torch.cat(qkv)),
            qk_norm=torch.stack([query_norm] * sizes.heads + [key_norm] * sizes.kv_heads),
            out=self._packed(weight("self_attn.o_proj")),
            norm_2=self._norm_weight(weight("post_attention_layernorm")),
            router=router,
            gate_up=gate_up,
            down=down,
        )

    def _norm_weight(self, weight: Tensor) -> Tensor:
        return weight.float() if self._one_call else weight

    def take_experts(self) -> Tensor:
        if not self._chosen:
            raise RuntimeError("a dense model has no experts")
        return torch.stack(self._chosen, 1)

    def keep(self, slot: int, count: int) -> None:
        self.cache.keep(slot, count)

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        self.cache.copy_prefix(source, target, count)

    def forward(self, step: Step) -> Tensor:
        if self._one_call is not None:
            return self._in_one_call(self._one_call, step)
        if self._kernels is not None:
            return self._by_kernels(self._kernels, step)
        shape, flat = plan(step, self.cache.pages)
        self.cache.reserve()
        if shape.tokens:
            return self._run(Inputs.of(flat.to(self._device), shape), shape)
        return self._graphs(flat, shape)[: len(step.rows)]

    def _one_call_for(self, kernels: Kernels | None) -> OneCall | None:
        """Return the decoder in C (`decoder.c`).

        Return None for models with experts, and where torch's matrix products are faster.
        """
        sizes = self.sizes
        if kernels is None or sizes.experts:
            return None
        if self._dtype == torch.bfloat16 and kernels.library.multiplies_bfloat16():
            return None
        wanted = StepSizes(
            hidden=sizes.hidden,
            inner=sizes.inner,
            vocab=sizes.vocab,
            query=sizes.heads * sizes.head_dim,
            qkv=(sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim,
            eps=sizes.eps,
        )
        return OneCall(kernels, wanted, self._dtype)

    def _in_one_call(self, one_call: OneCall, step: Step) -> Tensor:
        cells = torch.from_numpy(placed(step, self.cache.pages))
        self.cache.reserve()
        if self._pages_given != self.cache.num_pages:
            self._pages_given = self.cache.num_pages
            caches = zip(self._layers, self.cache.keys, self.cache.values, strict=True)
            one_call.load_layers(
                [(*layer.in_one_call(), keys, values) for layer, keys, values in caches]
            )
        last_of_chunks = [span.stop - 1 for _, span in step.spans()]
        tokens = StepTokens(
            tokens=step.tokens,
            positions=step.positions,
            cells=cells,
            pages=torch.from_numpy(self.cache.pages.of),
            runs=runs(step, self.cache.pages, RUN),
            ends=torch.cat(
                [torch.arange(len(step.rows)), torch.tensor(last_of_chunks, dtype=torch.int64)]
            ),
        )
        return one_call.run(tokens, self._helpers)

    def _by_kernels(self, kernels: Kernels, step: Step) -> Tensor:
        """Return the logits of a forward pass on a CPU, computed by several calls for each layer.

        oneDNN computes the matrix products, and `kernels.c` everything else.
        """
        sizes = self.sizes
        eps = sizes.eps
        cells = torch.from_numpy(placed(step, self.cache.pages))
        self.cache.reserve()
        of = torch.from_numpy(self.cache.pages.of)
        begins, counts, slots, held = runs(step, self.cache.pages, RUN)
        count = len(step.tokens)
        wide = tiled(count)
        x = F.embedding(F.pad(step.tokens, (0, wide - count)), self._embed)
        query = torch.empty(count, sizes.heads, sizes.head_dim, dtype=torch.float32)
        h = torch.empty_like(x)
        mixed = x.new_zeros(wide, sizes.heads * sizes.head_dim)
        gated = x.new_empty(wide, sizes.inner)
        more = torch.zeros_like(x)
        self._chosen = []
        caches = zip(self._layers, self.cache.keys, self.cache.values, strict=True)
        for layer, keys, values in caches:
            kernels.norm(x, more, layer.norm_1, h, wide, sizes.hidden, eps)
            qkv = self._project(h, layer.qkv)
            placing = (layer.qk_norm, self._rotations, step.positions, cells)
            kernels.turn(qkv, *placing, query, keys, values, count, eps)
            attention = (query, keys, values, of, of.shape[1], begins, counts, slots, held, mixed)
            divided(self._helpers, partial(kernels.attend, *attention), len(begins))
            kernels.norm(
                x, self._project(mixed, layer.out), layer.norm_2, h, wide, sizes.hidden, eps
            )
            if sizes.experts:
                more = self._mixed_experts(kernels, layer, h, count)
                continue
            kernels.gated(self._project(h, layer.gate_up), gated, wide, sizes.inner)
            more = self._project(gated, layer.down)
        ends = [*range(len(step.rows)), *(span.stop - 1 for _, span in step.spans())]
        if step.chunks:
            padded_ends = ends + ends[-1:] * (tiled(len(ends)) - len(ends))
            x = x[padded_ends]
            more = more[padded_ends]
        h = torch.empty_like(x)
        kernels.norm(x, more, self._norm, h, len(x), sizes.hidden, eps)
        return self._linear(h, self._head).float()[: len(ends)]

    def _mixed_experts(self, kernels: Kernels, layer: _Layer, h: Tensor, count: int) -> Tensor:
        """Return `[T, hidden]`: for each token, the sum of its experts' outputs, weighted by the
        router.

        Only the first `count` tokens are real. The others are padding, and get zeros.
        """
        sizes = self.sizes
        scores = F.linear(h, layer.router)[:count].softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(sizes.choices)
        if sizes.normed:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(self._dtype).float().contiguous()
        self._chosen.append(chosen)
        pairs = chosen.numel()
        inner = -(-sizes.inner // self._lanes) * self._lanes
        wide = layer.down.shape[1] * self._lanes
        begins = torch.empty(sizes.experts + 1, dtype=torch.long)
        order, place = torch.empty(2, pairs, dtype=torch.long)
        rows = torch.empty(pairs, sizes.hidden)
        both = torch.empty(pairs, 2 * inner)
        output = torch.empty(pairs, wide)
        kernels.grouped(chosen, pairs, sizes.experts, begins, order)
        choice = (layer.gate_up, layer.down, begins, order, sizes.choices)
        work = partial(kernels.experts, h, *choice, sizes.hidden, inner, wide, rows, both, output)
        divided(self._helpers, work, sizes.experts)
        more = torch.zeros_like(h)
        kernels.summed(
            output, weights, order, pairs, sizes.choices, sizes.hidden, wide, place, more
        )
        return more

    def _run(self, inputs: Inputs, shape: StepShape) -> Tensor:
        """Return float32 logits `[tokens, V]` of a forward pass that torch computes.

        There are logits after each token. In a pass with prompts, there are logits only after the
        tokens `inputs.ends`.
        """
        sizes, parts = self.sizes, self._parts
        num_rows = len(inputs.tables)
        x = F.embedding(inputs.tokens, self._embed)
        group = sizes.heads // sizes.kv_heads
        mask = mask_later(inputs.positions[inputs.lanes], inputs.reached, group, x.dtype)
        more = None
        pools = zip(self.cache.keys, self.cache.values, strict=True)
        caches = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in pools]
        for layer, cache in zip(self._layers, caches, strict=True):
            h = parts.add_norm(x, more, layer.norm_1)
            qkv = self._project(h, layer.qkv).view(len(x), -1, sizes.head_dim)
            query = parts.place(qkv, layer.qk_norm, inputs, cache)
            mixed = []
            if num_rows:
                mixed.append(parts.attend_rows(query[:num_rows], inputs, cache))
            if len(inputs.lanes):
                mixed.append(attend_blocks(query, mask, inputs, cache, sizes.kv_heads))
            more = self._project(torch.cat(mixed) if len(mixed) > 1 else mixed[0], layer.out)
            h = parts.add_norm(x, more, layer.norm_2)
            more = self._project(parts.gated(self._project(h, layer.gate_up)), layer.down)
        if more is not None and shape.ends:
            x, more = x[inputs.ends], more[inputs.ends]
        h = parts.add_norm(x, more, self._norm)
        return self._linear(h, self._head).float()


def _panels(weights: Tensor, lanes: int) -> Tensor:
    """Return weights `[experts, out, in]` in the layout of `kernels.c`: `[experts, out / lanes, in,
    lanes]`.

    `lanes` is the number of values that a CPU vector holds. Rows of zeros are added until `out` is
    a multiple of it.
    """
    padded = F.pad(weights, (0, 0, 0, -weights.shape[1] % lanes))
    return padded.unflatten(1, (-1, lanes)).transpose(2, 3).contiguous()


def _linear_for(
    device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return a function that multiplies by a prepared weight, and a function that prepares a
    weight.

    The weight is `[out, in]`. On a CPU, it is prepared for oneDNN (`model/linear.py` gives the
    reason).
    """
    if device.type != "cpu" or not linear.supported(dtype):
        return F.linear, lambda weight: weight
    return linear.prepared_product, linear.prepare


def _parts_for(rotations: Tensor, sizes: ModelSizes) -> LayerParts:
    """Return a layer's Triton kernels if this GPU can run them, otherwise torch's operations."""
    device = rotations.device
    is_old = rotations.is_cuda and torch.cuda.get_device_capability(device) < MIN_CAPABILITY
    if not rotations.is_cuda or is_old or gpu_kernels() is None:
        return TorchParts(sizes.kv_heads, rotations, sizes.eps)
    from unstale.engines.embedded.gpu_kernels import TritonParts  # it needs Triton

    return TritonParts(sizes.kv_heads, rotations, sizes.eps)


def _kernels_for(
    device: torch.device, dtype: torch.dtype, sizes: ModelSizes, quantise: str
) -> tuple[Kernels | None, str]:
    """Return the CPU kernels, or None if they are not used, and a warning for the user.

    The warning gives the reason why this CPU cannot use them. It is "" if they are used, and on a
    GPU.
    """
    lanes = math.gcd(16, sizes.head_dim)
    slower = "the engine decodes by torch, several times slower, because"
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None, ""
    if dtype == torch.float16:
        return None, f"{slower} its kernels read float32 and bfloat16, not float16"
    if lanes < 4:
        return None, f"{slower} a head size of {sizes.head_dim} is not a multiple of 4"
    macros = {
        "HEADS": sizes.heads,
        "KV_HEADS": sizes.kv_heads,
        "HEAD_DIM": sizes.head_dim,
        "PAGE": PAGE,
        "RUN": RUN,
        "LANES": lanes,
    }
    if dtype == torch.bfloat16:
        macros["BFLOAT16"] = 1
    if quantise != "none":
        macros |= _rounding(FORMATS[quantise])
    try:
        return Kernels(SOURCE, **macros), ""
    except NotCompiled as error:
        return None, f"{slower} its kernels do not compile: {error}"


def _rounding(form: Format) -> dict[str, int]:
    """Return C macros that make `decoder.c` round activations to a number format.

    Empty if the format does not round activations.
    """
    if form.activation_block is None:
        return {}
    macros = {"ROUND_LARGEST": int(form.largest), "ROUND_BLOCK": form.activation_block}
    return macros | ({"ROUND_E4M3": 1} if form.stored == torch.float8_e4m3fn else {})
