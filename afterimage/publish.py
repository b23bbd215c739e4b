"""Hand a version to the engines. An engine is never left between versions."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from afterimage.engines import Engine
from afterimage.policy import Policy


class Publisher(Protocol):
    """Brings `policy.version` to every engine."""

    def prepare(self, policy: Policy) -> None:
        """In the trainer's thread: what will travel, made while generation goes on."""
        ...

    async def publish(self) -> None:
        """Bring what was prepared to the engines. Generation goes on, under that version, when it returns."""
        ...


class DirectPublisher:
    """Full weights, handed straight to one engine in the engine's own precision."""

    def __init__(self, engine: Engine, *, dtype: torch.dtype) -> None:
        self._engine = engine
        self._dtype = dtype
        self._prepared: tuple[dict[str, Tensor], int] | None = None

    def prepare(self, policy: Policy) -> None:
        self._prepared = _cast(policy.weights(), self._dtype), policy.version

    async def publish(self) -> None:
        """Interrupt, load, resume. If loading fails the engine stays interrupted and the error ends the run."""
        if self._prepared is None:
            raise RuntimeError("nothing to publish: call prepare first")
        (update, version), self._prepared = self._prepared, None
        await self._engine.interrupt()
        await self._engine.load(update, version)
        await self._engine.resume()


def _cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.detach().to(dtype, copy=True) for name, tensor in weights.items()}
