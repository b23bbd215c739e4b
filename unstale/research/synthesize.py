"""Let a language model write tasks, and keep those whose answers are verified (SHARP).

Alignment: a rubric describes good tasks, and a tree of subjects the topics. Instantiation: a prompt
is filled with a cell of the plan, which is a subject, a skill and a difficulty. Inference: a writer
drafts a task with its answer, and solves the task `solves` more times without seeing this answer.
If a draft has no answer, that of one more solution is used. A draft is kept if its answer is a
number or at most three words, if no kept task has nearly the same words, if at least the share
`agree` of the solutions has the draft's answer, and if the policy to be trained solves it at a rate
from `lowest_rate` to `highest_rate`. In the next call, each cell gets drafts in proportion to p (1
- p), where p is its pass rate in a training run on these tasks.

A model that agrees with itself can still be wrong. So the same check is applied to controls:
puzzles whose answers programs have found, with the writer's own solution in place of the draft's
answer. The share of kept controls with a wrong answer measures the check. It does not measure
drafts that have no answer.
"""

import asyncio
import hashlib
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from unstale.cli.resume import read_config
from unstale.config import ConfigError
from unstale.durability.journal import Journal
from unstale.envs import Message
from unstale.envs.registry import build_taskset
from unstale.records import Task
from unstale.research.envs.synthesis import SynthesisConfig, SynthesisTasks
from unstale.research.served_writer import Writer
from unstale.research.typed_answer import ANSWER_LINE, answer_key, final_answer, typed_answer
from unstale.rollout.seeds import derive_seed

RUBRIC = """The problem is logically consistent, has all that is needed to solve it, and has one
answer, which is a number or at most three words. It needs the named skill, and it is as difficult
as named. It has no hints."""
END = "End your reply with one line: answer: ANSWER"
DRAFT = """Write one new problem about {subject}. Skill: {skill}. Difficulty: {difficulty}.
{rubric}
Reply with the text of the problem, and then one line: answer: ANSWER"""
REWARD = "unstale.research.typed_answer:typed_answer"
"""Value of the option `task.reward` for training on the written tasks."""
ROUND = 32
"""Number of drafts that are written and solved at the same time."""
NEAR = 0.6
"""Two texts are near duplicates if at least this share of their runs of three words is common to
both.
"""
FEWEST_WORDS = 5
"""Smallest number of words of a task."""
_LABEL = re.compile(r"^\W*(?:new )?problem\W*:\s*", re.IGNORECASE)


class Cell(NamedTuple):
    """A cell of the plan: what a task should be about."""

    subject: str
    skill: str
    difficulty: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A description of good tasks (`rubric`), and the subjects, skills and
    difficulties of tasks.
    """

    subjects: Sequence[str] = ("arithmetic: prices", "arithmetic: time", "arithmetic: lengths")
    """The leaves of the tree of subjects, each after the names above it."""
    skills: Sequence[str] = ("adding and subtracting", "multiplying and dividing", "percentages")
    difficulties: Sequence[str] = ("easy, one step", "medium, two steps", "hard, four steps")
    rubric: str = RUBRIC

    @property
    def cells(self) -> list[Cell]:
        return [Cell(*each) for each in product(self.subjects, self.skills, self.difficulties)]


def load_plan(path: Path) -> Plan:
    """Read a plan from a TOML file. Raises `ConfigError` for a file that has no valid plan.

    `subjects` is a tree of tables whose leaves are lists of names. `skills` and `difficulties` are
    lists, and `rubric` is a text. A missing key has its default.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plan {path}: {error}") from error
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name == "rubric" and isinstance(value, str):
            given[name] = value
        elif name in ("subjects", "skills", "difficulties"):
            given[name] = list(_leaves(value, f"--plan {path}: {name}"))
        else:
            raise ConfigError(
                f"--plan {path} cannot have {name} = {str(value)[:80]!r}: it has the text rubric, "
                "the lists skills and difficulties, and the tree subjects"
            )
    return Plan(**given)


def _leaves(tree: Any, where: str, above: str = "") -> Iterator[str]:
    """Yield the leaves of a tree, each after the names above it."""
    if isinstance(tree, dict) and tree:
        for name, branch in tree.items():
            yield from _leaves(branch, where, f"{above}{name}: ")
    elif isinstance(tree, list) and tree and all(isinstance(each, str) for each in tree):
        yield from (above + each for each in tree)
    else:
        raise ConfigError(f"{where} must be names in lists, got {str(tree)[:80]!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthesisOptions:
    """Options of the synthesis: the number of drafts, and the limits of the checks."""

    drafts: int = 256
    solves: int = 4
    agree: float = 1.0
    """Smallest share of the writer's solutions that must have the draft's answer."""
    attempts: int = 8
    """Number of the policy's attempts at a verified draft; 0 measures no pass rate."""
    lowest_rate: float = 0.01
    highest_rate: float = 0.99
    controls: int = 32
    """Number of puzzles with known answers that are checked like drafts."""

    def check(self, *, writes_itself: bool) -> None:
        """Raise `ConfigError` if a value is not allowed, or if hardly a draft could be kept."""
        if not 0 < self.agree <= 1:
            raise ConfigError(f"--agree must be above 0 and at most 1, got {self.agree:g}")
        if not 0 <= self.lowest_rate <= self.highest_rate <= 1:
            raise ConfigError(
                "--lowest-rate and --highest-rate must be from 0 to 1 in this order, got "
                f"{self.lowest_rate:g} and {self.highest_rate:g}"
            )
        if writes_itself and self.attempts and self.agree > self.highest_rate:
            raise ConfigError(
                f"--agree {self.agree:g} is above --highest-rate {self.highest_rate:g}, and the "
                "policy both verifies and is measured: hardly a task that it always solves alike "
                "is in the band. Set --agree 0.75, or name another writer by --url"
            )


def read_draft(reply: str) -> tuple[str, str]:
    """Return the task text and the answer in the reply of a writer.

    The text is "" if it has fewer than `FEWEST_WORDS` words. The answer is "" if the reply has no
    answer line.
    """
    line = ANSWER_LINE.search(reply)
    text = _LABEL.sub("", reply[: line.start() if line else None].strip()).strip()
    return text if len(text.split()) >= FEWEST_WORDS else "", line[1].strip() if line else ""


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Return the runs of three consecutive words in a text. All numbers count as the same word."""
    words = re.sub(r"\d[\d.,]*", "0", text.casefold())
    found = re.findall(r"\w+", words)
    return frozenset(tuple(found[at : at + 3]) for at in range(max(1, len(found) - 2)))


def is_near(one: frozenset[Any], others: Collection[frozenset[Any]]) -> bool:
    """Return True if a text is a near duplicate of one of `others`. Texts are
    given by `shingles`.
    """
    return any(len(one & other) >= NEAR * len(one | other) for other in others)


class Synthesis:
    """The synthesis of tasks: drafts, controls, and the checks that they have to pass."""

    def __init__(  # noqa: PLR0913 - two models, and what is asked of them
        self,
        writer: Writer,
        policy: Writer,
        plan: Plan,
        options: SynthesisOptions,
        *,
        seed: int,
        rates: Mapping[Cell, tuple[int, int]] | None = None,
        progress: Callable[..., None] = lambda *_, **__: None,
    ) -> None:
        """Create the synthesis. `rates` has, by cell, the successes and attempts
        at earlier tasks.
        """
        self._writer = writer
        self._policy = policy
        self._plan = plan
        self._options = options
        self._seed = seed
        self._cells = plan.cells
        self._weights = [_weight(*(rates or {}).get(cell, (0, 0))) for cell in self._cells]
        self._progress = progress

    async def run(self, log: Path) -> list[dict[str, Any]]:
        """Return a row for each draft and each control. The file `log` stores them, for
        continuation.

        The value of `refused` is the reason for the rejection, or "". Raises `ConfigError` if the
        log belongs to other options, and OSError if a writer does not answer.
        """
        rows = self._continued(log)
        controls = self._controls()
        done = len(rows)
        total = len(controls) + self._options.drafts
        while len(rows) < total:
            self._progress("drafts", done=len(rows), total=total)
            stop = min(total, len(rows) + ROUND)
            if len(rows) < len(controls):
                stop = min(stop, len(controls))
                tasks = [self._control(*controls[at]) for at in range(len(rows), stop)]
            else:
                kept = [shingles(row["text"]) for row in rows if not row["refused"]]
                numbers = range(len(rows) - len(controls), stop - len(controls))
                tasks = [self._draft(number, kept) for number in numbers]
            async with asyncio.TaskGroup() as running:
                made = [running.create_task(each) for each in tasks]
            rows += _without_twins([each.result() for each in made])
            with log.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows[done:])
            done = len(rows)
        return rows

    def _continued(self, log: Path) -> list[dict[str, Any]]:
        """Return the rows in the log. If there is no log, create it."""
        described = json.dumps([asdict(self._plan), asdict(self._options), self._weights])
        digest = hashlib.sha256(f"{self._seed} {described}".encode()).hexdigest()
        head = {"format": 1, "options": digest}
        if not log.exists():
            log.write_text(json.dumps(head) + "\n", encoding="utf-8")
            return []
        try:
            first, *rows = map(json.loads, log.read_text(encoding="utf-8").splitlines())
        except ValueError as error:
            raise ConfigError(f"{log} cannot be continued: {error}. Remove it") from error
        if first != head:
            raise ConfigError(
                f"{log} has drafts of another plan, seed, options or rates: use another --out, or "
                "remove it"
            )
        return rows

    def _controls(self) -> list[tuple[int, str, str]]:
        """Return number, text and right answer of each control, a puzzle that a program has
        solved.
        """
        if not self._options.controls:
            return []
        config = SynthesisConfig(size=self._options.controls, held_out=1, hardest=2)
        puzzles = SynthesisTasks(config).data["train"]
        return [(number, each.text, each.answer) for number, each in enumerate(puzzles)]

    async def _control(self, number: int, text: str, right: str) -> dict[str, Any]:
        answer = await self._infer(text, "control", number)
        agreed = await self._agreed(text, answer, "control", number)
        refused = "" if answer_key(answer) else "no short answer"
        if not refused and agreed < self._options.agree:
            refused = "solutions disagree"
        is_wrong = answer_key(answer) != answer_key(right)
        return {"control": number, "text": text, "refused": refused, "wrong": is_wrong}

    async def _draft(self, number: int, kept: Collection[frozenset[Any]]) -> dict[str, Any]:
        seed = derive_seed(self._seed, "draft", number)
        [cell] = Random(seed).choices(self._cells, self._weights)
        asked = DRAFT.format(rubric=self._plan.rubric, **cell._asdict())
        text, answer = read_draft(await self._writer.reply([Message("user", asked)], seed))
        row: dict[str, Any] = {"draft": number, **cell._asdict(), "text": text}
        options = self._options
        if not text:
            return {**row, "refused": "unreadable"}
        if "answer" in text.casefold():
            return {**row, "refused": "names an answer"}
        if is_near(shingles(text), kept):
            return {**row, "refused": "near duplicate"}
        answer = answer or await self._infer(text, "draft", number)
        row["answer"] = answer
        if not answer_key(answer):
            return {**row, "refused": "no short answer"}
        row["agreed"] = agreed = await self._agreed(text, answer, "draft", number)
        if agreed < options.agree:
            return {**row, "refused": "solutions disagree"}
        if options.attempts:
            row["rate"] = rate = await self._rate(text, answer, number)
            if not options.lowest_rate <= rate <= options.highest_rate:
                return {**row, "refused": "pass rate"}
        return {**row, "refused": ""}

    async def _infer(self, text: str, kind: str, number: int) -> str:
        """Return the writer's answer to the task `text`, from one solution."""
        return final_answer(await self._solve(self._writer, text, kind, number, 0))

    async def _agreed(self, text: str, answer: str, kind: str, number: int) -> float:
        """Return the share of the writer's solutions whose answer is `answer`."""
        return await self._share(self._writer, text, answer, self._options.solves, kind, number)

    async def _rate(self, text: str, answer: str, number: int) -> float:
        attempts = self._options.attempts
        return await self._share(self._policy, text, answer, attempts, "attempt", number)

    async def _share(
        self, writer: Writer, text: str, answer: str, count: int, *names: str | int
    ) -> float:
        solves = (self._solve(writer, text, *names, each) for each in range(1, count + 1))
        replies = await asyncio.gather(*solves)
        return sum(typed_answer(reply, {"answer": answer}) for reply in replies) / count

    async def _solve(self, writer: Writer, text: str, *names: str | int) -> str:
        seed = derive_seed(self._seed, "solve", *names)
        return await writer.reply([Message("user", f"{text}\n\n{END}")], seed)


def _without_twins(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reject near duplicates among the drafts that were written at the same time.
    Return all rows.
    """
    kept: list[frozenset[Any]] = []
    for row in rows:
        if "draft" in row and not row["refused"]:
            words = shingles(row["text"])
            if is_near(words, kept):
                row["refused"] = "near duplicate"
            else:
                kept.append(words)
    return list(rows)


def _weight(successes: int, attempts: int) -> float:
    """Return the weight of a cell, p (1 - p), where p is the mean pass rate under
    a uniform prior.
    """
    p = (successes + 1) / (attempts + 2)
    return p * (1 - p)


def tasks_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the kept drafts as rows for the environment `dataset`."""
    return [
        {
            "prompt": f"{row['text']}\n\n{END}",
            **{name: row[name] for name in ("answer", *Cell._fields, "draft", "agreed")},
            **({"rate": row["rate"]} if "rate" in row else {}),
        }
        for row in rows
        if "draft" in row and not row["refused"]
    ]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the numbers of drafts and controls: all, kept, and rejected by reason."""
    drafts = [row for row in rows if "draft" in row]
    kept = [row for row in rows if "control" in row and not row["refused"]]
    return {
        "drafts": len(drafts),
        "kept": sum(not row["refused"] for row in drafts),
        "refused": dict(Counter(row["refused"] for row in drafts if row["refused"]).most_common()),
        "controls": len(rows) - len(drafts),
        "controls_kept": len(kept),
        "controls_kept_wrong": sum(row["wrong"] for row in kept),
    }


def rates_of(run: Path) -> dict[Cell, tuple[int, int]]:
    """Return the successes and attempts of a run on tasks of `synthesize`, by cell.

    Raises `ConfigError` if `run` is not a run folder, or if the run was on other tasks.
    """
    task = read_config(run).task
    if getattr(task, "reward", "") != REWARD:
        raise ConfigError(
            f"--rates {run} is not a run on tasks of `unstale synthesize`: its task.reward is not "
            f"{REWARD}"
        )
    data_of: Callable[[Task], Mapping[str, Any]] = getattr(build_taskset(task), "data_of")  # noqa: B009
    counts: dict[Cell, tuple[int, int]] = {}
    with Journal.read(run) as journal:
        for stored in journal.trajectories():
            episode = stored.trajectory
            if episode.task.split == "train" and not episode.fork and episode.stop != "pruned":
                row = data_of(episode.task)
                cell = Cell(*(str(row[name]) for name in Cell._fields))
                successes, attempts = counts.get(cell, (0, 0))
                counts[cell] = successes + episode.success, attempts + 1
    return counts
