"""A slow runner for models that `packed.py` cannot run: transformers computes prompts one by one.

The model must have full attention. Models with recurrent layers, or with a sliding window shorter
than the context, are refused at the start. They are recognised by their configuration, or because a
forward pass with a cache differs from one without.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from unstale.engines.embedded.probe import FORWARD_ERRORS, SLOTS, Probe
from unstale.engines.embedded.runner import ModelWeights, Step
from unstale.model.experts import ExpertRecorder
from unstale.model.loading import load_model
from unstale.model.quantisation import round_activations


class _Slots:
    """The slots and positions of the current forward pass, which the caches of all layers read.

    A slot is the part of a cache that holds one sequence.
    """

    def __init__(self, max_slots: int, max_context: int) -> None:
        self.shape = (max_slots, max_context)
        self.rows = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, dtype=torch.long)
        self.length = 0


class _SlotLayer(CacheLayerMixin):
    """The cached keys and values of one layer, each `[slots, heads, max_context, width]`.

    Memory is allocated in the first forward pass, which shows the sizes.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, slots: _Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        max_slots, max_context = self._slots.shape
        self.keys, self.values = (
            torch.zeros(
                max_slots, states.shape[1], max_context, states.shape[3], dtype=states.dtype
            )
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the keys and values `[rows, heads, n, width]` of n new tokens of each sequence.

        Return the keys and values of the whole sequences, `[rows, heads, length, width]`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self._slots
        contexts = []
        for stored, states in ((self.keys, key_states), (self.values, value_states)):
            stored[slots.rows[:, None], :, slots.positions] = states.transpose(1, 2)
            contexts.append(stored[slots.rows, :, : slots.length])
        return contexts[0], contexts[1]

    def get_seq_length(self) -> int:
        return self._slots.length - self._slots.positions.shape[-1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.length, 0

    def get_max_length(self) -> int:
        return self._slots.shape[1]

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        for stored in (self.keys, self.values):
            stored[target, :, :count] = stored[source, :, :count]


class TransformersRunner:
    """A runner that computes a model with transformers.

    Sequences that sample their next token are computed as one batch. Parts of prompts are computed
    one after the other.
    """

    adapters = None

    def __init__(  # noqa: PLR0913 - the limits and the number formats
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        max_slots: int,
        max_context: int,
        why_slow: str,
        record_experts: bool = False,
        quantise: str = "none",
    ) -> None:
        model = load_model(folder, torch.float32, attn_implementation="eager").eval()
        config = model.config.get_text_config()
        architecture = type(model).__name__
        self.name = f"transformers {architecture}"
        self.warning = (
            f"the engine decodes {architecture} by transformers, prompts one by one and slowly, "
            f"because sequences cannot be packed into one forward pass: {why_slow}"
        )
        self.vocab_size = int(config.vocab_size)
        _refuse_other_state(config, max_context)
        self._model = model
        probe = self._probed(max_context, why_slow)
        if probe.warning:
            self.warning += f". One by one, {probe.warning}"
        if dtype != torch.float32:
            # Not converted: transformers keeps some buffers and parameters in float32.
            self._model = load_model(folder, dtype, attn_implementation="eager").eval()
            self._probed(max_context, why_slow, exact=probe)
        self._reset(max_slots, max_context)
        round_activations(self._model, quantise)
        self._weights = ModelWeights(self._model, quantise)
        self._recorder = ExpertRecorder(self._model) if record_experts else None

    def _probed(self, max_context: int, why_slow: str, exact: Probe | None = None) -> Probe:
        """Compare this runner's logits with those of a plain forward pass.

        Return the plain pass (`Probe`). Raises ValueError, with the text `why_slow`, if they
        differ. `exact` is the probe of the same model in float32, or None if this model is in
        float32.
        """
        self._reset(SLOTS, max_context)
        try:
            probe = Probe(self._model, max_context, exact)
            error = probe.error(self)
        except FORWARD_ERRORS as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error:
            raise ValueError(
                f"the embedded engine cannot run {type(self._model).__name__}. Packed into one "
                f"forward pass: {why_slow}. One by one with a cache: {error}. If its rotary "
                "embedding depends on the longest position, a lower max_context helps"
            )
        return probe

    def _reset(self, max_slots: int, max_context: int) -> None:
        self._slots = _Slots(max_slots, max_context)
        self._layers = [
            _SlotLayer(self._slots)
            for _ in range(self._model.config.get_text_config().num_hidden_layers)
        ]
        self._cache = Cache(layers=list(self._layers))

    def load(self, update: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for _, parameter, value in self._weights.take(update):
                parameter.copy_(value)

    def keep(self, slot: int, count: int) -> None:
        """Do nothing.

        This cache always holds the memory of all slots, so no memory can be freed.
        """

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        for layer in self._layers:
            layer.copy_prefix(source, target, count)

    def take_experts(self) -> Tensor:
        if self._recorder is None:
            raise RuntimeError("this runner does not record experts: make it with record_experts")
        return self._recorder.take()

    def forward(self, step: Step) -> Tensor:
        num_rows = len(step.rows)
        logits = []
        if num_rows:
            positions = step.positions[:num_rows, None]
            tokens = step.tokens[:num_rows, None]
            logits.append(self._run(step.rows, positions, tokens, step.longest))
        for chunk, span in step.spans():
            slot = torch.tensor([chunk.slot])
            logits.append(
                self._run(slot, step.positions[None, span], step.tokens[None, span], chunk.end)
            )
        return torch.cat(logits)

    def _run(self, rows: Tensor, positions: Tensor, tokens: Tensor, length: int) -> Tensor:
        """Return float32 logits `[rows, V]` after the last of each row's `tokens` `[rows, n]`.

        `rows` are the cache slots of the sequences. `length` is the length of the longest sequence.
        """
        slots = self._slots
        slots.rows = rows
        slots.positions = positions
        slots.length = length
        hidden = torch.arange(length) > positions[:, None, :, None]
        dtype = self._model.dtype
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min)
        out = self._model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
        )
        return out.logits[:, -1].float()


def _refuse_other_state(config: Any, max_context: int) -> None:
    layer_types = getattr(config, "layer_types", None)
    kinds = set(layer_types or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    slides = layer_types is None or "sliding_attention" in kinds
    if slides and window and window < max_context:
        raise ValueError(
            f"sliding_window={window} is shorter than max_context={max_context}, but the embedded "
            f"engine needs full attention: set max_context to at most {window}"
        )
    if other := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ValueError(
            f"the embedded engine needs full attention; this model has {', '.join(other)}"
        )
