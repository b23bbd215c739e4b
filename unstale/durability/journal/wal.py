"""Find damage in a journal's `-wal` file, SQLite's write-ahead log of recent transactions.

SQLite reads the file up to the first frame (a changed database page) with a wrong checksum, because
a killed writer may have left it. So a damaged frame hides all later ones. The format is that of
https://sqlite.org/fileformat2.html#the_write_ahead_log.
"""

import os
import stat
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct(">8I")
"""Fields of the header of a `-wal` file: magic number, format, page size, number of resets, two
salts, two checksums.
"""
_MAGIC = 0x377F0682
"""The magic number at the start of a `-wal` file. If the file has a number larger by 1, checksums
read its words as big-endian.
"""
_FRAME_WORDS = 6
"""Number of words of a frame before its page: page number, database size if the frame ends a
transaction (otherwise 0), two salts, two checksums.
"""
_AT_ONCE = 512
"""Number of frames held in memory at once."""
_TRIES = 3
"""Number of attempts to read a file to which a run writes."""

_Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class WalDamage:
    """Damage of a `-wal` file, and the transactions after it, which SQLite ignores."""

    frame: int
    """Number of the damaged frame (a database page), from 1. 0 if the file's header is damaged."""
    num_frames: int
    """Number of frames that are lost: from the damaged one to the last that ends a transaction."""
    num_transactions: int

    def __str__(self) -> str:
        return (
            f"its -wal file is damaged at {f'frame {self.frame}' if self.frame else 'its header'}, "
            f"which hides {self.num_transactions} committed transactions with "
            f"{self.num_frames} pages"
        )


def find_damage(journal: Path) -> WalDamage | None:
    """Return the damage of the `-wal` file of `journal`. None if it is undamaged or does not exist.

    After a kill or a power cut the last transaction may be incomplete, which is not damage. But a
    changed bit in it is damage. Raises `OSError` if this file or another file of the journal is not
    a regular file, or cannot be read.
    """
    for ending in ("-shm", "-journal"):  # SQLite would wait for ever to open a pipe
        beside = journal.with_name(f"{journal.name}{ending}")
        if beside.exists() and not beside.is_file():
            raise OSError(f"{beside.name} is not a regular file")
    path = journal.with_name(f"{journal.name}-wal")
    for _ in range(_TRIES):
        try:
            before = path.stat()
            if not stat.S_ISREG(before.st_mode):
                raise OSError(f"{path.name} is not a regular file")
            found = _scan(path, _page_bytes(journal))
            if found is None or _moment(before) == _moment(path.stat()):
                return found
        except FileNotFoundError:
            return None
    return None  # a run writes to it


def _moment(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _page_bytes(journal: Path) -> int:
    """Return the size in bytes of a page of the database, from the header of its file."""
    with journal.open("rb") as file:
        size = int.from_bytes(file.read(18)[16:])
    return 65536 if size == 1 else size


def _scan(path: Path, page_bytes: int) -> WalDamage | None:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or page_bytes < 512:
            return None
        fields = np.frombuffer(header, ">u4").astype(np.uint32)
        order = ">u4" if fields[0] == _MAGIC + 1 else "<u4"
        is_sound = fields[0] in (_MAGIC, _MAGIC + 1) and np.array_equal(
            _sums(np.frombuffer(header[:24], order).astype(np.uint32)[None], fields[6:8][:0])[0],
            fields[6:8],
        )
        frames = _Frames(fields[6:8], order)
        while block := file.read(_AT_ONCE * (page_bytes + 4 * _FRAME_WORDS)):
            frames.read(block, page_bytes)
    if not len(frames.commits):
        return None
    if not is_sound:
        return frames.damage(frames.salts[0])
    return frames.damage(fields[4:6], page_bytes)


class _Frames:
    """The contents of all frames of a `-wal` file that the search for damage needs: commits, salts
    and differences of checksums.
    """

    def __init__(self, sums: _Words, order: str) -> None:
        self.commits: _Words = np.empty(0, np.uint32)
        self.salts: _Words = np.empty((0, 2), np.uint32)
        self.differences: _Words = np.empty((0, 2), np.uint32)
        """`[n, 2]`: for each frame, the computed checksums minus those in the file."""
        self._last = sums
        self._order = order

    def damage(self, salts: _Words, page_bytes: int = 0) -> WalDamage | None:
        """Return the damage of the file, or None. `salts` are those in its header.

        A `page_bytes` of 0 means that the header is damaged.
        """
        is_valid = (self.salts == salts).all(1) & (self.differences == 0).all(1)
        commits = self.commits > 0
        first = 0
        if page_bytes:
            if is_valid.all():
                return None
            first = int(np.argmin(is_valid))
            flipped = self._repair(first, salts, page_bytes, commits)
            is_valid[first] = flipped or (self.salts[first] == salts).all()
            if first + 1 < len(is_valid):  # if the bit is in a checksum, the next one starts wrong
                _, start = _weights(page_bytes // 4 + 2)
                rest = self.differences[first + 1] + self.differences[first] @ start
                is_valid[first + 1] |= flipped and not rest.any()
        lost = np.flatnonzero(is_valid & commits)
        lost = lost[lost >= first]
        if not len(lost) or (page_bytes and len(lost) == 1 and not flipped):
            return None  # only the last transaction, of which a power cut may lose any part
        frame = first + 1 if page_bytes else 0
        return WalDamage(frame, int(lost[-1]) - first + 1, len(lost))

    def _repair(
        self, frame: int, salts: _Words, page_bytes: int, commits: npt.NDArray[np.bool_]
    ) -> bool:
        """Return True if one changed bit explains why a frame is not valid.

        If this bit may have hidden or faked the end of a transaction, the frame's entry in
        `commits` is corrected.
        """
        if not self.differences[frame].any():
            return sum(int(word).bit_count() for word in self.salts[frame] ^ salts) == 1
        changed = _changed_bit(self.differences[frame], page_bytes)
        if changed and changed[0] == 1:
            before = np.array([self.commits[frame]]).astype(">u4").view(self._order)[0]
            commits[frame] = int(before) != 1 << changed[1]
        return changed is not None

    def read(self, block: bytes, page_bytes: int) -> None:
        """Add the frames in a block of bytes. An incomplete frame at the end is ignored."""
        width = page_bytes // 4 + _FRAME_WORDS
        count = len(block) // (4 * width)
        raw = np.frombuffer(block, np.uint32, count * width).reshape(count, width)
        heads = raw[:, :_FRAME_WORDS].byteswap() if np.little_endian else raw[:, :_FRAME_WORDS]
        words = np.delete(raw, np.s_[2:_FRAME_WORDS], axis=1).view(self._order).astype(np.uint32)
        stored = heads[:, 4:6]
        sums = _sums(words, np.vstack([self._last, stored])[:count])
        self._last = stored[-1] if count else self._last
        self.commits = np.concatenate([self.commits, heads[:, 1]])
        self.salts = np.vstack([self.salts, heads[:, 2:4]])
        self.differences = np.vstack([self.differences, sums - stored])


def _sums(words: _Words, before: _Words) -> _Words:
    """Return the checksums `[n, 2]` after each row of `words` `[n, num_words]`.

    `before` are the checksums `[n, 2]` before each row. Empty means zeros.
    """
    weights, start = _weights(words.shape[1])
    sums = words @ weights
    return sums + before @ start if len(before) else sums


@cache
def _weights(num_words: int) -> tuple[_Words, _Words]:
    """Return the factors `[num_words, 2]` with which each word enters the two sums of a checksum.

    Also return the factors `[2, 2]` of the values that the sums have before these words. For each
    pair of words (x, y), the checksum of sums (s, t) does s += x + t and t += y + s. So it is
    linear in words and earlier sums, modulo 2^32.
    """
    weights, one, two = [], (1, 1), (0, 1)
    for _ in range(num_words // 2):
        weights += [two, one]
        one, two = (((s + t) % 2**32, (s + 2 * t) % 2**32) for s, t in (one, two))
    of_s = [(x - y) % 2**32 for x, y in zip(one, two, strict=True)]  # (1, 0) is (1, 1) - (0, 1)
    return np.array(weights[::-1], np.uint32), np.array([of_s, two], np.uint32)


def _changed_bit(difference: _Words, page_bytes: int) -> tuple[int, int] | None:
    """Return (word, bit): the one bit whose change explains the difference of a frame's checksums.

    None if no single bit does. First come the words that the checksum covers, then the two of the
    checksum itself.
    """
    weights, _ = _weights(page_bytes // 4 + 2)
    weights = np.vstack([weights, np.eye(2, dtype=np.uint32)])
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    changes = weights[:, None, :] * np.concatenate([bits, -bits])[None, :, None]
    found = np.argwhere((changes == difference).all(2))
    return (int(found[0, 0]), int(found[0, 1]) % 32) if len(found) else None
