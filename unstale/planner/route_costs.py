"""What each old-logit route holds and runs, as it is implemented here (docs/old-logps.md)."""

from dataclasses import dataclass
from typing import Literal

from unstale.config import Route
from unstale.planner.deltas import delta_bytes
from unstale.planner.models import WORD, Model

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCost:
    """One route. What `unstale.old_logps.Needs` says of it, in numbers that a plan can be made of."""

    forwards: Literal["none", "one", "versions"] = "none"
    """Passes over a batch: of the whole of it, or of each version over what holds its tokens."""
    exact: bool = False
    movable: int = 0
    """Models beside the trained one, in its precision."""
    averages: int = 0
    """Copies of the weights in float32."""
    chain: bool = False
    """Keeps the deltas of the live versions, in main memory, and publishes by them."""
    closing: bool = False
    """Generation stands still while it scores, and while the optimizer steps."""
    idle: bool = False
    """Scores in time that the trainer waits."""
    apart: bool = False
    """Its forward passes and its model are another process's."""

    def forwarded(self, versions: float, *, given: float = 0.0) -> float:
        """Lengths of a trajectory that are run for it, if it holds so many versions in equal parts.

        A version's pass runs up to its last token: two equal versions cost 1.5. The first `given` of it are prompt.

        >>> ROUTES["snapshot_old"].forwarded(2), ROUTES["ewma_prox"].forwarded(2)
        (1.5, 1.0)
        """
        if self.forwards != "versions":
            return float(self.forwards == "one")
        versions = max(1.0, versions)
        return versions * given + (1 - given) * (versions + 1) / 2

    def chain_bytes(self, model: Model, *, live: int, rate: float) -> float:
        """Of main memory: one delta less than live versions."""
        return (live - 1) * delta_bytes(model.parameters, rate) if self.chain else 0.0

    def device_bytes(self, model: Model) -> float:
        """Of the trainer's devices together, beside what training takes."""
        return (
            model.copy_bytes * self.movable * (not self.apart)
            + _FLOAT32 * model.parameters * self.averages
        )

    def traffic_bytes(self, model: Model) -> float:
        """Of device memory, a step: an average is read and written beside the weights, and copied to where it runs."""
        return model.parameters * self.averages * (WORD + 2 * _FLOAT32 + _FLOAT32 + WORD)


ROUTES: dict[Route, RouteCost] = {
    "rollout": RouteCost(),
    "current_recompute": RouteCost(forwards="one"),
    "snapshot_old": RouteCost(forwards="versions", exact=True, movable=1, chain=True),
    "old_logit_model": RouteCost(forwards="versions", exact=True, movable=1, apart=True),
    "interrupt_sync": RouteCost(forwards="versions", exact=True, closing=True),
    "eager": RouteCost(forwards="versions", exact=True, movable=1, chain=True, idle=True),
    "interp_prox_loglinear": RouteCost(),
    "interp_prox_linear": RouteCost(),
    "ewma_prox": RouteCost(forwards="one", movable=1, averages=1),
    "ppo_ewma_async": RouteCost(forwards="one", movable=1, averages=1),
}
"""`eager` with its default fallback, `snapshot_old`; `ppo_ewma_async` with one average."""
