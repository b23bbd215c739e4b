"""`reward_channels`: normalise each named reward of an episode on its own.

A channel is a named reward. An episode's advantage in a channel is its reward minus the group's
mean, divided by the group's standard deviation plus 0.0001. The advantage of an episode is the
weighted sum over the channels. Then it is normalised over the batch: minus the mean, divided by the
standard deviation plus 0.0001. If the rewards were added up first, different combinations of
rewards would have equal advantages: in groups of two, the sums 0 and 1 give the same as 0 and 2.
From GDPO (arXiv 2601.05242).

The channels are the named rewards of the environment before the task set's `combine`, and the terms
that techniques add. A reward that an episode lacks, for example because it was cut off, counts as
0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from unstale.config.checks import ConfigError, JsonObject, Section
from unstale.config.techniques import Entry, chosen
from unstale.records import ENDED_BY_ENVIRONMENT, Group, ScoredTrajectory, Trajectory
from unstale.research.techniques.facts import Seen
from unstale.techniques.hooks import CreditContext

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig

EPSILON = 1e-4
"""A constant added to a standard deviation before dividing by it, as in the code of GDPO's
authors.
"""
COMBINED = "reward/"
"""Prefix of the facts (reported numbers) that store the separate rewards if a task set combined
them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChannelsConfig(Section):
    """Normalise each named reward of an episode on its own (GDPO)."""

    weights: Annotated[str, JsonObject()] = ""
    """The weight of each named reward, as in {"answer": 1, "brief": 0.1}. Empty: 1 for each. The
    weights of a task set's `combine` are not used.
    """
    whiten: Literal["episodes", "tokens", "none"] = "episodes"
    """Normalisation of advantages over the batch: `episodes` gives each episode the same weight,
    `tokens` weights it by its number of sampled tokens, `none` does not normalise.
    """

    def by_name(self) -> Mapping[str, float]:
        """Return the weight of each named reward. Empty if the option `weights` is empty."""
        return {} if not self.weights else json.loads(self.weights)

    def check_combination(self) -> None:
        weights = self.by_name()
        for name, weight in weights.items():
            is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not is_number or not math.isfinite(weight):
                raise ConfigError(
                    f"reward_channels.weights must have a number for each reward, got {weight!r} "
                    f"for {name!r}"
                )
        if len(weights) == 1:
            raise ConfigError(
                f"reward_channels.weights must name several rewards, got {', '.join(weights)} "
                "alone: with one reward, use advantage.estimator grpo"
            )


class RewardChannels:
    """An estimator of advantages that compares each named reward within its group."""

    def __init__(self, options: RewardChannelsConfig) -> None:
        self._options = options
        self._weights = options.by_name()
        self._several = Seen()

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        """Return trajectories with advantages.

        Raises `ConfigError` if the episodes of a whole batch have only one named reward, and none
        of an earlier batch had several.
        """
        import torch

        items = [item for group in groups for item in group.trajectories]
        if not items:
            return []
        values = [named_rewards(item) for item in items]
        ended = context.whole and any(item.stop in ENDED_BY_ENVIRONMENT for item in items)
        names = self._names(values, ended=ended, progress=context.progress)
        rewards = torch.tensor(
            [[each.get(name, 0.0) for name in names] for each in values], dtype=torch.float64
        ).view(len(items), len(names))
        owner = torch.tensor([i for i, group in enumerate(groups) for _ in group.trajectories])
        for name, column in zip(names, rewards.T, strict=True):
            mixed = sum(len(column[owner == i].unique()) > 1 for i in owner.unique())
            context.metrics[f"reward_channels/{name}_mixed_group_share"] = mixed / len(
                owner.unique()
            )
        weight = torch.tensor([self._weights.get(name, 1.0) for name in names]).double()
        lengths = None
        if self._options.whiten == "tokens":
            lengths = torch.tensor([item.num_sampled_in_all for item in items]).double()
        advantage = channel_advantages(rewards, owner, weight)
        if self._options.whiten != "none":
            advantage = whiten_nonzero(advantage, lengths)
        return [
            ScoredTrajectory(conversation, (value,))
            for item, value in zip(items, advantage.tolist(), strict=True)
            for conversation in item.conversations
        ]

    def _names(
        self, values: Sequence[Mapping[str, float]], *, ended: bool, progress: float
    ) -> list[str]:
        found = sorted(set().union(*values))
        if not self._weights:
            had_several = self._several.update(len(found) > 1, counts=ended, progress=progress)
            # Cut-off episodes lack the environment's rewards, but have the terms of techniques.
            if len(found) == 1 and ended and not had_several:
                raise ConfigError(
                    f"the technique reward_channels needs several named rewards, got {found[0]} "
                    "alone. Return several from the environment (docs/rewards.md), or use "
                    "advantage.estimator grpo"
                )
            return found
        if unknown := [name for name in found if name not in self._weights]:
            raise ConfigError(
                "reward_channels.weights must have every named reward, got "
                f"{', '.join(self._weights)}; the episodes also have {', '.join(unknown)}. Give a "
                "reward that must not count the weight 0"
            )
        return list(self._weights)


def named_rewards(item: Trajectory) -> Mapping[str, float]:
    """Return the rewards of an episode by name.

    If the task set combined several rewards into one, the separate rewards are returned instead,
    with the terms that techniques added.
    """
    parts = {
        name.removeprefix(COMBINED): value
        for name, value in item.facts.items()
        if name.startswith(COMBINED)
    }
    if not parts:
        return item.rewards
    return {**parts, **{name: each for name, each in item.rewards.items() if name != "reward"}}


def channel_advantages(rewards: Tensor, group: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of the advantages of all named rewards (channels), `[n]`.

    `rewards` is `[n, channels]`, `group` `[n]` has the number of each episode's group, and `weight`
    is `[channels]`.
    """
    from unstale.algorithms.advantages import grpo_advantage

    total = rewards.new_zeros(len(rewards))
    for column, each in zip(rewards.T, weight, strict=True):
        total = total + each * grpo_advantage(column, group, epsilon=EPSILON)
    return total


def whiten_nonzero(advantage: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Return advantages `[n]`, normalised over the batch. Advantages of 0 stay 0.

    `lengths` `[n]`, if given, are the weights for mean and standard deviation.
    """
    import torch

    from unstale.algorithms.advantages import whiten

    whitened = whiten(advantage, lengths=lengths, epsilon=EPSILON)
    return torch.where(advantage == 0, 0.0, whitened)


def _describe(options: RewardChannelsConfig) -> str:
    weights = "; ".join(f"{name} times {each:g}" for name, each in options.by_name().items())
    after = {
        "episodes": ", normalised over the episodes of the batch",
        "tokens": ", normalised over the batch, by sampled tokens",
        "none": "",
    }[options.whiten]
    return (
        "each named reward minus its group's mean, divided by its standard deviation, added up"
        f"{f' ({weights})' if weights else ''}{after}"
    )


def _check(options: RewardChannelsConfig, config: RunConfig) -> None:
    names = config.task.reward_names
    terms = [entry.name for entry in chosen(config.techniques) if entry.slot == "reward"]
    if names and len(names) + len(terms) < 2:
        raise ConfigError(
            "the technique reward_channels needs several named rewards, but task.env "
            f"{config.task.env} has {names[0]} alone. Add a reward term, as in --techniques "
            "'tool_bonus reward_channels', or use advantage.estimator grpo"
        )


_MEASURED = """
Of all groups of 4 episodes with two rewards of 0 or 1, there are 51 different lists of advantages
with the sum of the rewards first, and 107 with `reward_channels` (3 and 5 in groups of 2).

A policy of four answers, with an answer's rewards (right, brief) of (0, 0), (0, 1), (1, 0) and
(1, 1), which at first have the probabilities 0.60, 0.30, 0.07 and 0.03. 40 seeds, 4 groups of 8 per
step, learning rate 0.3; the probability of the answer with both rewards (standard error in
brackets):

| advantages | after 40 steps | after 80 steps |
|---|---|---|
| sum of the rewards first (GRPO) | 0.07 (0.01) | 0.81 (0.04) |
| `reward_channels` | 0.21 (0.02) | 0.97 (0.00) |
| `reward_channels` with `whiten` = none | 0.23 (0.03) | 0.95 (0.01) |
| GRPO, weights 1 and 0.1 | 0.05 (0.00) | 0.25 (0.04) |
| `reward_channels`, weights 1 and 0.1 | 0.03 (0.00) | 0.07 (0.01) |

With unequal weights it is a loss here: in a group whose episodes are all right, GRPO divides by the
deviation of the small reward, and so enlarges it. `reward_channels` does so only if the whole batch
is like that. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="reward_channels",
    slot="estimator",
    rows=(26,),
    makes=RewardChannels,
    options=RewardChannelsConfig,
    changes=frozenset({"advantage"}),
    describe=_describe,
    use="The reward is a sum of several, of which one is learned much earlier than another.",
    measured=_MEASURED,
    exactness="As with grpo, the gradient is not that of the expected reward: a reward counts more "
    "in a group, the less it differs there. D and S do not change. That advantages of 0 are not "
    "moved by the mean of the batch is our own reading.",
    requires=frozenset({"siblings"}),
    check=_check,
)
