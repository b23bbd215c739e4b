"""Test the effective horizon of small tasks: known chains, all policies of others, shipped tasks.

The environments of this package that are used in toys must be neither trivial nor hopeless.
"""

import asyncio
import math
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch

from unstale.algorithms.effective_horizon import (
    END,
    Tabular,
    back_up,
    effective_horizon,
    optimal_values,
    random_values,
)
from unstale.envs import Message, ToolCall, Turn
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.desk import shipped_desks
from unstale.envs.desk.expert import expert_replies
from unstale.records import Task
from unstale.testing import tabulate

LENGTH = 5


def chain(length: int, *, consolation: float = 0.3) -> Tabular:
    """Return a chain of right actions with a reward of 1 at its end. A wrong one ends the episode.

    A wrong action in the first state has the reward `consolation`.
    """
    forward = [*range(1, length), END]
    reward = torch.zeros(length, 2)
    reward[0, 1], reward[-1, 0] = consolation, 1.0
    return Tabular(torch.tensor([[each, END] for each in forward]), reward, num_steps=length)


def test_the_values_of_a_chain() -> None:
    """After the first of 5 right actions, 4 random ones are right with a probability of 1/16."""
    task = chain(LENGTH)
    first = random_values(task)
    assert first[0, 0].tolist() == pytest.approx([1 / 16, 0.3])
    assert back_up(task, first)[0, 0].tolist() == pytest.approx([1 / 8, 0.3])
    assert optimal_values(task)[0, 0].tolist() == pytest.approx([1, 0.3])


def test_the_horizon_of_a_known_chain() -> None:
    """Q^k of the first right action is 2^-(5 - k). Only k = 4 gives more than the consolation 0.3.

    Of 4 right actions and a random one, the return has the variance 1/4 and the range 1. The error
    must be below 0.1 in 5 * 2^4 means, twice: m = (2/4 + 0.2/3) / 0.01 * log(2 * 80 / 0.5) = 326.9.
    """
    found = effective_horizon(chain(LENGTH))
    assert (found.depth, found.rollouts) == (4, 327)
    assert found.gap == pytest.approx(0.2)
    assert found.episodes == 5 * 2**4 * 327
    assert found.effective == pytest.approx(4 + math.log2(327))
    assert (found.random_return, found.best_return) == pytest.approx(((1 / 16 + 0.3) / 2, 1.0))


@pytest.mark.parametrize(
    ("task", "depth"),
    [
        (chain(2), 1),  # 1/2 against 0.3
        (chain(3), 2),
        (chain(3, consolation=0.2), 1),  # 1/4 against 0.2
        (chain(9, consolation=0.0), 1),  # rare, but nothing else has a reward
        (chain(4, consolation=0.99), 4),
        (chain(4, consolation=2.0), 1),
        (chain(1), 1),
    ],
)
def test_the_depth_of_other_chains(task: Tabular, depth: int) -> None:
    assert effective_horizon(task).depth == depth


def test_a_rare_success_needs_many_episodes_at_depth_1() -> None:
    """Without a consolation, the first of 9 actions is found only by 1 in 256 random episodes."""
    found = effective_horizon(chain(9, consolation=0.0))
    assert found.gap == pytest.approx(2**-8)
    assert found.rollouts > 256


def random_task(random: Random, num_states: int = 4, num_actions: int = 2) -> Tabular:
    targets = [
        [random.choice([END, *range(num_states)]) for _ in range(num_actions)]
        for _ in range(num_states)
    ]
    rewards = [[float(random.randrange(3)) for _ in range(num_actions)] for _ in range(num_states)]
    return Tabular(torch.tensor(targets), torch.tensor(rewards), num_steps=4)


def all_returns(task: Tabular) -> dict[tuple[int, ...], float]:
    """Return the return of every sequence of actions."""
    found = {}
    for actions in product(range(task.reward.shape[1]), repeat=task.num_steps):
        state, total = task.start, 0.0
        for action in actions:
            if state == END:
                break
            total += float(task.reward[state, action])
            state = int(task.next_state[state, action])
        found[actions] = total
    return found


def test_greedy_policies_are_optimal_from_the_depth_on_and_not_before() -> None:
    """Every sequence of actions of 60 random tasks, of which greedy ones are played from Q^k."""
    random, depths = Random(0), []
    for _ in range(60):
        task = random_task(random)
        returns = all_returns(task)
        values, best = random_values(task), max(returns.values())
        k = 0
        while True:
            k += 1
            worst = math.inf
            for actions, total in returns.items():
                state, is_greedy = task.start, True
                for step, action in enumerate(actions):
                    if state == END:
                        break
                    of_state = values[step, state]
                    is_greedy = is_greedy and float(of_state[action]) > float(of_state.max()) - 1e-9
                    state = int(task.next_state[state, action])
                worst = min(worst, total if is_greedy else math.inf)
            if worst == best:
                break
            values = back_up(task, values)
        found = effective_horizon(task)
        assert found.depth == k
        assert found.best_return == best
        assert found.random_return == pytest.approx(sum(returns.values()) / len(returns))
        depths.append(k)
    assert len(set(depths)) >= 3


def search(task: Tabular, depth: int, rollouts: int, random: Random) -> float:
    """Return what is reached by the first action of the best sequence, chosen anew in each step."""

    def sampled(state: int, step: int, actions: tuple[int, ...]) -> float:
        total = 0.0
        for place in range(task.num_steps - step):
            action = actions[place] if place < len(actions) else random.randrange(num_actions)
            total += float(task.reward[state, action])
            state = int(task.next_state[state, action])
            if state == END:
                break
        return total

    num_actions = task.reward.shape[1]
    state, total = task.start, 0.0
    for step in range(task.num_steps):
        sequences = list(product(range(num_actions), repeat=depth))
        means = [sum(sampled(state, step, each) for _ in range(rollouts)) for each in sequences]
        action = sequences[max(range(len(sequences)), key=lambda i: means[i])][0]
        total += float(task.reward[state, action])
        state = int(task.next_state[state, action])
        if state == END:
            break
    return total


def test_the_rollouts_are_enough_and_a_lower_depth_is_not() -> None:
    """20 searches each on a chain of depth 2: 80 rollouts per sequence, by the bound."""
    task = chain(3)
    found = effective_horizon(task)
    best = [search(task, 2, found.rollouts, Random(seed)) for seed in range(20)]
    assert sum(each == 1.0 for each in best) >= 10  # all 20 when this was written
    lower = [search(task, 1, found.rollouts, Random(seed)) for seed in range(20)]
    assert sum(each == 1.0 for each in lower) < 10  # 0 to 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": torch.zeros(2, 3)}, r"got \[3, 2\] and \[2, 3\]"),
        ({"start": 3}, r"start below 3 \(the states\), got 3 and 3"),
        ({"next_state": torch.full((3, 2), 3)}, r"from -1 \(the end\) to 2, got 3 to 3"),
        ({"reward": torch.full((3, 2), math.nan)}, "reward must be finite"),
    ],
)
def test_wrong_arrays_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(chain(3), **changes)


def test_the_calculator_is_not_trivial_and_not_hopeless() -> None:
    """Four replies in three turns: a call, a call in a wrong form, the number and another one."""
    taskset = CalculatorTasks()
    task = taskset.held_out(1)[0]
    expression = taskset.expression(task)
    replies = [
        Message("assistant", "", (ToolCall("calculate", {"expression": expression}),)),
        Message("assistant", "", (ToolCall("calculate", {}),)),
        Message("assistant", str(eval(expression))),
        Message("assistant", "1"),
    ]
    table = asyncio.run(tabulate(taskset, task, replies, max_turns=3))
    # Two replies continue an episode: 1 + 2 + 4 states.
    assert tuple(table.reward.shape) == (7, 4)
    found = effective_horizon(table)
    assert found.best_return == 1.0
    assert found.random_return == pytest.approx(1 / 4 + 1 / 8 + 1 / 16)
    assert found.depth == 1 and found.rollouts > 1


@pytest.mark.parametrize("name", ["retail", "airline"])
def test_a_desk_is_not_trivial_and_not_hopeless(name: str) -> None:
    """The replies of the expert at a task, each of which may be given at any of 4 times."""
    taskset = shipped_desks()[name]
    task = taskset.held_out(3)[1]
    replies = expert_replies(taskset.scenario(task))
    assert len(replies) == {"retail": 4, "airline": 5}[name]
    found = effective_horizon(asyncio.run(tabulate(taskset, task, replies, max_turns=4)))
    assert found.best_return == 1.0
    assert 0.1 < found.random_return < 0.5
    assert found.depth == 1 and found.episodes < 10_000


class Forgetful:
    """A task set whose environment answers by a counter that all episodes share."""

    name, tools, count = "forgetful", (), 0

    def env(self, task: Task, seed: int) -> "Forgetful":
        return self

    async def begin(self) -> Turn:
        return Turn((Message("user", "?"),))

    async def step(self, reply: Message) -> Turn:
        self.count += 1
        return Turn((Message("user", str(self.count)),))


def test_what_cannot_be_tabulated_is_refused() -> None:
    task, reply = Task("forgetful", "train", 0), Message("assistant", "a")
    with pytest.raises(ValueError, match="forgetful/train/0 answered the same 1 replies differ"):
        asyncio.run(tabulate(Forgetful(), task, [reply], max_turns=3))
    with pytest.raises(ValueError, match="2 replies in 20 turns are up to 2097150 episodes"):
        asyncio.run(tabulate(Forgetful(), task, [reply, reply], max_turns=20))
    with pytest.raises(ValueError, match="at least one reply"):
        asyncio.run(tabulate(Forgetful(), task, []))
