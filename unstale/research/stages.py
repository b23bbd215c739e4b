"""Named stages of an attempt, such as to locate a fault, to change the code and to verify it.

At the start of a stage, the policy reads an instruction. At the end, a command can be run in the
sandbox, such as the tests of a repository. The choice among attempts uses the command's result,
which the policy does not see. From SWE-Reasoner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from unstale.config import ConfigError
from unstale.config.files import read_mapping
from unstale.envs import Env, Message, Taskset, Turn
from unstale.envs.guard import call
from unstale.envs.notes import NotedEnv, NotedTasks
from unstale.records import Task, Trajectory

CHECK = "check"
"""The fact that has the result of the last command of a stage: 1 for exit code 0, otherwise 0."""
OLD = "check_is_old"
"""The fact that is 1 if the attempt continued after this command, so that the checked files may
have changed. Such an attempt was ended by a limit before the next command.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of an attempt."""

    name: str
    turns: int = 1
    """Number of replies. The last stage has no limit."""
    ask: str = ""
    """The instruction to the policy at the start of the stage, after the environment's message."""
    run: str = ""
    """A command that is run in the sandbox at the end of the stage. Empty: none."""
    judge: str = ""
    """Folder of the reward model of this stage. Empty means the model of `--judge`."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of an attempt, in order."""

    stages: tuple[Stage, ...]
    ends: tuple[int, ...] = field(init=False)
    """Number of replies after which each stage ends. The last stage has no limit."""

    def __post_init__(self) -> None:
        ends = tuple(accumulate(stage.turns for stage in self.stages))
        object.__setattr__(self, "ends", ends)

    @classmethod
    def plain(cls, number: int, turns: int) -> "Stages":
        """Return stages of equal length, without names."""
        return cls((Stage(name="", turns=turns),) * number)

    @classmethod
    def read(cls, path: Path) -> "Stages":
        """Return the stages of a TOML or JSON file, a list `stage`. Raises `ConfigError` for a file
        that has none, and for unknown fields or values of another type.
        """
        rows = read_mapping(path).get("stage")
        if not isinstance(rows, list) or not rows:
            raise ConfigError(f"{path} has no stages: write [[stage]] with a name for each")
        return cls(tuple(_stage(row, f"{path}, stage {i}") for i, row in enumerate(rows, 1)))

    @property
    def runs(self) -> bool:
        """True if a stage has a command."""
        return any(stage.run for stage in self.stages)

    @property
    def last_run(self) -> str:
        """The command of the last stage that has one."""
        return next((stage.run for stage in reversed(self.stages) if stage.run), "")


def _stage(row: Any, place: str) -> Stage:
    kinds = {each.name: int if each.name == "turns" else str for each in fields(Stage)}
    if not isinstance(row, dict) or not row.get("name"):
        raise ConfigError(f"{place} has no name")
    for name, value in row.items():
        if name not in kinds:
            raise ConfigError(f"{place} has the field {name!r}; allowed: {', '.join(kinds)}")
        if type(value) is not kinds[name] or (name == "turns" and int(value) < 1):
            raise ConfigError(f"{place}: {name} cannot be {value!r}")
    return Stage(**row)


def passed(attempt: Trajectory) -> float:
    """Return the result of the last command that was run in an attempt. 0 if no command was run, or
    if the attempt continued after it.
    """
    return 0.0 if attempt.facts.get(OLD) else attempt.facts.get(CHECK, 0.0)


@runtime_checkable
class RunsCommands(Protocol):
    """An environment with a sandbox, in which commands can be run that the policy does not see."""

    async def check(self, command: str) -> bool:
        """Return True if a command ends with exit code 0 in the sandbox."""
        ...


class StagedTasks(NotedTasks):
    """A task set that adds stages to the episodes of another task set: it announces each stage to
    the policy, and runs its command.
    """

    def __init__(self, inner: Taskset, stages: Stages) -> None:
        super().__init__(inner, {})
        self._stages = stages

    def require(self, task: Task) -> None:
        """Raise `ConfigError` if stages have commands, and the environments cannot run them."""
        if self._stages.runs and not isinstance(self.inner.env(task, 0), RunsCommands):
            raise ConfigError(
                f"--stages has commands (run), and the environments of {self.inner.name} have no "
                "method check(command), as those of terminal: have"
            )

    def env(self, task: Task, seed: int) -> Env:
        return _StagedEnv(self.inner.env(task, seed), self._stages)


class _StagedEnv(NotedEnv):
    def __init__(self, inner: Env, stages: Stages) -> None:
        super().__init__(inner, stages.stages[0].ask)
        self._stages = stages
        self._replies = 0
        self._has_checked = False

    async def begin(self) -> Turn:
        if self._stages.stages[0].ask:
            return await super().begin()
        turn: Turn = await call(self.inner.begin)
        return turn

    async def step(self, reply: Message) -> Turn:
        self._replies += 1
        facts = {OLD: 1.0} if self._has_checked else {}
        if not reply.tool_calls:  # it ends the attempt, and hidden tests may come next
            facts |= await self._run(self._stages.last_run)
        turn: Turn = await call(self.inner.step, reply)
        ended = [i for i, end in enumerate(self._stages.ends[:-1]) if end == self._replies]
        if turn.done or not ended:
            return replace(turn, facts={**turn.facts, **facts})
        facts |= await self._run(self._stages.stages[ended[0]].run)
        ask = self._stages.stages[ended[0] + 1].ask
        messages: Sequence[Message] = turn.messages
        if ask and messages:
            *before, last = messages
            messages = (*before, replace(last, content=f"{last.content}\n\n{ask}"))
        return replace(turn, messages=tuple(messages), facts={**turn.facts, **facts})

    async def _run(self, command: str) -> dict[str, float]:
        if not command:
            return {}
        assert isinstance(self.inner, RunsCommands), "StagedTasks.require"
        self._has_checked = True
        return {CHECK: float(await self.inner.check(command)), OLD: 0.0}
