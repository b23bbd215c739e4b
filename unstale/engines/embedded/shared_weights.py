"""The weights as servers on this host read them: one safetensors file, written whole or changed in place.

It lies in memory (`/dev/shm`), or where temporary files do if there is no room for it.
"""

import json
import mmap
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from unstale.engines.embedded.leftovers import hold, sweep
from unstale.weights.codec import advance
from unstale.weights.store import Delta

WEIGHTS = "model.safetensors"
MEMORY = Path("/dev/shm")
_PREFIX = "unstale-weights-"
_HEADER = 1 << 20
"""More than names and shapes take."""
_SIZE = 8
"""Bytes at the beginning that say how long the header is."""


class SharedWeights:
    """A folder with one file, which is the memory of `weights`: a delta that is applied to them is in the file.

    Takes the memory of one copy of the weights, until `close`. What a killed process has left, the next one of the
    same user removes.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.folder = Path()
        """From the first `put` on."""
        self._held = ExitStack()

    def put(self, weights: Mapping[str, Tensor]) -> None:
        """All weights, in the precision that they are in. OSError if there is no room for them."""
        if not self.weights:
            self._make(sum(tensor.nbytes for tensor in weights.values()))
        self.weights = {}
        path = self.folder / WEIGHTS
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, path
        )
        self.weights = _mapped(path, weights)

    def advance(self, delta: Delta) -> None:
        """Change them in place. ValueError if that does not lead to `delta.version`, bit for bit; they stay then."""
        advance(self.weights, delta)

    def close(self) -> None:
        self.weights = {}
        self._held.close()

    def _make(self, size: int) -> None:
        places = [place for place in (MEMORY, Path(tempfile.gettempdir())) if place.is_dir()]
        for place in places:
            sweep(place, _PREFIX)
        free = {place: shutil.disk_usage(place).free for place in places}
        roomy = [place for place in places if free[place] > size + _HEADER]
        if not roomy:
            rooms = " and ".join(f"{room:,} in {place}" for place, room in free.items())
            raise OSError(
                f"the weights for the server have {size:,} bytes, and there is room for {rooms}: make the first larger "
                "(containers: --shm-size), or set TMPDIR to a place that is"
            )
        self.folder = Path(
            self._held.enter_context(tempfile.TemporaryDirectory(prefix=_PREFIX, dir=roomy[0]))
        )
        self._held.enter_context(hold(self.folder))


def _mapped(path: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file as its own memory."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    start = _SIZE + int.from_bytes(memory[:_SIZE], "little")
    header = json.loads(memory[_SIZE:start])
    tensors = {}
    for name, tensor in like.items():
        place = {"offset": start + header[name]["data_offsets"][0], "count": tensor.numel()}
        flat = (
            torch.frombuffer(memory, dtype=tensor.dtype, **place)
            if tensor.numel()
            else torch.empty(0).to(tensor)
        )
        tensors[name] = flat.view(tensor.shape)
    return tensors
