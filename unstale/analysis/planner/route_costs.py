"""The work and memory of a route, a method to obtain old log-probabilities.

Both are computed from the needs that the route declares.
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
    """Functions that return the costs of a route, a method to obtain old log-probabilities."""

    needs: Needs
    exact: bool
    in_place: bool = False
    """True if past versions or averages of the weights are loaded into the trained model to compute
    `old_logp` (`old_logps.placement = own`).
    """

    def forward_passes(self, versions: float, *, prompt_fraction: float = 0.0) -> float:
        """Return the number of forward passes over a trajectory that it takes to compute its
        `old_logp`.

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

        A delta is the difference between two versions. Its size depends on the learning rate
        `rate`. The result is 0 if past versions are not kept.
        """
        return (live - 1) * delta_bytes(model.parameters, rate) if self.needs.snapshots else 0.0

    def main_bytes(self, model: Model, *, live: int, rate: float) -> float:
        """Return the bytes of main memory, over all training ranks, that computing `old_logp`
        takes.

        These bytes hold the differences (deltas) from which `live` versions are restored. If past
        weights are loaded into the trained model, they also hold the past version or the float32
        averages, and the trained float32 weights while these are replaced.
        """
        kept = self.delta_bytes(model, live=live, rate=rate)
        loaded = WORD * self.needs.snapshots + _FLOAT32 * self.needs.averages
        return kept + (loaded + _FLOAT32) * model.parameters * self.in_place

    def device_bytes(self, model: Model) -> float:
        """Return the bytes of memory, over all training devices, that computing `old_logp`
        takes.
        """
        copies = 0 if self.needs.own_process else self.needs.resident_models
        averages = 0 if self.in_place else self.needs.averages
        return model.copy_bytes * copies + _FLOAT32 * model.parameters * averages

    def traffic_bytes(self, model: Model) -> float:
        """Return the bytes per step that are moved in device memory to keep averages or whole
        versions.

        To update an average, the weights and the average are read, and the average is written and
        copied into a model. If averages are loaded into the trained model, these copies cross the
        bus to main memory, which is not predicted.
        """
        if self.needs.whole_versions:  # one is written, and one is copied into the scoring model
            return 2 * model.parameters * (WORD + _FLOAT32)
        moved = WORD + 2 * _FLOAT32 + _FLOAT32 + WORD
        return model.parameters * self.needs.averages * moved


def route_cost(name: str, **options: Any) -> RouteCost:
    """Return the costs of the route `name`. `options` are options of `old_logps` that replace
    defaults.
    """
    config = OldLogpsConfig(route=name, **options)
    return RouteCost(
        config.needs,
        config.exact,
        in_place=getattr(config, "placement", "twin") == "own",
    )
