"""Cost of each old-log-probability route: memory and forward passes, from what the route declares."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unstale.config import OldLogpsConfig
from unstale.config.routes import Forwards, routes
from unstale.planner.deltas import delta_bytes
from unstale.planner.models import WORD, Model

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteCost:
    """The cost of a route with its default options. See `Needs` in `unstale.config.routes`."""

    forwards: Forwards = "none"
    exact: bool = False
    movable: int = 0
    """Models beside the trained one, in its precision."""
    averages: int = 0
    """Copies of the weights in float32."""
    chain: bool = False
    """True if it keeps the deltas of live versions in main memory, and publishes them."""
    closing: bool = False
    """True if generation is paused while it scores and while the optimizer steps."""
    idle: bool = False
    """True if it scores while the trainer waits."""
    apart: bool = False
    """True if its model and forward passes are in another process."""

    def forwarded(self, versions: float, *, given: float = 0.0) -> float:
        """Return the lengths of a trajectory of so many equal versions that are run to score it.

        A version's pass runs up to its last token: two equal versions cost 1.5. The first `given` of
        the trajectory is prompt.

        >>> ROUTES["snapshot_old"].forwarded(2), ROUTES["ewma_prox"].forwarded(2)
        (1.5, 1.0)
        """
        if self.forwards != "versions":
            return float(self.forwards == "one")
        versions = max(1.0, versions)
        return versions * given + (1 - given) * (versions + 1) / 2

    def chain_bytes(self, model: Model, *, live: int, rate: float) -> float:
        """Return bytes of main memory: one delta less than live versions."""
        return (live - 1) * delta_bytes(model.parameters, rate) if self.chain else 0.0

    def device_bytes(self, model: Model) -> float:
        """Return bytes of the trainer's devices together, beside training."""
        copies = 0 if self.apart else self.movable
        return model.copy_bytes * copies + _FLOAT32 * model.parameters * self.averages

    def traffic_bytes(self, model: Model) -> float:
        """Return bytes of device memory per step for averages.

        An average is read and written beside the weights, and copied to where it runs.
        """
        return model.parameters * self.averages * (WORD + 2 * _FLOAT32 + _FLOAT32 + WORD)


class _RouteCosts(Mapping[str, RouteCost]):
    """The costs of all routes that are registered."""

    def __getitem__(self, name: str) -> RouteCost:
        config = OldLogpsConfig(route=name)
        needs = config.needs
        return RouteCost(
            forwards=needs.forwards,
            exact=config.exact,
            movable=needs.resident_models,
            averages=needs.averages,
            chain=needs.snapshots,
            closing=needs.closing,
            idle=needs.idle,
            apart=needs.own_process,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(routes())

    def __len__(self) -> int:
        return len(routes())

    def __contains__(self, name: object) -> bool:
        return name in routes()


ROUTES = _RouteCosts()
