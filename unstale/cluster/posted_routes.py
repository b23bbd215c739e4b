"""Expert routes in Ray's object store. They take megabytes, so replies only refer to them."""

import zlib
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from unstale.cluster.session import import_ray
from unstale.expert_routes import ExpertRoutes

FETCH_S = 60.0
"""Longest time in seconds that routes may take to arrive."""


@dataclass(frozen=True, slots=True)
class PostedRoutes:
    """A reference to the expert routes of one reply, and their checksum."""

    start: int
    reference: Any
    checksum: int

    @classmethod
    def post(cls, routes: ExpertRoutes) -> Self:
        """Put routes into the object store. Blocks, so call it in a thread."""
        experts = np.ascontiguousarray(routes.experts)
        return cls(routes.start, import_ray().put(experts), zlib.crc32(experts.data))

    def fetch(self) -> ExpertRoutes | None:
        """Return a copy of the routes. None if they were lost with their host.

        Blocks, so call it in a thread. Raises ValueError if the checksum differs, or if the routes
        do not arrive within `FETCH_S`.
        """
        ray = import_ray()
        try:
            experts = ray.get(self.reference, timeout=FETCH_S)
        except ray.exceptions.GetTimeoutError:
            raise ValueError(f"its expert routes did not arrive within {FETCH_S:g} s") from None
        except ray.exceptions.RayError:
            return None
        if zlib.crc32(experts.data) != self.checksum:
            raise ValueError("its expert routes changed on the way")
        return ExpertRoutes(self.start, experts.copy())
