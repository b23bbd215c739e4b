"""The route `rollout`: take the engine's log-probability as `old_logp`.

The ratio D = pi_old / mu is then 1, and S = pi / pi_old is pi / mu.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from unstale.config.routes import ALWAYS_ONE, WHOLE_RATIO, Meaning, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.records import Batch


class RolloutRoute(OldLogps):
    """A method that takes the engine's log-probability as `old_logp`, instead of computing it.

    The ratio S of the objective then also contains the numerical differences between engine and
    trainer, so a clip limits these, too. With `engine.bitwise` there are no such differences, and
    the values count as exact.
    """

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, batch.sampled & False


@dataclass(frozen=True, kw_only=True)
class RolloutSpec(OldLogpsConfig):
    """Options of the route `rollout`, which uses the engine's log-probability as the old one."""

    route: str = "rollout"
    makes: ClassVar = RolloutRoute

    requires: ClassVar = {"correction.mode": "none"}  # old_logp is behavior_logp, so D is 1
    docs: ClassVar = RouteDocs(
        policy="the engine (mu)",
        exact="only with `engine.bitwise`",
        holds="nothing",
        costs="nothing",
        choose="as a baseline, or with `engine.bitwise`; D is 1",
    )

    def weight_of_now(self, run: RunConfig) -> float:
        return 0.0

    def meaning(self, run: RunConfig) -> Meaning:
        if run.engine.bitwise:
            own = "the engine's own, which is the trainer's bit for bit (engine.bitwise)"
            return Meaning("mu", own, ALWAYS_ONE, "learning alone: D is 1", "nothing")
        return Meaning("mu", "the engine's own", ALWAYS_ONE, WHOLE_RATIO, "nothing")

    def make(self, scorer: Any, *, lockstep: bool) -> RolloutRoute:
        return RolloutRoute()
