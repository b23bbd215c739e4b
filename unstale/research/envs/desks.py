"""The environment `desks`: the tasks of several customer-service desks in one run."""

from dataclasses import dataclass

from unstale.config import ConfigError, nearest
from unstale.config.tasks import EnvSpec
from unstale.envs.desk import DeskConfig, desk_names, shipped_desks
from unstale.envs.mixed import MixedTasks


@dataclass(frozen=True, slots=True, kw_only=True)
class DesksConfig(DeskConfig):
    """The tasks of several customer-service desks in turn."""

    env: str = "desks"
    desks: str = ""
    """Names of customer-service desks, separated by commas, such as `airline,retail`. Empty means
    all.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the chosen customer-service desks."""
        given = [name.strip() for name in self.desks.split(",")]
        return tuple(dict.fromkeys(given)) if self.desks.strip() else desk_names()

    def check_combination(self) -> None:
        super(DesksConfig, self).check_combination()
        for name in self.names:
            if name not in desk_names():
                raise ConfigError(f"task.desks cannot have {name!r}{nearest(name, desk_names())}")


def _make(options: DesksConfig) -> MixedTasks:
    desks = shipped_desks(
        level=options.level, latency_s=options.latency_s, latency_sigma=options.latency_sigma
    )
    return MixedTasks("desks", [desks[name] for name in options.names])


ENV = EnvSpec("desks", _make, DesksConfig)
