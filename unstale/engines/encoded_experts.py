"""Find and decode the routed experts in the JSON of a server's reply, while other threads run.

Routed experts are the experts that an MoE model chose for each token. Those of a long context are
megabytes of base64. Python's own functions hold the interpreter lock while they read them, so the
event loop would wait. Compiled code (`routed_experts.c`) does not hold it. Without a C compiler,
the JSON parser reads the experts with the rest of the reply, and `binascii` decodes them in parts.
"""

import binascii
import ctypes
import warnings
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from unstale.engines.http import Body
from unstale.native import NotCompiled, compile_library

SOURCE = Path(__file__).with_name("routed_experts.c")
NAME = b'"routed_experts"'
"""The key of the routed experts in the JSON of vLLM and SGLang, with its quotes."""
_PART = 1 << 18
"""Number of characters that `binascii` decodes at once. It must be a multiple of 4."""


def cut_experts(body: Body) -> tuple[Body, memoryview | None]:
    """Return the JSON of a reply without its routed experts, and the experts.

    The experts are a JSON string with its quotes, as a view of `body`. In the returned JSON, an
    empty string replaces them. The result is `body` and None if they cannot be cut out: without
    compiled code, if `body` does not have the key `NAME` exactly once, or if its value is not a
    string without escapes.
    """
    library = _library()
    first, last = ctypes.c_int64(), ctypes.c_int64()
    text = np.frombuffer(body, np.uint8)
    found = library is not None and library.find_value(
        text.ctypes.data, len(text), NAME, ctypes.byref(first), ctypes.byref(last)
    )
    if not found:
        return body, None
    view = memoryview(body)
    start, stop = first.value, last.value + 1
    return b"".join((view[:start], b'""', view[stop:])), view[start:stop]


def decode_base64(text: memoryview) -> NDArray[np.uint8]:
    """Return the bytes that `text` encodes: a JSON string of base64, with its quotes.

    Raises ValueError if the string is not valid base64.
    """
    if bytes(text[:1]) != b'"':
        raise ValueError("base64 must be a JSON string")
    encoded = text[1:-1]
    library = _library()
    if library is not None:
        characters = np.frombuffer(encoded, np.uint8)
        decoded = np.empty(3 * len(characters) // 4, np.uint8)
        count = library.decode(characters.ctypes.data, len(characters), decoded.ctypes.data)
        if count >= 0:
            return decoded[:count]
    try:
        return _decode_parts(encoded)
    except ValueError:  # perhaps / is written as \/
        return _decode_parts(memoryview(msgspec.json.decode(text, type=str).encode()))


def _decode_parts(encoded: memoryview) -> NDArray[np.uint8]:
    """Decode base64 in parts. Other threads can run only between two parts."""
    decoded = np.empty(3 * len(encoded) // 4, np.uint8)
    end = 0
    for start in range(0, len(encoded), _PART):
        part = binascii.a2b_base64(encoded[start : start + _PART], strict_mode=True)
        decoded[end : end + len(part)] = np.frombuffer(part, np.uint8)
        end += len(part)
    return decoded[:end]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = compile_library(SOURCE)
    except NotCompiled as error:
        warnings.warn(
            "the event loop waits while long routed experts are read, because "
            f"{SOURCE.name} does not compile: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    place = ctypes.POINTER(ctypes.c_int64)
    library.find_value.argtypes = [address, number, ctypes.c_char_p, place, place]
    library.decode.argtypes = [address, number, address]
    library.decode.restype = number
    return library
