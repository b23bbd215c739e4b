"""The weights as servers on this host read them: one safetensors file in memory, written whole or changed in place."""

import json
import mmap
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from afterimage.engines.leftovers import hold, sweep
from afterimage.versions import Delta
from afterimage.versions.codec import advance

WEIGHTS = "model.safetensors"
_PREFIX = "afterimage-weights-"
_SIZE = 8
"""Bytes at the beginning that say how long the header is."""


class Handed:
    """A folder with one file, which is the memory of `weights`: a delta that is applied to them is in the file.

    Takes the memory of one copy of the weights, until `close`. What a killed process has left, the next one of the
    same user removes.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._held = ExitStack()
        self._path: Path | None = None

    @property
    def folder(self) -> Path:
        """Made when it is first asked for."""
        if self._path is None:
            memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
            sweep(memory, _PREFIX)
            self._path = Path(self._held.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=memory)))
            self._held.enter_context(hold(self._path))
        return self._path

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """All weights, in the precision that they are in."""
        self.weights = {}
        path = self.folder / WEIGHTS
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path)
        self.weights = _mapped(path, weights)

    def advance(self, delta: Delta) -> None:
        """Change them in place. ValueError if that does not lead to `delta.version`, bit for bit; they stay then."""
        advance(self.weights, delta)

    def close(self) -> None:
        self.weights, self._path = {}, None
        self._held.close()


def _mapped(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file as its own memory."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    start = _SIZE + int.from_bytes(memory[:_SIZE], "little")
    header = json.loads(memory[_SIZE:start])
    tensors = {}
    for name, tensor in like.items():
        place = {"offset": start + header[name]["data_offsets"][0], "count": tensor.numel()}
        flat = torch.frombuffer(memory, dtype=tensor.dtype, **place) if tensor.numel() else torch.empty(0).to(tensor)
        tensors[name] = flat.view(tensor.shape)
    return tensors
