"""A forward pass of the trainer's model, to check the log-probabilities of a server."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from unstale.engines.embedded.runner import check_update, tied_parameters
from unstale.kept_sets import KeptSets
from unstale.model.experts import routed_layers
from unstale.model.loading import load_model
from unstale.model.lora import Base, Merging
from unstale.model.quantisation import quantise_passes


class ReferenceModel:
    """A language model whose weights are passed to each call of `logps`.

    `max_positions` is the longest sequence that the model's configuration allows, or None. With
    `merging`, updates are LoRA adapters, which `cast` adds to the base weights in `folder`. Like
    the engine, `logps` rounds weights and activations to the number format `quantise`. `cast` does
    not.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        merging: Merging | None = None,
        quantise: str = "none",
    ) -> None:
        model = load_model(folder, dtype).eval()
        quantise_passes(model, quantise, dtype)
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._dtype = dtype
        self._base = Base(folder, merging) if merging else None
        state = model.state_dict()
        self._tied = tied_parameters(model)
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in state.items() if name not in self._tied
        }
        self._buffers = dict(model.named_buffers())
        self._model = _without_memory(model)

    def routed_layers(self) -> tuple[bool, ...]:
        """Return for each layer whether it has a router that chooses experts.

        Raises ConfigError if no layer has one.
        """
        return routed_layers(self._model)

    def cast(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an update's weights, LoRA adapters merged, in the engine's precision.

        Tied weights appear once. Raises ValueError if names or shapes of the update do not fit the
        model.
        """
        if self._base:
            update = self._base.merged(update, dtype=self._dtype)
        check_update(update, self._shapes, self._tied)
        return {name: update[name].detach().to(self._dtype).contiguous() for name in self._shapes}

    @torch.no_grad()
    def logps(
        self,
        weights: Mapping[str, Tensor],
        tokens: Sequence[int],
        *,
        temperature: float,
        kept_sets: KeptSets | None = None,
    ) -> Tensor:
        """Return the log-probabilities in nats of all `tokens` except the first, `[T - 1]`, on the
        CPU.

        `weights` must be a result of `cast`. `kept_sets` has the sets to which the last tokens were
        truncated. Their log-probabilities are over these sets.
        """
        device = next(iter(weights.values())).device
        row = torch.tensor([tokens], device=device)
        buffers = {name: buffer.to(device) for name, buffer in self._buffers.items()}
        state = {**buffers, **weights}
        logits = functional_call(self._model, state, (row,), {"use_cache": False}).logits[0, :-1]
        scaled = logits.float() / temperature
        if kept_sets is not None:
            sizes, ids = kept_sets.to_tensors()
            before = len(scaled) - len(kept_sets)
            cut = torch.ones(scaled.shape, dtype=torch.bool)
            cut[:before] = False
            cut[before + torch.repeat_interleave(sizes), ids.long()] = False
            scaled = scaled.masked_fill(cut.to(device), -torch.inf)
        logps = scaled.log_softmax(-1)
        return logps.gather(1, row[0, 1:, None]).squeeze(1).cpu()


def _without_memory(model: PreTrainedModel) -> PreTrainedModel:
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            meta = empty.setdefault(
                id(parameter), nn.Parameter(parameter.to("meta"), requires_grad=False)
            )
            module.register_parameter(name, meta)
    return model
