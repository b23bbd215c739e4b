"""A slow runner for models that `packed.py` cannot run: transformers computes one sequence at a
time.

Each sequence has a cache of transformers, which also holds the states of recurrent layers. When the
runner is made, a test compares its logits with those of a forward pass without a cache. Some
architectures lose their state if several tokens follow a cached beginning. Their tokens are
computed one at a time. For others, logits with a cache are wrong even then. For these, the whole
sequence is computed again for each token.
"""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from unstale.config import ConfigError
from unstale.engines.embedded.probe import FORWARD_ERRORS, SLOTS, Probe
from unstale.engines.embedded.runner import ModelWeights, Step
from unstale.model import apart
from unstale.model.experts import ExpertRecorder
from unstale.model.loading import load_model, load_tokenizer
from unstale.model.pictures import (
    PictureInputs,
    decoder_of,
    load_pictures,
    reads_pictures,
    tower_names,
)
from unstale.model.quantisation import round_activations
from unstale.pictures import PictureStore


class TransformersRunner:
    """A `Runner` that computes a model with transformers, one sequence at a time."""

    adapters = None
    cache = None
    keeps_beginnings = False

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
        pictures: PictureStore | None = None,
    ) -> None:
        model = load_model(folder, torch.float32).eval()
        self._pictures: PictureInputs | None = None
        if reads_pictures(folder):
            self._pictures = load_pictures(folder, load_tokenizer(folder), pictures)
        architecture = type(model).__name__
        self.name = f"transformers {architecture}"
        self.warning = (
            f"the engine computes {architecture} by transformers, one sequence at a time and "
            f"slowly, because sequences cannot be packed into one forward pass: {why_slow}"
        )
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._part = max_context
        """The largest number of tokens that one pass may add to a cached beginning. 0 if the
        model's cache cannot be used.
        """
        parameters = signature(type(model).forward).parameters
        self._caches: list[Any] = []
        """For each slot, the model's cache of the slot's sequence. If the cache cannot be used, the
        sequence's tokens `[n]`. For a model that reads pictures, a pair of tokens and cache. None
        if the slot is empty.
        """
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        probe = self._use(model, max_context, why_slow)
        if probe.warning:
            self.warning += f". One by one, {probe.warning}"
        if dtype != torch.float32:
            # Not converted: transformers keeps some buffers and parameters in float32.
            self._use(load_model(folder, dtype).eval(), max_context, why_slow, exact=probe)
        if not self._part:
            self.warning += (
                ". With its cache logits are wrong: each token takes a pass of all tokens"
            )
        self._caches = [None] * max_slots
        round_activations(self._model, quantise)
        frozen = tower_names(self._model) if self._pictures else ()
        self._weights = ModelWeights(self._model, quantise, frozen)
        self._recorder = ExpertRecorder(self._model) if record_experts else None

    def _use(
        self, model: Any, max_context: int, why_slow: str, exact: Probe | None = None
    ) -> Probe:
        """Use `model` for all later passes. Test it, and return the `Probe` with its logits in
        plain passes.

        `exact` is the probe of the same model in float32, or None if this model is in float32.
        Raises ValueError if this runner's logits differ from those of a plain forward pass.
        """
        self._model = model
        try:
            apart.use(model)
            found = apart.check_apart(model)
            apart.check_length_apart(model, max_context)
            if self._pictures:
                apart.check_pictures(model, self._pictures, found)
            probe = Probe(model, max_context, exact, strict=exact is None)
        except ConfigError as refusal:
            error = str(refusal)
        except FORWARD_ERRORS as failure:
            error = f"{type(failure).__name__}: {failure}"
        else:
            for self._part in [part for part in (max_context, 1, 0) if part <= self._part]:
                self._caches = [None] * SLOTS
                try:
                    error = probe.error(self)
                except FORWARD_ERRORS as failure:
                    error = f"{type(failure).__name__}: {failure}"
                if not error:
                    return probe
        raise ValueError(
            f"the embedded engine cannot run {type(model).__name__}. Packed into one forward pass: "
            f"{why_slow}. One by one: {error}. Use a server of vLLM or SGLang"
        )

    def load(self, update: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for _, parameter, value in self._weights.take(update):
                parameter.copy_(value)

    def keep(self, slot: int, count: int) -> None:
        """Keep all cached tokens of `slot`, or drop them if `count` is 0."""
        if not count:
            self._caches[slot] = None

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        raise NotImplementedError("a recurrent state has no prefix: see `keeps_beginnings`")

    def take_experts(self) -> Tensor:
        if self._recorder is None:
            raise RuntimeError("this runner does not record experts: make it with record_experts")
        return self._recorder.take()

    def forward(self, step: Step) -> Tensor:
        rows = [(int(slot), step.tokens[i : i + 1]) for i, slot in enumerate(step.rows)]
        chunks = []
        for chunk, span in step.spans():
            if chunk.start == 0:
                self.keep(chunk.slot, 0)
            part = (self._part if chunk.start else 0) or chunk.end
            tokens = step.tokens[span].split(part)
            chunks += [self._run(chunk.slot, each) for each in tokens][-1:]
        return torch.stack([self._run(slot, token) for slot, token in rows] + chunks)

    def _run(self, slot: int, tokens: Tensor) -> Tensor:
        """Return float32 logits `[V]` after the last of `tokens` `[n]`.

        The tokens continue the sequence of the slot.
        """
        if self._pictures:
            return self._run_with_pictures(self._pictures, slot, tokens)
        if not self._part:
            if self._caches[slot] is not None:
                tokens = torch.cat([self._caches[slot], tokens])
            self._caches[slot] = tokens
            whole: Tensor = self._model(input_ids=tokens[None], use_cache=False).logits[0, -1]
            return whole.float()
        cache = {self._cache_name: self._caches[slot]}
        out = self._model(input_ids=tokens[None], use_cache=True, **cache)
        self._caches[slot] = out[self._cache_name]
        logits: Tensor = out.logits[0, -1]
        return logits.float()

    def _run_with_pictures(self, pictures: PictureInputs, slot: int, tokens: Tensor) -> Tensor:
        start, cache = 0, None
        if self._caches[slot] is not None:
            before, cache = self._caches[slot]
            start, tokens = len(before), torch.cat([before, tokens])
        elif self._part:
            cache = DynamicCache(config=decoder_of(self._model).config)
        out = pictures.states(self._model, tokens, start=start * (cache is not None), cache=cache)
        self._caches[slot] = tokens, cache
        logits: Tensor = self._model.get_output_embeddings()(out.last_hidden_state[0, -1])
        return logits.float()
