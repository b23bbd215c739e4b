"""A decoding step of a Qwen3 model in one call of `decoder.c`.

With a small model, calling a matrix library from Python takes longer than the matrix products.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unstale.engines.embedded.kernels import Kernels

SOURCE = Path(__file__).with_name("decoder.c")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The sizes of a model that `decoder.c` gets as arguments. Other sizes are C macros."""

    hidden: int
    inner: int
    vocab: int
    query: int
    qkv: int
    eps: float


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a forward pass and their places in the KV cache, as `int64` tensors.

    `cells` has the cache index of each token. `pages` `[slots, width]` has the cache pages of each
    sequence. `runs` is the result of `pages.runs`: the groups of tokens whose attention is computed
    together. `ends` has the indices of the tokens after which logits are computed.
    """

    tokens: Tensor
    positions: Tensor
    cells: Tensor
    pages: Tensor
    runs: Tensor
    ends: Tensor


_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Step(ctypes.Structure):
    """The C struct `step_` of `decoder.c`: all arguments of a forward pass."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "embed", "head", "norm", "rotations")),
        *((name, _INT) for name in ("num_layers", "hidden", "inner", "vocab")),
        *((name, _POINTER) for name in ("tokens", "positions", "cells")),
        ("count", _INT),
        ("of", _POINTER),
        ("width", _INT),
        ("runs", _POINTER),
        ("num_runs", _INT),
        ("ends", _POINTER),
        ("num_ends", _INT),
        *((name, _POINTER) for name in ("x", "h", "qkv", "query", "gated", "logits", "mixed")),
        ("scratch", _POINTER),
        ("scratch_size", _INT),
        ("threads", _INT),
        ("arrived", _INT),
        ("eps", ctypes.c_double),
    )


class OneCall:
    """A model's weights in the layout of `decoder.c`, and the memory for one forward pass."""

    def __init__(self, kernels: Kernels, sizes: StepSizes, dtype: torch.dtype) -> None:
        self._library = library = kernels.library
        library.panel.restype = library.scratch.restype = _INT
        library.scratch.argtypes = [_INT]
        library.decode.restype = None
        library.decode.argtypes = [_POINTER, _INT]
        self._panel = library.panel()
        self._sizes = sizes
        self._dtype = dtype
        self._step = _Step(hidden=sizes.hidden, inner=sizes.inner, vocab=sizes.vocab, eps=sizes.eps)
        self._kept: list[Tensor] = []
        """The tensors to which `_step` has pointers. The list keeps them from being freed."""
        self._layers = torch.empty(0)
        self._memory: dict[str, Tensor] = {}
        self._capacity = self._threads = 0

    def pack(self, weight: Tensor) -> Tensor:
        """Return a matrix `[N, K]` in the layout of `decoder.c`, `[N / panel, K, panel]`.

        `panel` is the number of rows that `decoder.c` multiplies at once. Zero rows are added until
        N is a multiple of it.
        """
        missing = -len(weight) % self._panel
        whole = torch.cat([weight, weight.new_zeros(missing, weight.shape[1])])
        return whole.view(-1, self._panel, weight.shape[1]).transpose(1, 2).contiguous()

    def pack_gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the matrices `gate` and `up` as one matrix in the layout of `pack`.

        Half of each panel's rows are from `gate`, the other half from `up`.
        """
        half = self._panel // 2
        missing = -len(gate) % half
        both = [
            torch.cat([each, each.new_zeros(missing, each.shape[1])]).view(-1, half, each.shape[1])
            for each in (gate, up)
        ]
        return self.pack(torch.cat(both, dim=1).flatten(0, 1))

    def load(self, embed: Tensor, head: Tensor, norm: Tensor, rotations: Tensor) -> None:
        """Set the weights outside of layers: the embedding, the output head, the last norm, and the
        rotary factors.

        `head` must be the result of `pack`, and `norm` float32.
        """
        self._kept = [embed, head, norm, rotations]
        step = self._step
        step.embed, step.head, step.norm, step.rotations = map(Tensor.data_ptr, self._kept)

    def load_layers(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Set the weights and KV caches of all layers.

        Each item of `layers` has the tensors of a layer, in the order of the C struct `layer_` of
        `decoder.c`. Only pointers are stored, so the caller must keep the tensors alive.
        """
        self._layers = torch.tensor([[each.data_ptr() for each in layer] for layer in layers])
        self._step.layers = self._layers.data_ptr()
        self._step.num_layers = len(layers)

    def run(self, tokens: StepTokens, helpers: ThreadPoolExecutor) -> Tensor:
        """Compute a forward pass, with the threads of `helpers`.

        Return float32 logits `[len(tokens.ends), vocab]`: those after each of the tokens
        `tokens.ends`.
        """
        count = len(tokens.tokens)
        threads = torch.get_num_threads()
        self._reserve(count, threads)
        logits = torch.empty(len(tokens.ends), self._sizes.vocab)
        step = self._step
        step.tokens = tokens.tokens.data_ptr()
        step.positions = tokens.positions.data_ptr()
        step.cells = tokens.cells.data_ptr()
        step.count = count
        step.of = tokens.pages.data_ptr()
        step.width = tokens.pages.shape[1]
        step.runs = tokens.runs.data_ptr()
        step.num_runs = tokens.runs.shape[1]
        step.ends = tokens.ends.data_ptr()
        step.num_ends = len(tokens.ends)
        step.logits = logits.data_ptr()
        step.threads = threads
        step.arrived = 0
        address = ctypes.addressof(step)
        others = [
            helpers.submit(self._library.decode, address, thread) for thread in range(1, threads)
        ]
        self._library.decode(address, 0)
        for other in others:
            other.result()
        return logits

    def _reserve(self, count: int, threads: int) -> None:
        if count <= self._capacity and threads <= self._threads:
            return
        self._capacity = count = max(-(-count // 64) * 64, self._capacity)
        self._threads = threads
        step = self._step
        step.scratch_size = self._library.scratch(count)
        widths = {
            "x": self._sizes.hidden,
            "h": self._sizes.hidden,
            "qkv": self._sizes.qkv,
            "query": self._sizes.query,
            "gated": self._sizes.inner,
        }
        self._memory = {name: torch.empty(count, width) for name, width in widths.items()}
        self._memory["mixed"] = torch.empty(count, self._sizes.query, dtype=self._dtype)
        self._memory["scratch"] = torch.empty(threads, step.scratch_size)
        for name, memory in self._memory.items():
            setattr(step, name, memory.data_ptr())
