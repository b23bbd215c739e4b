"""LoRA training (arXiv 2106.09685): W = W0 + alpha / rank * B @ A, where only A and B are trained.

A and B are the adapters of a layer, and W0 is its base weight. The trainer multiplies by base and
adapters separately. An engine adds the adapters to its base weights in float32 and rounds the sums
to its own precision. Adapters have the names that PEFT writes, such as
`model.layers.0.mlp.up_proj.lora_A.weight`.
"""

import copy
import json
import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unstale.config import ConfigError, install, nearest
from unstale.config.files import read_mapping
from unstale.config.hub import require_safe_weights
from unstale.routed_experts import num_experts

ALL = "all-linear"
_A, _B, _ADAPTER = ".lora_A.weight", ".lora_B.weight", "default"


@dataclass(frozen=True, slots=True)
class Lora:
    """The settings of LoRA adapters: rank, scale, layers and seed.

    The matrices B start at 0, so new adapters do not change the model.
    """

    rank: int
    alpha: float = 32.0
    targets: str = ALL
    """`all-linear` (all linear layers but the output head), or ends of module names, separated by
    spaces, such as "q_proj v_proj".
    """
    seed: int = 0
    """Seed of the random initial values of the LoRA matrices A."""


@dataclass(frozen=True, slots=True)
class Merging:
    """The data with which an engine adds LoRA adapters to its base weights."""

    base: int
    """Checksum (`base_checksum`) of the base weights on which the adapters are trained."""
    dtype: str
    """Precision of the base weights in the trainer, such as "bfloat16"."""
    scale: float
    """The factor alpha / rank by which the product B @ A of an adapter is multiplied."""
    rank: int


class Base:
    """The weights in a model folder to which trained LoRA adapters are added (the base weights).

    They are memory-mapped. The constructor raises ValueError if the adapters were trained on other
    base weights.
    """

    def __init__(self, folder: Path, merging: Merging) -> None:
        self._tensors = _read(folder)
        self._merging = merging
        checksum = _checksum(self._tensors)
        if checksum != merging.base:
            raise ValueError(
                f"{folder} has weights with checksum {checksum:08x}, "
                f"but the adapters are trained on weights with checksum {merging.base:08x}"
            )

    @property
    def scale(self) -> float:
        """The factor alpha / rank by which the product B @ A of an adapter is multiplied."""
        return self._merging.scale

    def merged(
        self, adapters: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return all weights by name, with the adapters added, on the CPU and in `dtype`.

        `adapters` has the matrices A and B by PEFT's names. If `dtype` is None, weights with an
        adapter are float32 and the others have the trainer's precision. Raises ValueError if the
        adapters do not fit the base weights.
        """
        layers = self._layers_of(adapters)
        trainer_dtype = getattr(torch, self._merging.dtype)
        weights = {}
        # One tensor at a time, because a float32 copy of all weights needs twice the model's
        # memory.
        for name, base in self._tensors.items():
            weight = base.to(trainer_dtype) if base.is_floating_point() else base
            layer = name.removesuffix(".weight")
            if layer in layers:
                a = adapters[layer + _A].cpu()
                b = adapters[layer + _B].cpu()
                weight = _merge(weight, a, b, self._merging.scale)
            if weight.is_floating_point():
                weight = weight.to(dtype or weight.dtype)
            weights[name] = weight
        return weights

    def _layers_of(self, adapters: Mapping[str, Tensor]) -> set[str]:
        pairs = pairs_of(adapters)
        for layer, pair in pairs.items():
            base = self._tensors.get(f"{layer}.weight")
            require_fit(layer, pair, None if base is None else base.shape)
        return {*pairs}


def pairs_of(adapters: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the adapter matrices (A, B) of each layer, by the layer's name.

    `adapters` has the matrices by PEFT's names. Raises ValueError if a layer lacks one of the two,
    or if a name is not that of an adapter matrix.
    """
    layers = [name.removesuffix(_A) for name in adapters if name.endswith(_A)]
    if adapters.keys() != {layer + end for layer in layers for end in (_A, _B)}:
        raise ValueError(
            f"adapters need a lora_A and a lora_B for each layer, not {sorted(adapters)[:4]}"
        )
    return {layer: (adapters[layer + _A], adapters[layer + _B]) for layer in layers}


def require_fit(layer: str, pair: tuple[Tensor, Tensor], shape: Sequence[int] | None) -> None:
    """Raise ValueError unless the matrices `pair` = (A, B) fit a base weight of `shape`.

    `layer` is the name in the message. `shape` None means that the layer has no base weight, which
    is an error, too.
    """
    a, b = pair
    if shape is None or tuple(shape) != (len(b), *a.shape[1:]) or len(a) != b.shape[-1]:
        raise ValueError(
            f"the adapter of {layer} does not fit the base: "
            f"A is {list(a.shape)}, B is {list(b.shape)}"
        )


def base_checksum(folder: Path) -> int:
    """Return the CRC-32 of the names and bits of all tensors in a folder's safetensors files."""
    return _checksum(_read(folder))


def inject(model: Any, lora: Lora, *, without: Collection[str] = ()) -> None:
    """Freeze all weights of a model and add LoRA adapters to layers, in place.

    `lora` names the layers. Layers whose weights are in `without` (names) get no adapter. Raises
    ConfigError for a layer that cannot have an adapter, for a name that fits no layer, and for a
    model with experts.
    """
    if experts := num_experts(model.config.to_dict()):
        raise ConfigError(
            f"trainer.lora_rank is {lora.rank}, but the policy has {experts} experts in a layer: "
            "adapters of such a policy are not built. Set trainer.lora_rank to 0, or choose a "
            "dense policy"
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise ConfigError(f"trainer.lora_rank needs {error.name}: {install('lora')}") from error
    targets: Any = ALL
    if lora.targets != ALL:
        targets = lora.targets.split()
        _require_layers(model, targets)
    alpha: Any = lora.alpha
    options = LoraConfig(
        r=lora.rank,
        lora_alpha=alpha,
        target_modules=targets,
        exclude_modules=[name.rpartition(".")[0] for name in without] or None,
        task_type="CAUSAL_LM",
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
                f"trainer.lora_targets: {name} is not a linear layer, or shares its weight, and "
                "adapters of such layers are not built. Leave it out"
            )
        a = layer.lora_A[_ADAPTER].weight.detach()
        a.copy_((torch.rand(a.shape, generator=noise) * 2 - 1) / math.sqrt(a.shape[1]))


def _require_layers(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise ConfigError if a name in `targets` is not the end of any module's name.

    PEFT would ignore such a name if other names fit.
    """
    names = [f".{name}" for name, _ in model.named_modules()]
    linear = {
        name.rpartition(".")[2]: None
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    for target in targets:
        if not any(name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"trainer.lora_targets: no layer has the name {target}{nearest(target, [*linear])}"
            )


def adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable adapter matrices of a model, by the names that PEFT writes."""
    return {
        name.replace(f".{_ADAPTER}.", "."): weight
        for name, weight in model.named_parameters()
        if ".lora_" in name
    }


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model that has its own adapters but shares the base weights."""
    trained = {id(weight) for weight in adapters(model).values()}
    shared = {id(weight): weight for weight in model.parameters() if id(weight) not in trained}
    return copy.deepcopy(model, shared)


@torch.no_grad()
def plain(model: nn.Module, *, scale: float) -> Any:
    """Return a model without adapters, whose weights are W0 + `scale` * B @ A.

    Scale 0 gives the base weights W0. Weights without an adapter are shared with `model`.
    """
    bare: Any = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for name, layer in _layers(bare):
        linear = layer.base_layer
        if scale:
            a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
            merged = _merge(linear.weight, a, b, scale).to(linear.weight)
            linear.weight = nn.Parameter(merged, requires_grad=False)
        parent, _, last = name.rpartition(".")
        setattr(bare.get_submodule(parent), last, linear)
    del bare.peft_config
    return bare


def save_adapter(model: Any, folder: Path) -> None:
    """Save only the adapters, in the format that `peft.PeftModel.from_pretrained` reads."""
    options = copy.copy(model.peft_config[_ADAPTER])
    options.base_model_name_or_path = model.name_or_path
    options.inference_mode = True
    # This is a set, which each process would save in another order.
    options.target_modules = sorted(options.target_modules)
    options.save_pretrained(folder)
    _save_adapters(adapters(model), folder)


def write_adapter(tensors: Mapping[str, Tensor], folder: Path, *, scale: float) -> None:
    """Write adapters, given by PEFT's names, to a new folder in PEFT's format.

    `scale` is alpha / rank. `save_adapter` writes the same format for a whole model.
    """
    pairs = pairs_of(tensors)
    rank = len(next(iter(pairs.values()))[0])
    options = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted(pairs),
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(options))
    _save_adapters(tensors, folder)


def _save_adapters(tensors: Mapping[str, Tensor], folder: Path) -> None:
    named = {f"base_model.model.{name}": each.detach().cpu() for name, each in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return weight.float() + scale * (b.float() @ a.float())


def _layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module) for name, module in model.named_modules() if hasattr(module, "base_layer")
    ]


def _read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the safetensors files of a model folder, memory-mapped."""
    require_safe_weights(folder)
    files = [folder / "model.safetensors"]
    if not files[0].is_file():
        index = read_mapping(folder / "model.safetensors.index.json")
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        bits = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(bits.data, zlib.crc32(name.encode(), crc))
    return crc
