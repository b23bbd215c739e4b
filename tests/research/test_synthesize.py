"""Test `unstale synthesize`: which drafts are kept, what the check is worth, rates fed back."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest

from unstale.cli.main import main
from unstale.config import ConfigError
from unstale.config.tasks import make_task
from unstale.envs import Message
from unstale.envs.registry import build_taskset
from unstale.research.envs.synthesis import SynthesisConfig, SynthesisTasks
from unstale.research.synthesize import (
    REWARD,
    Cell,
    Plan,
    Synthesis,
    SynthesisOptions,
    load_plan,
    rates_of,
    summary,
    tasks_of,
)
from unstale.research.typed_answer import typed_answer

PLAN = Plan(subjects=("sums",), skills=("carrying",), difficulties=("easy", "medium", "hard"))
CHANCE = {"easy": 1.0, "medium": 0.5, "hard": 0.0}
"""The policy's chance to solve a task, by difficulty."""
WORDS = "ant bee cow dog elk fox gnu hen ibis jay kite lynx mole newt owl pig quail ram seal toad"
PUZZLES = {
    each.text: each.answer
    for each in SynthesisTasks(SynthesisConfig(size=40, held_out=1, hardest=2)).data["train"]
}


class Solver:
    """A model that drafts sums of a difficulty, and solves each with a given chance.

    A wrong solution of a task is the same one with the probability `stubborn`.
    """

    def __init__(self, chance: Mapping[str, float], *, wrong_drafts: float = 0.0) -> None:
        self._chance = chance
        self._wrong_drafts = wrong_drafts
        self.drafts = 0
        self.stubborn = 0.0

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        text, random = messages[-1].content, Random(seed)
        if found := re.search(r"Difficulty: (\w+)", text):
            self.drafts += 1
            return self._draft(found[1], random)
        for puzzle, answer in PUZZLES.items():
            if puzzle in text:
                return self._answer(answer, self._chance["puzzle"], random, text)
        right = str(sum(map(int, re.findall(r"\d+", text))))
        return self._answer(right, self._chance[text.split()[1]], random, text)

    def _draft(self, difficulty: str, random: Random) -> str:
        one, other = random.sample(range(10, 99), 2)
        names = random.sample(WORDS.split(), 6)
        answer = one + other + (random.random() < self._wrong_drafts)
        text = f"An {difficulty} sum of {' '.join(names)}: {one} and {other}?"
        return f"Problem: {text}\nAnswer: {answer}"

    def _answer(self, right: str, chance: float, random: Random, text: str) -> str:
        if random.random() < chance:
            return f"It is clear.\nAnswer: {right}"
        same = random.random() < self.stubborn
        return f"Answer: {77777 if same else random.randrange(10**6, 10**9)}"


ALWAYS = dict.fromkeys((*CHANCE, "puzzle"), 1.0)


def made(
    folder: Path,
    writer: Solver,
    policy: Solver | None = None,
    *,
    rates: Mapping[Cell, tuple[int, int]] | None = None,
    **options: float,
) -> list[dict[str, object]]:
    chosen = SynthesisOptions(**options)  # type: ignore[arg-type]
    work = Synthesis(writer, policy or Solver(CHANCE), PLAN, chosen, seed=3, rates=rates)
    return asyncio.run(work.run(folder / "drafts.jsonl"))


def test_a_draft_is_kept_if_solutions_agree_and_the_policy_is_in_the_band(tmp_path: Path) -> None:
    writer = Solver(ALWAYS, wrong_drafts=0.3)
    rows = made(tmp_path, writer, drafts=120, controls=0)
    tasks = tasks_of(rows)
    assert {task["difficulty"] for task in tasks} == {"medium"}
    for row in rows:
        right = str(sum(map(int, re.findall(r"\d+", str(row["text"])))))
        is_wrong = row["answer"] != right
        assert (row["refused"] == "solutions disagree") == is_wrong
        in_band = not is_wrong and 0 < row["rate"] < 1  # type: ignore[operator]
        assert in_band == (not row["refused"])
    counts = summary(rows)
    assert 20 < counts["kept"] < 45 and counts["refused"]["pass rate"] > 30
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    taskset = build_taskset(make_task(f"dataset:{path}", reward=REWARD))
    first = next(taskset.train(0))
    assert taskset.text(first).endswith("answer: ANSWER")  # type: ignore[attr-defined]
    assert taskset.answer_of(first, "Answer: $12.0") == "12"  # type: ignore[attr-defined]


def test_drafts_without_a_short_answer_or_nearly_the_same_are_refused(tmp_path: Path) -> None:
    class Bad(Solver):
        def _draft(self, difficulty: str, random: Random) -> str:
            text = f"An {difficulty} sum of the same old words again: {random.randrange(99)} and 2?"
            return random.choice(
                [
                    f"{text}\nAnswer: {sum(map(int, re.findall('[0-9]+', text)))}",
                    f"{text}\nAnswer: that depends on what you mean",
                    f"Sum up:\nAnswer: {random.randrange(99)}",
                    f"{text} The answer is 3.\nAnswer: 3",
                ]
            )

    rows = made(tmp_path, Bad(ALWAYS), drafts=60, controls=0, attempts=0)
    refused = summary(rows)["refused"]
    assert set(refused) == {
        "near duplicate",
        "no short answer",
        "names an answer",
        "unreadable",
    }
    assert len(tasks_of(rows)) == 1, "other numbers or one other word do not make a text new"


@pytest.mark.parametrize(("stubborn", "solves", "low", "high"), [(0, 2, 0, 0), (1, 4, 0.3, 1)])
def test_the_share_that_is_kept_but_wrong_is_measured_on_known_answers(
    tmp_path: Path, stubborn: float, solves: int, low: float, high: float
) -> None:
    """A model that errs each time in another way never agrees. One that repeats its error does."""
    writer = Solver({**ALWAYS, "puzzle": 0.5})
    writer.stubborn = stubborn
    rows = made(tmp_path, writer, drafts=1, controls=40, solves=solves)
    counts = summary(rows)
    assert counts["controls"] == 40 and counts["controls_kept"] > 0
    assert low <= counts["controls_kept_wrong"] / counts["controls_kept"] <= high


def test_a_killed_synthesis_continues_with_the_same_drafts(tmp_path: Path) -> None:
    whole = made(tmp_path, Solver(ALWAYS), drafts=70, controls=5)
    log = tmp_path / "drafts.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[: 1 + 5 + 32]))
    writer = Solver(ALWAYS)
    assert made(tmp_path, writer, drafts=70, controls=5) == whole
    assert log.read_text() == "".join(lines) and writer.drafts == 38
    with pytest.raises(ConfigError, match="drafts of another plan, seed, options or rates"):
        made(tmp_path, writer, drafts=71, controls=5)


def test_pass_rates_of_a_run_move_drafts_to_tasks_in_the_band(tmp_path: Path) -> None:
    cells = dict(zip(CHANCE, PLAN.cells, strict=True))
    rates = {cells[name]: (round(30 * chance), 30) for name, chance in CHANCE.items()}
    kept = []
    for known in ({}, rates):
        folder = tmp_path / str(len(known))
        folder.mkdir()
        kept.append(len(tasks_of(made(folder, Solver(ALWAYS), drafts=90, controls=0, rates=known))))
    assert kept[0] < 40 and kept[1] > 2 * kept[0]


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the policy both verifies and is measured"):
        SynthesisOptions().check(writes_itself=True)
    SynthesisOptions(agree=0.75).check(writes_itself=True)
    with pytest.raises(ConfigError, match="--lowest-rate and --highest-rate"):
        SynthesisOptions(lowest_rate=0.5, highest_rate=0.2).check(writes_itself=False)
    plan = tmp_path / "plan.toml"
    plan.write_text('skills = ["s"]\n[subjects.science]\nphysics = ["heat", "light"]\n')
    assert load_plan(plan).subjects == ["science: physics: heat", "science: physics: light"]
    plan.write_text("skills = 3")
    with pytest.raises(ConfigError, match="skills must be names in lists, got '3'"):
        load_plan(plan)
    plan.write_text("topics = ['a']")
    with pytest.raises(ConfigError, match="cannot have topics"):
        load_plan(plan)


def test_the_reward_reads_numbers_and_few_words() -> None:
    assert typed_answer("He has 3.\nFinal answer: Monday.", {"answer": "monday"}) == 1
    assert typed_answer("So it is 7", {"answer": "7.0"}) == 1
    assert typed_answer("Answer: 50%", {"answer": "50"}) == 0


def called(*words: str) -> object:
    """Return the exit code of a command."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code or 0


@pytest.mark.costly
def test_the_command_writes_tasks_for_a_run_whose_rates_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped policy writes nothing readable. A run on hand-made tasks has rates."""
    out = tmp_path / "tasks.jsonl"
    plan = tmp_path / "plan.toml"
    plan.write_text('subjects = ["sums"]\nskills = ["carrying"]\ndifficulties = ["easy", "hard"]')
    words = ["synthesize", "base", "retail", "--out", str(out), "--plan", str(plan)]
    words += ["--drafts", "2", "--agree", "0.5"]
    small = ["--controls", "1", "--solves", "1", "--engine.max_completion_tokens", "8"]
    assert called(*words, *small, "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["drafts"] == 2 and counts["controls"] == 1
    assert out.read_text() == "" and counts["kept"] == 0
    cell = {"subject": "sums", "skill": "carrying", "difficulty": "easy"}
    rows = [{"prompt": f"What is {n} and 1?", "answer": str(n + 1), **cell} for n in range(30)]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = tmp_path / "run"
    task = [f"--task.env=dataset:{out}", f"--task.reward={REWARD}"]
    size = ["--max_steps=1", "--schedule.groups_per_step=2", "--schedule.group_size=2"]
    short = ["--engine.max_completion_tokens=4", "--eval.tasks=0", "--engine.max_context=512"]
    where = ["--runs", str(tmp_path), "--name", "run"]
    assert called("train", "llm", "--model=base", *task, *size, *short, *where) == 0
    counted = rates_of(run)
    assert set(counted) == {Cell(**cell)} and counted[Cell(**cell)][1] >= 4
    assert called(*words, *small, "--rates", str(run)) == 2
    assert "drafts of another plan, seed, options or rates" in capsys.readouterr().err
