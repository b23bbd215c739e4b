"""Steps of the same shape replayed from CUDA graphs: one launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstale.engines.embedded.pages import Inputs, Shape

_MAX_GRAPHS = 256
"""Each holds on to its part of the device's memory; beyond this the one longest unused is given up."""


@dataclass(frozen=True, slots=True)
class _Captured:
    flat: Tensor
    """What a step is copied into before `replay`."""
    logits: Tensor
    """What it is read from afterwards, until the next replay."""
    replay: Callable[[], None]


class Graphs:
    """`run` by shape: as it is the first time, from its graph from then on. Only CUDA has graphs."""

    def __init__(self, device: torch.device, run: Callable[[Inputs, Shape], Tensor]) -> None:
        self._device, self._run = device, run
        self._captured: dict[Shape, _Captured] = {}
        self._pool: Any = None  # the memory that all graphs share

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Weights or cache have moved."""
        self._captured.clear()
        self._pool = None

    def __call__(self, flat: Tensor, shape: Shape) -> Tensor:
        """Logits, good until the next call."""
        captured = self._captured.pop(shape, None)
        if captured is not None:
            self._captured[shape] = captured  # the last to be given up
            captured.flat.copy_(flat)
            captured.replay()
            return captured.logits
        flat = flat.to(self._device)
        logits = self._run(Inputs.of(flat, shape), shape)
        if self._device.type == "cuda" and _MAX_GRAPHS:
            if len(self._captured) >= _MAX_GRAPHS:
                del self._captured[next(iter(self._captured))]
            self._captured[shape] = self._capture(flat, shape)
        return logits

    def _capture(self, flat: Tensor, shape: Shape) -> _Captured:
        """After a run of this shape, which has loaded its kernels."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run(Inputs.of(flat, shape), shape)
        self._pool = self._pool or graph.pool()
        return _Captured(flat, logits, graph.replay)
