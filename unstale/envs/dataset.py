"""The environment `dataset`: tasks from the rows of a data set, with the user's reward function.

It is chosen by `--task.env dataset:FILE --task.reward MODULE:FUNCTION`. A row has a prompt and any
other columns. The reward function gets the last reply and the row.
"""

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

from unstale.config import ConfigError, nearest
from unstale.config.checks import Count, Share
from unstale.config.given import (
    HERE,
    Given,
    NameObject,
    name_functions,
    name_held_out_rows,
    name_tasks,
)
from unstale.config.tasks import EnvSpec
from unstale.envs import Env, ListedTasks, Message, Turn, read_rewards
from unstale.envs.draft_edit import DraftEditConfig
from unstale.envs.guard import call_named
from unstale.envs.numbers import given_answer
from unstale.envs.registry import import_user_code
from unstale.envs.reward_processes import RewardProcesses
from unstale.envs.rows import FILES, Row, file_type, list_rows, load_rows
from unstale.envs.strict_json import require_characters
from unstale.frames import show_line
from unstale.records import Task

Rewards = float | Mapping[str, float]
"""One reward, or name -> reward. Several are added up."""
RewardFunction = Callable[[str, Mapping[str, Any]], Awaitable[Rewards] | Rewards]
"""A function `(last reply, row)` that returns one or several rewards."""
ROLES = ("system", "user", "assistant")
HELD_OUT_SHARE = 0.1
"""Default of `task.held_out_share`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig(DraftEditConfig):
    """Tasks from the rows of a file, or of a data set on the Hugging Face hub."""

    env: Annotated[str, NameObject(name_tasks)] = "dataset:"
    """`dataset:FILE` (.jsonl, .json or .csv, also with .gz, or .parquet), or `dataset:NAME` of a
    data set on the hub. In Python also the rows themselves: a list or a `datasets.Dataset`.
    """
    reward: Annotated[str, NameObject(name_functions)] = ""
    """The reward function as `module:function`. It gets the last reply and the row, and returns one
    or more rewards. In Python also the function, or a list of several.
    """
    reward_processes: Count = 0
    """Largest number of processes that compute the reward function, for one that takes much
    processor time; 0 computes it in threads of the run. Processes start while rewards wait for
    one, and end when idle (docs/rewards.md).
    """
    min_reward_processes: Count = 0
    """Number of these processes that remain when idle."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of messages with `role` and `content`."""
    follow_up_column: str = ""
    """Column with a list of further user messages, each sent after a reply. Only the reply after
    the last one is rewarded.
    """
    system: str = ""
    """Text of a system message before every prompt."""
    held_out_share: Share = HELD_OUT_SHARE
    """Share of the rows that are held out for evaluation. A hash of the prompt decides. Not used
    with `held_out_file` or `held_out_split`.
    """
    held_out_file: Annotated[str, NameObject(name_held_out_rows)] = ""
    """File with the held-out tasks, of a type as in `task.env`. All rows of `task.env` are then
    trained on.
    """
    subset: str = ""
    """Name of the configuration of a data set on the hub, such as `main`."""
    split: str = "train"
    """Name of the split of a data set on the hub."""
    held_out_split: str = ""
    """Name of the split with the held-out tasks, such as `test`. All rows of `task.split` are then
    trained on.
    """

    def check_combination(self) -> None:
        super(DatasetConfig, self).check_combination()
        if self.min_reward_processes > self.reward_processes:
            raise ConfigError(
                f"task.min_reward_processes must be at most {self.reward_processes} "
                f"(task.reward_processes), got {self.min_reward_processes}"
            )
        if self.reward_processes and self.isolate != "none":
            raise ConfigError(
                f"task.reward_processes = {self.reward_processes} cannot be used with "
                f"task.isolate = {self.isolate}, which computes rewards in its task.workers: set "
                "one of them"
            )
        if not self.held_out_file and not self.held_out_split:
            return
        name = "held_out_file" if self.held_out_file else "held_out_split"
        given = f"task.{name} = {getattr(self, name)}"
        if self.held_out_file and self.held_out_split:
            raise ConfigError(
                f"{given} and task.held_out_split = {self.held_out_split} both name the held-out "
                "tasks: give one of them"
            )
        if self.held_out_share != HELD_OUT_SHARE:
            raise ConfigError(
                f"task.held_out_share must not be set with {given}, got {self.held_out_share:g}: "
                "all rows of task.env are trained on, and all of the other are held out"
            )
        if self.held_out_file:
            is_file = not self.held_out_file.startswith(HERE)
            if is_file and file_type(self.held_out_file) not in FILES:
                raise ConfigError(f"{given} must be a file of type {', '.join(FILES)}")
            if Path(self.held_out_file) == Path(self.source):
                raise ConfigError(f"{given} is the file of task.env: name another one")
        elif file_type(self.source) in FILES or self.source.startswith(HERE):
            raise ConfigError(
                f"{given} needs a data set of the hub, and task.env is {self.source}. Use "
                "task.held_out_file"
            )
        elif self.held_out_split == self.split:
            raise ConfigError(f"{given} is also task.split: name another split")

    @property
    def source(self) -> str:
        """The file with the training rows, or the name of the data set on the hub."""
        return self.env.partition(":")[2]

    @property
    def largest_reward(self) -> float | None:
        known = ("unstale.rewards:", "unstale.rewards.mathematics:")
        return 1.0 if self.reward.startswith(known) else None


class DatasetTasks(ListedTasks):
    """A task set whose tasks are rows of a data set. `data` has the rows of each split.

    Rows with equal prompts are in the same split, unless the held-out rows are given.
    """

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(
        self,
        rows: Sequence[Row],
        reward: RewardFunction,
        options: DatasetConfig,
        held_out: Sequence[Row] | None = None,
    ) -> None:
        """Divide `rows` into training and held-out tasks, or train on all `rows` if `held_out` is
        given.

        Raises `ConfigError` if a row has no usable prompt, or if there are no training or held-out
        tasks.
        """
        self.name = options.env
        self._reward = reward
        self._options = options
        openings = _openings(rows, options)
        other = options.held_out_file or f"{options.env}, split {options.held_out_split}"
        for where, given in ((options.env, rows), (other, held_out)):
            if given is not None and not given:
                raise ConfigError(f"{where} has no rows: name data with at least one row")
        if held_out is not None:
            _openings(held_out, options)
            self.data = {"train": list(rows), "held_out": list(held_out)}
            return
        data: dict[str, list[Row]] = {"train": [], "held_out": []}
        for row, opening in zip(rows, openings, strict=True):
            is_held_out = share_of(opening) < options.held_out_share
            data["held_out" if is_held_out else "train"].append(row)
        for split, chosen in data.items():
            if not chosen and (split == "train" or options.held_out_share):
                num_prompts = len(set(map(share_of, openings)))
                raise ConfigError(
                    f"{options.env} has {len(rows)} rows with {num_prompts} different prompts, and "
                    f"none for {split.replace('_', '-')} tasks: add rows with other prompts, name "
                    "task.held_out_file, or set task.held_out_share = 0 to hold none out"
                )
        self.data = data

    def text(self, task: Task) -> str:
        """Return the prompt of a task as one text, without system messages."""
        opening = _opening(self.data_of(task), self._options)
        return "\n".join(message.content for message in opening if message.role != "system")

    def answer_of(self, task: Task, reply: str) -> str:
        r"""Return the answer in a reply, as the reward function's attribute `answer` reads it.

        Without this attribute, it is the last number or the last `\boxed{}`.
        """
        read: Callable[[str], str] = getattr(self._reward, "answer", given_answer)
        return read(reply)

    def env(self, task: Task, seed: int) -> Env:
        """Return the environment of a task. `seed` is not used, because nothing in it is random."""
        row = self.data_of(task)
        opening = _opening(row, self._options)
        return self._options.with_edit(
            lambda: RowEnv(opening, _follow_ups(row, self._options), self._reward, row)
        )


class PooledDatasetTasks(DatasetTasks):
    """A task set whose rewards are computed in processes. They end with the context that it is."""

    _reward: RewardProcesses

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reward.pool.close()


class RowEnv:
    """The environment of one row. After a reply to each of its user messages, it returns the
    reward.
    """

    def __init__(
        self,
        opening: tuple[Message, ...],
        follow_ups: Sequence[str],
        reward: RewardFunction,
        row: Row,
    ) -> None:
        self._opening = opening
        self._follow_ups = iter(follow_ups)
        self._reward = reward
        self._row = row
        self.code_name = f"the reward function {getattr(reward, '__qualname__', reward)}"
        """Name of the reward function in errors of the user's code."""

    async def begin(self) -> Turn:
        return Turn(self._opening)

    async def step(self, reply: Message) -> Turn:
        for text in self._follow_ups:
            return Turn((Message("user", text),))
        rewards = await call_named(self.code_name, self._reward, reply.content, self._row)
        return Turn((), done=True, rewards=_read(rewards, self.code_name, self._reward))


def _openings(rows: Sequence[Row], options: DatasetConfig) -> list[tuple[Message, ...]]:
    """Return the first messages of each row.

    Raises `ConfigError`, with the row's place in the file, for a prompt that is not a text or a
    list of messages, or that no tokenizer can encode.
    """
    openings = []
    for row in rows:
        try:
            opening = _opening(row, options)
            for text in (*(message.content for message in opening), *_follow_ups(row, options)):
                require_characters(text)
        except ValueError as error:
            raise ConfigError(f"{row.place}: {error}") from None
        openings.append(opening)
    return openings


def _opening(row: Row, options: DatasetConfig) -> tuple[Message, ...]:
    """Return the first messages of a row: the system message, if any, and its prompt.

    Raises ValueError unless the prompt is a text, or a list of messages that ends with a user's.
    """
    prompt = _column(row, options.prompt_column, "task.prompt_column")
    if prompt is None:
        raise ValueError(f"{options.prompt_column} is empty (null)")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = [Message("system", options.system)] if options.system else []
    for message in prompt if isinstance(prompt, Sequence) else [prompt]:
        match message:
            case {"role": role, "content": str(content)} if role in ROLES:
                messages.append(Message(role, content))
            case _:
                raise ValueError(
                    f"{options.prompt_column} must be text, or messages with a role of "
                    f"{', '.join(ROLES)} and a content, got {str(message)[:80]!r}"
                )
    if not messages or messages[-1].role != "user":
        raise ValueError(f"{options.prompt_column} must end with a user message")
    return tuple(messages)


def _follow_ups(row: Row, options: DatasetConfig) -> Sequence[str]:
    if not options.follow_up_column:
        return ()
    texts = _column(row, options.follow_up_column, "task.follow_up_column")
    if texts is None:
        return ()
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{options.follow_up_column} must be a list of texts")
    return tuple(texts)


def _column(row: Row, column: str, option: str) -> Any:
    """Return a row's value in a column, which the option named `option` chooses.

    Raises ValueError, with the name of the option, if the row has no such column.
    """
    if column not in row:
        raise ValueError(f"no column {column!r} ({option}){nearest(column, list(row))}")
    return row[column]


def share_of(opening: tuple[Message, ...]) -> float:
    """Return a number in [0, 1) that is a hash of the first messages of a row."""
    text = json.dumps([[message.role, message.content] for message in opening])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def load_reward(name: str) -> RewardFunction:
    """Return the reward function named `module:function`, or the one that a Python program passed.

    A list of functions becomes one function. Raises `ConfigError` if a function cannot be used.
    """
    if not name.partition(":")[2]:
        raise ConfigError(
            f"task.reward must be module:function, a function of (reply, row), got {name!r}; "
            "for a column `answer` there are unstale.rewards:exact_answer, :numeric_answer and "
            "unstale.rewards.mathematics:math_answer"
        )
    problem = f"task.reward {name!r} cannot be used"
    reward = import_user_code(name, problem)
    for each in reward if isinstance(reward, list | tuple) else (reward,):
        _check_reward(each, problem)
    return _joined(reward) if isinstance(reward, list | tuple) else reward


def _check_reward(reward: RewardFunction, problem: str) -> None:
    """Raise `ConfigError`, beginning with `problem`, unless a function can be called with (reply,
    row).
    """
    try:
        signature = inspect.signature(reward)
        signature.bind("reply", {})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{problem}: {error}. It is called as reward(reply, row)") from error
    if batch := {"prompts", "completions"} & signature.parameters.keys():
        raise ConfigError(
            f"{problem}: it has the parameter {min(batch)}, as for TRL's lists. Here it is called "
            "for one episode, as reward(reply, row), and returns a number"
        )


def _joined(rewards: Sequence[RewardFunction]) -> RewardFunction:
    """Return a function whose rewards are those of all `rewards`, by their functions' names."""
    names = [getattr(each, "__name__", type(each).__name__) for each in rewards]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"task.reward has two functions with the name {repeated}: rename one")

    async def joined(reply: str, row: Mapping[str, Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, each in zip(names, rewards, strict=True):
            code = f"the reward function {name}"
            given = await call_named(code, each, reply, row)
            values[name] = sum(_read(given, code, each).values())
        return values

    return joined


def _read(rewards: Any, name: str, reward: RewardFunction) -> dict[str, float]:
    """Return what a reward function returned, as name -> reward.

    An error about a wrong value has `name` and the place where `reward` is defined.
    """
    function: Any = inspect.unwrap(reward.func if isinstance(reward, partial) else reward)
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    place = show_line(code.co_filename, code.co_firstlineno, "") if code else ""
    place = place and f" ({place.partition(', in ')[0]})"
    return read_rewards(rewards, f"{name}{place}: ")


def make_dataset(options: DatasetConfig) -> DatasetTasks:
    """Return the task set for `task.env = "dataset:SOURCE"`.

    Raises `ConfigError` if the options or the rows are wrong.
    """
    reward = load_reward(options.reward)
    column = options.prompt_column
    if isinstance(options.env, Given):
        rows = list_rows(options.env.value, "task.env", column)
    else:
        rows = load_rows(options.source, subset=options.subset, split=options.split)
    held_out = None
    if isinstance(options.held_out_file, Given):
        held_out = list_rows(options.held_out_file.value, "task.held_out_file", column)
    elif options.held_out_file:
        held_out = load_rows(options.held_out_file, option="task.held_out_file")
    elif options.held_out_split:
        held_out = load_rows(options.source, subset=options.subset, split=options.held_out_split)
    if options.reward_processes:
        processes = RewardProcesses(
            options.reward,
            reward,
            processes=options.reward_processes,
            min_processes=options.min_reward_processes,
        )
        return PooledDatasetTasks(rows, processes, options, held_out)
    return DatasetTasks(rows, reward, options, held_out)


ENV = EnvSpec("dataset", make_dataset, DatasetConfig, takes_source=True)
