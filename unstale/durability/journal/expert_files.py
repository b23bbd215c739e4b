"""Files next to the journal with the experts that an MoE model used for each sampled token.

Each group of episodes has one file. Routed experts take a hundred times the space of tokens, so
they are not in the database. The files are not flushed to disk. If the machine crashes, the last
experts may be missing when the run resumes.
"""

import math
import os
import queue
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from unstale.records import Sampled
from unstale.routed_experts import RoutedExperts

ROUTED_EXPERTS = "routes"
"""Name of the folder in a run folder for the files of routed experts."""

_MAGIC = b"UXR1"
_HEADER = struct.Struct("<4sqqqqIIIIII")
"""Format of a record's header: magic number, episode, position of the piece, version, index of the
first token, numbers of tokens, of layers and of experts for each token, bytes of one expert's
number, two checksums.
"""
_SEAL = struct.Struct("<I")
_DTYPES = {1: "uint8", 2: "int16"}


class ExpertKey(NamedTuple):
    """The key of a record in these files: the run of sampled tokens whose experts the record has.

    `position` is the index of this run of tokens (a `Sampled` piece) in the episode, and `version`
    the version that sampled it.
    """

    episode: int
    position: int
    version: int
    tokens: int
    """Checksum of the token ids."""


class ExpertFiles:
    """A writer and reader of the files of routed experts in `folder`.

    A separate thread writes, so only `flush` and `close` wait for the disk.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        """Use the files in `folder`.

        A group's file is removed `keep` checkpoints after the first checkpoint that was trained on
        the group.
        """
        self.folder = folder
        self._keep = keep
        self.on_error: Callable[[Exception], None] = lambda error: None
        """A function that the writing thread calls if a file cannot be written or removed."""
        self._consumed: deque[list[int]] = deque()
        """For each of the last checkpoints, oldest first: the groups that were trained on since the
        checkpoint before it. Their files still exist.
        """
        self._opened: set[int] = set()
        """Groups whose files are known to end with a complete record. Only the writing thread uses
        this set.
        """
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Functions for the writing thread, which calls them in turn. None ends the thread."""
        self._num_done = 0
        self._thread: Thread | None = None
        self._is_closed = False

    def write(self, group: int, episode: int, position: int, piece: Sampled) -> None:
        """Append the routed experts of a piece, a run of sampled tokens, to the group's file.

        `position` is the index of `piece` in the episode. Only experts that `piece` has are
        written. If a killed process left an incomplete record in the file, this record is removed
        first.
        """
        if piece.routed_experts is not None:
            self._submit(self._append, group, _key(episode, position, piece), piece.routed_experts)

    def flush(self, stuck_s: float | None = None) -> None:
        """Block until everything that was passed to `write` is in the files.

        Raises TimeoutError if nothing could be written for `stuck_s` seconds. None waits forever.
        """
        mark: Future[None] = Future()
        self._submit(mark.set_result, None)
        while True:
            num_done = self._num_done
            try:
                return mark.result(stuck_s)
            except TimeoutError:
                if self._num_done == num_done:
                    raise

    def close(self, stuck_s: float | None = None) -> None:
        """Write everything that was passed to `write`, then end the writing thread.

        Raises TimeoutError if nothing could be written for `stuck_s` seconds. None waits forever.
        """
        try:
            if self._thread is not None and not self._is_closed:
                self.flush(stuck_s)
        finally:
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join(stuck_s)

    def consumed(self, groups: Iterable[int]) -> None:
        """Record `groups`, which a new checkpoint was trained on since the checkpoint before it.

        If more than `keep` checkpoints are recorded, the files of the oldest one's groups are
        removed.
        """
        self._consumed.append([*groups])
        while len(self._consumed) > self._keep:
            self._submit(self._remove, self._consumed.popleft())

    def read(self, group: int) -> dict[ExpertKey, RoutedExperts]:
        """Return the recorded routed experts of a group. Empty if the group has no file.

        Damaged records are left out, and so are all records after a damaged header. Of several
        records for the same tokens, the last one counts.
        """
        try:
            data = self._path(group).read_bytes()
        except FileNotFoundError:
            return {}
        return {key: routed_experts for key, routed_experts, _ in _records(data)}

    @staticmethod
    def find(
        records: dict[ExpertKey, RoutedExperts], episode: int, position: int, piece: Sampled
    ) -> RoutedExperts | None:
        """Return the routed experts of `piece` from `records`, or None if it has no record.

        `position` is the index of `piece` in the episode `episode`.
        """
        return records.get(_key(episode, position, piece))

    def _path(self, group: int) -> Path:
        return self.folder / f"group-{group:06d}.bin"

    def _submit(self, act: Callable[..., None], *arguments: object) -> None:
        if self._is_closed:
            raise RuntimeError("the files of routed experts are closed")
        if self._thread is None:
            # a daemon thread, because a disk that does not answer must not keep the process alive
            self._thread = Thread(target=self._work, name="routes", daemon=True)
            self._thread.start()
        self._queue.put(partial(act, *arguments))

    def _work(self) -> None:
        while (act := self._queue.get()) is not None:
            try:
                act()
            except Exception as error:  # noqa: BLE001 - nothing else reads what the thread raises
                self.on_error(error)
            self._num_done += 1

    def _append(self, group: int, key: ExpertKey, routed_experts: RoutedExperts) -> None:
        try:
            self.folder.mkdir(exist_ok=True)
            path = self._path(group)
            if group not in self._opened and path.exists():
                _remove_damaged_end(path)
            self._opened.add(group)
            with path.open("ab") as file:
                file.writelines(_record(key, routed_experts))
        except BaseException:
            self._opened.discard(group)  # a part of the record may be in the file
            raise

    def _remove(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._opened.discard(group)
            self._path(group).unlink(missing_ok=True)


def _key(episode: int, position: int, piece: Sampled) -> ExpertKey:
    tokens = struct.pack(f"<{len(piece.tokens)}I", *piece.tokens)
    return ExpertKey(episode, position, piece.version, zlib.crc32(tokens))


def _record(key: ExpertKey, routed_experts: RoutedExperts) -> tuple[bytes, memoryview]:
    """Return a record in two parts: its header, and the bytes of the experts."""
    import numpy as np

    data = np.ascontiguousarray(routed_experts.experts).reshape(-1).view(np.uint8).data
    shape = (*routed_experts.experts.shape, routed_experts.experts.itemsize)
    header = _HEADER.pack(
        _MAGIC, *key[:3], routed_experts.start, *shape, key.tokens, zlib.crc32(data)
    )
    return header + _SEAL.pack(zlib.crc32(header)), data


def _remove_damaged_end(path: Path) -> None:
    """Cut off the end of a file after its last valid record."""
    data = path.read_bytes()
    size = max((end for *_, end in _records(data)), default=0)
    if size < len(data):
        os.truncate(path, size)


def _records(data: bytes) -> Iterator[tuple[ExpertKey, RoutedExperts, int]]:
    """Yield the key and experts of each valid record, and the offset of its end in `data`.

    It ends at a damaged header, because the records after it cannot be found.
    """
    import numpy as np

    at = 0
    while at + _HEADER.size + _SEAL.size <= len(data):
        header = data[at : at + _HEADER.size]
        (seal,) = _SEAL.unpack_from(data, at + _HEADER.size)
        magic, episode, position, version, start, *shape, width, tokens, checksum = _HEADER.unpack(
            header
        )
        if magic != _MAGIC or zlib.crc32(header) != seal:
            return
        at += _HEADER.size + _SEAL.size
        end = at + math.prod(shape) * width
        if zlib.crc32(data[at:end]) == checksum:
            experts = np.frombuffer(data[at:end], _DTYPES[width]).reshape(shape)
            key = ExpertKey(episode, position, version, tokens)
            yield key, RoutedExperts(start, experts.copy()), end
        at = end
