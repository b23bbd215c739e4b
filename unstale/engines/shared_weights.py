"""A weight file that is mapped into memory, by which servers on this host get weights.

It is a safetensors file in `/dev/shm`, or in the folder for temporary files if `/dev/shm` has too
little space.
"""

import mmap
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from unstale.weights.child_process import Bytes
from unstale.weights.codec import file_of, file_size, tensors_of
from unstale.weights.leftovers import hold_lock, remove_leftovers

WEIGHTS = "model.safetensors"
MEMORY = Path("/dev/shm")
_PREFIX = "unstale-weights-"
_SPARE_BYTES = 1 << 20
"""Bytes of the memory file system that are left free for other files of the servers."""


class SharedWeights(Mapping[str, Tensor]):
    """A weight file that is mapped into memory, as a mapping from names to tensors.

    The tensors use the file's memory, so changing them in place changes the file. The file is alone
    in a folder. `close` removes both. If this process is killed, the next process of the same user
    removes the folder.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.folder = Path()
        """The folder with the weight file. The first `write` sets it."""
        self._resources = ExitStack()
        self._readers = 0
        self._free = threading.Condition()
        """The condition that guards `_readers`. It is notified when a thread stops reading."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return a context in which the weight file does not change. Several threads may enter."""
        with self._free:
            self._readers += 1
        try:
            yield
        finally:
            with self._free:
                self._readers -= 1
                self._free.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context in which no other thread reads or changes the weight file.

        It begins by waiting for threads that do.
        """
        with self._free:
            self._free.wait_for(lambda: not self._readers)
            yield

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """Write all weights to the file, in their own dtypes. This replaces the file's content.

        Raises OSError if there is too little space.
        """
        self.write_file(file_of(weights))

    def write_file(self, parts: Sequence[Bytes]) -> None:
        """Write a safetensors file that is given in parts, of which the first is the header.

        If there is only the header, all weights are 0. Raises OSError if there is too little space.
        """
        size = file_size(parts[0])
        if not self.weights:
            self.folder = memory_folder(size, self._resources)
        self.weights = {}
        path = self.folder / WEIGHTS
        with path.open("wb") as file:
            file.writelines(parts)
            file.truncate(size)
        self.weights = _map_file(path)

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    def holds(self, weights: Mapping[str, Tensor]) -> bool:
        """Return True if `weights` are the tensors in the file's memory, and not copies of them."""
        return weights.keys() == self.weights.keys() and all(
            tensor.data_ptr() == self.weights[name].data_ptr() for name, tensor in weights.items()
        )

    def close(self) -> None:
        self.weights = {}
        self._resources.close()


def memory_folder(num_bytes: int, resources: ExitStack) -> Path:
    """Make a folder for `num_bytes` bytes of files, in memory if they fit. Return its path.

    Otherwise it is in the folder for temporary files. It is removed when `resources` are closed.
    Raises OSError if there is too little space.
    """
    parents = [path for path in (MEMORY, Path(tempfile.gettempdir())) if path.is_dir()]
    for parent in parents:
        remove_leftovers(parent, _PREFIX)
    free = {parent: shutil.disk_usage(parent).free for parent in parents}
    fitting = [parent for parent in parents if free[parent] > num_bytes + _SPARE_BYTES]
    if not fitting:
        space = " and ".join(f"{count:,} in {parent}" for parent, count in free.items())
        raise OSError(
            f"the server's weights take {num_bytes:,} bytes, but only {space} are free: make "
            "/dev/shm larger (containers: --shm-size), or set TMPDIR to a larger folder"
        )
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=fitting[0])
    folder = Path(resources.enter_context(made))
    resources.enter_context(hold_lock(folder))
    return folder


def _map_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of the file's memory."""
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    return tensors_of(memory)
