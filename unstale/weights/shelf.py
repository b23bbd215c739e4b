"""Storage of the differences (deltas) between weight versions, in memory or in files."""

import os
from contextlib import ExitStack
from mmap import mmap
from pathlib import Path

from unstale.weights.codec import Delta, file_parts, loads
from unstale.weights.leftovers import locked_folder

_PREFIX = "unstale-versions-"


class Shelf:
    """A store of one delta per version, in memory or in files of a temporary folder.

    A delta is the difference of the weights from the previous version. Without `folder`, deltas are
    in memory. Else the temporary folder is inside `folder`, and a later process removes it if this
    one is killed. Files are in safetensors format and are never incomplete. In memory, a delta is
    the bytes of such a file, which checkpoints write without a copy.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._place: Path | None = None
        self._resources = ExitStack()
        self._held: dict[int, bytearray | Path] = {}
        self._deltas: dict[int, Delta] = {}
        """The deltas in memory, by version. They are views of the bytes in `_held`."""
        self._sizes: dict[int, int] = {}

    def put(self, version: int, delta: Delta) -> None:
        """Store the delta of `version`.

        It replaces a delta that is already stored for this version.
        """
        self._sizes[version] = delta.nbytes
        if self._folder:
            self._held[version] = self._write(version, delta)
            return
        file = bytearray().join(file_parts(delta))
        self._held[version] = file
        self._deltas[version] = loads(memoryview(file))

    def get(self, version: int) -> Delta:
        held = self._held[version]
        return loads(held.read_bytes()) if isinstance(held, Path) else self._deltas[version]

    def file(self, version: int) -> bytearray | mmap:
        """Return the delta of a version as the bytes of a safetensors file.

        The caller must not change them. A delta on disk is mapped into memory. The map stays valid
        when the file is deleted.
        """
        held = self._held[version]
        if not isinstance(held, Path):
            return held
        with held.open("r+b") as file:  # torch takes writable memory only
            return mmap(file.fileno(), 0)

    def drop(self, version: int) -> None:
        """Delete the delta of a version, if there is one."""
        held = self._held.pop(version, None)
        self._sizes.pop(version, None)
        self._deltas.pop(version, None)
        if isinstance(held, Path):
            held.unlink()

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._held)

    @property
    def bytes(self) -> int:
        """The total size of the stored deltas in bytes, in memory or in files."""
        return sum(self._sizes.values())

    @property
    def in_files(self) -> bool:
        return self._folder is not None

    def close(self) -> None:
        """Delete all deltas and their files."""
        self._held = {}
        self._sizes = {}
        self._deltas = {}
        self._place = None
        self._resources.close()

    def _write(self, version: int, delta: Delta) -> Path:
        if self._place is None:
            assert self._folder is not None
            self._place = self._resources.enter_context(locked_folder(self._folder, _PREFIX))
        path = self._place / f"{version:08d}.safetensors"
        aside = path.with_suffix(".partial")
        with aside.open("wb") as file:
            file.writelines(file_parts(delta))
        os.replace(aside, path)
        return path
