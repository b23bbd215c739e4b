"""A task set that joins several others, such as all domains of a benchmark."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any

from unstale.config import ConfigError
from unstale.envs import (
    Env,
    HasDemonstrations,
    HasNotice,
    Message,
    Taskset,
    Votable,
    implements,
    task_answer,
    task_identity,
    task_text,
)
from unstale.records import Task


class MixedTasks:
    """A mixture of task sets, whose tasks come in turn. A task keeps its task set's name and
    tools.
    """

    def __init__(self, name: str, parts: Sequence[Taskset]) -> None:
        self.name = name
        self._parts = {part.name: part for part in parts}
        if len(self._parts) < len(parts):
            names = ", ".join(part.name for part in parts)
            raise ConfigError(f"the parts of {name} must have different names, got {names}")
        schemas = {tool["function"]["name"]: tool for part in parts for tool in part.tools}
        self.tools: tuple[Mapping[str, Any], ...] = tuple(schemas.values())
        self.longest_call_s = max(getattr(part, "longest_call_s", 0.0) for part in parts)
        if all(implements(part, Votable) for part in parts):
            self.answer_of = self._answer_of
        if all(implements(part, HasDemonstrations) for part in parts):
            self.demonstration = self._demonstration

    @property
    def parts(self) -> Sequence[Taskset]:
        return list(self._parts.values())

    def part_of(self, task: Task) -> Taskset:
        """Return the task set to which a task belongs."""
        return self._parts[task.env]

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self.part_of(task).tools

    def train(self, seed: int) -> Iterator[Task]:
        streams = {name: iter(part.train(seed)) for name, part in self._parts.items()}
        while streams:
            for name, tasks in streams.items():
                if (task := next(tasks, None)) is None:
                    raise ConfigError(f"train({seed}) of {name} ended; it must be endless")
                yield task

    def held_out(self, count: int) -> list[Task]:
        """Return up to `count` held-out tasks, in turn from each task set that still has some."""
        rows = zip_longest(*(part.held_out(count) for part in self._parts.values()))
        return list(islice((task for task in chain.from_iterable(rows) if task), count))

    def identity(self, task: Task) -> str:
        return task_identity(self.part_of(task), task)

    def text(self, task: Task) -> str:
        return task_text(self.part_of(task), task)

    def _answer_of(self, task: Task, reply: str) -> str:
        return task_answer(self.part_of(task), task, reply)

    def _demonstration(self, task: Task) -> Sequence[Message]:
        part: Any = self.part_of(task)
        messages: Sequence[Message] = part.demonstration(task)
        return messages

    def notice(self) -> str:
        parts = [part for part in self._parts.values() if implements(part, HasNotice)]
        return ". ".join(filter(None, (part.notice() for part in parts)))

    def env(self, task: Task, seed: int) -> Env:
        return self.part_of(task).env(task, seed)
