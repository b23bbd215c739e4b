"""The effective horizon of a small task: how hard its best policy is to find by random episodes.

Q^1 is the expected return of each action if all later actions are random, and Q^(k + 1) = r + max
Q^k of the next step. The depth of the task is the smallest k for which every policy that is greedy
with respect to Q^k is optimal. At depth 1 it is enough to compare single actions by the results of
random episodes. At depth k, all sequences of k actions must be compared. If m random episodes after
each sequence are enough to find the best one, the effective horizon is k + log_A m, with A actions.
From Laidlaw, Russell and Dragan (arXiv 2304.09853). `unstale.algorithms.sqirl` has the one of tasks
whose answers are random.
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
"""Two returns count as equal if they differ by less than this share of the largest absolute one.
Probabilities count as equal if they differ by less than this.
"""
MISTAKE = 0.5
"""Probability with which the random episodes of `EffectiveHorizon.rollouts` may fail to show the
best actions.
"""

Values = Float[Tensor, "steps states actions"]


@dataclass(frozen=True, slots=True)
class Tabular:
    """A task as arrays. All states have the same number of actions."""

    next_state: Int[Tensor, "states actions *outcomes"]
    """The state to which each action in each state leads, or `END`. With `probability`, actions
    have several outcomes.
    """
    reward: Float[Tensor, "states actions *outcomes"]
    num_steps: int
    """T: the largest number of actions in an episode."""
    start: int | Float[Tensor, " states"] = 0
    """The first state, or the probability of each state to be the first."""
    probability: Float[Tensor, "states actions outcomes"] | None = None
    """The probability of each outcome of an action. None for a deterministic task."""

    def __post_init__(self) -> None:
        shape = tuple(self.next_state.shape)
        outcomes = self.probability is not None
        if len(shape) != 2 + outcomes or 0 in shape or tuple(self.reward.shape) != shape:
            raise ValueError(
                f"next_state and reward must both be [states, actions{', outcomes' * outcomes}], "
                f"got {list(shape)} and {list(self.reward.shape)}"
            )
        is_distribution = isinstance(self.start, Tensor)
        if self.num_steps < 1 or not (is_distribution or 0 <= self.start < shape[0]):
            raise ValueError(
                f"num_steps must be >= 1 and start below {shape[0]} (the states), got "
                f"{self.num_steps} and {self.start}"
            )
        if isinstance(self.start, Tensor):
            _check_probability(self.start, (shape[0],), "start")
        if self.probability is not None:
            _check_probability(self.probability, shape, "probability")
        low, high = int(self.next_state.min()), int(self.next_state.max())
        if low < END or high >= shape[0]:
            raise ValueError(
                f"next_state must be from {END} (the end) to {shape[0] - 1}, got {low} to {high}"
            )
        if not self.reward.isfinite().all():
            raise ValueError("reward must be finite")

    @property
    def num_actions(self) -> int:
        return self.reward.shape[1]

    @property
    def first(self) -> Float[Tensor, " states"]:
        """The probability of each state to be the first."""
        if isinstance(self.start, Tensor):
            return self.start.double()
        found = torch.zeros(len(self.reward), dtype=torch.float64)
        found[self.start] = 1.0
        return found

    def mean(self, of_outcome: Tensor) -> Float[Tensor, "states actions"]:
        """Return the expected value of a number that each outcome of an action has."""
        if self.probability is None:
            return of_outcome
        return (self.probability.double() * of_outcome).sum(-1)


def _check_probability(found: Tensor, shape: tuple[int, ...], name: str) -> None:
    if tuple(found.shape) != shape:
        raise ValueError(f"{name} must be {list(shape)}, got {list(found.shape)}")
    if not ((found >= 0).all() and ((found.double().sum(-1) - 1).abs() < TOLERANCE).all()):
        raise ValueError(f"{name} must be >= 0, with a sum of 1 in the last dimension")


@dataclass(frozen=True, slots=True)
class EffectiveHorizon:
    """The difficulty of finding the best policy of a task by random episodes.

    A is the number of actions in a state, and T the largest number of actions in an episode.
    """

    depth: int
    """k: the number of successive actions whose sequences must be compared."""
    gap: float
    """The smallest difference of Q^k (the values at depth k, see the module) between the best and
    the next best action, over all states that greedy policies visit. Infinite if all actions are
    equally good everywhere.
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
    """Return Q^1: the expected return of each action in each step, if later actions are random."""
    return _values(task, lambda values: values.mean(-1))


def optimal_values(task: Tabular) -> Values:
    """Return Q*: the return of each action in each step, if later actions are optimal."""
    return _values(task, lambda values: values.amax(-1))


def back_up(task: Tabular, values: Values) -> Values:
    """Do one step of Q-iteration: return the reward plus the best of `values` in the next step."""
    return torch.stack(
        [
            task.mean(
                task.reward.double() + of_next(task, later.amax(-1) if later is not None else None)
            )
            for later in [*values[1:], None]
        ]
    )


def effective_horizon(task: Tabular) -> EffectiveHorizon:
    """Return the effective horizon of a deterministic task.

    T steps of Q-iteration give the optimal values, so the depth k is at most T. Each step of
    Q-iteration takes O(T states actions) time and memory. Raises `ValueError` for a task with
    random outcomes.
    """
    if task.probability is not None or isinstance(task.start, Tensor):
        raise ValueError(
            "the task has random outcomes: use unstale.algorithms.sqirl.stochastic_horizon"
        )
    num_steps, num_actions = task.num_steps, task.num_actions
    values, best = random_values(task), optimal_values(task)
    random_return, best_return = (
        start_value(task, values.mean(-1)),
        start_value(task, best.amax(-1)),
    )
    depth = 1
    while not (greedy := Greedy.of(task, values, best)).is_optimal:
        values, depth = back_up(task, values), depth + 1
    rollouts = _rollouts(task, greedy.gaps, depth=depth)
    return EffectiveHorizon(
        depth=depth,
        gap=float(greedy.gaps.min()),
        rollouts=rollouts,
        episodes=num_steps * num_actions**depth * rollouts,
        effective=depth + (math.log(rollouts, num_actions) if num_actions > 1 else 0.0),
        random_return=random_return,
        best_return=best_return,
    )


@dataclass(frozen=True, slots=True)
class Greedy:
    """All policies that are greedy with respect to some values."""

    taken: Bool[Tensor, "steps states actions"]
    """True for the best actions by these values."""
    visited: Bool[Tensor, "steps states"]
    """True for the states that such a policy can visit."""
    gaps: Float[Tensor, "steps states"]
    """The difference between the best value of a state and the next best. Infinite if all actions
    are equally good, and in states that are not visited.
    """
    is_optimal: bool
    """True if every such policy is optimal."""

    @classmethod
    def of(cls, task: Tabular, values: Values, best: Values) -> "Greedy":
        """Return the greedy policies of `values`. `best` are the optimal values."""
        scale = TOLERANCE * max(1.0, float(best.abs().max()))
        is_best = best >= best.amax(-1, keepdim=True) - scale
        taken = values >= values.amax(-1, keepdim=True) - scale
        visited = _visited(task, taken)
        others = torch.where(taken, -math.inf, values).amax(-1)
        return cls(
            taken,
            visited,
            torch.where(visited, values.amax(-1) - others, math.inf),
            not (taken & ~is_best)[visited].any(),
        )


def start_value(task: Tabular, of_state: Float[Tensor, "steps states"]) -> float:
    """Return the expected value of the first state."""
    return float(task.first @ of_state[0])


def _values(task: Tabular, reduce: Callable[[Tensor], Tensor]) -> Values:
    later: Tensor | None = None
    steps = []
    for _ in range(task.num_steps):
        values = task.mean(task.reward.double() + of_next(task, later))
        later = reduce(values)
        steps.append(values)
    return torch.stack(steps[::-1])


def of_next(task: Tabular, of_state: Tensor | None) -> Float[Tensor, "states actions *outcomes"]:
    """Return the value (`of_state`) of the state after each action, for each outcome of a task that
    has several. 0 if the episode ends, and everywhere if `of_state` is None.
    """
    if of_state is None:
        return torch.zeros(task.reward.shape, dtype=torch.float64)
    return torch.where(task.next_state == END, 0.0, of_state[task.next_state.clamp(min=0)])


def _visited(
    task: Tabular, taken: Bool[Tensor, "steps states actions"]
) -> Bool[Tensor, "steps states"]:
    """Return the states that can be reached in each step by the actions in `taken`."""
    visited = torch.zeros(taken.shape[:2], dtype=torch.bool)
    visited[0] = task.first > 0
    for step in range(task.num_steps - 1):
        can_be = visited[step][:, None] & taken[step]
        if task.probability is not None:
            can_be = can_be[..., None] & (task.probability > 0)
        reached = task.next_state[can_be]
        visited[step + 1, reached[reached != END]] = True
    return visited


def _rollouts(task: Tabular, gaps: Float[Tensor, "steps states"], *, depth: int) -> int:
    """Return m, the number of random episodes after each sequence of `depth` actions.

    `gaps` are the differences of Q^k between the best action and the next best one. With m episodes
    for each mean return, every mean is wrong by less than half of its gap, with a probability of at
    least 1/2.

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
    """Return the largest variance and the largest range of the return, for each step and state.

    The maximum is over all sequences of `depth` actions. Later actions are random.
    """
    reward = task.reward.double()
    mean: Tensor | None = None
    square: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    variances, widths = [], []
    for _ in range(task.num_steps):
        later = of_next(task, mean)
        squares = reward.square() + 2 * reward * later + of_next(task, square)
        lows, highs = reward + of_next(task, low), reward + of_next(task, high)
        variances.append((squares - (reward + later).square()).clamp(min=0).amax(-1))
        widths.append((highs - lows).amax(-1))
        mean, square = (reward + later).mean(-1), squares.mean(-1)
        low, high = lows.amin(-1), highs.amax(-1)
    for _ in range(depth - 1):
        # The first action is chosen, so only what follows it has a spread.
        for found in (variances, widths):
            for step in reversed(range(task.num_steps)):
                before = found[step - 1] if step else None
                found[step] = of_next(task, before).amax(-1)
    return torch.stack(variances[::-1]), torch.stack(widths[::-1])
