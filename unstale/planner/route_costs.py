"""The work and the memory of an old-logit route, computed from the needs that it declares.

A route is a method to obtain old log-probabilities.
"""

from dataclasses import dataclass

from unstale.config import OldLogpsConfig
from unstale.config.routes import Needs
from unstale.planner.deltas import delta_bytes
from unstale.planner.models import WORD, Model

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class RouteCost:
    """The costs of an old-logit route with its default options."""

    needs: Needs
    exact: bool

    def forward_passes(self, versions: float, *, prompt_fraction: float = 0.0) -> float:
        """Return how many tokens the route's forward passes compute per token of a trajectory.

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

        `rate` is the learning rate, on which the size of a delta depends.
        """
        return (live - 1) * delta_bytes(model.parameters, rate) if self.needs.snapshots else 0.0

    def device_bytes(self, model: Model) -> float:
        """Return the bytes that the route adds to training, on all trainer devices together."""
        copies = 0 if self.needs.own_process else self.needs.resident_models
        return model.copy_bytes * copies + _FLOAT32 * model.parameters * self.needs.averages

    def traffic_bytes(self, model: Model) -> float:
        """Return the bytes of device memory that averages of the weights read and write per step.

        An update reads the weights and the average, writes the average, and copies it into a model.
        """
        moved = WORD + 2 * _FLOAT32 + _FLOAT32 + WORD
        return model.parameters * self.needs.averages * moved


def route_cost(name: str) -> RouteCost:
    config = OldLogpsConfig(route=name)
    return RouteCost(config.needs, config.exact)
