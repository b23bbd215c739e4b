"""Test attempts in named stages, on small repositories with an issue, tests and hidden tests.

A scripted policy takes three decisions, each right with probability 0.5: the line of the fault, the
new line, and a last change. A judge of pairs is right in 80% of them.
"""

import asyncio
import json
import re
from collections.abc import Sequence
from io import StringIO
from math import sqrt
from pathlib import Path
from random import Random
from statistics import NormalDist
from typing import Any

import pytest

from examples.terminal_tasks import OPERATORS, MadeTasks, _body, train_repairs
from tests.support.groups import TASK
from tests.techniques.test_correctors import server
from unstale.builders import build_sampler
from unstale.cli.evaluate import HeldOut
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.durability.console import Console
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, ToolCall, Turn
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.registry import held_out_tasks
from unstale.records import ContextPiece, Sampled, Task, Trajectory
from unstale.research.attempt import AttemptOptions, attempt_all
from unstale.research.attempt_result import AttemptResult
from unstale.research.collect import CollectedTasks
from unstale.research.scores import ServedScorer
from unstale.research.stages import StagedTasks, Stages, passed

STAGES = Path(__file__).parents[2] / "examples" / "repair_stages.toml"
NUM_TASKS, ATTEMPTS = 8, 4
ACCURACY = 0.8
"""Probability with which the judge prefers the right one of two attempts."""
ISSUE = re.compile(r"(\w+) in shop\.py must return ([a-z ]+)\.")


def decisions(text: str) -> tuple[int | None, str | None, bool]:
    """Return the line and its new text in an attempt, and True if its last change is harmless."""
    line = re.search(r"echo (\d+) > /tmp/fault", text)
    patch = re.search(r"\d+c(\\+)( return [^']+)'", text)
    return int(line[1]) if line else None, patch[2] if patch else None, "echo '('" not in text


class Policy:
    """A policy that takes each decision right with probability 0.5."""

    def __init__(self, faults: dict[str, int]) -> None:
        self._faults = faults

    def reply(self, text: str, random: Random) -> Message:
        name, kind = ISSUE.findall(text)[0]
        is_right = random.random() < 0.5
        if "Now check" in text:
            if "# checked" in text:
                return Message("assistant", "Done.")
            return bash("true # checked" if is_right else "echo '(' >> shop.py # checked")
        if "Now change" in text:
            others = [each for each in OPERATORS if each != kind]
            body = _body(OPERATORS[kind if is_right else random.choice(others)][0])
            return bash(f"sed -i '{decisions(text)[0]}c\\{body}' shop.py")
        line = self._faults[name, kind]
        return bash(f"echo {line if is_right else line % 6 + 2} > /tmp/fault")


def bash(command: str) -> Message:
    return Message("assistant", "", (ToolCall("bash", {"command": command}),))


class Judge:
    """A judge whose score of an attempt is higher if all of its decisions are right so far."""

    def __init__(self, faults: dict[Any, int]) -> None:
        self._faults = faults
        self.stages: set[str] = set()

    async def score(self, task: str, replies: list[str], stage: str) -> float:
        self.stages.add(stage)
        text = "".join(replies)
        name, kind = ISSUE.findall(task)[0]
        line, body, is_harmless = decisions(text)
        is_right = line == self._faults[name, kind] and is_harmless
        is_right &= body in (None, _body(OPERATORS[kind][0]))
        gap = sqrt(2) * NormalDist().inv_cdf(ACCURACY)
        return gap * is_right + Random(text + task).gauss(0, 1)


def attempt_issues(tmp_path: Path) -> tuple[AttemptResult, CollectedTasks, Judge]:
    """Attempt issues of repositories with the scripted policy, and search in stages."""
    values: dict[str, Any] = {
        "task.env": "examples.terminal_tasks:issues",
        "eval.tasks": NUM_TASKS,
    }
    values |= {"engine.max_context": 2048, "sft.steps": 0}
    config = override(train_repairs(), values)
    faults: dict[Any, int] = {}

    def script(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        chat = generator.chat
        random = Random(f"{params.seed} {len(tokens)}")
        reply = Policy(faults).reply(chat.text(tokens, whole=True), random)
        return chat.encode_reply(reply)

    policy, taskset, generator = build_sampler(config, ScriptedEngine(script))
    assert isinstance(taskset, MadeTasks)
    tasks = held_out_tasks(taskset, NUM_TASKS)
    for task in tasks:
        solved = taskset.solved(task)
        found = re.search(r"sed -i '(\d+)c", solved.commands[1][0])
        assert found
        faults[ISSUE.findall(solved.task.instruction)[0]] = int(found[1])
    stages: Any = StagedTasks(taskset, Stages.read(STAGES))
    kept: Any = CollectedTasks(stages)
    repeated = [task for task in tasks for _ in range(ATTEMPTS)]
    held_out = HeldOut(config, policy, kept, generator, repeated)
    judge = Judge(faults)
    options = AttemptOptions(attempts=ATTEMPTS, beam=2, stages=STAGES)
    result = attempt_all(held_out, options, judge=judge, console=Console(file=StringIO()))
    return result, kept, judge


@pytest.mark.costly
def test_a_search_by_scores_and_tests_solves_more_issues_than_a_choice_at_the_end(
    tmp_path: Path,
) -> None:
    """Hidden tests grade, of equal tokens. The search has not seen them."""
    result, kept, judge = attempt_issues(tmp_path)
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["search with 3 stages"] >= rows["best score of 4 attempts"] + 0.2
    assert rows["best score of 4 attempts"] > rows["one attempt"]
    assert result.tokens["search"] == pytest.approx(result.tokens["attempts"], rel=0.1)
    assert judge.stages == {"", "locate", "patch", "verify"}
    assert len(result.judge) > 1 and "judge" in result.judge_text(), "it is measured on pairs"
    assert set(kept.begun.values()) == {ATTEMPTS}, "candidates of the search are no attempts"
    conversations = [json.loads(row)["messages"] for row in kept.rows()]
    assert conversations
    for messages in conversations:
        (issue, _), (found, _), (changed, _) = (
            (each["content"], each["role"]) for each in messages[1:6:2]
        )
        assert "First find the fault." in issue and "Now change this line." in found
        assert "Now check the change" in changed
        assert messages[-1]["content"] == "Done."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no stages: write ..stage.. with a name for each"),
        ("[[stage]]\nturns = 1", "stage 1 has no name"),
        ('[[stage]]\nname = "a"\nturn = 1', "stage 1 has the field 'turn'; allowed: name, turns"),
        ('[[stage]]\nname = "a"\nturns = 0', "stage 1: turns cannot be 0"),
        ('[[stage]]\nname = "a"\nrun = 3', "stage 1: run cannot be 3"),
    ],
)
def test_files_without_usable_stages_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "stages.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Stages.read(file)


def test_commands_of_stages_need_a_sandbox() -> None:
    tasks: Any = CalculatorTasks()
    staged = StagedTasks(tasks, Stages.read(STAGES))
    with pytest.raises(ConfigError, match="the environments of calculator have no method check"):
        staged.require(next(iter(tasks.held_out(1))))
    with pytest.raises(ConfigError, match="--search and --stages both divide"):
        AttemptOptions(search=2, stages=STAGES).check(tasks)
    with pytest.raises(ConfigError, match="--stages needs --votes above 0"):
        AttemptOptions(stages=STAGES).check(tasks)
    with pytest.raises(ConfigError, match="replaces --votes and --weigh"):
        AttemptOptions(votes=1).check(tasks, scores=True)
    AttemptOptions(stages=STAGES).check(tasks, scores=True)


class Shop:
    """An environment with a file that is right until a reply breaks it."""

    name, tools = "shop", ()

    def env(self, task: Task, seed: int) -> "Shop":
        self.is_right = True
        return self

    async def begin(self) -> Turn:
        return Turn((Message("user", "Repair it."),))

    async def step(self, reply: Message) -> Turn:
        self.is_right &= not any("break" in str(each.arguments) for each in reply.tool_calls)
        return Turn((Message("user", "ok"),), done=not reply.tool_calls)

    async def check(self, command: str) -> bool:
        return self.is_right


@pytest.mark.parametrize(
    ("replies", "result"),
    [
        ([bash("find"), bash("patch")], 1.0),
        ([bash("find"), bash("break")], 0.0),
        ([bash("find"), bash("patch"), bash("break")], 0.0),  # ended by a limit
        ([bash("find"), bash("patch"), bash("look")], 0.0),  # nobody knows what it did
        ([bash("find"), bash("patch"), bash("look"), Message("assistant", "Done.")], 1.0),
        ([bash("find"), bash("patch"), bash("break"), Message("assistant", "Done.")], 0.0),
    ],
)
def test_the_result_of_a_command_counts_only_if_nothing_came_after_it(
    replies: list[Message], result: float
) -> None:
    async def play() -> dict[str, float]:
        env = StagedTasks(Shop(), Stages.read(STAGES)).env(TASK, 0)  # type: ignore[arg-type]
        await env.begin()
        facts: dict[str, float] = {}
        for reply in replies:
            facts |= (await env.step(reply)).facts
        return facts

    said = (ContextPiece((1,)), Sampled((2,), (-1.0,), version=0))
    attempt = Trajectory(said, {}, "max_turns", TASK, 0, 0, facts=asyncio.run(play()))
    assert passed(attempt) == result


def test_a_served_judge_scores_a_stage() -> None:
    with server('{"reason": "the right file", "score": 7}', "I cannot say", "no", "no") as (
        url,
        asked,
    ):
        judge = ServedScorer(f"{url}/v1", "prm")
        assert asyncio.run(judge.score("fix it", ["line 4"], "locate")) == 0.7
        assert asyncio.run(judge.score("fix it", ["line 9"], "")) is None
    shown = json.loads(asked[0]["messages"][1]["content"])
    assert shown == {"task": "fix it", "attempt": "line 4", "stage": "locate"}
    assert len(asked) == 4, "an answer without a grade is asked for again"


def test_stages_of_equal_length_have_no_commands() -> None:
    stages = Stages.plain(3, 2)
    assert stages.ends == (2, 4, 6) and not stages.runs and stages.last_run == ""
