"""The environment `desks`: customers of several desks in one run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from unstale.config import ConfigError, nearest
from unstale.envs import Env
from unstale.envs.desk import DeskConfig, DeskTasks, desk_names, shipped_desks
from unstale.envs.registry import EnvSpec
from unstale.records import Task


class MixedTasks:
    """The tasks of several desks in turn. A task has the name of its desk, and its tools."""

    name = "desks"

    def __init__(self, desks: Sequence[DeskTasks]) -> None:
        self._desks = {desk.name: desk for desk in desks}
        schemas = {tool["function"]["name"]: tool for desk in desks for tool in desk.tools}
        self.tools: tuple[Mapping[str, Any], ...] = tuple(schemas.values())

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._desks[task.env].tools

    def train(self, seed: int) -> Iterator[Task]:
        for tasks in zip(*(desk.train(seed) for desk in self._desks.values()), strict=True):
            yield from tasks

    def held_out(self, count: int) -> list[Task]:
        per_desk = -(-count // len(self._desks))
        rows = zip(*(desk.held_out(per_desk) for desk in self._desks.values()), strict=True)
        return list(islice((task for row in rows for task in row), count))

    def env(self, task: Task, seed: int) -> Env:
        return self._desks[task.env].env(task, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DesksConfig(DeskConfig):
    """The tasks of several customer-service desks in turn."""

    env: str = "desks"
    desks: str = ""
    """Names of the desks, separated by commas, such as `airline,retail`. Empty means all."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the desks."""
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
    return MixedTasks([desks[name] for name in options.names])


ENV = EnvSpec("desks", _make, DesksConfig)
