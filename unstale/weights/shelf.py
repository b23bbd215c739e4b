"""Storage of weight differences (deltas), in memory or in files."""

import os
import tempfile
from pathlib import Path

from unstale.weights.codec import Delta, dumps, loads


class Shelf:
    """Stores the delta of each version, in memory or in files of a temporary folder.

    A delta is the difference of the weights from the previous version. The temporary folder is
    inside `folder`. Files are in safetensors format and are never incomplete.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._held: dict[int, Delta | Path] = {}
        self._sizes: dict[int, int] = {}

    def put(self, version: int, delta: Delta) -> None:
        """Store the delta of a version. It replaces an earlier one."""
        self._held[version] = self._write(version, delta) if self._folder else delta
        self._sizes[version] = delta.nbytes

    def get(self, version: int) -> Delta:
        held = self._held[version]
        return loads(held.read_bytes()) if isinstance(held, Path) else held

    def drop(self, version: int) -> None:
        """Delete the delta of a version, if there is one."""
        held = self._held.pop(version, None)
        self._sizes.pop(version, None)
        if isinstance(held, Path):
            held.unlink()

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(self._held)

    @property
    def bytes(self) -> int:
        """The size of all deltas in bytes, in memory or in files."""
        return sum(self._sizes.values())

    @property
    def in_files(self) -> bool:
        return self._folder is not None

    def close(self) -> None:
        """Delete all deltas and their files."""
        self._held = {}
        self._sizes = {}
        if self._place is not None:
            self._place.cleanup()
            self._place = None

    def _write(self, version: int, delta: Delta) -> Path:
        if self._place is None:
            self._place = tempfile.TemporaryDirectory(prefix="versions-", dir=self._folder)
        path = Path(self._place.name) / f"{version:08d}.safetensors"
        aside = path.with_suffix(".partial")
        aside.write_bytes(dumps(delta))
        os.replace(aside, path)
        return path
