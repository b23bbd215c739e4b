"""The puzzles of reasoning-gym, one reply each: `--task.env reasoning-gym:countdown`.

Some scorers evaluate the answer as Python or sympy code. For these an answer must consist of numbers,
words, lists and formulas, and the scorer runs in the sandbox with a time limit.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from unstale.config import ConfigError, nearest
from unstale.envs import EnvError, Message, NumberedTasks, Turn, sandbox
from unstale.records import Task

UNSTEADY = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder")
"""Data sets that depend on the order of sets, which PYTHONHASHSEED=0 makes reproducible."""

LIMITS = sandbox.Limits(seconds=20.0, memory_mb=2048, file_mb=1)
MAX_EVALUATED = 500
"""Maximum characters of an answer that is evaluated."""

_EVALUATES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")
_NAMES = "sin|cos|tan|asin|acos|atan|sinh|cosh|tanh|exp|log|ln|sqrt|Abs|pi|[A-Za-z]"
# Neither can call anything but these functions, name an attribute or hold text that is evaluated again.
_LIST = re.compile(r"(?:\d++(?:\.\d++)?|[A-Za-z_\s,'\"\[\]-])*+", re.ASCII)
_FORMULA = re.compile(
    rf"(?:\d++(?:\.\d++)?|(?<![A-Za-z])(?:{_NAMES})(?![A-Za-z])|[\s+\-*/^()])*+", re.ASCII
)

_SCORE = """
import json, sys
import reasoning_gym
asked = json.load(sys.stdin)
dataset = reasoning_gym.create_dataset(asked["name"], seed=asked["seed"], size=1, **asked["config"])
entry = dataset[0]
if entry["question"] != asked["question"]:
    sys.exit("the puzzle is another one in the sandbox")
try:
    score = float(dataset.score_answer(asked["answer"], entry))
except Exception:
    score = 0.0
sys.stdout.write(repr(score))
"""


class ReasoningGymTasks(NumberedTasks):
    """A data set with its options. Training and held-out seeds differ."""

    tools: tuple[Mapping[str, Any], ...] = ()

    def __init__(self, dataset: str, **config: Any) -> None:
        if dataset not in DATASETS:
            raise ConfigError(
                f"reasoning-gym has no {dataset!r}{nearest(dataset, sorted(DATASETS))}"
            )
        if dataset in UNSTEADY and os.environ.get("PYTHONHASHSEED") != "0":
            raise ConfigError(
                f"the puzzles of {dataset} differ from process to process; set PYTHONHASHSEED=0"
            )
        self.dataset, self.config = dataset, config
        self.name = f"reasoning-gym:{dataset}"
        scorer = type(self.posed(0)).score_answer
        own = scorer is not ProceduralDataset.score_answer
        self.evaluates = own and bool(_EVALUATES.search(inspect.getsource(scorer)))

    def posed(self, seed: int) -> ProceduralDataset:
        """Return a data set of one puzzle."""
        made: ProceduralDataset = reasoning_gym.create_dataset(
            self.dataset, seed=seed, size=1, **self.config
        )
        return made

    def env(self, task: Task, seed: int) -> "PuzzleEnv":
        """Randomness comes from the task alone, not from `seed`."""
        return PuzzleEnv(self, self.seed_of(task))


class PuzzleEnv:
    """One question and one reply. The text in the last `<answer>` tags is scored from 0 to 1."""

    def __init__(self, tasks: ReasoningGymTasks, seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._dataset = tasks.posed(seed)
        self._entry = self._dataset[0]
        self._state = "new"

    async def begin(self) -> Turn:
        if self._state != "new":
            raise EnvError("an episode begins once; make a new environment")
        self._state = "open"
        return Turn(
            (Message("system", SYSTEM_PROMPTS["simple"]), Message("user", self._entry["question"]))
        )

    async def step(self, reply: Message) -> Turn:
        if self._state != "open":
            raise EnvError(f"step() in an episode that is {self._state}")
        self._state = "over"
        answer = extract_answer(reply.content)
        score = 0.0 if answer is None else await self._score(answer)
        facts = MappingProxyType({"no_answer": float(answer is None)})
        return Turn((), done=True, rewards=MappingProxyType({"score": score}), facts=facts)

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
                return 0.0  # some scorers fail on malformed answers
        if len(answer) > MAX_EVALUATED or not (
            _LIST.fullmatch(answer) or _FORMULA.fullmatch(answer)
        ):
            return 0.0
        asked = {
            "name": self._tasks.dataset,
            "config": self._tasks.config,
            "seed": self._seed,
            "answer": answer,
        }
        done = await sandbox.run(
            [sys.executable, "-s", "-c", _SCORE],
            stdin=json.dumps(asked | {"question": self._entry["question"]}),
            limits=LIMITS,
        )
        if done.ended == "timeout":
            return 0.0
        if done.code:
            raise EnvError(f"the scorer of {self._tasks.name} failed: {done.stderr[-300:]}")
        return float(done.stdout)


TASKSET = ReasoningGymTasks
