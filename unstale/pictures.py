"""Pictures in sequences of tokens, and the store of their pixels.

All tokens of a picture are one number, which no vocabulary reaches and no other picture of a store
has. So sequences with equal tokens have equal pictures: a cache, a shared prefix or a comparison of
tokens can never take one picture for another.
"""

import os
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from weakref import finalize

from unstale.config.files import flush_to_disk

if TYPE_CHECKING:  # environments and the command line import this module without numpy
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

FIRST = 1 << 30
"""The lowest number that stands for a picture. Numbers have 31 bits, so all arrays of tokens can
hold them.
"""
PICTURES = "pictures"
"""Name of the folder with the pixels, in a run folder."""
_END = ".safetensors"


class PictureError(ValueError):
    """Error: a picture cannot be used. The message says why."""


class Picture(NamedTuple):
    """A picture in a record: the number that is its token, and the SHA-256 of its file in hex."""

    number: int
    digest: str


def read_data_url(url: str) -> bytes | None:
    """Return the file in a data URL of a picture. None for another URL.

    >>> read_data_url("data:image/png;base64,AAA="), read_data_url("http://host/a.png")
    (b'\\x00\\x00', None)
    """
    head, comma, data = url.partition(",")
    if comma and head.startswith("data:image/") and head.endswith(";base64"):
        with suppress(ValueError):
            return b64decode(data, validate=True)
    return None


def numbers_in(tokens: Iterable[int]) -> Iterator[int]:
    """Return the different numbers of pictures among tokens, in the order of their appearance.

    >>> [*numbers_in((5, FIRST + 1, FIRST + 1, FIRST))] == [FIRST + 1, FIRST]
    True
    """
    return iter(dict.fromkeys(token for token in tokens if token >= FIRST))


def decoded(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> str:
    """Return the text of tokens, with a name such as `<picture 40000007>` for each picture.

    `decode` returns the text of the other tokens.

    >>> decoded([1, FIRST + 7, FIRST + 7, 2], str)
    '[1]<picture 40000007>[2]'
    """
    return "".join(
        f"<picture {key:08x}>" if key else decode(list(run))
        for key, run in groupby(tokens, lambda token: token if token >= FIRST else 0)
    )


class PictureStore:
    """A store of the pixels of pictures, with one file for each picture. A file is never changed.

    Threads and processes may share the folder. A file is on the disk before its number is used.
    Without a folder the store has a temporary one, until `open` is called.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(mkdtemp(prefix="unstale-pictures-"))
        if folder is None:
            finalize(self, rmtree, self.folder, ignore_errors=True)
        self._digests: dict[int, str] = {}
        """The SHA-256 of each known picture, by number."""
        self._numbers: dict[str, int] = {}
        self._lock = Lock()

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def open(self, folder: Path) -> None:
        """Move the store to `folder`, which may already have pictures.

        Copy the store's pictures to it.
        """
        folder.mkdir(exist_ok=True)
        for each in folder.glob(f".*{_END}"):  # left by a crash
            each.unlink()
        old, self.folder = self.folder, folder
        known, self._numbers, self._digests = self._numbers, {}, {}
        for digest, number in known.items():
            arrays = _load(old / f"{number:08x}{_END}")[1]
            if self.add(digest, arrays) != number:
                raise PictureError(f"{folder} has another picture with the number {number:08x}")

    def find(self, digest: str) -> int | None:
        """Return the number of the picture with the SHA-256 `digest`.

        None if the store does not have it.
        """
        if number := self._numbers.get(digest):
            return number
        for number in _candidates(digest):
            path = self._path(number)
            if not path.exists():
                return None
            if self.digest(number) == digest:
                return number
        return None

    def add(self, digest: str, arrays: "Arrays") -> int:
        """Store the pixels of a picture with the SHA-256 `digest`, on the disk.

        Return its number.
        """
        with self._lock:
            if known := self.find(digest):
                return known
            new = self.folder / f".{os.getpid()}{_END}"
            _save(new, digest, arrays)
            try:
                for number in _candidates(digest):
                    try:
                        os.link(new, self._path(number))
                        break
                    except FileExistsError:
                        if self.digest(number) == digest:
                            return number
            finally:
                new.unlink()
            flush_to_disk(self.folder)
            self._digests[number], self._numbers[digest] = digest, number
            return number

    def digest(self, number: int) -> str:
        """Return the SHA-256 of a picture. Raises `PictureError` if the store does not have it."""
        if number not in self._digests:
            self._digests[number] = digest = _load(self._path(number))[0]
            self._numbers[digest] = number
        return self._digests[number]

    def read(self, number: int) -> "Arrays":
        """Return the pixels of a picture as arrays by name.

        Raises `PictureError` if they are lost or damaged.
        """
        return _load(self._path(number))[1]

    def pictures(self, tokens: Sequence[int]) -> tuple[Picture, ...]:
        """Return the different pictures among tokens."""
        return tuple(Picture(number, self.digest(number)) for number in numbers_in(tokens))

    def require(self, pictures: Iterable[Picture]) -> None:
        """Raise `PictureError` if the store lacks one of these pictures, or if it is damaged."""
        for number, digest in set(pictures):
            if _load(self._path(number))[0] != digest:
                raise PictureError(
                    f"{self._path(number)} is not the picture of the record, which "
                    f"has the SHA-256 {digest}"
                )

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08x}{_END}"


def _candidates(digest: str) -> Iterator[int]:
    """Yield the numbers that a picture may have: first the one from its hash, then later ones."""
    start = int(digest[:8], 16) % FIRST
    for place in range(1 << 10):
        yield FIRST + (start + place) % FIRST


def _save(path: Path, digest: str, arrays: "Arrays") -> None:
    import numpy as np
    from safetensors.numpy import save_file

    whole = {name: np.ascontiguousarray(each) for name, each in arrays.items()}
    save_file(whole, path, metadata={"sha256": digest, "crc": str(_checksum(whole))})
    flush_to_disk(path)


def _load(path: Path) -> "tuple[str, Arrays]":
    """Return a picture's SHA-256 and its pixels.

    Raises `PictureError` for a lost or damaged file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = file.metadata()
    except (OSError, SafetensorError) as error:
        raise PictureError(f"the picture {path} cannot be read: {error}") from None
    if about.get("crc") != str(_checksum(arrays)):
        raise PictureError(f"the picture {path} is damaged. Restore it from a copy of the run")
    return str(about["sha256"]), arrays


def _checksum(arrays: "Arrays") -> int:
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].tobytes(), zlib.crc32(name.encode(), crc))
    return crc
