"""Test `majority`: the vote of a group as its label, and the collapse to which it leads.

A policy of independent softmax answers is trained with its own votes, with and without `least`, and
with labels. It ends with one answer per task, which is wrong on more than half of the tasks.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from tests.support.groups import group, made
from unstale.builders.sampling import require_methods
from unstale.config import ConfigError, SelectionConfig
from unstale.config.options import override
from unstale.envs import task_answer
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.dataset import DatasetConfig, DatasetTasks
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset
from unstale.envs.rows import Row
from unstale.recipes import RECIPES
from unstale.records import Fork, Group, Task
from unstale.research.techniques.majority import Majority, MajorityConfig
from unstale.rewards import exact_answer, numeric_answer
from unstale.rollout.selection import make_pool
from unstale.techniques.hooks import CreditContext


def test_votes_replace_no_rewards_that_a_search_reads() -> None:
    with pytest.raises(ConfigError, match="search"):
        override(RECIPES["calculator"](), {"techniques": "majority search", "selection.pool": 32})


def vote(
    *groups: Group, answers: Mapping[int, str], least: float = 0.5
) -> tuple[list[list[float]], Mapping[str, float]]:
    """Return the rewards of the episodes of each group, and the metrics."""
    context = CreditContext(
        0.0, 0, lambda task: task.key, answer=lambda episode: answers[episode.episode]
    )
    graded = Majority(MajorityConfig(least=least)).reward(groups, context)
    return [[each.reward for each in one.trajectories] for one in graded], context.metrics


def five(*rewards: float) -> Group:
    return group(*(made(reward, episode=number) for number, reward in enumerate(rewards)))


def test_the_most_frequent_answer_is_rewarded_whatever_the_environment_says() -> None:
    answers = {0: "7", 1: "8", 2: "7", 3: "", 4: "7"}
    (rewards,), metrics = vote(five(0, 1, 0, 1, 0), answers=answers)
    assert rewards == [1, 0, 1, 0, 1]
    assert metrics["majority/share_mean"] == 3 / 5 and metrics["majority/used_share"] == 1
    assert metrics["majority/label_success_mean"] == 0, "the environment knows better"
    assert metrics["majority/one_answer_share"] == 0


def test_what_acts_later_sees_the_label_and_not_the_environment() -> None:
    context = CreditContext(0.0, 0, lambda task: task.key, answer=lambda episode: "7")
    group = five(0, 1)
    (graded,) = Majority(MajorityConfig()).reward([group], context)
    assert [each.success for each in graded.trajectories] == [True, True]
    assert [each.success for each in group.trajectories] == [False, True], "of which metrics are"


def test_a_vote_below_the_share_gives_no_label() -> None:
    answers = {0: "1", 1: "1", 2: "2", 3: "3", 4: "4"}
    assert vote(five(0, 0, 0, 0, 0), answers=answers)[0] == [[0] * 5]
    assert vote(five(0, 0, 0, 0, 0), answers=answers, least=0.4)[0] == [[1, 1, 0, 0, 0]]
    silent = dict.fromkeys(range(5), "")
    (rewards,), metrics = vote(five(1, 1, 0, 0, 0), answers=silent, least=0)
    assert rewards == [0] * 5 and metrics["majority/label_success_mean"] == 0


def test_ties_are_broken_by_the_number_of_the_group() -> None:
    answers = {0: "1", 1: "2"}
    rewards = [
        vote(replace(five(0, 0), number=number), answers=answers)[0][0] for number in range(20)
    ]
    assert {tuple(each) for each in rewards} == {(1, 0), (0, 1)}
    again = [vote(replace(five(0, 0), number=3), answers=answers)[0][0] for _ in range(3)]
    assert len({tuple(each) for each in again}) == 1


def test_the_forks_of_an_episode_share_its_vote() -> None:
    """Three leaves of one tree say 8 and two other trees say 7: the trees decide."""
    turns = ((1, 2), (3, 4))
    forks = [made(turns=turns, episode=number, fork=Fork(0, 3)) for number in (3, 4)]
    tree = group(*(made(turns=turns, episode=number) for number in range(3)), *forks)
    answers = {0: "8", 1: "7", 2: "7", 3: "8", 4: "8"}
    (rewards,), metrics = vote(tree, answers=answers)
    assert rewards == [0, 1, 1, 0, 0]
    assert metrics["majority/share_mean"] == pytest.approx(2 / 3)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def train(least: float | None) -> tuple[float, float, float, list[float]]:
    """Train a policy on votes, or on labels if `least` is None.

    Return its success before and after, the share of tasks that end below 0.01, and the share of
    groups with one answer at each step.
    """
    tasks, answers, size = 60, 6, 16
    start = np.random.default_rng(57)
    logits = start.normal(size=(tasks, answers))
    likely = softmax(1.5 * logits)
    right = np.array([start.choice(answers, p=likely[task]) for task in range(tasks)])
    random, one_answer = np.random.default_rng(1), []
    first = softmax(logits)[np.arange(tasks), right].mean()
    for _ in range(100):
        policy = softmax(logits)
        drawn = np.stack([random.choice(answers, p=p, size=size) for p in policy])
        if least is None:
            rewards = (drawn == right[:, None]).astype(float)
        else:
            groups = [
                group(*(made(episode=task * size + i) for i in range(size)), number=task)
                for task in range(tasks)
            ]
            given = dict(enumerate(map(str, drawn.ravel().tolist())))
            values, metrics = vote(*groups, answers=given, least=least)
            rewards = np.array(values)
            one_answer.append(metrics["majority/one_answer_share"])
        advantage = rewards - rewards.mean(1, keepdims=True)
        chosen = np.eye(answers)[drawn]
        gradient = (advantage[..., None] * (chosen - policy[:, None])).mean(1)
        logits = logits + 4 * gradient
    success = softmax(logits)[np.arange(tasks), right]
    return float(first), float(success.mean()), float((success < 0.01).mean()), one_answer


@pytest.mark.costly
def test_votes_raise_success_to_that_of_the_most_frequent_answers_and_then_it_collapses() -> None:
    first, with_labels, _, _ = train(None)
    _, by_votes, lost, one_answer = train(0.0)
    _, by_clear_votes, _, _ = train(0.5)
    assert first == pytest.approx(0.309, abs=0.001) and with_labels > 0.99
    assert by_votes == pytest.approx(0.416, abs=0.02)
    assert by_clear_votes == pytest.approx(0.466, abs=0.02)
    assert lost == pytest.approx(0.58, abs=0.04), "tasks on which the policy has become wrong"
    assert one_answer[0] < 0.1 and one_answer[-1] > 0.9
    assert by_votes < 0.5, "success stays low where all groups agree"


def test_answers_are_read_from_replies_by_the_task_set() -> None:
    sums, task = CalculatorTasks(), Task("calculator", "train", 1)
    assert task_answer(sums, task, "It is **1,350.0**.") == task_answer(sums, task, "1350")
    assert task_answer(sums, task, "no idea") == ""
    rows = [Row({"prompt": f"{number}?", "answer": "Oslo"}, f"row {number}") for number in (1, 2)]
    options = DatasetConfig(env="dataset:x", held_out_share=0)
    towns = DatasetTasks(rows, exact_answer, options)
    row = Task(options.env, "train", 0)
    assert task_answer(towns, row, " oslo.") == "oslo"
    assert task_answer(DatasetTasks(rows, numeric_answer, options), row, "so 3/4") == "3/4"
    mixed = MixedTasks("both", [sums, towns])
    assert task_answer(mixed, task, "7") == "7" and task_answer(mixed, row, "7 Hills") == "7 hills"


USES_LABELS: Mapping[str, Mapping[str, object]] = {
    "beta_sampler": {"selection.pool": 4},
    "allocate": {"advantage.estimator": "rloo_first"},
    "replay": {},
    "limits": {},
    "hints": {"objective.placed": "anchor", "advantage.estimator": "grpo"},
    "retry": {"objective.placed": "anchor", "advantage.estimator": "grpo"},
    "difficulty_bin_weights": {"selection.pool": 4},
}
"""Techniques that read the environment's rewards, with the options that they need."""


def test_what_would_use_labels_is_refused() -> None:
    calculator = RECIPES["calculator"]()
    test_time = {"selection.pool": 4, "selection.test_time": True}
    with pytest.raises(ConfigError, match=r"test_time must be false without .* majority"):
        override(calculator, test_time)
    chosen = override(calculator, {"techniques": "majority", **test_time})
    with pytest.raises(ConfigError, match=r"eval.keep_best must be none with selection.test_time"):
        override(chosen, {"eval.keep_best": "success_rate"})
    with pytest.raises(ConfigError, match=r"test_time"):
        override(calculator, {"techniques": "majority", "selection.test_time": True})
    with pytest.raises(ConfigError, match="majority must come before tool_bonus"):
        override(calculator, {"techniques": "tool_bonus majority"})
    for name, values in USES_LABELS.items():
        with pytest.raises(ConfigError, match=f"majority cannot be used with {name}, .* labels"):
            override(calculator, {"techniques": f"majority {name}", **values})
    with pytest.raises(ConfigError, match="resampled_groups must be 0 with the technique majority"):
        override(calculator, {"techniques": "majority", "schedule.resampled_groups": 2})
    allowed = {"techniques": "majority tool_bonus segments outer_step episode_filter"}
    override(calculator, {**allowed, "schedule.group_size": 8})
    require_methods(chosen, CalculatorTasks())
    retail = override(RECIPES["retail"](), {"techniques": "majority"})
    with pytest.raises(
        ConfigError, match=r"majority needs answer_of\(\) of the task set, and retail"
    ):
        require_methods(retail, build_taskset(retail.task))


def test_test_time_training_draws_the_held_out_tasks() -> None:
    tasks = CalculatorTasks()
    pool = make_pool(tasks, 0, SelectionConfig(pool=3, test_time=True))
    assert [task for _, task in pool.values()] == tasks.held_out(3)
    trained = make_pool(tasks, 0, SelectionConfig(pool=3))
    assert [task for _, task in trained.values()] == list(islice(tasks.train(0), 3))
