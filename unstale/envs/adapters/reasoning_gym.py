"""The puzzles of reasoning-gym, with one reply each: `--task.env reasoning-gym:countdown`.

Some scorers evaluate the answer as Python or sympy code. These run in the sandbox with a time
limit. They receive only answers of numbers, words, lists and formulas.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from unstale.config import ConfigError, nearest
from unstale.envs import EnvError, Message, NumberedTasks, Turn, sandbox
from unstale.records import Task

UNSTEADY = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets whose puzzles depend on the order of Python sets. PYTHONHASHSEED=0 makes them
reproducible.
"""

LIMITS = sandbox.Limits(seconds=20.0, memory_mb=2048, file_mb=1)
MAX_EVALUATED = 500
"""Largest number of characters in an answer that is evaluated as code."""

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
    """The puzzles of one reasoning-gym data set, with its options.

    Training and held-out tasks have different seeds.
    """

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, dataset: str, **config: Any) -> None:
        if dataset not in DATASETS:
            raise ConfigError(
                f"reasoning-gym has no {dataset!r}{nearest(dataset, sorted(DATASETS))}"
            )
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
        self.dataset = dataset
        self.config = config
        self.name = f"reasoning-gym:{dataset}"
        scorer = type(self.puzzle(0)).score_answer
        is_default = scorer is ProceduralDataset.score_answer
        self.evaluates = not is_default and bool(_EVALUATES.search(inspect.getsource(scorer)))

    def puzzle(self, seed: int) -> ProceduralDataset:
        """Return a data set with a single puzzle, made from `seed`."""
        dataset: ProceduralDataset = reasoning_gym.create_dataset(
            self.dataset, seed=seed, size=1, **self.config
        )
        return dataset

    def env(self, task: Task, seed: int) -> "PuzzleEnv":
        """Return the environment of a task. `seed` is not used, because the task has the seed."""
        return PuzzleEnv(self, self.seed_of(task))


class PuzzleEnv:
    """One puzzle with one reply. The text in the last `<answer>` tags is scored from 0 to 1."""

    def __init__(self, tasks: ReasoningGymTasks, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._dataset = tasks.puzzle(seed)
        self._entry = self._dataset[0]

    async def begin(self) -> Turn:
        return Turn(
            (Message("system", SYSTEM_PROMPTS["simple"]), Message("user", self._entry["question"]))
        )

    async def step(self, reply: Message) -> Turn:
        answer = extract_answer(reply.content)
        score = 0.0 if answer is None else await self._score(answer)
        facts = {"no_answer": float(answer is None)}
        return Turn((), done=True, rewards={"score": score}, facts=facts)

    async def _score(self, answer: str) -> float:
        if not self._tasks.evaluates:
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
        is_allowed = _LIST.fullmatch(answer) or _FORMULA.fullmatch(answer)
        if len(answer) > MAX_EVALUATED or not is_allowed:
            return 0.0
        request = {
            "name": self._tasks.dataset,
            "config": self._tasks.config,
            "seed": self._seed,
            "answer": answer,
            "question": self._entry["question"],
        }
        done = await sandbox.run(
            [sys.executable, "-s", "-c", _SCORE],
            stdin=json.dumps(request),
            limits=LIMITS,
        )
        if done.ended == "timeout":
            return 0.0
        if done.code:
            raise EnvError(f"the scorer of {self._tasks.name} failed: {done.stderr[-300:]}")
        return float(done.stdout)


TASKSET = ReasoningGymTasks
