"""Routed experts (the experts that an MoE model chose for each token) in Ray's object store.

They take megabytes, so replies have only references to them.
"""

import zlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from unstale.cluster.session import import_ray
from unstale.routed_experts import RoutedExperts

FETCH_S = 60.0
"""Seconds after which fetching routed experts fails."""


@dataclass(frozen=True, slots=True)
class PostedExperts:
    """A reference to the routed experts of one reply, and their checksum."""

    start: int
    reference: Any
    checksum: int

    @classmethod
    def post(cls, routed_experts: RoutedExperts) -> Self:
        """Put routed experts into Ray's object store. This blocks, so call it in a thread."""
        experts = np.ascontiguousarray(routed_experts.experts)
        return cls(routed_experts.start, import_ray().put(experts), zlib.crc32(experts.data))

    def fetch(self) -> RoutedExperts | None:
        """Return a copy of the routed experts, or None if they were lost with their host.

        This blocks, so call it in a thread. Raises ValueError if the checksum differs, or if the
        experts do not arrive within `FETCH_S` seconds.
        """
        ray = import_ray()
        try:
            experts = ray.get(self.reference, timeout=FETCH_S)
        except ray.exceptions.GetTimeoutError:
            raise ValueError(f"its routed experts did not arrive within {FETCH_S:g} s") from None
        except ray.exceptions.RayError:
            return None
        if zlib.crc32(experts.data) != self.checksum:
            raise ValueError("its routed experts changed on the way")
        return RoutedExperts(self.start, experts.copy())
