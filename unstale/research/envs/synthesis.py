"""The environment `synthesis`: puzzles that are made from templates, and checked before use.

A template draws a hidden solution and true clues about it. The draft is kept if an independent
search finds exactly one answer, if this is the template's own answer, and if no other task has the
same text. After `unstale eval` has measured how often a policy solves each task, the option
`pass_rates` keeps the tasks of middle difficulty. The phases are those of SHARP: instantiate by
topic and difficulty, solve independently, keep what agrees. Programs write and solve the puzzles in
place of SHARP's language model.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, permutations, product
from pathlib import Path
from random import Random
from typing import Annotated, Any

from unstale.config import ConfigError
from unstale.config.checks import Count, PositiveInt, Range, Share
from unstale.config.tasks import EnvSpec
from unstale.envs import Env, ListedTasks, Message, Turn
from unstale.envs.draft_edit import DraftEditConfig
from unstale.records import Task

SYSTEM = "Solve the puzzle. End your reply with the answer, as one word or number."
MAX_DIFFICULTY = 5
DRAFTS_PER_TASK = 200
"""Largest number of drafts per accepted task. The templates of this package need at most 20."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft of a puzzle, with its template's answer and all answers that an independent search
    finds.
    """

    text: str
    answer: str
    found: Collection[str]


Template = Callable[[Random, int], Draft]
"""A function that returns a random draft of a given difficulty, 1 to `MAX_DIFFICULTY`."""


def numbers(random: Random, difficulty: int) -> Draft:
    """Return a puzzle about one number, with a range that grows with the difficulty."""
    top = 20 * 2**difficulty
    hidden = random.randint(1, top)
    clues: list[tuple[str, Callable[[int], bool]]] = []
    for _ in range(2 + difficulty // 2):
        divisor = random.randint(3, 4 + 2 * difficulty)
        rest, digits = hidden % divisor, sum(map(int, str(hidden)))
        clues += random.choice(
            [
                [(f"divided by {divisor} it leaves {rest}", _leaves(divisor, rest))],
                [(f"its digits add up to {digits}", _adds_up(digits))],
            ]
        )
    found = {str(n) for n in range(1, top + 1) if all(holds(n) for _, holds in clues)}
    words = ", ".join(dict.fromkeys(text for text, _ in clues))
    return Draft(f"A number is between 1 and {top}: {words}. Which is it?", str(hidden), found)


def _leaves(divisor: int, rest: int) -> Callable[[int], bool]:
    return lambda number: number % divisor == rest


def _adds_up(digits: int) -> Callable[[int], bool]:
    return lambda number: sum(map(int, str(number))) == digits


def prices(random: Random, difficulty: int) -> Draft:
    """Return a puzzle about the prices of two goods, from the totals of two purchases."""
    top = 5 + 5 * difficulty
    goods = random.sample(("pen", "book", "cup", "lamp", "bag", "key"), 2)
    hidden = random.randint(1, top), random.randint(1, top)
    bought = [(random.randint(1, 1 + difficulty), random.randint(1, 4)) for _ in range(2)]
    totals = [first * hidden[0] + second * hidden[1] for first, second in bought]
    found = {
        str(one)
        for one, other in product(range(1, top + 1), repeat=2)
        if [first * one + second * other for first, second in bought] == totals
    }
    purchases = "; ".join(
        f"{first} x {goods[0]} and {second} x {goods[1]} cost {total}"
        for (first, second), total in zip(bought, totals, strict=True)
    )
    text = f"Prices are whole numbers from 1 to {top}. {purchases}. What does a {goods[0]} cost?"
    return Draft(text, str(hidden[0]), found)


def order(random: Random, difficulty: int) -> Draft:
    """Return a puzzle about the order of 3 to 6 people in a line."""
    size = min(6, 2 + difficulty)
    people = random.sample(("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn"), size)
    asked = random.randrange(size)
    num_clues = 2 * size - (3 if difficulty == MAX_DIFFICULTY else 2)
    clues = [
        (people[before], people[after])
        for before, after in (sorted(random.sample(range(size), 2)) for _ in range(num_clues))
    ]
    random.shuffle(clues)
    found = {
        line[asked]
        for line in permutations(people)
        if all(line.index(before) < line.index(after) for before, after in clues)
    }
    words = ". ".join(f"{before} stands before {after}" for before, after in dict.fromkeys(clues))
    names = ", ".join(sorted(people))
    text = f"{names} stand in a line. {words}. Who is number {asked + 1}?"
    return Draft(text, people[asked], found)


TEMPLATES: Mapping[str, Template] = {"numbers": numbers, "prices": prices, "order": order}


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisConfig(DraftEditConfig):
    """Options of the environment of puzzles, made from templates and checked before use."""

    env: str = "synthesis"
    """Name of the environment: `synthesis`."""
    topics: str = " ".join(TEMPLATES)
    """Templates to use, separated by spaces: `numbers`, `prices`, `order`."""
    easiest: Annotated[int, Range(1, MAX_DIFFICULTY)] = 1
    """Smallest difficulty of a task."""
    hardest: Annotated[int, Range(1, MAX_DIFFICULTY)] = 3
    """Largest difficulty of a task."""
    size: PositiveInt = 600
    """Number of training tasks before `pass_rates` removes some."""
    held_out: PositiveInt = 256
    """Number of held-out tasks."""
    tasks_seed: Count = 0
    """Seed of the tasks. Unlike `seed`, it changes their texts."""
    measure: bool = False
    """Exchange training and held-out tasks, so that `unstale eval --save` measures the pass rates
    of the training tasks.
    """
    pass_rates: str = ""
    """File of `unstale eval --save` with attempts at the training tasks. Tasks with a pass rate
    outside `lowest_rate` and `highest_rate`, or without an attempt, are removed.
    """
    lowest_rate: Share = 0.01
    """Smallest pass rate of a training task. Read only with `pass_rates`."""
    highest_rate: Share = 0.99
    """Largest pass rate of a training task. Read only with `pass_rates`."""

    @property
    def largest_reward(self) -> float:
        return 1.0

    def check_combination(self) -> None:
        super(SynthesisConfig, self).check_combination()
        unknown = [topic for topic in self.topics.split() if topic not in TEMPLATES]
        if unknown or not self.topics.split():
            raise ConfigError(
                f"task.topics must be some of {', '.join(TEMPLATES)}, got {self.topics!r}"
            )
        if self.easiest > self.hardest:
            raise ConfigError(
                f"task.easiest must be <= task.hardest, got {self.easiest} and {self.hardest}"
            )
        if self.lowest_rate > self.highest_rate:
            raise ConfigError(
                "task.lowest_rate must be <= task.highest_rate, got "
                f"{self.lowest_rate:g} and {self.highest_rate:g}"
            )
        if self.measure and self.pass_rates:
            raise ConfigError("task.measure needs all tasks: leave task.pass_rates empty")


_TEXT_OPTIONS = ("topics", "easiest", "hardest", "held_out", "tasks_seed")
"""Options that determine the text of each numbered training task."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A puzzle from a draft that has passed all checks."""

    text: str
    answer: str
    topic: str
    difficulty: int
    lineage: str
    """Template, difficulty, seed and number of the draft, joined by `/`."""


class SynthesisTasks(ListedTasks):
    """Puzzles with one answer each. The reward is 1 if the last word of the reply is the answer."""

    name = "synthesis"
    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, options: SynthesisConfig) -> None:
        """Create the tasks.

        Raises `ConfigError` if the templates yield too few puzzles, or if `pass_rates` excludes
        all.
        """
        self.refused = Counter[str]()
        """Number of rejected drafts by the reason: `several answers`, `another answer` or
        `duplicate`.
        """
        drawn = self._draw(options)
        puzzles = [next(drawn) for _ in range(options.held_out + options.size)]
        held_out, train = puzzles[: options.held_out], puzzles[options.held_out :]
        if options.pass_rates:
            shared = {f"task.{name}": getattr(options, name) for name in _TEXT_OPTIONS}
            rates = read_pass_rates(Path(options.pass_rates), f"{self.name}/train/", shared)
            train = [
                puzzle
                for place, puzzle in enumerate(train)
                if options.lowest_rate <= rates.get(place, -1) <= options.highest_rate
            ]
            if not train:
                raise ConfigError(
                    f"task.pass_rates {options.pass_rates} has no training task with a pass rate "
                    f"from {options.lowest_rate:g} to {options.highest_rate:g}"
                )
        self.data: Mapping[str, Sequence[Puzzle]] = {"train": train, "held_out": held_out}
        self._options = options
        self._splits = ("held_out", "train") if options.measure else ("train", "held_out")

    def _draw(self, options: SynthesisConfig) -> Iterator[Puzzle]:
        """Yield puzzles that pass the checks. Topics and difficulties alternate."""
        seen: set[str] = set()
        kinds = list(product(options.topics.split(), range(options.easiest, options.hardest + 1)))
        number = since = 0
        while since < DRAFTS_PER_TASK:
            topic, difficulty = kinds[number % len(kinds)]
            lineage = f"{topic}/{difficulty}/{options.tasks_seed}/{number}"
            draft = TEMPLATES[topic](Random(lineage), difficulty)
            number += 1
            reason = refusal(draft, seen)
            if reason:
                self.refused[reason] += 1
                since += 1
                continue
            since = 0
            seen.add(draft.text)
            yield Puzzle(draft.text, draft.answer, topic, difficulty, lineage)
        raise ConfigError(
            f"task.topics {options.topics!r} with difficulties {options.easiest} to "
            f"{options.hardest} give {len(seen)} different tasks, fewer than task.size + "
            f"task.held_out = {options.size + options.held_out}"
        )

    def train(self, seed: int) -> Iterator[Task]:
        if self._splits[0] == "train":
            return super().train(seed)
        return (Task(self.name, "held_out", index) for index in count())

    def held_out(self, count: int) -> list[Task]:
        split = self._splits[1]
        return [Task(self.name, split, place) for place in range(len(self.data[split]))][:count]

    def identity(self, task: Task) -> str:
        """Return an identity of a task that stays the same when the list of tasks is repeated."""
        puzzle: Puzzle = self.data_of(task)
        return f"{self.name}/{puzzle.lineage}"

    def text(self, task: Task) -> str:
        puzzle: Puzzle = self.data_of(task)
        return puzzle.text

    def env(self, task: Task, seed: int) -> Env:
        """Return the environment of a task. `seed` is not used: nothing in a puzzle is random."""
        return self._options.with_edit(lambda: PuzzleEnv(self.data_of(task)))


def refusal(draft: Draft, seen: Collection[str]) -> str:
    """Return the reason to reject a draft, or "" to accept it.

    A draft is accepted if the search finds exactly one answer, if this is the answer of its
    template, and if its text is not in `seen`, the texts of earlier tasks.
    """
    if len(draft.found) > 1:
        return "several answers"
    if set(draft.found) != {draft.answer}:
        return "another answer"
    return "duplicate" if draft.text in seen else ""


class PuzzleEnv:
    """The environment of one puzzle with one reply."""

    def __init__(self, puzzle: Puzzle) -> None:
        self._puzzle = puzzle

    async def begin(self) -> Turn:
        return Turn((Message("system", SYSTEM), Message("user", self._puzzle.text)))

    async def step(self, reply: Message) -> Turn:
        last = (reply.content.split() or [""])[-1].strip(".,!?:;*'\"").casefold()
        is_right = float(last == self._puzzle.answer.casefold())
        facts = {"difficulty": float(self._puzzle.difficulty)}
        return Turn((), done=True, rewards={"success": is_right}, facts=facts)


def read_pass_rates(path: Path, prefix: str, shared: Mapping[str, Any]) -> dict[int, float]:
    """Return the pass rate of each task in a file of `unstale eval --save`, by the task's number.

    `prefix` is the part of the tasks' keys before the number. `shared` has the options that the
    evaluation must have had, by name. Raises `ConfigError` if the file cannot be read, has other
    options, or has no task with this prefix.
    """
    attempts: dict[int, list[bool]] = {}
    stored: dict[str, Any] = {}
    try:
        first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        stored |= json.loads(first)
        for line in lines:
            row = json.loads(line)
            if row["task"].startswith(prefix):
                place = int(row["task"].removeprefix(prefix))
                attempts.setdefault(place, []).append(bool(row["success"]))
    except OSError as error:
        raise ConfigError(f"task.pass_rates {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"task.pass_rates {path} is not a file of `unstale eval --save`: {error}"
        ) from error
    for name, value in shared.items():
        if stored.get(name, value) != value:
            raise ConfigError(
                f"task.pass_rates {path} has pass rates of other tasks: they were measured with "
                f"{name} {stored[name]}, and this run has {value}. Measure them again, or set "
                f"--{name} {stored[name]}"
            )
    if not attempts:
        raise ConfigError(
            f"task.pass_rates {path} has no training task: measure them with --task.measure true"
        )
    return {place: sum(each) / len(each) for place, each in attempts.items()}


ENV = EnvSpec("synthesis", SynthesisTasks, SynthesisConfig)
