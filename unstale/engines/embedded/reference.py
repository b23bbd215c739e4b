"""The trainer's program, to hold an engine's log-probabilities against: a forward pass without weights of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from unstale.engines.embedded.runner import check_update
from unstale.model.loading import no_progress_bars
from unstale.model.lora import Base, Merging


class Reference:
    """Any causal-LM folder as a function of its weights: they are the caller's, and lie where the caller has them.

    `max_tokens` a model can have by its configuration, `vocab_size` by its embedding. With `merging` what it is given
    are adapters.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, merging: Merging | None = None) -> None:
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is not a model folder: it has no config.json")
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
            ).eval()
        config = model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_tokens = getattr(config, "max_position_embeddings", None)
        self._dtype = dtype
        self._base = Base(folder, merging) if merging else None
        named, state = dict(model.named_parameters()), model.state_dict()
        names = {parameter.data_ptr(): name for name, parameter in named.items()}
        self._tied = {
            alias: names[t.data_ptr()]
            for alias, t in state.items()
            if names.get(t.data_ptr(), alias) != alias
        }
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in state.items() if name not in self._tied
        }
        self._buffers = dict(model.named_buffers())
        self._model = _emptied(model)

    def cast(self, update: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights in the engine's precision, tied ones once. Raises ValueError for what is not this model's."""
        update = self._base.merged(update, dtype=self._dtype) if self._base else update
        check_update(update, self._shapes, self._tied)
        return {name: update[name].detach().to(self._dtype).contiguous() for name in self._shapes}

    @torch.no_grad()
    def logps(
        self, weights: Mapping[str, Tensor], tokens: Sequence[int], *, temperature: float
    ) -> Tensor:
        """`[T - 1]` log-probabilities of `tokens` after the first, under what `cast` returned."""
        device = next(iter(weights.values())).device
        row = torch.tensor([tokens], device=device)
        held = {name: buffer.to(device) for name, buffer in self._buffers.items()} | dict(weights)
        logits = functional_call(self._model, held, (row,), {"use_cache": False}).logits[0, :-1]
        return (
            (logits.float() / temperature)
            .log_softmax(-1)
            .gather(1, row[0, 1:, None])
            .squeeze(1)
            .cpu()
        )


def _emptied(model: nn.Module) -> nn.Module:
    """The model without memory for its parameters; those that are tied still are."""
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            meta = empty.setdefault(
                id(parameter), nn.Parameter(parameter.to("meta"), requires_grad=False)
            )
            module.register_parameter(name, meta)
    return model
