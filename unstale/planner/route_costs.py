"""Memory and forward passes of each old-log-probability route, as the route declares them."""

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
    """Additional models in the precision of the trained one."""
    averages: int = 0
    """Copies of the weights in float32."""
    chain: bool = False
    """True if deltas of the versions in use are kept in main memory, and published."""
    closing: bool = False
    """True if generation is paused during scoring and the optimizer step."""
    idle: bool = False
    """True if scoring uses the time in which the trainer waits."""
    apart: bool = False
    """True if its models and forward passes are in another process."""

    def forwarded(self, versions: float, *, prompt_fraction: float = 0.0) -> float:
        """Return the tokens of the forward passes that score a trajectory, per token of it.

        The trajectory has `versions` pieces of equal length, each of one version. A version's pass
        runs up to its last token, so two versions cost 1.5. `prompt_fraction` is the share of the
        trajectory before the first piece.

        >>> ROUTES["snapshot_old"].forwarded(2), ROUTES["ewma_prox"].forwarded(2)
        (1.5, 1.0)
        """
        if self.forwards != "versions":
            return float(self.forwards == "one")
        versions = max(1.0, versions)
        return versions * prompt_fraction + (1 - prompt_fraction) * (versions + 1) / 2

    def chain_bytes(self, model: Model, *, live: int, rate: float) -> float:
        """Return bytes of main memory: a delta for each of `live` versions except one."""
        return (live - 1) * delta_bytes(model.parameters, rate) if self.chain else 0.0

    def device_bytes(self, model: Model) -> float:
        """Return bytes on all of the trainer's devices, in addition to training."""
        copies = 0 if self.apart else self.movable
        return model.copy_bytes * copies + _FLOAT32 * model.parameters * self.averages

    def traffic_bytes(self, model: Model) -> float:
        """Return the bytes of device memory that averages read and write per step.

        An update reads the weights and the average, writes the average, and copies it to a model.
        """
        return model.parameters * self.averages * (WORD + 2 * _FLOAT32 + _FLOAT32 + WORD)


class _RouteCosts(Mapping[str, RouteCost]):
    """The costs of all registered routes, by name."""

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
