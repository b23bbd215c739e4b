"""A ridge regression from hidden states to rewards, fitted to the last episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unstale.records import Group
from unstale.techniques.hooks import HiddenStates

if TYPE_CHECKING:
    from torch import Tensor

LEAST_SPREAD = 1e-3
"""Smallest standard deviation by which a feature is divided, as a share of the root mean square of
its block of features. Without it, rounding errors of constant features would count as much as
features that vary.
"""
BLOCKS = ("prompt", "reply", "entropy")


class Probe:
    """A linear regression from the features of an episode to a reward.

    The features are those of `HiddenStates`, in three blocks: prompt, reply and entropy. Each block
    is divided by the square root of its number of features, so that all count equally. Each feature
    is standardised over the examples. Features of a missing block are 0. The weights minimise the
    sum of squared errors plus `ridge` times their squared norm; the constant term is the mean
    target.
    """

    def __init__(self, *, ridge: float, size: int) -> None:
        """Create a regression without examples. It keeps the last `size` examples.

        `ridge` is the penalty of squared weights.
        """
        self._ridge = ridge
        self._size = size
        self._examples: tuple[HiddenStates, Tensor] | None = None
        """The features of n examples, and their targets `[n]` in float64."""
        self._fit: _Fit | None = None
        """The fitted regression. None if the examples have changed since the last fit."""

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples[1]) if self._examples else 0

    def add(self, states: HiddenStates, targets: Tensor) -> None:
        """Add n examples: features of episodes, and the targets `[n]` to be predicted from them."""
        import torch

        targets = targets.double()
        if self._examples:
            old, old_targets = self._examples
            columns: dict[str, Any] = {
                name: torch.cat([getattr(old, name), getattr(states, name)]) for name in BLOCKS
            }
            states, targets = HiddenStates(**columns), torch.cat([old_targets, targets])
        kept = torch.arange(len(targets))[-self._size :]
        self._examples = (select(states, kept), targets[kept])
        self._fit = None

    def predict(self, states: HiddenStates) -> Tensor:
        """Return the predicted target for n rows of features, `[n]` in float64.

        Raises ValueError if there are no examples.
        """
        if not self._examples:
            raise ValueError("the probe has no examples")
        if self._fit is None:
            self._fit = _Fit(*self._examples, ridge=self._ridge)
        return self._fit.predict(states)

    def state(self) -> Mapping[str, Any]:
        if not self._examples:
            return {"probe": None}
        states, targets = self._examples
        return {"probe": {name: getattr(states, name) for name in BLOCKS} | {"targets": targets}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._examples = self._fit = None
        if state["probe"]:
            columns = dict(state["probe"])
            targets = columns.pop("targets")
            self.add(HiddenStates(**columns), targets)


class _Fit:
    def __init__(self, states: HiddenStates, targets: Tensor, *, ridge: float) -> None:
        import torch

        self._scales = {name: _scale(getattr(states, name).double()) for name in BLOCKS}
        self._mean = targets.mean()
        features = self._features(states)
        # There are mostly fewer examples than features, so the system has a row per example.
        system = features @ features.T + ridge * torch.eye(len(targets), dtype=torch.float64)
        self._weights = features.T @ torch.linalg.solve(system, targets - self._mean)

    def predict(self, states: HiddenStates) -> Tensor:
        return self._mean + self._features(states) @ self._weights

    def _features(self, states: HiddenStates) -> Tensor:
        import torch

        blocks = []
        for name, (mean, spread) in self._scales.items():
            values = (getattr(states, name).double() - mean) / spread
            blocks.append(torch.where(values.isnan(), 0.0, values) / values.shape[1] ** 0.5)
        return torch.cat(blocks, 1)


def _scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation, `[F]` each, of features `[n, F]`. NaN is ignored."""
    mean = values.nanmean(0)
    spread = (values - mean).square().nanmean(0).sqrt()
    least = LEAST_SPREAD * values.square().nanmean().sqrt()
    return mean, spread.maximum(least).nan_to_num(nan=1.0).clamp(min=1e-30)


def select(states: HiddenStates, rows: Tensor) -> HiddenStates:
    """Return the hidden states of the episodes with the indices `rows`."""
    return HiddenStates(**{name: getattr(states, name)[rows] for name in BLOCKS})


def without_replies(states: HiddenStates) -> HiddenStates:
    """Return the features of the prompts. The features of replies and entropies are set to NaN."""
    import torch

    return HiddenStates(
        prompt=states.prompt,
        reply=torch.full_like(states.reply, torch.nan),
        entropy=torch.full_like(states.entropy, torch.nan),
    )


@dataclass(frozen=True, slots=True)
class ProbedBatch:
    """The features of a batch's finished episodes, and the regression's predictions from them."""

    rows: Mapping[int, int]
    """The row in `states` of each episode, by the episode's number."""
    states: HiddenStates
    predicted: Tensor | None
    """The predicted mean reward of each episode's siblings, `[n]`. Siblings are the other episodes
    of its group. None before the first fit.
    """
    alone: Tensor | None
    """Like `predicted`, but computed from the features of the prompt only. None before the first
    fit.
    """

    def rows_of(self, group: Group) -> Tensor:
        import torch

        return torch.tensor([self.rows[each.episode] for each in group.finished])

    def baseline(self, group: Group, rewards: Tensor) -> Tensor:
        """Return the baseline of each finished episode of a group, `[n]`.

        It is the mean of the predictions for the other episodes of the group (siblings). Without
        predictions it is the mean of the siblings' `rewards` `[n]`. An episode without siblings has
        the prediction from its prompt.
        """
        if self.predicted is None or self.alone is None:
            return means_of_others(rewards)
        rows = self.rows_of(group)
        return means_of_others(self.predicted[rows]) if len(rows) > 1 else self.alone[rows]


def means_of_others(values: Tensor) -> Tensor:
    """Return for each value the mean of the other values (leave-one-out), `[n]`.

    A single value is returned unchanged.
    """
    if len(values) < 2 or (values == values[0]).all():  # no rounding errors of equal values
        return values
    return (values.sum() - values) / (len(values) - 1)
