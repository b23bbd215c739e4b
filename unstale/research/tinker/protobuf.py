"""The part of the Protocol Buffers wire format that messages of Tinker use.

A message is a sequence of fields. Each begins with its number and wire type in one varint:
The wire type gives the value's form: 0 a varint, 1 eight bytes, 2 a length and as many bytes, 5
four bytes.
"""

import struct
from collections.abc import Sequence

Value = int | float | bytes | str
Fields = dict[int, list[int | bytes]]
"""The values of a message: for each field's number, its values in the order of the message.

Values of four or eight bytes are not converted from bytes.
"""
_MAX_VARINT_BYTES = 10


def encode(*fields: tuple[int, Value]) -> bytes:
    """Return a message of these fields, given as (number, value).

    An integer becomes a varint, a float eight bytes.

    >>> encode((1, 300), (2, "ab")).hex()
    '08ac0212026162'
    """
    parts = []
    for number, value in fields:
        if isinstance(value, float):
            parts += [_varint(number << 3 | 1), struct.pack("<d", value)]
        elif isinstance(value, int):
            parts += [_varint(number << 3), _varint(value)]
        else:
            data = value.encode() if isinstance(value, str) else value
            parts += [_varint(number << 3 | 2), _varint(len(data)), data]
    return b"".join(parts)


def decode(message: int | bytes) -> Fields:
    """Return the fields of a message.

    Raises ValueError if `message` is not a valid message.

    >>> decode(bytes.fromhex("08ac0212026162"))
    {1: [300], 2: [b'ab']}
    """
    if isinstance(message, int):
        raise ValueError("a number is where a message must be")
    fields: Fields = {}
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        value: int | bytes
        match key & 7:
            case 0:
                value, at = _read_varint(message, at)
            case 1 | 2 | 5 as kind:
                length = {1: 8, 5: 4}.get(kind, 0)
                if kind == 2:
                    length, at = _read_varint(message, at)
                value = message[at : at + length]
                at += length
            case kind:
                raise ValueError(f"wire type {kind} at byte {at}")
        if at > len(message):
            raise ValueError(f"field {key >> 3} ends at byte {at} of {len(message)}")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def text(values: Sequence[int | bytes]) -> str:
    """Return the last value of a field as a string. Raises ValueError if it is not
    a valid string.
    """
    value = values[-1] if values else b""
    if isinstance(value, int):
        raise ValueError("a number is where a text must be")
    return value.decode()


def double(values: Sequence[int | bytes]) -> float:
    """Return the last value of a field as a float of eight bytes.

    Raises ValueError if it is not eight bytes long.
    """
    value = values[-1] if values else bytes(8)
    if isinstance(value, int) or len(value) != 8:
        raise ValueError("a number of eight bytes is missing")
    return float(struct.unpack("<d", value)[0])


def integers(values: Sequence[int | bytes]) -> list[int]:
    """Return the values of a repeated field of signed integers, packed or not."""
    found = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _read_varint(value, at)
            found.append(number)
    return [number - (1 << 64) if number >> 63 else number for number in found]


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint that begins at byte `at`, and the index of the byte after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if at + index >= len(data):
            break
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & (1 << 64) - 1, at + index + 1
    raise ValueError(f"the number at byte {at} has no end")
