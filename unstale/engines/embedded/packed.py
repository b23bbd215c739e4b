"""A runner of transformers models with causal attention: one forward pass for all sequences.

The model's own code runs on one row `[1, T]`: the next token of each sequence that is being
sampled, and parts of prompts. transformers calls `_attention_layer` for each attention layer. This
function writes keys and values to cache pages, and lets each sequence attend to its own pages.
Sequences with the same first tokens share pages, as in `decoder.py`.

The masks that transformers makes show to which tokens a layer attends: all earlier ones, or a
sliding window. When a runner is made, a test checks that the rest of the model keeps packed
sequences apart: the logits of a packed pass must equal those of a plain one, in float32 and in the
engine's precision.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from unstale.engines.embedded.adapters import VersionedAdapters
from unstale.engines.embedded.kernels import Kernels, divided
from unstale.engines.embedded.pages import PAGE, RUN, PagedCache, placed, runs, tiled
from unstale.engines.embedded.probe import FORWARD_ERRORS, SLOTS, Probe
from unstale.engines.embedded.runner import ModelWeights, Step, warning_with_gpu
from unstale.model import linear
from unstale.model.attention import window_of
from unstale.model.experts import ExpertRecorder
from unstale.model.loading import load_model
from unstale.model.lora import Base
from unstale.model.quantisation import round_activations
from unstale.native import NotCompiled

PACKED = "unstale_paged"
"""The name under which this module's attention is registered with transformers."""
_SURVEY = "unstale_survey"
"""The name under which `_Survey`, which computes no attention, is registered with transformers."""
_LANES = 16
"""Width of a CPU vector, in numbers. Head sizes are padded to a multiple of it."""


class CannotPack(ValueError):
    """Error: a model cannot compute several sequences in one forward pass, for the given reason."""


@dataclass(frozen=True, slots=True)
class _Layer:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    """Number of tokens to which a query attends, its own included. 0 means all earlier tokens."""

    @property
    def width(self) -> int:
        """The size of a head in the cache, padded to a multiple of the CPU's vector width."""
        return -(-max(self.key_dim, self.value_dim) // _LANES) * _LANES


@dataclass(frozen=True, slots=True)
class _Scores:
    scale: float
    cap: float
    """Soft cap of the attention scores (logits are `cap * tanh(logits / cap)`). 0 without a cap."""
    sinks: Tensor
    """Attention sinks `[heads]` in float32: a further score for each head, whose value is zero.
    Empty without sinks.
    """
    window: int
    """Number of tokens to which a query attends, its own included. 0 means all earlier tokens."""


class _Survey:
    """An attention function that computes nothing, and records its calling layers in order."""

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self.layers: list[_Layer] = []

    def mask(self, mask_function: Callable[..., Any], **options: Any) -> Tensor:
        """Return the number of tokens in a mask's sliding window, as a tensor `[1, 1, 1, 1]`.

        `mask_function` is a mask of transformers. The result is 0 if the mask allows all earlier
        tokens. Raises CannotPack for a mask that is not causal, or whose window depends on the
        position.
        """
        try:
            seen = window_of(mask_function, self._max_context)
        except NotImplementedError as error:
            raise CannotPack(str(error)) from error
        return torch.full((1, 1, 1, 1), 0 if seen == self._max_context else seen)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any
    ) -> Tensor:
        """Record a layer. Return zeros in the shape of its attention output.

        Raises CannotPack for a layer that `_Pages.attend` cannot compute.
        """
        if mask is None or mask.numel() != 1:
            raise CannotPack("its masks are not made by transformers' mask functions")
        if options.get("position_bias") is not None:
            raise CannotPack("its attention adds a bias to each score")
        heads, kv_heads = query.shape[1], key.shape[1]
        if query.shape[0] != 1 or heads % kv_heads:
            raise CannotPack(f"its attention has {heads} query heads and {kv_heads} key heads")
        self.layers.append(_Layer(heads, kv_heads, key.shape[3], value.shape[3], int(mask)))
        return query.new_zeros(1, query.shape[2], heads, value.shape[3])


class _Pages(PagedCache):
    """The paged KV cache of all layers, and the attention over it."""

    def __init__(
        self, layers: Sequence[_Layer], dtype: torch.dtype, max_slots: int, max_context: int
    ) -> None:
        self._layers = layers
        self._dtype = dtype
        shapes = [(layer.kv_heads, layer.width) for layer in layers]
        super().__init__(shapes, max_slots, max_context, dtype=dtype)
        self._helpers = ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1))
        self.warning = ""
        """The reason why attention is slow. Empty if it is fast."""
        self._kernels: dict[_Layer, Kernels] = {}
        try:
            self._kernels = {layer: _compiled(layer, dtype) for layer in layers}
        except NotCompiled as error:
            self.warning = (
                "the engine attends by torch, several times slower, because its kernels do not "
                f"compile: {error}"
            )

    def begin(self, step: Step) -> None:
        """Assign cache pages to the tokens of a forward pass. Then its layers call `attend`."""
        self._step = step
        self._cells = torch.from_numpy(placed(step, self.pages))
        self.reserve()
        self._of = torch.from_numpy(self.pages.of)
        self._runs = runs(step, self.pages, RUN)
        self._calls = 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: Any
    ) -> Tensor:
        """Return the attention output `[1, T, heads, value_dim]` of the next layer of a pass.

        `query` is `[1, heads, T, key_dim]`. `key` and `value` have `kv_heads` heads. Tokens after
        those of the current `Step` are padding.
        """
        index = self._calls
        self._calls += 1
        layer = self._layers[index]
        count = len(self._cells)
        scale = options.get("scaling")
        scale = layer.key_dim**-0.5 if scale is None else float(scale)
        cap = float(options.get("softcap") or 0.0)
        sinks = options.get("s_aux")
        sinks = torch.empty(0) if sinks is None else sinks.float().contiguous()
        how = _Scores(scale, cap, sinks, layer.window)
        # A model may compute some states in another precision than its weights.
        rows = [_rows(states.to(self._dtype), count, layer.width) for states in (query, key, value)]
        mixed = torch.zeros(query.shape[2], layer.heads, layer.width, dtype=self._dtype)
        if self._kernels:
            self._by_kernels(index, rows, mixed, how)
        else:
            self._by_torch(index, rows, mixed, how)
        return mixed[None, ..., : layer.value_dim].to(value.dtype)

    def _by_kernels(self, index: int, rows: list[Tensor], mixed: Tensor, how: _Scores) -> None:
        kernels = self._kernels[self._layers[index]]
        keys, values = self.keys[index], self.values[index]
        scaled = torch.empty(rows[0].shape, dtype=torch.float32)
        kernels.place(*rows, self._cells, how.scale, scaled, keys, values, len(scaled))
        arguments = (scaled, keys, values, self._of, self._of.shape[1], *self._runs, mixed)
        work = partial(kernels.attend, *arguments)
        if how.window or how.cap or len(how.sinks):
            window = how.window or len(self.pages.of[0]) * PAGE
            work = partial(kernels.attend_limited, *arguments, window, how.cap, how.sinks)
        divided(self._helpers, work, self._runs.shape[1])

    def _by_torch(self, index: int, rows: list[Tensor], mixed: Tensor, how: _Scores) -> None:
        """Do the same as `_by_kernels` with torch: write the cache and the output `mixed`."""
        query, key, value = rows
        page, offset = self._cells // PAGE, self._cells % PAGE
        self.keys[index][page, :, :, offset] = key
        self.values[index][page, :, offset] = value
        step = self._step
        count = len(step.rows)
        parts = [(step.rows, step.positions[:count, None], slice(0, count))] if count else []
        for chunk, span in step.spans():
            parts.append((torch.tensor([chunk.slot]), step.positions[None, span], span))
        for slots, at, span in parts:
            reach = int(at.max()) // PAGE + 1
            pages = self._of[slots, :reach]
            keys = self.keys[index][pages].permute(0, 2, 3, 1, 4).flatten(3)
            values = self.values[index][pages].transpose(1, 2).flatten(2, 3)
            queries = query[span].unflatten(0, at.shape).unflatten(2, (keys.shape[1], -1))
            out = _attention(queries, keys, values, at, how)
            mixed[span] = out.flatten(0, 1).flatten(1, 2).to(mixed.dtype)


def _attention(query: Tensor, key: Tensor, value: Tensor, at: Tensor, how: _Scores) -> Tensor:
    """Return the attention output `[B, n, kv_heads, repeats, width]` in float32.

    `query` has the same shape. `key` is `[B, kv_heads, width, length]`, and `value` is `[B,
    kv_heads, length, width]`. `at` `[B, n]` has the positions of the queries in their sequences.
    """
    scores = torch.einsum("bnkrd,bkdl->bnkrl", query.float() * how.scale, key.float())
    if how.cap:
        scores = torch.tanh(scores / how.cap) * how.cap
    place = torch.arange(key.shape[3])
    hidden = place > at[..., None]
    if how.window:
        hidden |= place <= at[..., None] - how.window
    scores = scores.masked_fill(hidden[:, :, None, None], -torch.inf)
    if len(how.sinks):
        further = how.sinks.view(scores.shape[2:4]).expand(scores.shape[:-1])[..., None]
        scores = torch.cat([scores, further], -1)
    weights = scores.softmax(-1)[..., : key.shape[3]]
    return torch.einsum("bnkrl,bkld->bnkrd", weights, value.float())


def _compiled(layer: _Layer, dtype: torch.dtype) -> Kernels:
    """Return the compiled attention of a layer. Raises NotCompiled for a dtype it cannot read."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise NotCompiled(f"they read float32 and bfloat16, not {dtype}")
    macros = {
        "HEADS": layer.heads,
        "KV_HEADS": layer.kv_heads,
        "HEAD_DIM": layer.width,
        "PAGE": PAGE,
        "RUN": RUN,
        "LANES": _LANES,
    }
    if dtype == torch.bfloat16:
        macros["BFLOAT16"] = 1
    return Kernels(**macros)


def _rows(states: Tensor, count: int, width: int) -> Tensor:
    """Return the first `count` tokens of `states` `[1, heads, T, n]` as `[count, heads, width]`.

    Each head is padded with zeros to `width`.
    """
    rows = states[0, :, :count].transpose(0, 1)
    if rows.shape[2] < width:
        rows = F.pad(rows, (0, width - rows.shape[2]))
    return rows.contiguous()


_running: ContextVar[_Survey | _Pages] = ContextVar("the attention of the current pass")


def _attention_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    return _running.get().attend(query, key, value, attention_mask, options), None


def _survey_mask(mask_function: Callable[..., Any], **options: Any) -> Tensor:
    survey = _running.get()
    assert isinstance(survey, _Survey)
    return survey.mask(mask_function)


# PACKED has no mask function: transformers then makes no masks.
AttentionInterface.register(PACKED, _attention_layer)
AttentionInterface.register(_SURVEY, _attention_layer)
AttentionMaskInterface.register(_SURVEY, _survey_mask)


class _PreparedLinear(nn.Linear):
    """A linear layer whose weight is in `prepared`, in the memory layout of oneDNN."""

    prepared: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return linear.prepared_product(input, self.prepared, self.bias)


class PackedRunner:
    """A `Runner` of transformers models: one forward pass for all sequences, with a paged cache."""

    keeps_beginnings = True

    def __init__(  # noqa: PLR0913 - the limits and the number formats
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        max_slots: int,
        max_context: int,
        record_experts: bool = False,
        quantise: str = "none",
        base: Base | None = None,
    ) -> None:
        """Load the model in `folder` and test it.

        With `base`, the runner uses these base weights, and adds LoRA adapters of several versions
        to the outputs of layers. Raises CannotPack if packing sequences changes the model's logits.
        """
        model = load_model(folder, torch.float32, attn_implementation="eager").eval()
        self.name = f"transformers {type(model).__name__}, packed"
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._quantise = quantise
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._layers: list[_Layer] = []
        self.adapters: VersionedAdapters | None = None
        probe = self._take(model, max_context)
        warning = probe.warning
        if dtype != torch.float32:
            # Not converted: transformers keeps some buffers and parameters in float32.
            del model, self._model
            model = load_model(folder, dtype, attn_implementation="eager").eval()
            self._take(model, max_context, exact=probe)
        self.cache = _Pages(self._layers, dtype, max_slots, max_context)
        slow = self.cache.warning or warning_with_gpu(type(model).__name__)
        self.warning = ". ".join(filter(None, (slow, warning)))
        round_activations(model, quantise)
        self._recorder = ExpertRecorder(model) if record_experts else None
        if base:
            self.load(base.merged({}))
            self.adapters = VersionedAdapters(model, dtype=dtype, scale=base.scale)

    def _take(self, model: PreTrainedModel, max_context: int, exact: Probe | None = None) -> Probe:
        """Set the model to run, and test it: compare its logits on packed sequences with plain
        passes.

        Return the `Probe` with the logits of the plain passes. `exact` is the probe of the same
        model in float32, or None if this model is in float32. Raises CannotPack if the logits
        differ.
        """
        try:
            probe = Probe(model, max_context, exact)
            self._layers = self._layers or _surveyed(model, max_context)
            self._prepare(model)
            self.cache = _Pages(self._layers, model.dtype, SLOTS, max_context)
            error = probe.error(self)
        except CannotPack:
            raise
        except FORWARD_ERRORS as failure:
            raise CannotPack(f"a packed pass fails: {_one_line(failure)}") from failure
        if error:
            raise CannotPack(f"in a packed pass, {error}")
        return probe

    def _prepare(self, model: PreTrainedModel) -> None:
        """Set the model to run. Copy the weights of its linear layers to oneDNN's layout."""
        model.set_attn_implementation(PACKED)
        self._model = model
        parameters = dict(model.named_parameters())
        self._weights = ModelWeights(model, self._quantise)
        self._linears: dict[str, list[_PreparedLinear]] = {}
        names = {id(parameter): name for name, parameter in parameters.items()}
        users = Counter(
            id(parameter)
            for module in model.modules()
            for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        for module in model.modules():
            if type(module) is not nn.Linear or not linear.supported(module.weight.dtype):
                continue
            weight = module.weight
            prepared: Any = module
            prepared.__class__ = _PreparedLinear
            prepared.prepared = linear.prepare(weight.detach())
            self._linears.setdefault(names[id(weight)], []).append(prepared)
            if users[id(weight)] == 1:
                module.weight = nn.Parameter(
                    weight.new_empty(0, weight.shape[1]), requires_grad=False
                )

    def load(self, update: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter, weight in self._weights.take(update):
                for module in self._linears.get(name, ()):
                    module.prepared = linear.prepare(weight)
                if parameter.shape == weight.shape:
                    parameter.copy_(weight)

    def keep(self, slot: int, count: int) -> None:
        self.cache.keep(slot, count)

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        self.cache.copy_prefix(source, target, count)

    def take_experts(self) -> Tensor:
        if self._recorder is None:
            raise RuntimeError("this runner does not record experts: make it with record_experts")
        return self._recorder.take()[: self._count]

    def forward(self, step: Step) -> Tensor:
        """Return the float32 logits `[R + C, V]` of a forward pass, as `Runner.forward` does."""
        self.cache.begin(step)
        self._count = len(step.tokens)
        padding = (0, tiled(self._count) - self._count)
        if self.adapters and step.versions is not None:
            first = int(step.versions[0])
            self.adapters.begin(F.pad(step.versions, padding, value=first))
        ends = [*range(len(step.rows)), *(span.stop - 1 for _, span in step.spans())]
        options: dict[str, Any] = {}
        if self._selects:
            ends += ends[-1:] * (tiled(len(ends)) - len(ends))
            options["logits_to_keep"] = torch.tensor(ends)
        logits = _run(
            self._model,
            self.cache,
            input_ids=F.pad(step.tokens, padding)[None],
            position_ids=F.pad(step.positions, padding)[None],
            **options,
        )
        logits = logits[0] if self._selects else logits[0, ends]
        return logits[: len(step.rows) + len(step.chunks)].float()


def _run(model: PreTrainedModel, attention: _Survey | _Pages, **inputs: Any) -> Tensor:
    """Return the logits of a forward pass in which `attention` computes the attention layers."""
    token = _running.set(attention)
    try:
        logits: Tensor = model(**inputs, use_cache=False).logits
        return logits
    finally:
        _running.reset(token)


def _surveyed(model: PreTrainedModel, max_context: int) -> list[_Layer]:
    """Return the attention layers of a model, in the order of their calls.

    Raises CannotPack if this module cannot compute a layer, or if the model does not call
    transformers' attention interface.
    """
    survey = _Survey(max_context)
    model.set_attn_implementation(_SURVEY)
    with torch.no_grad():
        _run(model, survey, input_ids=torch.zeros(1, min(4, max_context), dtype=torch.long))
    if not survey.layers:
        raise CannotPack("it does not call transformers' attention interface")
    return survey.layers


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
