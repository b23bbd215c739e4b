"""The puzzles of reasoning-gym: `--task.env reasoning-gym:countdown`.

An episode has one reply, or with `--task.tool calculator` several, of which the last is scored.
Some scorers evaluate the answer as Python or sympy code. These scorers run in the sandbox with a
time limit. They receive only answers of numbers, words, lists and formulas.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from unstale.config import ConfigError, nearest
from unstale.envs import (
    LEARNS_NOTHING,
    EnvError,
    Message,
    NumberedTasks,
    ToolCall,
    Turn,
    calculator,
    sandbox,
)
from unstale.envs.question import ToolRunner
from unstale.records import Task

UNSTEADY = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets whose puzzles depend on the iteration order of Python sets. Only PYTHONHASHSEED=0 makes
them reproducible.
"""

LIMITS = sandbox.Limits(seconds=20.0, memory_mb=2048, file_mb=1)
MAX_EVALUATED = 500
"""Largest number of characters of an answer that a scorer evaluates as code."""

PROBED = 8
"""Number of puzzles of a data set on which constant answers are tried, to see whether they pay."""
CONSTANTS = ("", "?", "0", "1", "True", "False", "yes", "no", "A")
GIVEAWAY = 0.75
"""Smallest mean score at which a constant answer counts as paying. It is above 0.5, the score of
guessing one of two answers.
"""

CALCULATOR_PROMPT = "Work it out with the tool, then give the result alone."

_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
_NAMES = "sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi|[A-Za-z]"
# Neither pattern allows other functions, attributes, or text that would be evaluated again.
_LIST = re.compile(r"(?:\d++(?:\.\d++)?|[A-Za-z_\s,'\"\[\]-])*+", re.ASCII)
_FORMULA = re.compile(
    rf"(?:\d++(?:\.\d++)?|(?<![A-Za-z])(?:{_NAMES})(?![A-Za-z])|[\s+\-*/^()])*+", re.ASCII
)

_SCORE = """
import json, sys
import reasoning_gym
request = json.load(sys.stdin)
dataset = reasoning_gym.create_dataset(
    request["name"], seed=request["seed"], size=1, **request["config"]
)
entry = dataset[0]
if entry["question"] != request["question"]:
    sys.exit("the puzzle is another one in the sandbox")
try:
    score = float(dataset.score_answer(request["answer"], entry))
except Exception:
    score = 0.0
sys.stdout.write(repr(score))
"""


class ReasoningGymTasks(NumberedTasks):
    """The puzzles of one reasoning-gym data set with its options, or of several in turn.

    `dataset` is a name, or several names joined by `+`; several data sets have their default
    options. With the `tool` `calculator`, the policy can compute expressions before it answers.
    Training and held-out tasks have different seeds.
    """

    def __init__(self, dataset: str, *, tool: str = "none", **config: Any) -> None:
        self.datasets = tuple(dataset.split("+"))
        for name in self.datasets:
            _check(name)
        if config and len(self.datasets) > 1:
            raise ConfigError(
                f"options are for one data set, got {sorted(config)} with {dataset}: use MixedTasks"
            )
        self.tool = tool
        self.tools: tuple[Mapping[str, Any], ...] = (calculator.TOOL,) if tool != "none" else ()
        self.config = config
        self.name = f"reasoning-gym:{dataset}"
        self.evaluates = {name: self._scores_by_evaluation(name) for name in self.datasets}

    def _scores_by_evaluation(self, name: str) -> bool:
        scorer = type(self._create(name, 0)).score_answer
        is_default = scorer is ProceduralDataset.score_answer
        return not is_default and bool(_EVALUATES.search(inspect.getsource(scorer)))

    def _create(self, name: str, seed: int) -> ProceduralDataset:
        dataset: ProceduralDataset = reasoning_gym.create_dataset(
            name, seed=seed, size=1, **self.config
        )
        return dataset

    def puzzle(self, task: Task) -> "Puzzle":
        """Return the puzzle of a task. Several data sets take turns from task to task."""
        name = self.datasets[task.index % len(self.datasets)]
        seed = self.seed_of(task)
        return Puzzle(name, seed, self._create(name, seed), self.evaluates[name], self.config)

    def notice(self) -> str:
        """Return a text that names the data sets which reward an empty or constant answer, or "".

        Constant answers are tried on `PROBED` puzzles. Data sets whose scorers evaluate answers as
        code are skipped, because each score would need a sandbox.
        """
        found = []
        for place, name in enumerate(self.datasets):
            if self.evaluates[name]:
                continue
            indices = range(place, place + PROBED * len(self.datasets), len(self.datasets))
            puzzles = [self.puzzle(Task(self.name, "train", index)) for index in indices]
            for answer in CONSTANTS:
                mean = fmean(puzzle.score_here(answer) for puzzle in puzzles)
                if mean >= GIVEAWAY:
                    found.append(f"{answer!r} gets {mean:.2f} in reasoning-gym:{name}")
                    break
        paid = f"an answer that solves nothing is paid: {'; '.join(found)}. {LEARNS_NOTHING}"
        return paid if found else ""

    def text(self, task: Task) -> str:
        return self.puzzle(task).question

    def env(self, task: Task, seed: int) -> "PuzzleEnv":
        """Return the environment of a task.

        `seed` is not used: the task's number decides everything.
        """
        puzzle = self.puzzle(task)
        return CalculatorPuzzleEnv(puzzle) if self.tool != "none" else PuzzleEnv(puzzle)

    def demonstration(self, task: Task) -> tuple[Message, ...]:
        """Return a conversation that solves a puzzle with the calculator.

        Raises `ConfigError` if the task set has no calculator, or if the data set provides no
        expression.
        """
        puzzle = self.puzzle(task)
        if self.tool == "none":
            raise ConfigError(f"{self.name} has demonstrations only with task.tool = calculator")
        expression = puzzle.expression
        if expression is None:
            raise ConfigError(
                f"reasoning-gym:{puzzle.name} has no demonstrations: its puzzles name no expression"
            )
        call = ToolCall(calculator.TOOL["function"]["name"], {"expression": expression})
        result = str(calculator.calculate(expression))
        return (
            *_prompt(CALCULATOR_PROMPT, puzzle),
            Message("assistant", "", (call,)),
            Message("tool", result),
            Message("assistant", result),
        )


def _check(dataset: str) -> None:
    """Raise `ConfigError` for a data set that does not exist or cannot be used."""
    if dataset not in DATASETS:
        raise ConfigError(f"reasoning-gym has no {dataset!r}{nearest(dataset, sorted(DATASETS))}")
    if dataset == "composite":
        raise ConfigError(
            "reasoning-gym:composite is not supported, because its parts may evaluate answers "
            "as code outside the sandbox. Use MixedTasks with one reasoning-gym task set for "
            "each part (docs/your-own-task.md)"
        )
    if dataset in UNSTEADY and os.environ.get("PYTHONHASHSEED") != "0":
        raise ConfigError(
            f"the puzzles of {dataset} differ from process to process; set PYTHONHASHSEED=0"
        )


class Puzzle:
    """One puzzle of a data set, with the data set's scorer."""

    def __init__(
        self,
        name: str,
        seed: int,
        dataset: ProceduralDataset,
        evaluates: bool,
        config: Mapping[str, Any],
    ) -> None:
        self.name = name
        self._seed = seed
        self._dataset = dataset
        self._evaluates = evaluates
        self._config = config
        self._entry = dataset[0]
        self.answer: str = self._entry["answer"]
        self.question: str = self._entry["question"]

    @property
    def expression(self) -> str | None:
        """The expression whose value is the answer. None if the data set does not provide it."""
        facts = self._entry["metadata"]
        if self.name in calculator.FUNCTIONS:
            return f"{self.name}({', '.join(map(str, facts['numbers']))})"
        return facts.get("expression")

    async def score(self, answer: str) -> float:
        """Return the score of an answer, from 0 to 1."""
        if not self._evaluates:
            return self.score_here(answer)
        is_allowed = _LIST.fullmatch(answer) or _FORMULA.fullmatch(answer)
        if len(answer) > MAX_EVALUATED or not is_allowed:
            return 0.0
        request = {
            "name": self.name,
            "config": self._config,
            "seed": self._seed,
            "answer": answer,
            "question": self.question,
        }
        done = await sandbox.run(
            [sys.executable, "-s", "-c", _SCORE],
            stdin=json.dumps(request),
            limits=LIMITS,
        )
        if done.ended == "timeout":
            return 0.0
        if done.code:
            raise EnvError(f"the scorer of reasoning-gym:{self.name} failed: {done.stderr[-300:]}")
        return float(done.stdout)

    def score_here(self, answer: str) -> float:
        """Return the score of an answer, 0 to 1, computed in this process.

        Scorers that evaluate answers as code must run in the sandbox instead (`score`).
        """
        try:
            return float(self._dataset.score_answer(answer, self._entry))
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ):
            return 0.0  # some scorers raise errors for malformed answers


def _prompt(system: str, puzzle: Puzzle) -> tuple[Message, Message]:
    return Message("system", system), Message("user", puzzle.question)


class PuzzleEnv:
    """An environment with one puzzle and one reply.

    The score, 0 to 1, is that of the text in the reply's last `<answer>` tags.
    """

    def __init__(self, puzzle: Puzzle) -> None:
        self._puzzle = puzzle

    async def begin(self) -> Turn:
        return Turn(_prompt(SYSTEM_PROMPTS["simple"], self._puzzle))

    async def step(self, reply: Message) -> Turn:
        answer = extract_answer(reply.content)
        score = 0.0 if answer is None else await self._puzzle.score(answer)
        facts = {"no_answer": float(answer is None)}
        return Turn((), done=True, rewards={"score": score}, facts=facts)


class CalculatorPuzzleEnv(PuzzleEnv):
    """An environment with one puzzle and a calculator.

    The first reply without a tool call is scored, 0 to 1.
    """

    def __init__(self, puzzle: Puzzle) -> None:
        super().__init__(puzzle)
        self._runner = ToolRunner(calculator.TOOL, calculator.run)

    async def begin(self) -> Turn:
        return Turn(_prompt(CALCULATOR_PROMPT, self._puzzle))

    async def step(self, reply: Message) -> Turn:
        answers = await self._runner.answer(reply.tool_calls)
        facts = self._runner.facts()
        if answers:
            return Turn(answers, facts=facts)
        score = await self._puzzle.score(reply.content.strip())
        return Turn((), done=True, rewards={"score": score}, facts=facts)


TASKSET = ReasoningGymTasks
