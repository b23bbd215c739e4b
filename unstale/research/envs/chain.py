"""The environment `chain:ENV`: several tasks of the environment ENV in one episode, with skills.

After each task but the last, the policy is asked for a skill: one line `SKILL name: text`. The
prompt of the next task lists all skills so far. The episode's reward is the mean reward of its
tasks, plus `bonus` if a reply in a later, solved task names a skill. The episode succeeds if all
its tasks do. Since all tasks are one episode, a reply that writes a skill also gets the credit for
its later use. From SAGE (skills).

A chain has `length` consecutive tasks of ENV, and no two chains share a task: rows 1 and 2 of a
file are a chain, and rows 3 and 4 the next. So write similar rows next to each other, and give the
held-out rows in a file of their own. Unlike in SAGE, earlier tasks stay in the context. So each
reply is trained on in the context in which it was sampled, and the gradient is that of the whole
reward.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unstale.config import ConfigError, TaskConfig
from unstale.config.checks import NonNegative, PositiveInt
from unstale.config.tasks import EnvSpec, make_task
from unstale.envs import (
    Closable,
    Env,
    EnvError,
    ListedTasks,
    Message,
    NumberedTasks,
    RewardCombiner,
    Taskset,
    Turn,
    implements,
    task_text,
)
from unstale.envs.guard import call
from unstale.envs.registry import build_taskset
from unstale.records import Task, is_success, total_reward

REQUEST = """The task has ended. Write one skill from it that helps with the next, similar task, \
as one line:
SKILL name: what to do
Refer to the name where you use the skill."""
SKILLS = "Skills from earlier tasks:"
_SKILL = re.compile(r"SKILL\s+(\w+)\s*:\s*(\S.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig(TaskConfig):
    """Chains of tasks of another environment, whose own options have their defaults."""

    env: str = "chain:retail"
    """`chain:ENV`, where ENV is another value of `task.env`."""
    length: PositiveInt = 2
    """Number of tasks of a chain, which is one episode."""
    bonus: NonNegative = 0.5
    """Reward that is added if a reply in a later, solved task names a skill."""


class ChainTasks:
    """A task set whose tasks are chains of consecutive tasks of another task set."""

    def __init__(self, inner: Taskset, *, length: int = 2, bonus: float = 0.5) -> None:
        """Create the chains.

        Raises `ConfigError` if the tasks of `inner` have no numbers or are fewer than `length`, or
        if it has `combine()`.
        """
        name = inner.name
        if implements(inner, RewardCombiner):
            raise ConfigError(
                f"tasks of {name} cannot be chained: it has combine(), which would not be "
                "called for each of them"
            )
        if not isinstance(inner, NumberedTasks | ListedTasks):
            raise ConfigError(
                f"tasks of {inner.name} cannot be chained: its class must be a NumberedTasks or "
                "ListedTasks, whose tasks are numbered"
            )
        if isinstance(inner, ListedTasks) and len(inner.data["train"]) < length:
            raise ConfigError(
                f"a chain of {inner.name} needs {length} training tasks (task.length), got "
                f"{len(inner.data['train'])}"
            )
        self.inner = inner
        self.name = f"chain:{inner.name}"
        self.tools: tuple[Mapping[str, Any], ...] = inner.tools
        self._length, self._bonus = length, bonus

    def train(self, seed: int) -> Iterator[Task]:
        for task in self.inner.train(seed):
            if self._begins(task):
                yield Task(self.name, task.split, task.index)

    def held_out(self, count: int) -> list[Task]:
        tasks = self.inner.held_out(count * self._length)
        return [Task(self.name, each.split, each.index) for each in tasks if self._begins(each)]

    def _begins(self, task: Task) -> bool:
        """Return whether a chain begins with a task of `inner`, so that all its tasks exist."""
        place, number = task.index, math.inf
        if isinstance(self.inner, ListedTasks):
            place, number = self.inner.index_of(task), len(self.inner.data[task.split])
        return place % self._length == 0 and place + self._length <= number

    def tasks_of(self, task: Task) -> list[Task]:
        """Return the tasks of `inner` that a chain consists of, in order."""
        numbers = range(task.index, task.index + self._length)
        return [Task(self.inner.name, task.split, number) for number in numbers]

    def identity(self, task: Task) -> str:
        identity = getattr(self.inner, "identity", lambda task: task.key)
        return f"chain/{identity(self.tasks_of(task)[0])}"

    def text(self, task: Task) -> str:
        return "\n".join(task_text(self.inner, each) for each in self.tasks_of(task))

    def env(self, task: Task, seed: int) -> "ChainEnv":
        envs = [self.inner.env(each, seed) for each in self.tasks_of(task)]
        return ChainEnv(envs, self._bonus)


class ChainEnv:
    """The environment of a chain, whose tasks follow each other in one episode."""

    def __init__(self, envs: Sequence[Env], bonus: float) -> None:
        self._envs = envs
        self._bonus = bonus
        self._ended: list[Turn] = []
        self._skills: dict[str, str] = {}
        self._asks = False
        self._used = self._names_skill = False

    @property
    def _env(self) -> Env:
        return self._envs[len(self._ended)]

    @property
    def replaying(self) -> bool | None:
        """True if simulated delays are skipped. None if the environment has no delays."""
        return getattr(self._envs[0], "replaying", None)

    @replaying.setter
    def replaying(self, value: bool) -> None:
        for env in self._envs:
            env.replaying = value  # type: ignore[attr-defined]

    async def begin(self) -> Turn:
        turn: Turn = await call(self._env.begin)
        return turn

    async def step(self, reply: Message) -> Turn:
        if self._asks:
            return await self._next(reply)
        said = " ".join([reply.content, *(str(each) for each in reply.tool_calls)])
        self._names_skill |= any(re.search(rf"\b{name}\b", said) for name in self._skills)
        turn: Turn = await call(self._env.step, reply)
        if not turn.done:
            return replace(turn, rewards={})
        self._used |= self._names_skill and is_success(turn.rewards, turn.facts)
        self._names_skill = False
        self._ended.append(turn)
        if len(self._ended) == len(self._envs):
            return self._end(turn)
        self._asks = True
        return Turn((*turn.messages, Message("user", REQUEST)), facts=turn.facts)

    async def _next(self, reply: Message) -> Turn:
        """Store the skills of a reply, and begin the next task."""
        self._asks = False
        self._skills |= dict(_SKILL.findall(reply.content))
        turn: Turn = await call(self._env.begin)
        if any(each.images for each in turn.messages):
            raise EnvError("chain: only the first task of a chain may have pictures")
        texts = [each.content for each in turn.messages]
        if self._skills:
            lines = [f"{name}: {text}" for name, text in self._skills.items()]
            texts.append("\n".join([SKILLS, *lines]))
        return Turn((Message("user", "\n\n".join(texts)),))

    def _end(self, turn: Turn) -> Turn:
        rewards = {
            f"task_{number}": total_reward(each.rewards) / len(self._envs)
            for number, each in enumerate(self._ended, 1)
        }
        solved = [is_success(each.rewards, each.facts) for each in self._ended]
        facts = {f"solved_{number}": float(each) for number, each in enumerate(solved, 1)}
        facts |= {"skills": float(len(self._skills)), "success": float(all(solved))}
        rewards["skill"] = self._bonus * self._used
        return replace(turn, rewards=rewards, facts={**turn.facts, **facts})

    async def close(self) -> None:
        for env in self._envs:
            if implements(env, Closable):
                await call(env.close)


def _make(options: ChainConfig) -> ChainTasks:
    inner = build_taskset(make_task(options.env.partition(":")[2]))
    return ChainTasks(inner, length=options.length, bonus=options.bonus)


ENV = EnvSpec("chain", _make, ChainConfig, takes_source=True)
