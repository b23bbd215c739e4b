"""The effective horizon of a small task: how hard its best policy is to find by random episodes.

Q^1 is the expected return of each action if all later actions are random, and Q^(k + 1) = r + max
Q^k of the next step. The task has the depth k if each policy that is greedy with respect to Q^k is
optimal, for the smallest such k. At depth 1 it is enough to look at the results of random episodes;
at depth k, all sequences of k actions must be compared. If m random episodes after each sequence
are enough to find the best one, the effective horizon is k + log_A m, with A actions. From Laidlaw,
Russell and Dragan (arXiv 2304.09853), on which SQIRL (arXiv 2312.08369) builds.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

END = -1
"""The number in `Tabular.next_state` for an action that ends the episode."""
TOLERANCE = 1e-9
"""Values count as equal if they differ by less than this share of the largest absolute value."""
MISTAKE = 0.5
"""Allowed probability that `EffectiveHorizon.rollouts` random episodes do not find the best
actions.
"""

Values = Float[Tensor, "steps states actions"]


@dataclass(frozen=True, slots=True)
class Tabular:
    """A deterministic task as arrays. Each state has the same number of actions."""

    next_state: Int[Tensor, "states actions"]
    """The state to which each action in each state leads, or `END`."""
    reward: Float[Tensor, "states actions"]
    num_steps: int
    """T: the largest number of actions in an episode."""
    start: int = 0

    def __post_init__(self) -> None:
        shape = tuple(self.next_state.shape)
        if len(shape) != 2 or 0 in shape or tuple(self.reward.shape) != shape:
            raise ValueError(
                "next_state and reward must both be [states, actions], got "
                f"{list(shape)} and {list(self.reward.shape)}"
            )
        if self.num_steps < 1 or not 0 <= self.start < shape[0]:
            raise ValueError(
                f"num_steps must be >= 1 and start below {shape[0]} (the states), got "
                f"{self.num_steps} and {self.start}"
            )
        low, high = int(self.next_state.min()), int(self.next_state.max())
        if low < END or high >= shape[0]:
            raise ValueError(
                f"next_state must be from {END} (the end) to {shape[0] - 1}, got {low} to {high}"
            )
        if not self.reward.isfinite().all():
            raise ValueError("reward must be finite")


@dataclass(frozen=True, slots=True)
class EffectiveHorizon:
    """How hard it is to find the best policy of a task from random episodes.

    A is the number of actions in a state, and T the largest number of actions in an episode.
    """

    depth: int
    """k: the number of successive actions that must be compared together."""
    gap: float
    """The smallest difference of Q^k between the best and the next best action, over all states
    that greedy policies visit. Infinite if all actions are equally good everywhere.
    """
    rollouts: int
    """m: a number of random episodes after each sequence of k actions that is enough to find a best
    action in all T steps, with a probability of at least 1/2. It is an upper bound (Bernstein's
    inequality).
    """
    episodes: int
    """T A^k m: the number of random episodes in total."""
    effective: float
    """k + log_A m: the effective horizon."""
    random_return: float
    """The expected return of a policy that chooses all actions at random."""
    best_return: float
    """The return of the best policy."""


def random_values(task: Tabular) -> Values:
    """Return Q^1: the expected return of each action in each step, if later ones are random."""
    return _values(task, lambda values: values.mean(-1))


def optimal_values(task: Tabular) -> Values:
    """Return Q*: the return of each action in each step, if later ones are optimal."""
    return _values(task, lambda values: values.amax(-1))


def back_up(task: Tabular, values: Values) -> Values:
    """Do one step of Q-iteration: return the reward plus the best of the next step's `values`."""
    return torch.stack(
        [
            task.reward.double() + _of_next(task, later.amax(-1) if later is not None else None)
            for later in [*values[1:], None]
        ]
    )


def effective_horizon(task: Tabular) -> EffectiveHorizon:
    """Return the effective horizon of a task.

    T steps of Q-iteration give the optimal values, so the depth k is at most T. Each step of
    Q-iteration takes O(T states actions) time and memory.
    """
    num_steps, num_actions = task.num_steps, task.reward.shape[1]
    values, best = random_values(task), optimal_values(task)
    random_return, best_return = (
        float(values[0, task.start].mean()),
        float(best[0, task.start].max()),
    )
    scale = TOLERANCE * max(1.0, float(best.abs().max()))
    is_optimal = best >= best.amax(-1, keepdim=True) - scale
    depth = 1
    while True:
        is_greedy = values >= values.amax(-1, keepdim=True) - scale
        visited = _visited(task, is_greedy)
        if not (is_greedy & ~is_optimal)[visited].any():
            break
        values, depth = back_up(task, values), depth + 1
    others = torch.where(is_greedy, -math.inf, values).amax(-1)
    gaps = torch.where(visited, values.amax(-1) - others, math.inf)
    rollouts = _rollouts(task, gaps, depth=depth)
    return EffectiveHorizon(
        depth=depth,
        gap=float(gaps.min()),
        rollouts=rollouts,
        episodes=num_steps * num_actions**depth * rollouts,
        effective=depth + (math.log(rollouts, num_actions) if num_actions > 1 else 0.0),
        random_return=random_return,
        best_return=best_return,
    )


def _values(task: Tabular, reduce: Callable[[Tensor], Tensor]) -> Values:
    later: Tensor | None = None
    steps = []
    for _ in range(task.num_steps):
        values = task.reward.double() + _of_next(task, later)
        later = reduce(values)
        steps.append(values)
    return torch.stack(steps[::-1])


def _of_next(task: Tabular, of_state: Tensor | None) -> Float[Tensor, "states actions"]:
    """Return the value `of_state` of the state after each action. 0 if the episode has ended."""
    if of_state is None:
        return torch.zeros(task.reward.shape, dtype=torch.float64)
    return torch.where(task.next_state == END, 0.0, of_state[task.next_state.clamp(min=0)])


def _visited(
    task: Tabular, taken: Bool[Tensor, "steps states actions"]
) -> Bool[Tensor, "steps states"]:
    """Return the states that may be visited in each step by the actions `taken`."""
    visited = torch.zeros(taken.shape[:2], dtype=torch.bool)
    visited[0, task.start] = True
    for step in range(task.num_steps - 1):
        reached = task.next_state[visited[step][:, None] & taken[step]]
        visited[step + 1, reached[reached != END]] = True
    return visited


def _rollouts(task: Tabular, gaps: Float[Tensor, "steps states"], *, depth: int) -> int:
    """Return m, the number of random episodes after each sequence of `depth` actions.

    `gaps` are the differences of Q^k between the best action and the next best one. With m
    episodes, a mean return is wrong by less than half of its gap, for all means with a probability
    of at least 1/2.

    Bernstein's inequality: a mean of m returns with variance v in a range R is wrong by e with a
    probability of at most 2 exp(-m e^2 / (2 v + 2 R e / 3)). All T A^k means must be right.
    """
    variance, width = _spread(task, depth)
    half = gaps / 2
    num_means = task.num_steps * task.reward.shape[1] ** depth
    needed = (
        (2 * variance + 2 * width * half / 3) / half.square() * math.log(2 * num_means / MISTAKE)
    )
    counted = needed[gaps.isfinite()]
    return max(1, math.ceil(float(counted.max()) - TOLERANCE)) if len(counted) else 1


def _spread(
    task: Tabular, depth: int
) -> tuple[Float[Tensor, "steps states"], Float[Tensor, "steps states"]]:
    """Return the largest variance and range of the return, for each step and state.

    They are the largest over all sequences of `depth` actions. Later actions are random.
    """
    reward = task.reward.double()
    mean: Tensor | None = None
    square: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    variances, widths = [], []
    for _ in range(task.num_steps):
        later = _of_next(task, mean)
        squares = reward.square() + 2 * reward * later + _of_next(task, square)
        lows, highs = reward + _of_next(task, low), reward + _of_next(task, high)
        variances.append((squares - (reward + later).square()).clamp(min=0).amax(-1))
        widths.append((highs - lows).amax(-1))
        mean, square = (reward + later).mean(-1), squares.mean(-1)
        low, high = lows.amin(-1), highs.amax(-1)
    for _ in range(depth - 1):
        # The first action is chosen, so only what follows it has a spread.
        for found in (variances, widths):
            for step in reversed(range(task.num_steps)):
                before = found[step - 1] if step else None
                found[step] = _of_next(task, before).amax(-1)
    return torch.stack(variances[::-1]), torch.stack(widths[::-1])
