"""The work and the memory of a route, computed from the needs that it declares.

A route is a method to obtain old log-probabilities.
"""

from dataclasses import dataclass
from typing import Any

from unstale.analysis.planner.models import Model
from unstale.config import OldLogpsConfig
from unstale.config.routes import Needs
from unstale.weights.delta_sizes import WORD, delta_bytes

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class RouteCost:
    """The costs of a route, a method to obtain old log-probabilities."""

    needs: Needs
    exact: bool
    in_place: bool = False
    """True if past versions or averages are loaded into the trained model to compute `old_logp`
    (`old_logps.placement = own`).
    """

    def forward_passes(self, versions: float, *, prompt_fraction: float = 0.0) -> float:
        """Return how many forward passes over a trajectory the computation of `old_logp` takes.

        The trajectory is assumed to have `versions` parts of equal length, each sampled by another
        version. The pass with a version ends at its last token, so two versions take 1.5 passes.
        `prompt_fraction` is the share of the trajectory before the first part.

        >>> [route_cost(name).forward_passes(2) for name in ("snapshot_old", "ewma_prox")]
        [1.5, 1.0]
        """
        if self.needs.forwards != "versions":
            return float(self.needs.forwards == "one")
        versions = max(1.0, versions)
        return versions * prompt_fraction + (1 - prompt_fraction) * (versions + 1) / 2

    def delta_bytes(self, model: Model, *, live: int, rate: float) -> float:
        """Return the bytes of main memory for the deltas from which `live` versions are restored.

        `rate` is the learning rate, on which the size of a delta depends. 0 if past versions are
        not kept.
        """
        return (live - 1) * delta_bytes(model.parameters, rate) if self.needs.snapshots else 0.0

    def main_bytes(self, model: Model, *, live: int, rate: float) -> float:
        """Return the bytes of main memory that computing `old_logp` takes on all training ranks.

        They hold the deltas of `live` versions. If past weights are loaded into the trained
        model, main memory also holds the past version or the float32 averages and, while they are
        used, the trained float32 weights.
        """
        kept = self.delta_bytes(model, live=live, rate=rate)
        loaded = WORD * self.needs.snapshots + _FLOAT32 * self.needs.averages
        return kept + (loaded + _FLOAT32) * model.parameters * self.in_place

    def device_bytes(self, model: Model) -> float:
        """Return the bytes of device memory that the route (way to get `old_logp`) needs, on all
        trainer devices together.
        """
        copies = 0 if self.needs.own_process else self.needs.resident_models
        averages = 0 if self.in_place else self.needs.averages
        return model.copy_bytes * copies + _FLOAT32 * model.parameters * averages

    def traffic_bytes(self, model: Model) -> float:
        """Return the bytes of device memory that averages of the weights read and write per step.

        An update reads the weights and the average, writes the average, and copies it into a model.
        If averages are loaded into the trained model, these copies cross the bus to main memory.
        The time of that is not predicted.
        """
        if self.needs.whole_versions:  # one is written, and one is copied into the scoring model
            return 2 * model.parameters * (WORD + _FLOAT32)
        moved = WORD + 2 * _FLOAT32 + _FLOAT32 + WORD
        return model.parameters * self.needs.averages * moved


def route_cost(name: str, **options: Any) -> RouteCost:
    """Return the costs of the route `name`. `options` are options of `old_logps` with other values
    than the default.
    """
    config = OldLogpsConfig(route=name, **options)
    return RouteCost(
        config.needs,
        config.exact,
        in_place=getattr(config, "placement", "twin") == "own",
    )
