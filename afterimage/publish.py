"""Hand a version to the engines. An engine is never left between versions."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from afterimage.engines import Engine
from afterimage.policy import Policy


class Publisher(Protocol):
    """Brings `policy.version` to every engine. Generation goes on, under that version, when it returns."""

    async def publish(self, policy: Policy) -> None: ...


class DirectPublisher:
    """Full weights, handed straight to one engine in the engine's own precision."""

    def __init__(self, engine: Engine, *, dtype: torch.dtype) -> None:
        self._engine = engine
        self._dtype = dtype

    async def publish(self, policy: Policy) -> None:
        """Interrupt, load, resume. If loading fails the engine stays interrupted and the error ends the run."""
        update = _cast(policy.weights(), self._dtype)
        await self._engine.interrupt()
        await self._engine.load(update, policy.version)
        await self._engine.resume()


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach().to(dtype) for name, tensor in weights.items()}
