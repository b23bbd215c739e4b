"""Lessons for the technique `distil`: the teacher of each sequence, and a text only it reads.

Both come from the task's data: the teacher's name from the field `distil.domain`, and the text from
the fields that `distil.context` names. The text is tokenized separately and inserted at the end of
the last message of the prompt, before the token that ends the message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

from unstale.config import ConfigError, RunConfig
from unstale.envs import Taskset
from unstale.envs.chat import Chat
from unstale.envs.mixed import MixedTasks
from unstale.records import Batch, Group, Lesson, Task
from unstale.techniques.distil import DistilConfig

ENV = "env"
"""A field that the data of every task has: the name of the task's environment."""


class Lessons:
    """A function that adds to a batch, for each sequence, its teacher and a text only this teacher
    reads.
    """

    def __init__(self, options: DistilConfig, taskset: Taskset, chat: Chat) -> None:
        """Read the names of fields in `distil.context`.

        Raises `ConfigError` if this text is malformed.
        """
        self._options = options
        self._taskset = taskset
        self._chat = chat
        self._names = list(options.teachers)
        try:
            found = [
                field for _, field, *_ in Formatter().parse(options.context) if field is not None
            ]
        except ValueError as error:
            raise ConfigError(f"distil.context {options.context!r}: {error}") from None
        if wrong := [field for field in found if not field.isidentifier()]:
            raise ConfigError(
                f"distil.context may have {{name}} for fields of the task's data, got "
                f"{{{wrong[0]}}}; write {{{{ and }}}} for braces"
            )
        self._fields = found

    def __call__(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        """Return the batch with the lesson of each sequence, which depends on the task of its
        group.
        """
        tasks = {episode: group.task for group in groups for episode in group.episodes}
        of_task = {task: self.of(task) for task in set(tasks.values())}
        lessons = []
        for i, episode in enumerate(batch.episodes):
            lesson = of_task[tasks[episode]]
            start = self._end_of_prompt(batch, i) if lesson.tokens else 0
            lessons.append(replace(lesson, start=start))
        return replace(batch, lessons=tuple(lessons))

    def of(self, task: Task) -> Lesson:
        """Return the lesson of a task: its teacher, and the tokens that only this teacher reads.

        The lesson's `start` in the prompt is not set yet. Raises `ConfigError` if the task has no
        teacher or lacks a field that the text needs.
        """
        data = data_of(self._taskset, task)
        return Lesson(self._teacher(task, data), tokens=self._encoded(task, data))

    def with_text(self, task: Task, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return a prompt's tokens. The text that only the teacher reads is inserted before the
        last end token.

        Raises `ConfigError` if the prompt has no end token.
        """
        place = self._last_end(tokens)
        return (
            *tokens[:place],
            *self._encoded(task, data_of(self._taskset, task)),
            *tokens[place:],
        )

    def _teacher(self, task: Task, data: Mapping[str, Any]) -> int:
        """Return the index in `distil.teacher` of the task's teacher."""
        if len(self._names) == 1:
            return 0
        name = str(_field(data, self._options.domain, task, "distil.domain"))
        if name not in self._names:
            raise ConfigError(
                f"distil.teacher has no teacher for {self._options.domain} = {name!r} of task "
                f"{task.key}: it names {', '.join(self._names)}"
            )
        return self._names.index(name)

    def _encoded(self, task: Task, data: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the tokens that only the teacher reads, for this task's data."""
        if not self._options.context:
            return ()
        values = {name: _field(data, name, task, "distil.context") for name in self._fields}
        text = self._options.context.format(**values)
        return tuple(self._chat.encode_content(text))

    def _end_of_prompt(self, batch: Batch, sequence: int) -> int:
        """Return the offset in a sequence of the last end token before the first reply.

        Raises `ConfigError` if there is none.
        """
        start, end = batch.spans()[sequence]
        sampled = batch.sampled[start:end].nonzero()
        prompt = batch.tokens[start : start + int(sampled[0])].tolist() if len(sampled) else []
        return self._last_end(prompt)

    def _last_end(self, prompt: Sequence[int]) -> int:
        """Return the index of the last end token. Raises `ConfigError` if there is none."""
        ends = [place for place, token in enumerate(prompt) if token in self._chat.stop_tokens]
        if not ends:
            raise ConfigError(
                "distil.context cannot be added: the chat template writes no end token after the "
                "last message of the prompt. Put the text into the data that a teacher's own run "
                "reads, or use another chat template"
            )
        return ends[-1]


def data_of(taskset: Taskset, task: Task) -> Mapping[str, Any]:
    """Return the fields of a task's data, and the name of its environment as the field `env`.

    If the task set has no data, `env` is the only field.
    """
    if isinstance(taskset, MixedTasks):
        taskset = taskset.part_of(task)
    find = getattr(taskset, "data_of", None)
    data = find(task) if find else {}
    return {ENV: task.env, **(data if isinstance(data, Mapping) else {})}


def _field(data: Mapping[str, Any], name: str, task: Task, option: str) -> Any:
    if name not in data:
        raise ConfigError(
            f"{option}: the data of task {task.key} has no field {name!r}. It has "
            f"{', '.join(map(str, data))}"
        )
    return data[name]


def build_lessons(config: RunConfig, taskset: Taskset, chat: Chat) -> Lessons | None:
    """Return the function that adds to a batch, for each sequence, its teacher and the text that
    only this teacher reads.

    Return None if the run has one teacher at most and this teacher reads no such text. Raises
    `ConfigError` if the first task has no teacher, or lacks a field that the text needs.
    """
    options = config.technique_options.get("distil")
    if not isinstance(options, DistilConfig) or not options.has_lessons:
        return None
    lessons = Lessons(options, taskset, chat)
    lessons.of(next(iter(taskset.train(config.seed))))
    return lessons
