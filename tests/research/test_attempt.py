"""Test `unstale attempt`: votes over several attempts, judged votes, and further attempts.

The figures are those of a tournament of 8 attempts that succeed with probability 0.3.
"""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from math import comb
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.rollout.test_episode import END, TASK, LetterChat, Tasks, says
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.builders import build_sampler
from unstale.builders.policy import load_policy
from unstale.builders.sampling import build_chat
from unstale.cli import session
from unstale.cli.evaluate import HeldOut
from unstale.cli.main import main
from unstale.config import ConfigError, EngineConfig, RolloutConfig
from unstale.config.options import override
from unstale.durability.console import Console
from unstale.durability.journal import Journal
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import Message, Turn
from unstale.envs.calculator import CalculatorTasks, calculate
from unstale.envs.references import load_references
from unstale.envs.registry import held_out_tasks
from unstale.recipes import RECIPES
from unstale.records import ContextPiece, Sampled, Trajectory
from unstale.research.attempt import (
    COMPARE,
    CONCLUSIONS,
    GO_ON,
    PLAN,
    SUMMARISE,
    AttemptOptions,
    attempt,
    attempt_all,
)
from unstale.research.attempt_result import PLANNED, AttemptResult
from unstale.research.collect import CollectedTasks
from unstale.research.quality_head import QualityHead
from unstale.research.search import StagedAttempts, beam_search
from unstale.research.served_writer import Writer
from unstale.research.techniques.live_tree import ForecastTree
from unstale.research.techniques.tree import TreeConfig
from unstale.research.votes import by_majority, by_tournament, judge_record
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.signals import Signals


def quiet() -> Console:
    return Console(file=StringIO())


P, N = 0.3, 8
RUNS = 250
"""Number of tournaments for each number of right attempts."""


def chosen_success(*, judge: float, votes: int) -> tuple[float, float, float]:
    """Return the success of the chosen attempt, of a vote and of a comparison of right and wrong.

    `judge` is the probability with which a vote on a right and a wrong attempt names the right one.
    """
    random = Random(57)
    success, of_votes, of_winners = 0.0, [], []

    for num_right in range(N + 1):
        wins = 0
        for _ in range(RUNS):
            right = [number < num_right for number in random.sample(range(N), N)]

            async def ask(attempts: Sequence[int], vote: int, right: list[bool] = right) -> int:
                one, other = attempts
                is_right = right[one] == right[other] or random.random() < judge
                return one if right[one] == is_right else other

            choice = asyncio.run(
                by_tournament(range(N), ask, votes=votes, group=2, random=Random(random.random()))
            )
            assert sorted(choice.ranking) == list(range(N))
            assert len(choice.comparisons) == N - 1
            assert {len(each.votes) for each in choice.comparisons} == {votes}
            wins += right[choice.ranking[0]]
            if record := judge_record(choice.comparisons, right):
                of_votes.append(record.votes)
                of_winners.append(record.winners)
        success += comb(N, num_right) * P**num_right * (1 - P) ** (N - num_right) * wins / RUNS
    return success, sum(of_votes) / len(of_votes), sum(of_winners) / len(of_winners)


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(
    ("judge", "votes", "expected"),
    [(0.8, 1, 0.720), (0.8, 8, 0.914), (0.5, 1, 0.300), (0.5, 8, 0.300), (1.0, 1, 0.942)],
)
def test_a_tournament_gains_what_its_judge_is_worth(
    judge: float, votes: int, expected: float
) -> None:
    success, of_votes, of_winners = chosen_success(judge=judge, votes=votes)
    assert success == pytest.approx(expected, abs=0.02)
    assert of_votes == pytest.approx(judge, abs=0.02)
    assert of_winners > judge + 0.1 if votes == 8 and judge == 0.8 else of_winners > judge - 0.03
    if judge == 1:
        assert success == pytest.approx(1 - (1 - P) ** N), "the perfect judge reaches pass@8"


def test_larger_groups_and_a_number_that_is_no_power_leave_one_attempt() -> None:
    async def largest(attempts: Sequence[int], vote: int) -> int:
        return max(attempts)

    for number, group in ((7, 3), (5, 2), (6, 6), (1, 2)):
        choice = asyncio.run(
            by_tournament(range(number), largest, votes=1, group=group, random=Random(0))
        )
        assert choice.ranking[0] == number - 1
        assert sorted(choice.ranking) == list(range(number))


def test_a_vote_that_names_none_is_no_vote_and_counts_against_the_judge() -> None:
    async def ask(attempts: Sequence[int], vote: int) -> int | None:
        return 1 if vote == 0 else None

    choice = asyncio.run(by_tournament([0, 1], ask, votes=4, group=2, random=Random(0)))
    assert choice.ranking == (1, 0)
    record = judge_record(choice.comparisons, [False, True])
    assert record is not None
    assert (record.votes, record.winners, record.chance) == (0.25, 1.0, 0.5)
    assert judge_record(choice.comparisons, [False, False]) is None
    failed = judge_record(choice.comparisons, [None, True])
    assert failed == record, "a failed episode is no success"


def test_the_majority_is_the_answer_given_most_often() -> None:
    answers = ["7", "", "8", "8", "7", "8", ""]
    choice = by_majority(answers, Random(0))
    assert [answers[number] for number in choice.ranking] == ["8", "8", "8", "7", "7", "", ""]
    firsts = {by_majority(["1", "2"], Random(seed)).ranking[0] for seed in range(20)}
    assert firsts == {0, 1}, "ties are broken at random"


Write = Callable[[str, Random], str]
"""A function that returns the reply to a prompt, given as text."""


def attempt_calculator(  # noqa: PLR0913 - what may choose, and what is kept
    write: Write,
    options: AttemptOptions,
    num_tasks: int = 6,
    *,
    head: QualityHead | None = None,
    judge: Writer | None = None,
    kept: CollectedTasks | None = None,
    signals: Callable[[Sequence[int]], Signals] | None = None,
    settings: Mapping[str, int] = MappingProxyType({"engine.max_context": 2048}),
) -> AttemptResult:
    """Run the procedure on held-out tasks of the calculator, with a scripted policy."""
    config = override(RECIPES["calculator"](), {"eval.tasks": num_tasks, **settings})

    def script(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        chat = generator.chat
        text = write(chat.text(tokens, whole=True), Random(params.seed))
        return [*chat.encode(text), chat.stop_tokens[0]]

    policy, taskset, generator = build_sampler(config, ScriptedEngine(script, signals=signals))
    tasks = held_out_tasks(taskset, num_tasks)
    repeated = [task for task in tasks for _ in range(options.attempts)]
    if kept:
        kept.inner = taskset
    used: Any = kept or taskset
    held_out = HeldOut(config, policy, used, generator, repeated)
    return attempt_all(held_out, options, head=head, judge=judge, console=quiet())


def right_answer(text: str) -> str:
    return str(calculate(re.findall(r"What is ([-+*\d ]+)\?", text)[-1]))


def guess(text: str, random: Random) -> str:
    """Return the right answer with probability 0.4, and otherwise one of many wrong ones."""
    return right_answer(text) if random.random() < 0.4 else str(random.randrange(10**6, 10**7))


def test_wrong_answers_that_differ_lose_against_right_ones() -> None:
    result = attempt_calculator(guess, AttemptOptions(attempts=6))
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["one attempt"] < 0.7
    pairs = sum(count >= 2 for count in result.attempts.successes) / 6
    assert rows["majority of 6 answers"] >= pairs, "two equal answers are the most frequent"
    assert rows["pass@6"] >= rows["majority of 6 answers"]
    assert not result.judge and set(result.tokens) == {"attempts"}


def entropies(*values: float) -> Signals:
    """Return the signals of tokens with these entropies."""
    n = len(values)
    likeliest = np.tile(np.array([[7, 9]], np.int32), (n, 1))
    logp = np.full((n, 2), -0.7, np.float32)
    return Signals(np.array(values, np.float32), likeliest, logp)


def test_answers_are_weighed_by_the_forecast_that_the_run_learned() -> None:
    """Wrong attempts give the same answer and are unsure, as the failures of the run were."""
    tree = ForecastTree(TreeConfig(branch="none", prune="mixed", roots=4, every=8))
    seen = [
        Trajectory(
            (ContextPiece((5,)), Sampled((7,) * 4, (-1.0,) * 4, 0, signals=entropies(*[h] * 4))),
            {"r": success},
            "done",
            TASK,
            0,
            number,
        )
        for number in range(20)
        for h, success in ((0.1, 1.0), (2.0, 0.0))
    ]
    assert tree.learn(seen) == 40

    def often_wrong(text: str, random: Random) -> str:
        return "0000000" if random.random() < 0.65 else right_answer(text)

    def unsure(prefix: Sequence[int]) -> Signals:
        zero = [token == prefix[-1] for token in prefix[-2:]]
        return entropies(3.0 if len(zero) == 2 and all(zero) else 0.05)

    result = attempt_calculator(
        often_wrong, AttemptOptions(attempts=8), head=QualityHead(tree), signals=unsure
    )
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["weighted majority of 8 answers"] == rows["pass@8"] == 1
    assert rows["majority of 8 answers"] < 0.5


@pytest.mark.usefixtures("forked_children")
def test_the_forecast_is_that_of_a_run_which_pruned_by_it(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    plain = tiny_run(tmp_path / "model", tmp_path, max_steps=2)
    plain = replace(plain, schedule=replace(plain.schedule, group_size=4))
    options = {"techniques": "tree tree_advantage", "tree.branch": "none", "tree.prune": "mixed"}
    config = override(plain, options)
    run = session.train(config, console=quiet()).folder
    head = QualityHead.of(run, config)
    with Journal.read(run) as journal:
        chances = {head.chance(each.trajectory) for each in journal.trajectories()}
    assert len(chances) > 1 and all(0 < each < 1 for each in chances)
    with pytest.raises(ConfigError, match="--weigh needs a run that forecast the success"):
        QualityHead.of(run, plain)
    with pytest.raises(ConfigError, match="--weigh needs a run folder"):
        QualityHead.of(tmp_path / "model", config)


def test_a_judge_that_knows_reaches_the_ceiling_and_one_that_does_not_is_named() -> None:
    def judged(text: str, random: Random) -> str:
        if COMPARE[:30] not in text:
            return guess(text, random)
        shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
        answer = str(calculate(shown.pop("task")))
        return f"best: {next((name for name in shown if shown[name] == answer), 'A')}"

    options = AttemptOptions(attempts=4, votes=2)
    result = attempt_calculator(judged, options)
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["best by 2 votes on each pair"] == rows["pass@4"] > rows["one attempt"]
    assert result.judge_rows()["one vote of the judge"].value == 1
    assert "better than chance" in result.judge_text() and result.tokens["votes"] > 0
    gain = result.gain("best by 2 votes on each pair")
    assert gain is not None and gain.mean > 0

    def silent(text: str, random: Random) -> str:
        return "I cannot say" if COMPARE[:30] in text else guess(text, random)

    result = attempt_calculator(silent, options)
    assert result.unread == 1 and "not told apart from chance" in result.judge_text()


class Knows:
    """A served judge that knows the answer."""

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        shown = json.loads(messages[0].content.partition("\n\n")[2])
        answer = str(calculate(shown.pop("task")))
        return f"best: {next((name for name in shown if shown[name] == answer), 'A')}"


def test_another_model_may_judge() -> None:
    def never_compares(text: str, random: Random) -> str:
        assert COMPARE[:30] not in text
        return guess(text, random)

    options = AttemptOptions(attempts=4, votes=2)
    result = attempt_calculator(never_compares, options, judge=Knows())
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["best by 2 votes on each pair"] == rows["pass@4"] > rows["one attempt"]


def test_successes_at_tasks_that_also_failed_become_conversations(tmp_path: Path) -> None:
    kept = CollectedTasks(CalculatorTasks())
    first: list[str] = []

    def some_are_easy(text: str, random: Random) -> str:
        question = text[text.rindex("What is") :]
        first.append(question)
        return right_answer(text) if question == first[0] else guess(text, random)

    result = attempt_calculator(some_are_easy, AttemptOptions(attempts=6), kept=kept)
    counts = result.attempts.successes
    assert 6 in counts, "a task that always succeeds"
    rows = [json.loads(row) for row in kept.rows()]
    assert len(rows) == sum(0 < count < 6 for count in counts) > 0, "equal successes count once"
    for row in rows:
        *opening, reply = row["messages"]
        assert reply == {"role": "assistant", "content": right_answer(opening[-1]["content"])}
        assert row["tools"]
    file = tmp_path / "kept.jsonl"
    file.write_text("".join(f"{row}\n" for row in kept.rows()))
    policy = load_policy(RECIPES["calculator"]())
    chat = build_chat(RECIPES["calculator"](), policy.tokenizer, policy.ends, kept.inner)
    assert len(load_references(file, chat, max_tokens=2048)) == len(rows)


def test_attempts_that_never_end_count_as_attempts_that_did_not_succeed() -> None:
    """The only success of four attempts is kept, though the others were cut off."""
    opened: list[str] = []

    class Tasks(CalculatorTasks):
        async def __aenter__(self) -> None:
            opened.append("in")

        async def __aexit__(self, *error: object) -> None:
            opened.append("out")

    kept = CollectedTasks(Tasks())

    async def attempts() -> None:
        async with kept:
            task = next(iter(kept.inner.held_out(1)))
            for number in range(4):
                env = kept.env(task, seed=0)
                turn = await env.begin()
                if not number:
                    await env.step(Message("assistant", right_answer(turn.messages[-1].content)))

    asyncio.run(attempts())
    assert len(kept.rows()) == 1 and opened == ["in", "out"]


def test_a_further_attempt_reads_the_conclusions_of_the_best() -> None:
    def reads(text: str, random: Random) -> str:
        if CONCLUSIONS not in text:
            return guess(text, random)
        notes = re.findall(r"^\d\. (\S+)$", text, re.MULTILINE)
        assert len(notes) == 3
        return max(notes, key=notes.count)

    result = attempt_calculator(reads, AttemptOptions(attempts=6, distil=3))
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["answer from 3 attempts"] == rows["majority of 6 answers"] > rows["one attempt"]
    assert result.tokens["distilled"] > 0


@pytest.mark.parametrize("plan", ["", "Use the answer."])
def test_an_empty_plan_changes_nothing_and_one_that_helps_is_a_paired_gain(plan: str) -> None:
    def plans(text: str, random: Random) -> str:
        if PLAN[:30] in text:
            return plan
        return right_answer(text) if "Use the answer." in text else guess(text, random)

    result = attempt_calculator(plans, AttemptOptions(attempts=2, plan=True))
    if not plan:
        assert tuple(result.chosen[PLANNED]) == result.first and result.gain(PLANNED) is None
    else:
        assert all(result.chosen[PLANNED]) and not all(result.first)
        gain = result.gain(PLANNED)
        assert gain is not None and gain.mean == result.first.count(False) / len(result.first)


def test_a_judge_may_read_summaries_that_the_policy_writes() -> None:
    def summarises(text: str, random: Random) -> str:
        if SUMMARISE[:30] in text:
            shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
            return "sound" if str(calculate(shown["task"])) in shown["attempt"] else "unsound"
        if COMPARE[:30] in text:
            shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
            return next((f"best: {name}" for name in shown if shown[name] == "sound"), "best: A")
        return guess(text, random)

    result = attempt_calculator(summarises, AttemptOptions(attempts=4, votes=1, summaries=True))
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["best by 1 vote on each pair"] == rows["pass@4"] > rows["one attempt"]


@pytest.mark.parametrize("votes", [1, 0])
def test_a_further_attempt_reads_summaries(votes: int) -> None:
    """Those that were compared, or without votes those of the best attempts alone."""
    read: list[str] = []

    def summarises(text: str, random: Random) -> str:
        if SUMMARISE[:30] in text:
            return "it added the numbers and failed"
        if COMPARE[:30] in text:
            return "best: A"
        if CONCLUSIONS in text:
            read.extend(re.findall(r"^\d\. (.+?)(?:<\|im_end\|>)?$", text, re.MULTILINE))
        return guess(text, random)

    def counts(text: str, random: Random) -> str:
        summarised.append(SUMMARISE[:30] in text)
        return summarises(text, random)

    summarised: list[bool] = []
    options = AttemptOptions(attempts=4, votes=votes, summaries=True, distil=2)
    result = attempt_calculator(counts, options)
    assert len(read) == 2 * len(result.first)
    assert {*read} == {"it added the numbers and failed"}
    assert sum(summarised) == (4 if votes else 2) * len(result.first)


@pytest.mark.parametrize("helps", [True, False])
def test_new_populations_read_the_best_of_the_one_before_and_are_chosen_from(
    *, helps: bool
) -> None:
    """An attempt that reads a right answer repeats it. So one right answer among those that a
    population reads makes the next one right.
    """
    readers: list[int] = []

    def reads(text: str, random: Random) -> str:
        if CONCLUSIONS not in text:
            return guess(text, random)
        assert text.count(CONCLUSIONS) == 1, "only those of the population before"
        notes = re.findall(r"^\d\. (\S+)$", text, re.MULTILINE)
        readers.append(len(notes))
        right = right_answer(text)
        return right if helps and right in notes else "unknown"

    result = attempt_calculator(reads, AttemptOptions(attempts=4, distil=4, rounds=2))
    rows = {name: row.value for name, row in result.rows().items()}
    assert readers == [4] * (2 * 4 * 6) and "answer from 4 attempts" not in rows
    for name in ("population 2", "population 3"):
        expected = rows["pass@4"] if helps else 0
        assert rows[f"majority of 4 answers, {name}"] == expected
        assert rows[f"one attempt, {name}"] == rows[f"pass@4, {name}"] == expected
    assert 0 < rows["one attempt"] < rows["pass@4"]
    assert result.tokens["population 2"] > 0 and {"attempts", "population 3"} <= {*result.tokens}


@pytest.mark.parametrize(("context", "in_parts"), [(768, True), (2048, False)])
def test_a_summary_is_of_the_whole_attempt(context: int, *, in_parts: bool) -> None:
    """Each part of a long attempt is read once, with the summary of the parts before it."""
    long = "".join(f"{number}," for number in range(80))
    read: list[list[str]] = []

    def summarises(text: str, random: Random) -> str:
        if SUMMARISE[:30] not in text:
            return "best: A" if COMPARE[:30] in text else long
        shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
        if "earlier" in shown:
            assert GO_ON in text and shown["earlier"] == f"summary of {len(read[-1])}"
        else:
            assert GO_ON not in text
            read.append([])
        read[-1].append(shown["attempt"])
        return f"summary of {len(read[-1])}"

    attempt_calculator(
        summarises,
        AttemptOptions(attempts=2, votes=1, summaries=True),
        num_tasks=1,
        settings={"engine.max_context": context, "engine.max_completion_tokens": 400},
    )
    assert len(read) == 2
    for parts in read:
        assert (len(parts) > 1) == in_parts and long in "".join(parts)


def searched(judge: float, runs: int = 400) -> tuple[float, float]:
    """Return the success of a search and of a choice at the end, of as many tokens.

    A candidate is a list of three stages, each of which is right with probability 0.5.
    """
    random = Random(5)

    async def rank(candidates: Sequence[list[bool]], stage: int) -> Sequence[list[bool]]:
        async def ask(attempts: Sequence[int], vote: int) -> int:
            one, other = attempts
            good = [all(candidates[each]) for each in attempts]
            is_right = good[0] == good[1] or random.random() < judge
            return one if good[0] == is_right else other

        numbers = range(len(candidates))
        chance = Random(random.random())
        choice = await by_tournament(numbers, ask, votes=1, group=2, random=chance)
        return [candidates[number] for number in choice.ranking]

    async def extend(kept: list[bool] | None, share: int, stage: int) -> list[list[bool]]:
        return [[*(kept or []), random.random() < 0.5] for _ in range(share)]

    async def whole(kept: list[bool] | None, share: int, stage: int) -> list[list[bool]]:
        return [[random.random() < 0.5 for _ in range(3)] for _ in range(share)]

    async def run() -> tuple[float, float]:
        wins = [0, 0]
        for _ in range(runs):
            best = await beam_search(extend, rank, stages=3, width=4, beam=2)
            end = await beam_search(whole, rank, stages=1, width=4, beam=1)
            wins[0] += all(best or [False])
            wins[1] += all(end or [False])
        return wins[0] / runs, wins[1] / runs

    return asyncio.run(run())


def test_a_search_gains_more_than_a_choice_at_the_end_of_as_many_tokens() -> None:
    search, end = searched(0.8)
    assert search > end + 0.1, (search, end)
    assert searched(0.5)[0] == pytest.approx(0.125, abs=0.05), "a judge at chance gains nothing"


def test_a_search_is_a_choice_of_the_procedure() -> None:
    """An attempt that has ended is a candidate of the later stages, too."""

    def searches(text: str, random: Random) -> str:
        if COMPARE[:30] in text:
            shown = json.loads(text[text.index("{") : text.rindex("}") + 1])
            answer = str(calculate(shown.pop("task")))
            right = (name for name in shown if shown[name].rstrip().endswith(answer))
            return f"best: {next(right, 'A')}"
        return guess(text, random)

    options = AttemptOptions(attempts=4, votes=1, search=2, beam=2)
    result = attempt_calculator(searches, options)
    rows = {name: row.value for name, row in result.rows().items()}
    assert rows["search with 2 stages"] >= rows["one attempt"]
    assert result.tokens["search"] > 0


def test_a_stage_goes_on_from_the_last_answer_of_a_kept_attempt() -> None:
    def script(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return [params.seed % 26 + ord("a"), END]

    tasks = Tasks(*([says("go "), says("on "), Turn((), done=True)] for _ in range(4)))
    engine = ScriptedEngine(script)
    chat: Any = LetterChat()
    generator = Generator(engine, chat, EngineConfig(max_context=64, max_completion_tokens=8))

    async def search() -> tuple[list[Trajectory], list[Trajectory]]:
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        rollout = Rollout(generator, tasks, RolloutConfig())
        made = StagedAttempts(rollout, TASK, 3, ends=(1, 2))
        first = await made.extend(None, 2, 1)
        last = await made.extend(first[1], 2, 2)
        assert await made.extend(last[0], 5, 2) == [last[0]], "it has ended"
        assert made.tokens == 2 * 2 + 2 * 2
        return [*first], [*last]

    first, last = asyncio.run(search())
    assert [each.stop for each in (*first, *last)] == ["max_turns"] * 2 + ["done"] * 2
    assert [each.num_turns for each in (*first, *last)] == [1] * 4
    for each in last:
        assert each.tokens[: len(first[1])] == first[1].tokens
    assert last[0].tokens != last[1].tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": 2}, "--search needs --votes above 0"),
        ({"attempts": 1}, "--attempts must be at least 2 to choose, got 1"),
        ({"group": 9}, "--group must be at most --attempts .8."),
        ({"summaries": True}, "--summaries has no effect without --votes, .* or --distil"),
        ({"rounds": 1}, "--rounds needs --distil above 0"),
        ({"distil": 9}, "--distil must be at most --attempts .8., got 9"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attempt_calculator(guess, AttemptOptions(**options), num_tasks=1)


def test_attempts_without_chance_are_refused() -> None:
    config = override(RECIPES["calculator"](), {"eval.tasks": 1, "eval.temperature": 0})
    with pytest.raises(ConfigError, match=r"eval.temperature must be above 0 .* would be the same"):
        attempt_all(HeldOut.of("base", config, 2), AttemptOptions(attempts=2), console=quiet())


def test_refused_attempts_leave_an_earlier_file_of_successes(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    kept.write_text("earlier\n")
    config = override(RECIPES["calculator"](), {"eval.tasks": 1, "eval.temperature": 0})
    with pytest.raises(ConfigError, match=r"eval\.temperature must be above 0"):
        attempt("base", config, AttemptOptions(attempts=2), collect=kept, console=quiet())
    assert kept.read_text() == "earlier\n"


def test_tasks_without_answers_need_a_judge() -> None:
    config = override(RECIPES["retail"](), {"eval.tasks": 1})
    with pytest.raises(ConfigError, match=r"retail have no answers .* set --votes"):
        attempt_all(HeldOut.of("base", config, 2), AttemptOptions(attempts=2), console=quiet())


def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.jsonl"
    words = [
        "attempt",
        "base",
        "retail",
        "--collect",
        str(kept),
        "--attempts",
        "2",
        "--votes",
        "1",
        "--eval.tasks",
        "2",
    ]
    with pytest.raises(SystemExit) as end:
        main([*words, "--json"])
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert set(result["success"]) == {"one attempt", "best by 1 vote on each pair", "pass@2"}
    assert result["tokens"]["votes"] > 0
    assert all("messages" in json.loads(row) for row in kept.read_text().splitlines())
