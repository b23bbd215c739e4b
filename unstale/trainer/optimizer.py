"""Optimizer."""

import difflib
import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from unstale.config import ConfigError, TrainerConfig


def make_optimizer(config: TrainerConfig, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Any class of torch.optim by its name. ConfigError names the nearest for a name that is none."""
    known = [
        name for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    ]  # fmt: skip
    if config.optimizer not in known:
        near = difflib.get_close_matches(config.optimizer, known, n=5, cutoff=0.4) or sorted(known)
        raise ConfigError(
            f"trainer.optimizer must be a class of torch.optim, got {config.optimizer!r}; nearest: {', '.join(near)}"
        )
    kind = getattr(torch.optim, config.optimizer)
    options: dict[str, Any] = {"lr": config.lr}
    takes = inspect.signature(kind).parameters
    if "weight_decay" in takes:
        options["weight_decay"] = config.weight_decay
    elif config.weight_decay:
        raise ConfigError(
            f"trainer.weight_decay must be 0 with {config.optimizer}, which has none; got {config.weight_decay}"
        )
    if "decoupled_weight_decay" in takes and config.weight_decay:
        options["decoupled_weight_decay"] = True
    if "fused" in takes and parameters and _fuses(kind, parameters[0]):
        options["fused"] = True
    if kind is torch.optim.LBFGS:
        raise ConfigError(
            "trainer.optimizer must not be LBFGS: it evaluates the loss again within a step"
        )
    try:
        return kind(parameters, **options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"trainer.optimizer: {config.optimizer} cannot train this model: {error}"
        ) from error


def _fuses(kind: Any, parameter: Tensor) -> bool:
    """Whether this class has one kernel for a step on the parameter's device, which only a step tells."""
    one = nn.Parameter(torch.zeros_like(parameter.detach().flatten()[:1]))
    one.grad = torch.zeros_like(one)
    try:
        kind([one], fused=True).step()
    except (RuntimeError, ValueError, TypeError):
        return False
    return True


def lr_factor(step: int, config: TrainerConfig, *, num_steps: int) -> float:
    """What the learning rate is multiplied by at optimizer step `step`, counted from 0.

    Warm-up rises linearly and reaches 1 at its last step; then the schedule falls towards 0 at `num_steps`.

    >>> [lr_factor(step, TrainerConfig(lr_schedule="linear", warmup_steps=2), num_steps=6) for step in range(6)]
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
