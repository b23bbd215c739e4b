"""Test SQIRL and the stochastic effective horizon: known chains, all policies of others, tables."""

import asyncio
import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_effective_horizon import chain
from unstale.algorithms.effective_horizon import (
    END,
    Tabular,
    back_up,
    effective_horizon,
    optimal_values,
    random_values,
)
from unstale.algorithms.sqirl import (
    Fitted,
    TabularSimulator,
    expected_return,
    sqirl,
    stochastic_horizon,
)
from unstale.envs import Message, Turn
from unstale.records import Task
from unstale.testing import tabulate

SLIP = 0.2


def slippery(length: int, *, consolation: float = 0.3) -> Tabular:
    """Return the chain in which a right action ends the episode with probability 0.2."""
    plain = chain(length, consolation=consolation)
    next_state = torch.stack([plain.next_state, torch.full_like(plain.next_state, END)], -1)
    reward = torch.stack([plain.reward, plain.reward], -1)
    reward[-1, 0, 1] = 0.0
    chance = torch.tensor([[1 - SLIP, SLIP], [0.5, 0.5]], dtype=torch.float64)
    return Tabular(next_state, reward, length, probability=chance.expand(length, 2, 2).clone())


def test_the_values_of_a_slippery_chain() -> None:
    task = slippery(3)
    first = random_values(task)
    assert first[0, 0].tolist() == pytest.approx([0.8 * 0.4 * 0.4, 0.3])
    second = back_up(task, first)
    assert second[0, 0].tolist() == pytest.approx([0.8 * 0.8 * 0.4, 0.3])
    assert optimal_values(task)[0, 0].tolist() == pytest.approx([0.8**3, 0.3])


def test_the_horizon_of_a_slippery_chain() -> None:
    """Q^1, Q^2 and Q^3 of the first right action are .128, .256 and .512, against .3."""
    found = stochastic_horizon(slippery(3))
    assert found.depth == 3
    assert found.gap == pytest.approx(0.512 - 0.3)
    assert found.effective == pytest.approx(3 + math.log2(1 / 0.212**2))
    assert found.by_depth[:2] == (math.inf, math.inf)
    assert found.best_return == pytest.approx(0.512)
    assert found.random_return == pytest.approx((0.128 + 0.3) / 2)


def test_a_greater_depth_may_be_easier() -> None:
    """Q^4 of the chain beats the consolation by 0.2, and Q^5 by 0.7."""
    found = stochastic_horizon(chain(5))
    assert effective_horizon(chain(5)).depth == 4
    assert found.by_depth[3:] == pytest.approx([4 + math.log2(25), 5 - 2 * math.log2(0.7)])
    assert found.depth == 5
    scaled = replace(chain(5), reward=7 * chain(5).reward)
    assert stochastic_horizon(scaled).effective == pytest.approx(found.effective)


def random_task(random: Random) -> Tabular:
    """Return a task with 3 states, 2 actions, 2 outcomes, 3 steps and a random first state."""
    numbers = [END, 0, 1, 2]
    next_state = [[[random.choice(numbers) for _ in "ab"] for _ in "ab"] for _ in "abc"]
    reward = [[[float(random.randrange(3)) for _ in "ab"] for _ in "ab"] for _ in "abc"]
    chance = [[[p := random.choice([0.25, 0.5, 1.0]), 1 - p] for _ in "ab"] for _ in "abc"]
    return Tabular(
        torch.tensor(next_state),
        torch.tensor(reward),
        3,
        torch.tensor(random.choice([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])),
        torch.tensor(chance),
    )


def of_policy(task: Tabular, policy: tuple[int, ...], state: int, step: int) -> float:
    """Return the expected return of a policy, which has an action for each step and state."""
    if state == END or step == task.num_steps:
        return 0.0
    assert task.probability is not None
    action = policy[3 * step + state]
    rows = (task.probability, task.reward, task.next_state)
    return sum(
        float(chance) * (float(reward) + of_policy(task, policy, int(after), step + 1))
        for chance, reward, after in zip(*(each[state, action] for each in rows), strict=True)
        if chance > 0
    )


def test_a_depth_is_solvable_if_every_greedy_policy_is_optimal() -> None:
    """All 512 policies of 6 random tasks."""
    random, depths = Random(1), []
    for _ in range(6):
        task = random_task(random)
        assert isinstance(task.start, Tensor)
        first = [(i, float(share)) for i, share in enumerate(task.start) if share > 0]
        returns = {
            policy: sum(share * of_policy(task, policy, state, 0) for state, share in first)
            for policy in product(range(2), repeat=9)
        }
        found, values = stochastic_horizon(task), random_values(task)
        assert found.best_return == pytest.approx(max(returns.values()))
        for depth in range(1, 4):
            best = values.amax(-1, keepdim=True) - 1e-9 <= values
            greedy = [
                total
                for policy, total in returns.items()
                if all(best[i // 3, i % 3, action] for i, action in enumerate(policy))
            ]
            is_solved = min(greedy) == pytest.approx(max(returns.values()))
            assert math.isfinite(found.by_depth[depth - 1]) == is_solved
            depths.append(is_solved)
            values = back_up(task, values)
    assert {True, False} == set(depths)


@pytest.mark.parametrize("task", [chain(3), slippery(3)])
def test_the_episodes_are_enough_and_a_lower_depth_is_not(task: Tabular) -> None:
    found = stochastic_horizon(task)
    for seed in range(4):
        simulator = TabularSimulator(task, seed=seed)
        learned = sqirl(simulator, depth=found.depth, episodes=found.episodes, seed=seed)
        assert expected_return(task, learned) == pytest.approx(found.best_return)
        assert learned.episodes <= task.num_steps * found.episodes
        lower = sqirl(simulator, depth=1, episodes=found.episodes, seed=seed)
        assert expected_return(task, lower) == pytest.approx(0.3), "the consolation"


def test_fewer_episodes_find_it_less_often() -> None:
    """The bound is far above the need: 200 episodes a step are enough, and 5 are not."""
    task = slippery(3)

    def share(episodes: int) -> float:
        found = [
            expected_return(task, sqirl(TabularSimulator(task, seed=s), depth=3, episodes=episodes))
            for s in range(30)
        ]
        return sum(each > 0.5 for each in found) / len(found)

    assert share(200) >= 0.9
    assert share(5) < 0.7


def linear(states: Tensor, actions: Tensor, targets: Tensor) -> Fitted:
    """Fit a line over the number of the state, for each action."""

    def features(states: Tensor) -> Tensor:
        return torch.stack([torch.ones(len(states)), states], -1).double()

    lines = [
        torch.linalg.lstsq(features(states[actions == a]), targets[actions == a]).solution
        for a in range(2)
    ]
    return lambda asked: features(asked) @ torch.stack(lines, -1)


def test_another_regression_generalises_over_states() -> None:
    """In a line of 12 states, right and left are +1 and -1 in expectation: few episodes suffice."""
    places = torch.arange(12)
    moves = torch.stack([(places + 1).clamp(max=11), (places - 1).clamp(min=0)], -1)
    next_state = torch.stack([moves, moves.flip(1)], -1)
    task = Tabular(
        next_state,
        next_state.double(),
        4,
        torch.full((12,), 1 / 12, dtype=torch.float64),
        torch.tensor([0.75, 0.25]).expand(12, 2, 2),
    )
    best = stochastic_horizon(task)
    learned = sqirl(TabularSimulator(task), depth=1, episodes=60, regress=linear)
    assert expected_return(task, learned) == pytest.approx(best.best_return, rel=0.02)
    table = sqirl(TabularSimulator(task), depth=1, episodes=60)
    assert expected_return(task, table) < expected_return(task, learned)


class Coin:
    """A task set in which a coin is called. The toss, shown first, is right 3 times of 4."""

    name, tools = "coin", ()

    def env(self, task: Task, seed: int) -> Any:
        return CoinEnv(seed)


class CoinEnv:
    def __init__(self, seed: int) -> None:
        self._shown, self._is_honest = "ht"[seed % 2], seed % 8 < 6

    async def begin(self) -> Turn:
        return Turn((Message("user", "?"),))

    async def step(self, reply: Message) -> Turn:
        if reply.content == "look":
            return Turn((Message("user", self._shown),))
        return Turn((), True, float((reply.content == self._shown) == self._is_honest))


def test_several_seeds_make_a_task_with_random_answers() -> None:
    """Looking first wins with 3/4, and calling at once with 1/2. 2 looks are no better."""
    replies = [Message("assistant", each) for each in ("look", "h", "t")]
    taskset: Any = Coin()
    task = asyncio.run(
        tabulate(taskset, Task("coin", "train", 0), replies, seed=range(8), max_turns=2)
    )
    assert tuple(task.next_state.shape) == (3, 3, 2), "before, after h, after t"
    values = optimal_values(task)
    assert values[0, 0].tolist() == pytest.approx([0.75, 0.5, 0.5])
    assert values[1, 1].tolist() == pytest.approx([0.0, 0.75, 0.25])
    found = stochastic_horizon(task)
    assert found.by_depth[0] == math.inf, "at random, a call after a look wins in 1 of 3 cases"
    assert (found.depth, found.gap) == (2, pytest.approx(0.25))
    learned = sqirl(TabularSimulator(task), depth=2, episodes=500)
    assert expected_return(task, learned) == pytest.approx(0.75)


def test_wrong_tasks_and_options_are_refused() -> None:
    task = slippery(2)
    with pytest.raises(ValueError, match="the task has random outcomes"):
        effective_horizon(task)
    with pytest.raises(ValueError, match="probability must be >= 0, with a sum of 1"):
        replace(task, probability=torch.full((2, 2, 2), 0.4))
    with pytest.raises(ValueError, match=r"start must be \[2\], got \[3\]"):
        replace(task, start=torch.ones(3))
    with pytest.raises(ValueError, match="depth and episodes must be >= 1, got 0 and 3"):
        sqirl(TabularSimulator(task), depth=0, episodes=3)
    with pytest.raises(ValueError, match="one seed"):
        asyncio.run(tabulate(Coin(), Task("coin", "train", 0), [], seed=[]))  # type: ignore[arg-type]
