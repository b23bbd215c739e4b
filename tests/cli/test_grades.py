"""Test `eval --k`: avg@k, pass@k and pass^k, and their intervals.

pass@k and pass^k are the unbiased estimates: the means over all choices of k attempts. Intervals
are labelled as Wilson's or bootstrap. Failed attempts count. Attempts at one task differ only in
the replies. Several environments have a result each.
"""

import asyncio
import re
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.test_cli import complaint
from tests.rollout.test_episode import END, TASK, LetterChat, Tasks, awake, over, says
from unstale.cli import evaluate as evaluate_module
from unstale.cli import main
from unstale.cli.grades import EvalResult, TaskMean, mean_over_tasks, pass_all, pass_at
from unstale.config import EngineConfig, RolloutConfig
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.observe.statistics import wilson
from unstale.records import TurnLimit
from unstale.rollout.episode import Rollout
from unstale.rollout.evaluation import FinishedEpisodes, attempts_at, evaluate
from unstale.rollout.generator import Generator


@pytest.mark.parametrize(
    ("k", "attempts", "successes", "chance"),
    [
        (1, 4, 1, 1 / 4),
        (2, 4, 1, 1 - 3 / 6),  # three of six pairs miss the one success
        (3, 4, 1, 1 - 1 / 4),
        (2, 4, 2, 1 - 1 / 6),
        (2, 4, 3, 1.0),
        (4, 4, 0, 0.0),
        (8, 64, 1, 1 / 8),
    ],
)
def test_the_chance_that_one_of_k_succeeds(
    k: int, attempts: int, successes: int, chance: float
) -> None:
    assert pass_at(k, attempts=attempts, successes=successes) == pytest.approx(chance)


def test_it_is_the_mean_over_all_choices_of_k_attempts() -> None:
    for successes in range(7):
        outcomes = [attempt < successes for attempt in range(6)]
        for k in range(1, 7):
            choices = [any(chosen) for chosen in combinations(outcomes, k)]
            assert pass_at(k, attempts=6, successes=successes) == pytest.approx(
                sum(choices) / len(choices)
            )
            choices = [all(chosen) for chosen in combinations(outcomes, k)]
            assert pass_all(k, attempts=6, successes=successes) == pytest.approx(
                sum(choices) / len(choices)
            )


@pytest.mark.parametrize(
    ("k", "attempts", "successes"), [(0, 4, 1), (5, 4, 1), (2, 4, 5), (2, 4, -1)]
)
def test_more_than_was_attempted_cannot_be_told(k: int, attempts: int, successes: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs"):
        pass_at(k, attempts=attempts, successes=successes)
    with pytest.raises(ValueError, match=rf"pass\^{k} needs"):
        pass_all(k, attempts=attempts, successes=successes)


def test_a_grade_is_a_mean_over_tasks() -> None:
    grade = EvalResult((2, 1, 0, 0), attempts=2)
    assert (grade.tasks, grade.success) == (4, 3 / 8)
    assert grade.average.interval == "bootstrap" and grade.average.low < 3 / 8 < grade.average.high
    both = grade.passed(2)  # with k attempts out of k a task is passed or not
    assert (both.value, both.interval) == (1 / 2, "Wilson") and (both.low, both.high) == wilson(
        1 / 2, 4
    )
    assert grade.passed(1) == grade.passed_all(1) == grade.average
    assert grade.passed_all(2).value == 1 / 4


def test_each_environment_has_its_result_if_there_are_several() -> None:
    graded = [True, False, None, True, True, True]
    envs = ["retail", "retail", "airline", "airline", "retail", "retail"]
    grade = EvalResult.of(graded, 2, envs)
    assert grade.successes == (1, 1, 2) and grade.failed == 1
    assert grade.by_env == {
        "retail": EvalResult((1, 2), attempts=2),
        "airline": EvalResult((1,), attempts=2, failed=1),
    }
    row = grade.as_json([2])
    assert row["by_env"]["retail"]["avg@2"].value == 3 / 4
    assert row["by_env"]["airline"]["result"] == {"successes": (1,), "attempts": 2, "failed": 1}
    assert row["pass@2"].value == 1 and row["pass^2"].value == pytest.approx(1 / 3)
    assert grade.table([2]).row_count == 9
    assert not EvalResult.of(graded, 2, ["retail"] * 6).by_env


def test_the_result_has_the_mean_turns_and_tokens_that_a_limit_saves() -> None:
    async def evaluated(limit: TurnLimit | None) -> EvalResult:
        engine = await awake(ScriptedEngine(lambda tokens, params: [ord("a"), END]))
        turns = [says("hi"), says("more"), says("more"), over(1.0)]
        rollout = Rollout(
            Generator(engine, LetterChat(), EngineConfig()), Tasks(turns, [*turns]), RolloutConfig()
        )
        rollout.turn_limit = limit
        finished = FinishedEpisodes()
        await evaluate(
            rollout, [TASK] * 2, seed=0, progress=lambda *_, **__: None, finished=finished
        )
        means = finished.means(attempts_at([TASK] * 2))
        return replace(EvalResult.of([True, True], 2), **means)

    for limit, turns in ((None, 3), (TurnLimit(2), 2)):
        result = asyncio.run(evaluated(limit))
        row = result.as_json([1])
        assert (row["turns_mean"], row["tokens_mean"]) == (turns, 2 * turns)
        console = Console(file=StringIO(), width=200)
        console.print(result.table([1]))
        assert isinstance(console.file, StringIO)
        for name, value in (("turns", turns), ("tokens", 2 * turns)):
            assert re.search(rf"mean {name}\W+{value}\W", console.file.getvalue())
    assert "turns_mean" not in EvalResult((1,)).as_json([1]), "it is not known"


def test_an_attempt_that_failed_is_no_success_and_not_passed_over_in_silence() -> None:
    grade = EvalResult.of([True, None, False, True, None, None], 2)
    assert grade == EvalResult((1, 1, 0), attempts=2, failed=3) and grade.success == 1 / 3
    assert str(grade) == "3 tasks, 2 attempts each\n3 of 6 failed and count as no success"
    assert str(EvalResult.of([False, True], 1)) == "2 tasks, 1 attempts each"


def test_wilson_has_a_width_where_nothing_was_seen() -> None:
    assert wilson(0.0, 4) == pytest.approx((0.0, 3.841459 / 7.841459))
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert mean_over_tasks([0.25] * 4) == TaskMean(0.25, *wilson(0.25, 4), "Wilson")


def test_the_bootstrap_draws_tasks() -> None:
    assert mean_over_tasks([0.0, 0.5]) == TaskMean(
        0.25, 0.0, 0.5, "bootstrap"
    )  # means 0, 1/4, 1/2 with chances 1/4, 1/2, 1/4
    many = mean_over_tasks([0.25, 0.75] * 200)  # standard error 1/80
    assert (many.low, many.high) == pytest.approx((0.5 - 1.96 / 80, 0.5 + 1.96 / 80), abs=2e-3)
    assert many == mean_over_tasks([0.25, 0.75] * 200)


def test_attempts_at_a_task_differ_in_their_replies_alone() -> None:
    def attempt(times: int) -> tuple[list[int], list[int], list[bool | None]]:
        noise: list[int] = []
        tasks = Tasks(*[[says("hi"), over(float(number == 1))] for number in range(times)])

        def speak(tokens: object, params: SamplingParams) -> list[int]:
            noise.append(params.seed)
            return [END]

        async def main() -> list[bool | None]:
            rollout = Rollout(
                Generator(await awake(ScriptedEngine(speak)), LetterChat(), EngineConfig()),
                tasks,
                RolloutConfig(),
            )
            return await evaluate(rollout, [TASK] * times, seed=0, progress=lambda *_, **__: None)

        return noise, tasks.seeds, asyncio.run(main())

    noise, seeds, graded = attempt(3)
    assert len(set(noise)) == 3 and len(set(seeds)) == 1 and graded == [False, True, False]
    assert attempt(1)[0] == noise[:1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--k", "0"), "--k: must be between 1 and 10000, got 0"),
        (("--k", "1", "8", "--attempts", "4"), "--k must be at most --attempts (4), got 1 8"),
        (("--k", "2", "--attempts", "-1"), "--attempts: must be between 1 and 10000, got -1"),
    ],
)
def test_k_is_at_most_what_is_attempted(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert says in complaint(capsys, "eval", "folder", "retail", *words)


def test_eval_shows_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Path, int]] = []

    def grade(trained: Path, config: object, *, attempts: int, **_: object) -> EvalResult:
        asked.append((trained, attempts))
        return EvalResult((4, 1, 0, 0), attempts, failed=3)

    monkeypatch.setattr(evaluate_module, "evaluate", grade)
    with pytest.raises(SystemExit) as end:
        main.main(["eval", "base", "retail", "--k", "4", "2", "1"])
    assert end.value.code in (0, None) and asked == [(Path("base"), 4)]
    lines = capsys.readouterr().out.splitlines()
    shown = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert list(shown) == ["avg@4", "pass@2", "pass^2", "pass@4", "pass^4"]
    assert "4 tasks, 4 attempts each" in "".join(lines)
    assert "3 of 16 failed and count as no success" in "".join(lines)
    assert "31.2%" in shown["avg@4"] and "bootstrap" in shown["avg@4"]
    assert "37.5%" in shown["pass@2"]  # (1 + 1/2 + 0 + 0) / 4
    assert "25.0%" in shown["pass^2"] and "25.0%" in shown["pass^4"]  # (1 + 0 + 0 + 0) / 4
    assert (
        "50.0%" in shown["pass@4"]
        and "15.0% to 85.0%" in shown["pass@4"]
        and "Wilson" in shown["pass@4"]
    )
