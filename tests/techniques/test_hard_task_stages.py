"""Test `hard_task_stages`: the tasks and sizes of each stage, and which hard tasks are solved."""

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest

from unstale.config import ConfigError, RunConfig, SelectionConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.research.techniques.hard_task_stages import HardTaskStages, HardTaskStagesConfig
from unstale.techniques.hooks import Draw, DrawContext, Outcome

SEEDS, TASKS, GROUPS = 20, 64, 8
NAMES = [f"{i:02}" for i in range(20)]


def outcome(task: str, *rewards: float) -> Outcome:
    return Outcome(task, 0, 0, rewards, 0, 10)


def ranked(**options: Any) -> HardTaskStages:
    """Return a sampler that has seen 20 tasks, whose success rises with their number."""
    sampler = HardTaskStages(HardTaskStagesConfig(steps=2, **options))
    sampler.observe([outcome(name, *[i / 20] * 50) for i, name in enumerate(NAMES)])
    return sampler


def context(number: int, seed: int = 0) -> DrawContext:
    return DrawContext(number, number // GROUPS + 1, Random(f"{seed}/{number}"), GROUPS)


def test_the_first_stage_draws_all_tasks_and_the_second_hard_ones() -> None:
    sampler = ranked(size=16, hard=0.25, least=2)
    first = [
        sampler.draw(NAMES, context(number, seed)) for seed in range(30) for number in range(16)
    ]
    assert {each.size for each in first} == {0} and len({each.task for each in first}) == 20
    assert {each.reply_tokens for each in first} == {0}
    second = [sampler.draw(NAMES, context(16 + j % 5, j)) for j in range(100)]
    assert {each.size for each in second} == {16}
    counts = Counter(each.task for each in second)
    assert set(counts) == set(NAMES[:5]) and min(counts.values()) > 8
    later = {sampler.draw(NAMES, context(16 + 5 + j % 3, j)).task for j in range(50)}
    assert later == set(NAMES[:3])  # half of 5
    last = {sampler.draw(NAMES, context(90 + j)).task for j in range(50)}
    assert last == set(NAMES[:2])
    assert sampler.draw(NAMES[6:], context(16)) == Draw("06", 16)  # the others are in flight


def test_the_first_stage_has_its_own_limit_of_replies() -> None:
    sampler = ranked(size=16, first_reply=24)
    assert sampler.draw(NAMES, context(15)).reply_tokens == 24
    assert sampler.draw(NAMES, context(16)).reply_tokens == 0


def test_the_linter_says_the_limit_and_one_that_is_none_is_refused() -> None:
    options = {"techniques": "hard_task_stages", "selection.pool": 9, "hard_task_stages.steps": 50}
    made = override(RunConfig(recipe="mine"), {**options, "hard_task_stages.first_reply": 95})
    assert (
        "replies of at most 95 tokens up to step 50; from step 51 on"
        in check(made).facts["techniques"]
    )
    for tokens in (96, 2000):
        message = rf"first_reply must be below 96 \(engine.max_completion_tokens\), got {tokens}"
        with pytest.raises(ConfigError, match=message):
            override(made, {"hard_task_stages.first_reply": tokens})


def test_the_number_of_hard_tasks_falls_with_each_pass() -> None:
    sampler = ranked(hard=0.4, keep=0.5, least=1)
    sizes = [len(sampler.hard_tasks(drawn)) for drawn in range(17)]
    assert sizes == [8] * 8 + [4] * 4 + [2] * 2 + [1] * 3
    assert len(ranked(hard=0.4, keep=1.0, least=1).hard_tasks(99)) == 8
    assert len(ranked(hard=0.05, least=6).hard_tasks(99)) == 6


def test_a_task_that_is_solved_is_no_longer_hard() -> None:
    sampler = ranked(hard=0.25, least=2)
    sampler.observe([outcome(NAMES[0], *[1.0] * 200)])
    assert sampler.hard_tasks(0) == set(NAMES[1:6])
    other = ranked(hard=0.25, least=2)
    other.restore(sampler.state())
    assert other.hard_tasks(0) == sampler.hard_tasks(0)


@pytest.mark.parametrize(
    ("techniques", "selection", "steps", "message"),
    [
        ("hard_task_stages", SelectionConfig(), 200, "needs selection.pool > 0"),
        (
            "hard_task_stages",
            SelectionConfig(pool=300),
            200,
            r"candidates >= selection.pool, got 256 and 300",
        ),
        (
            "hard_task_stages",
            SelectionConfig(pool=9),
            1,
            r"hard_task_stages.steps must be below max_steps, got 1 and 1",
        ),
        (
            "hard_task_stages allocate",
            SelectionConfig(pool=9),
            200,
            "and so does allocate. Remove one",
        ),
        (
            "hard_task_stages beta_sampler",
            SelectionConfig(pool=9),
            200,
            "hard_task_stages and beta_sampler",
        ),
    ],
)
def test_wrong_options_are_refused(
    techniques: str, selection: SelectionConfig, steps: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(recipe="mine", techniques=techniques, selection=selection, max_steps=steps)


def learn(options: HardTaskStagesConfig | None, episodes: int = 8000) -> tuple[float, float]:
    """Train tasks without anything in common. Return figures of those that are hard at first.

    They are the share that was solved at least once, and the success rate at the end.
    """
    found = []
    names = [f"{i:02}" for i in range(TASKS)]
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        logits = rng.normal(-2.5, 2.5, TASKS)
        hard = logits < np.log(0.05 / 0.95)
        sampler = HardTaskStages(options) if options else None
        solved = np.zeros(TASKS, bool)
        number = used = 0
        waiting: list[list[Outcome]] = []
        while used < episodes:
            free, batch = list(names), []
            for _ in range(GROUPS):
                at = context(number, seed)
                draw = sampler.draw(free, at) if sampler else Draw(at.random.choice(free))
                number += 1
                free.remove(draw.task)
                task = int(draw.task)
                rate = 1 / (1 + np.exp(-logits[task]))
                rewards = (rng.random(draw.size or 8) < rate).astype(float)
                used += len(rewards)
                solved[task] |= rewards.any()
                if rewards.std() > 0:
                    advantage = (rewards - rewards.mean()) / rewards.std(ddof=1)
                    logits[task] += 2 * (advantage * (rewards - rate)).mean()
                batch.append(outcome(draw.task, *rewards))
            waiting.append(batch)
            if sampler and len(waiting) > 1:
                sampler.observe(waiting.pop(0))
        found.append((solved[hard].mean(), (1 / (1 + np.exp(-logits[hard]))).mean()))
    once, end = np.mean(found, axis=0)
    return float(once), float(end)


@pytest.mark.costly
def test_more_hard_tasks_are_solved_at_least_once() -> None:
    """Measured: 0.64 with uniform draws and groups of 8, 0.77 with it; at the end 0.35 and 0.09.

    The standard error is at most 0.023. That the success rates are lower is kept here, too.
    """
    plain = learn(None)
    staged = learn(HardTaskStagesConfig(steps=24, size=32, hard=0.5, keep=0.75))
    assert staged[0] > plain[0] + 0.06
    assert staged[1] < plain[1]
