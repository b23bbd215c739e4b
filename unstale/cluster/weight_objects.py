"""Weights as objects in Ray's store: the parts of a safetensors file, as byte arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unstale.cluster.session import import_ray
from unstale.weights.child_process import Bytes
from unstale.weights.codec import file_parts, loads
from unstale.weights.store import Delta

Part = NDArray[Any]
"""Bytes of a file, as an array."""
Reference = Any
"""A reference to an object in Ray's store: the parts of one file, in order."""

FETCH_S = 600.0
"""Seconds after which fetching an object with weights fails, also from another machine."""


@dataclass(frozen=True, slots=True)
class PostedStep:
    """The deltas in Ray's store that lead from version `base` to `version`.

    If `base` is -1 they are applied to zeros. `nbytes` is their size in bytes.
    """

    base: int
    version: int
    nbytes: int
    deltas: Sequence[Reference]
    """References to one delta for all weights, or to one for each trainer rank's part."""


def arrays(parts: Sequence[Bytes]) -> list[Part]:
    """Return byte strings as arrays, without a copy. Ray copies such arrays only once."""
    return [np.frombuffer(part, np.uint8) for part in parts if len(part)]


def put(parts: Sequence[Bytes]) -> Reference:
    """Put bytes, given in parts, into Ray's object store, with one copy. Return a reference to
    them.
    """
    return import_ray().put(arrays(parts))


def put_delta(delta: Delta) -> Reference:
    return put(file_parts(delta))


def read_delta(parts: Sequence[Part]) -> Delta:
    """Return the delta in an object of Ray's store. Raises ValueError if it is damaged."""
    return loads(memoryview(b"".join(part.data for part in parts)))
