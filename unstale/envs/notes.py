"""Task sets whose prompts have a note at the end, or consist of a note only."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unstale.envs import Env, Message, Taskset, Turn
from unstale.envs.guard import call
from unstale.records import Fork, Task


class NotedTasks:
    """A task set around another one. It adds notes to the last message of prompts."""

    def __init__(self, inner: Taskset, notes: Mapping[str, str]) -> None:
        """`notes` is key of a task -> note. Tasks without a note, or with an empty one, are
        unchanged.
        """
        self.inner = inner
        self._notes = notes

    def env(self, task: Task, seed: int) -> Env:
        env = self.inner.env(task, seed)
        note = self._notes.get(task.key)
        return NotedEnv(env, note) if note else env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class NotedEnv:
    """An environment that adds a note to the end of its prompt."""

    def __init__(self, inner: Env, note: str) -> None:
        self.inner = inner
        self._note = note

    @property
    def replaying(self) -> bool:
        """True if the environment must not wait to simulate delays."""
        return bool(getattr(self.inner, "replaying"))  # noqa: B009 - not all have it

    @replaying.setter
    def replaying(self, value: bool) -> None:
        setattr(self.inner, "replaying", value)  # noqa: B010 - not all have it

    async def begin(self) -> Turn:
        turn: Turn = await call(self.inner.begin)
        *before, last = turn.messages
        noted = replace(last, content=f"{last.content}\n\n{self._note}")
        return replace(turn, messages=(*before, noted))

    async def step(self, reply: Message) -> Turn:
        turn: Turn = await call(self.inner.step, reply)
        return turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Questions(NotedTasks):
    """A task set whose prompts consist of the notes. A reply ends the episode, without a reward."""

    def env(self, task: Task, seed: int) -> Env:
        return _Question(self._notes[task.key])


class _Question:
    def __init__(self, text: str) -> None:
        self._text = text

    async def begin(self) -> Turn:
        return Turn((Message("user", self._text),))

    async def step(self, reply: Message) -> Turn:
        return Turn((), done=True)


def with_note(taskset: Taskset, task: Task, fork: Fork) -> Taskset:
    """Return a task set in which this task has the fork's note. Without a note, return
    `taskset`.
    """
    kind = _Questions if fork.writes else NotedTasks
    noted: Taskset = kind(taskset, {task.key: fork.note})
    return noted if fork.note else taskset
