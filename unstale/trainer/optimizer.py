"""The optimizer and its learning-rate schedule."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from unstale.config import ConfigError, TrainerConfig
from unstale.config.names import value_hint
from unstale.model.sharding import one_number
from unstale.trainer.adamw8bit import AdamW8bit


def make_optimizer(config: TrainerConfig, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Create the optimizer that the option `trainer.optimizer` names.

    It is a class of torch.optim, other than LBFGS, or `AdamW8bit`. Raises ConfigError for an
    unknown name, and for options that the class does not accept.
    """
    kind = _optimizer_class(config.optimizer)
    accepted = inspect.signature(kind).parameters
    options: dict[str, Any] = {"lr": config.lr}
    if "weight_decay" in accepted:
        options["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        raise ConfigError(
            f"trainer.weight_decay must be 0 with {config.optimizer}, which has none; "
            f"got {config.weight_decay}"
        )
    if "decoupled_weight_decay" in accepted and config.weight_decay:
        options["decoupled_weight_decay"] = True
    if "fused" in accepted and parameters and _supports_fused(kind, parameters[0]):
        options["fused"] = True
    try:
        return kind(parameters, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"trainer.optimizer: {config.optimizer} cannot train this model: {error}"
        ) from error


def _optimizer_class(name: str) -> Any:
    classes = {
        key: kind
        for key, kind in vars(torch.optim).items()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }
    classes[AdamW8bit.__name__] = AdamW8bit
    if name not in classes:
        raise ConfigError(
            f"trainer.optimizer must be a class of torch.optim or AdamW8bit, got {name!r}"
            f"{value_hint('trainer.optimizer', name, sorted(classes))}"
        )
    if name == "LBFGS":
        raise ConfigError(
            "trainer.optimizer must not be LBFGS: it evaluates the loss again within a step"
        )
    return classes[name]


def _supports_fused(kind: Any, parameter: Tensor) -> bool:
    """Return True if the optimizer class `kind` has a fused kernel for the parameter's device.

    torch has no list of these kernels, so one step on a single number is tried.
    """
    probe = nn.Parameter(one_number(like=parameter))
    probe.grad = torch.zeros_like(probe)
    try:
        kind([probe], fused=True).step()
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def lr_factor(step: int, config: TrainerConfig, *, num_steps: int) -> float:
    """Return the factor on the learning rate at an optimizer step, counted from 0.

    The factor rises linearly to 1 at the last step of the warm-up. Then it stays 1 or falls towards
    0 at step `num_steps`, as set by `lr_schedule`.

    >>> config = TrainerConfig(lr_schedule="linear", warmup_steps=2)
    >>> [lr_factor(step, config, num_steps=6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    match config.lr_schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - done
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
