"""Draws from bytes, and random changes of bytes, rows and JSON."""

import json
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3.5,
    -0.0,
    2**31,
    2**53 + 1,
    2**63,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "3",
    "true",
    "\ud800",
    "²²",
    "\x00",
    [],
    [1],
    {},
    {"a": 1},
    "x" * 300,
)
"""Values in places where they may not belong."""

NESTED = "[" * 3000, '{"a":' * 3000, "[" * 900 + "]" * 900


class Draws:
    """A source of choices from bytes. After the last byte it gives the first of everything."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return max(0, len(self._data) - self._at)

    def bytes(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, below: int) -> int:
        return int.from_bytes(self.bytes(1 if below <= 256 else 4)) % below

    def choice(self, among: Sequence[T]) -> T:
        return among[self.number(len(among))]

    def rest(self) -> bytes:
        return self.bytes(self.left)

    def text(self, most: int = 24) -> str:
        """Return a text, which may contain half surrogate pairs."""
        return self.bytes(self.number(most)).decode("utf-8", "surrogateescape")

    def json(self) -> Any:
        """Return any value that Python can write as JSON."""
        match self.number(4):
            case 0:
                return self.text()
            case 1:
                return self.number(2**32) - 2**31
            case _:
                return self.choice(ODD)

    def damaged(self, sound: bytes) -> bytes:
        """Return `sound` with a few changes: flipped bits, cut ends, moved pages, new bytes."""
        held = bytearray(sound)
        for _ in range(1 + self.number(3)):
            at = self.number(len(held) + 1)
            match self.number(7):
                case 0 | 1:
                    held[at : at + 1] = (
                        bytes([held[at] ^ 1 << self.number(8)]) if at < len(held) else b"\0"
                    )
                case 2:
                    held[at : at + 4] = self.bytes(4)
                case 3:
                    held[at:at] = self.bytes(self.number(16))
                case 4:
                    del held[at : at + 1 + self.number(64)]
                case 5:
                    del held[at:]
                case 6:
                    page = at - at % 4096
                    other = 4096 * self.number(1 + len(held) // 4096)
                    held[page : page + 4096] = held[other : other + 4096]
        return bytes(held)

    def changed(self, tree: Any) -> Any:
        """Return the JSON value `tree` with one value in it replaced, added or removed."""
        if not isinstance(tree, dict | list) or not tree or not self.number(5):
            return self.json()
        if isinstance(tree, list):
            at = self.number(len(tree))
            return [
                *tree[:at],
                *([] if self.number(8) == 7 else [self.changed(tree[at])]),
                *tree[at + 1 :],
            ]
        name = self.choice(sorted(tree))
        match self.number(8):
            case 6:
                return tree | {self.text(): self.json()}
            case 7:
                return {key: value for key, value in tree.items() if key != name}
        return tree | {name: self.changed(tree[name])}


def as_json(value: Any) -> str:
    """Return a value as JSON text, also NaN, infinity and half surrogate pairs."""
    return json.dumps(value, ensure_ascii=True)


def require(claim: bool, otherwise: object) -> None:
    """Raise AssertionError unless `claim`. An optimizing interpreter would skip an `assert`."""
    if not claim:
        raise AssertionError(otherwise)
