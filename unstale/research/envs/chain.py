"""The environment `chain:ENV`: several tasks of the environment ENV in one episode, with skills.

After each task but the last, the policy is asked for a skill: a note, or a procedure that it can
call as a tool (`unstale.research.skills`). Each later task begins with a fresh conversation: its
own prompt with all skills so far, and not the turns of earlier tasks. The episode's reward is the
mean reward of its tasks, plus `bonus` if a reply in a later, solved task uses a skill of the
episode. The episode succeeds if all its tasks do. All conversations of an episode get its
advantage, so a reply that writes a skill also gets the credit for its later use. From SAGE
(skills).

A chain has `length` consecutive tasks of ENV, and no two chains share a task: rows 1 and 2 of a
file are a chain, and rows 3 and 4 the next. So write similar rows next to each other, and give the
held-out rows in a file of their own. Each reply is trained on in the context in which it was
sampled, and the gradient is that of the whole reward.

The skills of an episode end with it, so that no episode depends on the order in which others end.
`unstale skills RUN` writes a library from the recorded episodes, which is a fixed part of later
tasks (`skills`), also of chains of one task.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from unstale.config import ConfigError, TaskConfig
from unstale.config.checks import NonNegative, PositiveInt
from unstale.config.tasks import EnvSpec, make_task
from unstale.envs import (
    Closable,
    Env,
    EnvError,
    HasTaskTools,
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
from unstale.research.skills import (
    ExpandedReply,
    Skill,
    SkillError,
    list_skills,
    read_library,
    read_skills,
    skill_row,
    usable,
    with_skills,
)

REQUEST = """The task has ended. Write one skill from it that helps with the next, similar task, \
as one line: a note,
SKILL name: what to do
or calls of tools, which you can call together by the name, with $parameter for what differs,
SKILL name(parameter): [{"name": "TOOL", "arguments": {"ARGUMENT": "$parameter"}}]
Use a note by its name in your text."""
NOT_KEPT = "The skill was not kept:"

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainConfig(TaskConfig):
    """Chains of tasks of another environment, whose own options have their defaults."""

    env: str = "chain:retail"
    """`chain:ENV`, where ENV is another value of `task.env`."""
    length: PositiveInt = 2
    """Number of tasks of a chain, which is one episode."""
    bonus: NonNegative = 0.5
    """Reward that is added if a reply in a later, solved task uses a skill of its chain."""
    fresh: bool = True
    """Begin each task with a fresh conversation, without the rewards of single replies that ENV
    may give. Otherwise earlier tasks stay in the context.
    """
    skills: str = ""
    """File with skills that all tasks have from the start, from `unstale skills`. Empty for
    none.
    """


class ChainTasks:
    """A task set whose tasks are chains of consecutive tasks of another task set."""

    def __init__(
        self,
        inner: Taskset,
        *,
        length: int = 2,
        bonus: float = 0.5,
        fresh: bool = True,
        skills: str = "",
    ) -> None:
        """Create the chains. The arguments are the options of `ChainConfig`.

        Raises `ConfigError` if the tasks of `inner` have no numbers or are fewer than `length`, if
        it has `combine()`, or if the file `skills` cannot be used with its tools.
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
        self.library = read_library(skills, inner.tools) if skills else ()
        self.tools: tuple[Mapping[str, Any], ...] = with_skills(inner.tools, self.library)
        self.several_conversations = fresh and length > 1
        rows = inner.data if isinstance(inner, ListedTasks) else {}
        library = {"skills": [*map(skill_row, self.library)]} if skills else {}
        self.digested: Mapping[str, Sequence[Any]] = {**rows, **library}
        """The rows by which a resumed run checks that its tasks are still the same."""
        self._length, self._bonus, self._fresh = length, bonus, fresh

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

    def tools_of(self, task: Task) -> Tools:
        return with_skills(self._own_tools(self.tasks_of(task)[0]), self.library)

    def _own_tools(self, task: Task) -> Tools:
        """Return the tools of a task of `inner`."""
        inner = self.inner
        return inner.tools_of(task) if implements(inner, HasTaskTools) else inner.tools

    def env(self, task: Task, seed: int) -> "ChainEnv":
        parts = [
            (self.inner.env(each, seed), self._own_tools(each)) for each in self.tasks_of(task)
        ]
        return ChainEnv(parts, self._bonus, fresh=self._fresh, library=self.library)


class ChainEnv:
    """The environment of a chain, whose tasks follow each other in one episode."""

    def __init__(
        self,
        parts: Sequence[tuple[Env, Tools]],
        bonus: float,
        *,
        fresh: bool = True,
        library: Sequence[Skill] = (),
    ) -> None:
        """`parts` has the environment and the tools of each task."""
        self._parts = parts
        self._bonus, self._fresh = bonus, fresh and len(parts) > 1
        self._ended: list[Turn] = []
        self._known = {each.name: each for each in library}
        """The skills so far, by name."""
        self._written: set[str] = set()
        """Names of the skills that the policy has written in this episode."""
        self._asks = False
        """True if the next reply should be a skill."""
        self._asked_again = False
        self._used = self._uses_skill = False
        self._counts = {"skills": 0, "bad_skills": 0, "skill_calls": 0, "bad_skill_calls": 0}

    @property
    def _env(self) -> Env:
        return self._parts[len(self._ended)][0]

    @property
    def _tools(self) -> Tools:
        return self._parts[min(len(self._ended), len(self._parts) - 1)][1]

    @property
    def replaying(self) -> bool | None:
        """True if simulated delays are skipped. None if the environment has no delays."""
        return getattr(self._parts[0][0], "replaying", None)

    @replaying.setter
    def replaying(self, value: bool) -> None:
        for env, _ in self._parts:
            env.replaying = value  # type: ignore[attr-defined]

    async def begin(self) -> Turn:
        turn: Turn = await call(self._env.begin)
        return replace(turn, messages=self._noted(turn.messages))

    async def step(self, reply: Message) -> Turn:
        if self._asks:
            return await self._next(reply)
        expanded = ExpandedReply(reply, usable(self._known.values(), self._tools))
        self._counts["skill_calls"] += len(expanded.called)
        self._counts["bad_skill_calls"] += expanded.num_wrong
        self._uses_skill |= not self._written.isdisjoint(expanded.used)
        if reply.tool_calls and not expanded.reply.tool_calls:
            return Turn(expanded.answers(()), facts=self._facts())
        turn: Turn = await call(self._env.step, expanded.reply)
        messages = expanded.answers(turn.messages, done=turn.done)
        turn = replace(turn, messages=messages, reward=0.0 if self._fresh else turn.reward)
        if not turn.done:
            return replace(turn, rewards={}, facts={**turn.facts, **self._facts()})
        self._used |= self._uses_skill and is_success(turn.rewards, turn.facts)
        self._uses_skill = False
        self._ended.append(turn)
        if len(self._ended) == len(self._parts):
            return self._end(turn)
        self._asks = True
        return Turn((*turn.messages, Message("user", REQUEST)), facts=turn.facts)

    async def _next(self, reply: Message) -> Turn:
        """Store the skills of a reply, and begin the next task. A wrong skill may be written once
        more.
        """
        tools = self._parts[len(self._ended) - 1][1]
        found: dict[str, Skill] = {}
        try:
            found = read_skills(reply.content, tools, self._known)
        except SkillError as error:
            self._counts["bad_skills"] += 1
            if not self._asked_again:
                self._asked_again = True
                text = f"{NOT_KEPT} {error}. Write it again."
                return Turn((Message("user", text),), facts=self._facts())
        self._asks = self._asked_again = False
        self._known |= found
        self._written |= found.keys()
        self._counts["skills"] = len(self._written)
        turn: Turn = await call(self._env.begin)
        if self._fresh:
            tools = with_skills(self._tools, [*self._known.values()])
            messages = self._noted(turn.messages)
            return Turn(messages, facts=self._facts(), fresh=True, tools=tools)
        if any(each.images for each in turn.messages):
            raise EnvError("chain: only the first task of a chain may have pictures")
        content = "\n\n".join(each.content for each in turn.messages)
        return Turn(self._noted([Message("user", content)]), facts=self._facts())

    def _noted(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return a prompt whose last message ends with the skills for the current task."""
        listed = list_skills(usable(self._known.values(), self._tools).values())
        if not listed:
            return tuple(messages)
        *before, last = messages
        return (*before, replace(last, content=f"{last.content}\n\n{listed}"))

    def _facts(self) -> dict[str, float]:
        return {name: float(count) for name, count in self._counts.items()}

    def _end(self, turn: Turn) -> Turn:
        rewards = {
            f"task_{number}": total_reward(each.rewards) / len(self._parts)
            for number, each in enumerate(self._ended, 1)
        }
        solved = [is_success(each.rewards, each.facts) for each in self._ended]
        facts = {f"solved_{number}": float(each) for number, each in enumerate(solved, 1)}
        facts |= {**self._facts(), "success": float(all(solved))}
        rewards["skill"] = self._bonus * self._used
        return replace(turn, rewards=rewards, facts={**turn.facts, **facts})

    async def close(self) -> None:
        async with AsyncExitStack() as stack:  # all are closed if one of them fails
            for env, _ in self._parts:
                if implements(env, Closable):
                    stack.push_async_callback(call, env.close)


def _make(options: ChainConfig) -> ChainTasks:
    inner = build_taskset(make_task(options.env.partition(":")[2]))
    return ChainTasks(
        inner,
        length=options.length,
        bonus=options.bonus,
        fresh=options.fresh,
        skills=options.skills,
    )


ENV = EnvSpec("chain", _make, ChainConfig, takes_source=True)
