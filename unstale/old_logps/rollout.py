"""`rollout`: `old_logp` is the engine's `behavior_logp`, so D is 1 and S is pi / mu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from unstale.config.routes import (
    ALWAYS_ONE,
    WHOLE_RATIO,
    Meaning,
    Needs,
    OldLogpsConfig,
    RouteDocs,
    register_route,
)
from unstale.old_logps import Passive

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.records import Batch


class RolloutRoute(Passive):
    """The engine's log-probability as the old one (algorithm.md, section 3).

    The discrepancy is part of S, so a clip on S also acts on numerics. Never exact.
    """

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, batch.sampled & False


@register_route
@dataclass(frozen=True, kw_only=True)
class RolloutSpec(OldLogpsConfig):
    """The engine's own log-probability."""

    route: str = "rollout"

    requires: ClassVar = {"correction.control": "none"}  # D is 1 by construction
    docs: ClassVar = RouteDocs(
        policy="the engine (mu)",
        exact="no",
        holds="nothing",
        costs="nothing",
        choose="as a baseline; D is 1",
        report="Approximate. The engine's own number is taken as old_logp, so log D is 0 by "
        "construction and log S holds numerics and staleness together.",
    )

    @property
    def needs(self) -> Needs:
        return RolloutRoute.needs

    def weight_of_now(self, run: RunConfig) -> float:
        return 0.0

    def meaning(self, run: RunConfig) -> Meaning:
        return Meaning("mu", "the engine's own", ALWAYS_ONE, WHOLE_RATIO, "nothing")

    def make(self, scorer: Any, *, lockstep: bool) -> RolloutRoute:
        return RolloutRoute()
