"""SQIRL: fitted Q-iteration after random episodes, and how hard a task with random answers is.

Q^1 is the value of an action if all later actions are random, and Q^(k + 1) = E[r + max Q^k of the
next step]. A task is k-QVI-solvable if every policy that is greedy with respect to Q^k is optimal.
SQIRL then learns the policy of one step after the other: it plays episodes with the policies that
it has so far, and at random from there on. A regression of the returns after k - 1 more steps
estimates Q^1, and k - 1 regressions of r + max Q estimate Q^k. How the regression generalises is
left to the user.

With A actions and returns in a range of 1, the effective horizon at depth k is H_k = k + log_A(1 /
gap^2), where the gap is the smallest difference between the best and the next best Q^k. That of the
task is the smallest H_k. From Laidlaw, Zhu, Russell and Dragan (arXiv 2312.08369).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unstale.algorithms.effective_horizon import (
    END,
    Greedy,
    Tabular,
    back_up,
    of_next,
    optimal_values,
    random_values,
    start_value,
)

MISTAKE = 0.5
"""Largest probability with which `StochasticHorizon.episodes` do not show an optimal policy."""

Actions = Int[Tensor, " episodes"]
Observed = Tensor
"""Observations `[episodes, ...]`. Those of a `Tabular` task are the numbers of states."""
Fitted = Callable[[Observed], Float[Tensor, "episodes actions"]]
"""A function of observations that returns the value of each action."""
Regression = Callable[[Observed, Actions, Float[Tensor, " episodes"]], Fitted]
"""A function `(observations, actions, targets)` that fits a value to observations and actions."""


class Simulator(Protocol):
    """An interface of an environment that plays several episodes at a time."""

    num_steps: int
    """T: the largest number of actions in an episode."""
    num_actions: int

    def begin(self, episodes: int) -> Observed:
        """Begin new episodes, and return their first observations."""
        ...

    def step(
        self, actions: Actions
    ) -> tuple[Observed, Float[Tensor, " episodes"], Bool[Tensor, " episodes"]]:
        """Take an action in each episode. Return the next observations, the rewards, and which
        episodes have ended. In an episode that had ended before, the action changes nothing, and
        the reward does not count. The values of its observation are computed, but not used.
        """
        ...


class TabularSimulator:
    """Episodes of a task that is given as arrays."""

    def __init__(self, task: Tabular, *, seed: int = 0) -> None:
        self._task = task
        self._random = torch.Generator().manual_seed(seed)
        self._state = torch.zeros(0, dtype=torch.long)
        self.num_steps, self.num_actions = task.num_steps, task.num_actions

    def begin(self, episodes: int) -> Observed:
        self._state = torch.multinomial(
            self._task.first, episodes, replacement=True, generator=self._random
        )
        return self._state

    def step(
        self, actions: Actions
    ) -> tuple[Observed, Float[Tensor, " episodes"], Bool[Tensor, " episodes"]]:
        task = self._task
        place: tuple[Tensor, ...] = (self._state, actions)
        if task.probability is not None:
            chances = task.probability[place].double()
            outcome = torch.multinomial(chances, 1, generator=self._random).squeeze(-1)
            place = (*place, outcome)
        following = task.next_state[place]
        self._state = following.clamp(min=0)
        return self._state, task.reward[place].double(), following == END


@dataclass(frozen=True, slots=True)
class Learned:
    """The policy that SQIRL has learned."""

    values: tuple[Fitted, ...]
    """The fitted Q^k of each step. They may be fewer than `num_steps`: no episode was longer."""
    episodes: int
    """Number of episodes that were played."""

    def choose(self, step: int, observations: Observed) -> Actions:
        """Return the best action in each episode. Raises IndexError for a step without values."""
        return self.values[step](observations).argmax(-1)


def sqirl(
    simulator: Simulator,
    *,
    depth: int,
    episodes: int,
    regress: Regression | None = None,
    seed: int = 0,
) -> Learned:
    """Learn a policy from `episodes` episodes for each step, with the values Q^`depth`.

    `regress` fits values to observations. Without it, observations are numbers of states, and the
    value is the mean of the targets of each state and action. An action that was never taken in a
    state is then never the best. `seed` draws the random actions. Raises `ValueError` if `depth` or
    `episodes` is below 1.
    """
    if depth < 1 or episodes < 1:
        raise ValueError(f"depth and episodes must be >= 1, got {depth} and {episodes}")
    random = torch.Generator().manual_seed(seed)
    fit = regress or table_means(simulator.num_actions)
    learned: list[Fitted] = []
    for step in range(simulator.num_steps):
        played = _play(simulator, Learned(tuple(learned), 0), episodes, random)
        longest = int(played.going.any(-1).sum())  # steps that some episode has reached
        if step >= longest:
            break
        last = min(step + depth, longest) - 1
        fitted = played.fit(fit, last, played.reward[last:].sum(0))
        for place in reversed(range(step, last)):
            later = fitted(played.observed[place + 1]).amax(-1)
            following = torch.where(played.going[place + 1], later, 0.0)
            fitted = played.fit(fit, place, played.reward[place] + following)
        learned.append(fitted)
    return Learned(tuple(learned), episodes * min(len(learned) + 1, simulator.num_steps))


def table_means(num_actions: int) -> Regression:
    """Return a regression of numbered states: the mean target of each state and action."""

    def fit(states: Observed, actions: Actions, targets: Tensor) -> Fitted:
        num_states = int(states.max()) + 1
        place = states * num_actions + actions
        number = torch.bincount(place, minlength=num_states * num_actions)
        total = torch.bincount(place, weights=targets, minlength=num_states * num_actions)
        means = torch.where(number > 0, total / number.clamp(min=1), -math.inf)
        table = means.reshape(num_states, num_actions)
        unknown = torch.full((num_actions,), -math.inf, dtype=table.dtype)

        def values(asked: Observed) -> Tensor:
            known = (asked < num_states)[:, None]
            return torch.where(known, table[asked.clamp(max=num_states - 1)], unknown)

        return values

    return fit


@dataclass(frozen=True, slots=True)
class _Played:
    """Episodes, each up to its end. All arrays have the steps in their first dimension."""

    observed: list[Observed]
    actions: Int[Tensor, "steps episodes"]
    reward: Float[Tensor, "steps episodes"]
    """0 after the end of an episode."""
    going: Bool[Tensor, "steps episodes"]
    """True for the steps before the end of an episode."""

    def fit(self, regress: Regression, step: int, targets: Float[Tensor, " episodes"]) -> Fitted:
        going = self.going[step]
        return regress(self.observed[step][going], self.actions[step][going], targets[going])


def _play(
    simulator: Simulator, learned: Learned, episodes: int, random: torch.Generator
) -> _Played:
    observed = [simulator.begin(episodes)]
    actions: list[Tensor] = []
    rewards: list[Tensor] = []
    going: list[Tensor] = []
    is_going = torch.ones(episodes, dtype=torch.bool)
    for step in range(simulator.num_steps):
        if step < len(learned.values):
            chosen = learned.choose(step, observed[step])
        else:
            chosen = torch.randint(simulator.num_actions, (episodes,), generator=random)
        found, reward, has_ended = simulator.step(chosen)
        observed.append(found)
        actions.append(chosen)
        rewards.append(torch.where(is_going, reward, 0.0).double())
        going.append(is_going)
        is_going = is_going & ~has_ended
    return _Played(observed, torch.stack(actions), torch.stack(rewards), torch.stack(going))


def expected_return(task: Tabular, learned: Learned) -> float:
    """Return the expected return of a learned policy of a task, from all outcomes.

    In steps without values, which no episode reached, the first action is taken.
    """
    states = torch.arange(len(task.reward))
    later: Tensor | None = None
    for step in reversed(range(task.num_steps)):
        values = task.mean(task.reward.double() + of_next(task, later))
        chosen = torch.zeros_like(states)
        if step < len(learned.values):
            chosen = learned.choose(step, states)
        later = values[states, chosen]
    assert later is not None, "num_steps is at least 1"
    return float(task.first @ later)


@dataclass(frozen=True, slots=True)
class StochasticHorizon:
    """The difficulty of a task for SQIRL. A is the number of actions, T the number of steps."""

    depth: int
    """k: the depth with the smallest H_k."""
    gap: float
    """The smallest difference of Q^k between the best and the next best action, over all states
    that greedy policies visit, as a share of the range of returns. Infinite if all actions are
    equally good everywhere.
    """
    effective: float
    """H_k: the stochastic effective horizon."""
    by_depth: tuple[float, ...]
    """H_1 to H_T. Infinite for the depths at which a greedy policy is not optimal."""
    episodes: float
    """A number of episodes for each step that is enough for SQIRL with `table_means` and depth k to
    find an optimal policy, with a probability of at least 1/2. It is an upper bound by Hoeffding's
    inequality, and far above the number that is needed.
    """
    random_return: float
    """The expected return of a policy that chooses all actions at random."""
    best_return: float
    """The expected return of the best policy."""


def stochastic_horizon(task: Tabular) -> StochasticHorizon:
    """Return the stochastic effective horizon of a task, which may also be deterministic.

    Takes O(T^2 states actions outcomes) time.
    """
    values, best = random_values(task), optimal_values(task)
    random_return = start_value(task, values.mean(-1))
    width = _width(task)
    found: list[tuple[float, Greedy]] = []
    for depth in range(1, task.num_steps + 1):
        greedy = Greedy.of(task, values, best)
        gap = float(greedy.gaps.min()) / width if width else math.inf
        size = depth + max(0.0, -2 * math.log(gap)) / math.log(max(task.num_actions, 2))
        found.append((size if greedy.is_optimal else math.inf, greedy))
        values = back_up(task, values)
    by_depth = tuple(size for size, _ in found)
    depth = by_depth.index(min(by_depth)) + 1
    greedy = found[depth - 1][1]
    gap = float(greedy.gaps.min()) / width if width else math.inf
    return StochasticHorizon(
        depth=depth,
        gap=gap,
        effective=by_depth[depth - 1],
        by_depth=by_depth,
        episodes=_episodes(task, greedy, gap, depth),
        random_return=random_return,
        best_return=start_value(task, best.amax(-1)),
    )


def _width(task: Tabular) -> float:
    """Return the difference between the largest and the smallest possible return."""
    reward = task.reward.double()
    high: Tensor | None = None
    low: Tensor | None = None
    possible = torch.ones_like(reward) if task.probability is None else task.probability
    for _ in range(task.num_steps):
        highs = torch.where(possible > 0, reward + of_next(task, high), -math.inf)
        lows = torch.where(possible > 0, reward + of_next(task, low), math.inf)
        high, low = highs.flatten(1).amax(-1), lows.flatten(1).amin(-1)
    assert high is not None and low is not None, "num_steps is at least 1"
    first = task.first > 0
    return float(high[first].max() - low[first].min())


def _episodes(task: Tabular, greedy: Greedy, gap: float, depth: int) -> float:
    """Return the number of episodes for each step. Infinite if a needed way has the probability 0
    in float64.

    Each of the k regressions may be wrong by less than gap / 2k. By Hoeffding's inequality, n
    targets in a range of 1 have a mean that is wrong by e with a probability of at most 2 exp(-2 n
    e^2). All N means of states and actions must be right. A state and an action with the
    probability p has n of m targets with m p / 2 >= n, and fewer than m p / 2 with a probability of
    at most exp(-m p / 8), by Chernoff's inequality.
    """
    if math.isinf(gap):
        return 1
    num_means = task.num_steps * depth * task.reward.shape[0] * task.num_actions
    share = MISTAKE / 2  # the rest is for states that are visited too rarely
    error = gap / (2 * depth)
    needed = math.log(2 * num_means / share) / (2 * error**2)
    rare = _rarest(task, greedy, depth)
    episodes = max(2 * needed, 8 * math.log(num_means / share)) / rare if rare else math.inf
    return math.ceil(episodes) if math.isfinite(episodes) else episodes


def _rarest(task: Tabular, greedy: Greedy, depth: int) -> float:
    """Return a lower bound on the probability with which episodes reach each state and action that
    the regressions of a step need. It is the probability of the least probable path to one of them.

    The paths are greedy up to a step, and random in the next `depth` steps.
    """
    anywhere = torch.ones_like(greedy.taken[0])
    way, least = torch.where(task.first > 0, task.first, math.inf), math.inf
    for step in range(task.num_steps):
        later = way
        for _ in range(min(depth, task.num_steps - step)):
            least = min(least, float(later.min()) / task.num_actions)
            later = _least_way(task, later, anywhere) / task.num_actions
        way = _least_way(task, way, greedy.taken[step])
    return least


def _least_way(
    task: Tabular, way: Float[Tensor, " states"], taken: Bool[Tensor, "states actions"]
) -> Float[Tensor, " states"]:
    """Return the probability of the least probable way to each state that takes one more action of
    `taken`. Infinite for states without a way.
    """
    next_state = task.next_state.reshape(*taken.shape, -1)
    chance = torch.ones(next_state.shape, dtype=torch.float64)
    if task.probability is not None:
        chance = task.probability.double()
    can_be = taken[..., None] & (chance > 0) & (next_state != END)
    ways = (way[:, None, None] * chance)[can_be]
    found = torch.full_like(way, math.inf)
    return found.scatter_reduce(0, next_state[can_be], ways, "amin")
