"""Successful attempts at training tasks as conversations for supervised training (SWE-Reasoner).

An attempt is kept if it succeeded and passed the commands of its stages, and if not every attempt
at its task succeeded: what always succeeds teaches nothing new. Thoughts are kept.
"""

import json
from collections import Counter, defaultdict
from contextlib import AbstractAsyncContextManager
from typing import Any

from unstale.config import ConfigError
from unstale.envs import Env, Message, RewardCombiner, Taskset, Turn, implements
from unstale.envs.guard import call
from unstale.envs.notes import NotedEnv, NotedTasks
from unstale.records import Task, is_success
from unstale.research.stages import CHECK


class CollectedTasks(NotedTasks):
    """A task set that keeps the conversations of its successful episodes."""

    def __init__(self, inner: Taskset) -> None:
        """Create the task set without kept episodes. Raises `ConfigError` if an environment does
        not report success.
        """
        name = inner.name
        if implements(inner, RewardCombiner):
            raise ConfigError(
                f"--collect cannot be used with {name}: it has combine(), so its "
                "environments do not know which episodes succeed"
            )
        super().__init__(inner, {})
        self.begun = Counter[str]()
        """Number of attempts at each task that have begun."""
        self.are_attempts = True
        """False while episodes of another kind run, such as those of a search. They do not count in
        `begun`, but their successes are kept, too.
        """
        self._solved = Counter[str]()
        """Number of successful attempts at each task."""
        self._found: dict[str, list[str]] = defaultdict(list)
        """Rows of successful episodes by task, as JSON."""

    async def __aenter__(self) -> Any:
        if isinstance(self.inner, AbstractAsyncContextManager):
            await self.inner.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        if isinstance(self.inner, AbstractAsyncContextManager):
            await self.inner.__aexit__(*error)

    def env(self, task: Task, seed: int) -> Env:
        return _CollectedEnv(self, task, self.inner.env(task, seed))

    def begin(self, task: Task) -> None:
        """Count an episode of a task that begins, if it is an attempt."""
        self.begun[task.key] += self.are_attempts

    def add(
        self, task: Task, messages: list[dict[str, Any]], *, success: bool, passed: bool
    ) -> None:
        """Add an ended episode of a task. `passed` is False if a command of a stage failed."""
        self._solved[task.key] += success and self.are_attempts
        if success and passed:
            tools_of = getattr(self.inner, "tools_of", lambda task: self.inner.tools)
            row = {
                "messages": messages,
                **({"tools": [*found]} if (found := tools_of(task)) else {}),
            }
            self._found[task.key].append(json.dumps(row, ensure_ascii=False))

    def rows(self) -> list[str]:
        """Return the different kept conversations as JSON. `unstale sft` reads them."""
        hard = (rows for key, rows in self._found.items() if self._solved[key] < self.begun[key])
        return [row for rows in hard for row in dict.fromkeys(rows)]


class _CollectedEnv(NotedEnv):
    def __init__(self, tasks: CollectedTasks, task: Task, inner: Env) -> None:
        super().__init__(inner, "")
        self._tasks, self._task = tasks, task
        self._messages: list[dict[str, Any]] = []
        self._facts: dict[str, float] = {}
        self._passed = True

    async def begin(self) -> Turn:
        self._tasks.begin(self._task)
        turn: Turn = await call(self.inner.begin)
        self._messages = [_row(each) for each in turn.messages]
        self._facts |= turn.facts
        return turn

    async def step(self, reply: Message) -> Turn:
        turn: Turn = await call(self.inner.step, reply)
        self._messages.append(_row(reply))
        self._facts |= turn.facts
        self._passed &= bool(turn.facts.get(CHECK, 1.0))
        if turn.done:
            success = is_success(turn.rewards, self._facts)
            self._tasks.add(self._task, self._messages, success=success, passed=self._passed)
        self._messages += map(_row, turn.messages)
        return turn


def _row(message: Message) -> dict[str, Any]:
    """Return a message as `unstale sft` reads it."""
    if message.images:
        raise ConfigError("--collect cannot be used with pictures, which unstale sft does not read")
    calls = [{"function": {"name": e.name, "arguments": e.arguments}} for e in message.tool_calls]
    row: dict[str, Any] = {"role": message.role, "content": message.content}
    row |= {"reasoning_content": message.thoughts} if message.thoughts else {}
    return {**row, "tool_calls": calls} if calls else row
