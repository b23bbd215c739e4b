"""CUDA graphs of decoding steps. With them, a step needs one kernel launch instead of hundreds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstale.engines.embedded.pages import Inputs, StepShape

_MAX_GRAPHS = 256
"""Largest number of CUDA graphs to keep, because each takes GPU memory. Beyond it, the least
recently used one is dropped.
"""


@dataclass(frozen=True, slots=True)
class _Captured:
    flat: Tensor
    """The input tensor of the graph. A step's input is copied into it before a replay."""
    logits: Tensor
    """The output tensor of the graph, the logits. The next replay overwrites it."""
    replay: Callable[[], None]


class Graphs:
    """A cache of CUDA graphs of decoding steps, one for each `StepShape`.

    The first step of a shape calls the function `run`, and its graph is recorded. Later steps
    replay the graph. Without CUDA, every step calls `run`.
    """

    def __init__(self, device: torch.device, run: Callable[[Inputs, StepShape], Tensor]) -> None:
        self._device = device
        self._run = run
        self._captured: dict[StepShape, _Captured] = {}
        self._pool: Any = None  # the memory that all graphs share

    def __len__(self) -> int:
        return len(self._captured)

    def clear(self) -> None:
        """Drop all graphs. Call this when the weights or the KV cache are at another address."""
        self._captured.clear()
        self._pool = None

    def __call__(self, flat: Tensor, shape: StepShape) -> Tensor:
        """Run a decoding step of the given shape. `flat` has all its `Inputs` in one tensor.

        Return the step's logits, in memory that the next call may overwrite.
        """
        captured = self._captured.pop(shape, None)
        if captured is not None:
            self._captured[shape] = captured  # moves the graph to the end, as the one used last
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

    def _capture(self, flat: Tensor, shape: StepShape) -> _Captured:
        """Record and return the CUDA graph of a step. A step of this shape must have run before."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._run(Inputs.of(flat, shape), shape)
        self._pool = self._pool or graph.pool()
        return _Captured(flat, logits, graph.replay)
