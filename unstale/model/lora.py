"""Training by adapters (LoRA, arXiv 2106.09685): W = W0 + alpha / rank * B @ A, of which only A and B learn.

The trainer runs base and adapters side by side. Whoever samples merges them into the base, in float32, and casts to its
own precision. Adapters have the names that PEFT gives them in files: `model.layers.0.mlp.up_proj.lora_A.weight`.
"""

import copy
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unstale.config import ConfigError, install

ALL = "all-linear"
_A, _B, _ADAPTER = ".lora_A.weight", ".lora_B.weight", "default"


@dataclass(frozen=True, slots=True)
class Lora:
    """Which layers get adapters, and how large. B begins as 0, so that nothing is changed at first."""

    rank: int
    alpha: float = 32.0
    targets: str = ALL
    """`all-linear`, which leaves the head out, or the ends of module names, separated by spaces."""
    seed: int = 0
    """A is drawn from it."""


@dataclass(frozen=True, slots=True)
class Merging:
    """What whoever merges has to know of the base: its checksum, the precision the trainer has it in, and the scale."""

    base: int
    dtype: str
    scale: float


class Base:
    """The weights of a model folder, to merge adapters into. They are mapped from its files and take no memory."""

    def __init__(self, folder: Path, merging: Merging) -> None:
        """ValueError if these are not the weights that the adapters were trained on."""
        self._tensors, self._merging = _read(folder), merging
        if (found := _checksum(self._tensors)) != merging.base:
            raise ValueError(
                f"{folder} does not hold the weights that the adapters are trained on: their checksum is "
                f"{merging.base:08x}, and {found:08x} is found"
            )

    def merged(
        self, adapters: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """All weights, on the CPU, in `dtype`; None is float32 where there is an adapter, else as the trainer has them.

        ValueError for adapters of another model.
        """
        layers = {name.removesuffix(_A) for name in adapters if name.endswith(_A)}
        if adapters.keys() != {layer + end for layer in layers for end in (_A, _B)}:
            raise ValueError(f"these are not A and B of adapters: {sorted(adapters)[:4]}")
        for layer in layers:
            a, b, base = (
                adapters[layer + _A],
                adapters[layer + _B],
                self._tensors.get(f"{layer}.weight"),
            )
            if base is None or base.shape != (len(b), *a.shape[1:]) or len(a) != b.shape[-1]:
                raise ValueError(
                    f"the adapter of {layer} does not fit the base: {list(a.shape)}, {list(b.shape)}"
                )
        weights, held = {}, getattr(torch, self._merging.dtype)
        for (
            name,
            base,
        ) in self._tensors.items():  # one by one: in float32 all of them would be twice the model
            weight, layer = (
                base.to(held) if base.is_floating_point() else base,
                name.removesuffix(".weight"),
            )
            if layer in layers:
                weight = _merge(
                    weight,
                    adapters[layer + _A].cpu(),
                    adapters[layer + _B].cpu(),
                    self._merging.scale,
                )
            weights[name] = (
                weight.to(dtype or weight.dtype) if weight.is_floating_point() else weight
            )
        return weights


def base_checksum(folder: Path) -> int:
    """CRC-32 over the names and bits of all tensors in a model folder's safetensors files."""
    return _checksum(_read(folder))


def inject(model: nn.Module, lora: Lora) -> None:
    """Freeze the model and put adapters beside its layers. ConfigError for layers that cannot have one."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError(f"trainer.lora_rank needs {error.name}: {install('lora')}") from error
    targets: Any = ALL if lora.targets == ALL else lora.targets.split()
    alpha: Any = lora.alpha
    options = LoraConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    try:
        with torch.random.fork_rng(devices=[]):
            inject_adapter_in_model(options, model)
    except ValueError as error:
        raise ConfigError(f"trainer.lora_targets {lora.targets!r}: {error}") from error
    noise = torch.Generator().manual_seed(lora.seed)
    for name, layer in _layers(model):
        if not isinstance(layer.base_layer, nn.Linear) or uses[id(layer.base_layer.weight)] > 1:
            raise ConfigError(
                f"trainer.lora_targets: {name} is no linear layer with a weight of its own"
            )
        a = layer.lora_A[_ADAPTER].weight.detach()
        a.copy_((torch.rand(a.shape, generator=noise) * 2 - 1) / math.sqrt(a.shape[1]))


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that learn."""
    named = model.named_parameters()
    return {
        name.replace(f".{_ADAPTER}.", "."): weight for name, weight in named if ".lora_" in name
    }


def twin(model: nn.Module) -> nn.Module:
    """A copy with adapters of its own over the same base."""
    own = {id(weight) for weight in adapters(model).values()}
    return copy.deepcopy(
        model, {id(weight): weight for weight in model.parameters() if id(weight) not in own}
    )


@torch.no_grad()
def plain(model: nn.Module, *, scale: float) -> Any:
    """The model without adapters: merged at this scale, or the base itself at 0. All other weights are shared."""
    bare: Any = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for name, layer in _layers(bare):
        linear = layer.base_layer
        if scale:
            a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
            linear.weight = nn.Parameter(
                _merge(linear.weight, a, b, scale).to(linear.weight), requires_grad=False
            )
        parent, _, last = name.rpartition(".")
        setattr(bare.get_submodule(parent), last, linear)
    del bare.peft_config
    return bare


def save_adapter(model: Any, folder: Path) -> None:
    """The adapters alone, as `peft.PeftModel.from_pretrained` reads them."""
    options = copy.copy(model.peft_config[_ADAPTER])
    options.base_model_name_or_path, options.inference_mode = model.name_or_path, True
    options.target_modules = sorted(
        options.target_modules
    )  # a set, whose order is another in every process
    options.save_pretrained(folder)
    held = {
        f"base_model.model.{name}": weight.detach().cpu()
        for name, weight in adapters(model).items()
    }
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return weight.float() + scale * (b.float() @ a.float())


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    """Those that have an adapter, with their names."""
    return [
        (name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")
    ]


def _read(folder: Path) -> dict[str, Tensor]:
    """By the names of the files that transformers reads."""
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        bits = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(bits.data, zlib.crc32(name.encode(), crc))
    return crc
