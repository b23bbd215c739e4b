"""A small value model: it forecasts the success of a task from the results of past groups.

A task has a vector x of word features. For a new task, the model attends over the past groups:

    weight of group h   n_h exp(s sum_d m_d x_d x_hd)   n_h episodes, m_d and s are learned
    weight of the mean  exp(c)                          of all past groups; c is learned
    logit z             a logit(r) + b                  r: weighted mean of success rates
    forecast            sigmoid(g z + (1 - g) z0)       z0: logit of the mean of all past groups

s, m, c, a and b are trained on the past groups, each of which is forecast from the others. The loss
is that of V0: 0.75 times the cross entropy, plus 0.25 times the ranking loss -log sigmoid(z - z')
over pairs of groups with different results. g, between 0 and 1, is the trust in the model. It is
fitted by maximum likelihood to the results of past groups, each forecast before the model was
trained on it. So patterns that past groups show by chance get no trust.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unstale.config.checks import ConfigError
from unstale.research.techniques.forecast import DIMENSIONS, Array, logit, sigmoid

if TYPE_CHECKING:
    from torch import Tensor

RANKING = 0.25
"""Weight of the ranking loss in the loss. As in V0, the cross entropy has the rest."""
DECAY = (0.9, 0.99)
"""Decay rates of Adam's two moving averages. The second is small because few steps are taken."""
PENALTY = 1.0
"""Coefficient of (log m_d)^2 in the loss, which keeps every factor m_d near 1. It weighs as much as
the cross entropy of one episode.
"""
MARGIN = 1e-3
"""Success rates are moved to at least this distance from 0 and from 1, so that their logits are
finite.
"""
TRUSTS = np.linspace(0.0, 1.0, 21)
"""The candidates for the trust g, the weight of the model in forecasts."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of h groups of episodes."""

    vectors: Array
    """The word-feature vectors of the groups' tasks, `[h, d]`."""
    solved: Array
    """The number of successes of each group, `[h]`."""
    sizes: Array
    """The number of episodes of each group, `[h]`, at least 1."""

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def mean(self) -> float:
        """The success rate over all episodes of all groups."""
        return float(self.solved.sum() / self.sizes.sum())


class LearnedForecast:
    """Forecasts by a `ValueModel`, mixed with the mean success rate.

    The mixing weight, the trust in the model, is fitted to its earlier forecasts.
    """

    def __init__(self, *, width: float, lr: float, steps: int, history: int) -> None:
        """Create a forecast. Its model takes `steps` optimizer steps after each batch.

        The trust is fitted to the last `history` groups. `width` and `lr` are those of
        `ValueModel`.
        """
        self._model = ValueModel(DIMENSIONS, width=width, lr=lr)
        self._steps = steps
        self._before: deque[tuple[float, ...]] = deque(maxlen=history)
        """A row for each group: the model's logit and the mean success rate of all earlier groups,
        as they were before the model was trained on the group, then the group's successes and
        episodes.
        """

    @property
    def trust(self) -> float:
        """The trust g, the weight of the model in forecasts, from 0 to 1."""
        return fit_trust(*np.array(self._before, dtype=np.float64).reshape(-1, 4).T)

    def forecast(self, vectors: Array, past: Results) -> Array:
        """Return forecast success rates `[n]` of tasks with word vectors `[n, d]`.

        They are computed from the results `past`.
        """
        return trusted(self._model.logits(vectors, past), past.mean, self.trust)

    def learn(self, new: Results, before: Results, past: Results) -> None:
        """Train the model after a batch, and store what the trust is fitted to.

        `new` are the groups of the batch, `before` the earlier groups from which they were
        forecast, and `past` the groups to train on.
        """
        if len(before) and len(new):
            logits = self._model.logits(new.vectors, before)
            means = np.full(len(new), before.mean)
            rows = zip(logits, means, new.solved, new.sizes, strict=True)
            self._before += [tuple(map(float, row)) for row in rows]
        if len(past) > 1:
            self._model.train(past, steps=self._steps)

    def state(self) -> Mapping[str, Any]:
        return {"model": self._model.state(), "before": [list(each) for each in self._before]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._model.restore(state["model"])
        rows = [tuple(map(float, each)) for each in state["before"]]
        self._before = deque(rows, maxlen=self._before.maxlen)


class ValueModel:
    """A model that forecasts success by attention over past groups.

    The weights of word features and the calibration are learned.
    """

    def __init__(self, dimensions: int, *, width: float, lr: float) -> None:
        """Create an untrained model, which weighs groups as `weighted_rates` does with this
        `width`.

        `lr` is the learning rate of Adam.
        """
        import torch

        self._lr = lr
        self._weights: dict[str, Tensor] = {
            "words": torch.zeros(dimensions, dtype=torch.float64),
            "scale": torch.tensor(math.log(1 / width), dtype=torch.float64),
            "mean": torch.tensor(1 / width, dtype=torch.float64),
            "slope": torch.ones((), dtype=torch.float64),
            "shift": torch.zeros((), dtype=torch.float64),
        }
        self._moments = {
            name: (torch.zeros_like(value), torch.zeros_like(value))
            for name, value in self._weights.items()
        }
        self._steps = 0

    def logits(self, vectors: Array, past: Results) -> Array:
        """Return the logits `[n]` of the success rates of tasks with word vectors `[n, d]`.

        They are computed from the results of past groups.
        """
        import torch

        with torch.no_grad():
            found = self._logits(torch.from_numpy(vectors), past, own=False)
        return np.asarray(found.numpy())

    def train(self, *histories: Results, steps: int) -> None:
        """Take `steps` optimizer steps on histories of at least two groups each.

        Each group is forecast from the others of its history. With the histories of several
        policies, the model learns to read from a history what its policy can do.
        """
        import torch

        self._fit_size(histories[0].vectors.shape[1])
        for _ in range(steps):
            for value in self._weights.values():
                value.requires_grad_()
            loss = torch.stack([self._loss(past) for past in histories]).mean()
            self._step(torch.autograd.grad(loss, list(self._weights.values())))

    def _loss(self, past: Results) -> Tensor:
        import torch

        x, solved, sizes = map(torch.from_numpy, (past.vectors, past.solved, past.sizes))
        loss = value_loss(self._logits(x, past, own=True), solved, sizes)
        return loss + PENALTY * self._weights["words"].square().sum() / sizes.sum()

    def _fit_size(self, size: int) -> None:
        """Create a weight for each of `size` features, before the first training.

        Raises `ConfigError` if the model was trained on another number of features.
        """
        import torch

        trained = len(self._weights["words"])
        if trained == size:
            return
        if self._steps:
            raise ConfigError(
                f"the value model was trained on vectors of {trained} numbers, and these have "
                f"{size}: predicted_sampler.load needs a run with the same "
                "predicted_sampler.encoder and the same model"
            )
        self._weights["words"] = torch.zeros(size, dtype=torch.float64)
        self._moments["words"] = torch.zeros(size).double(), torch.zeros(size).double()

    def _logits(self, vectors: Tensor, past: Results, *, own: bool) -> Tensor:
        """Return the logits z `[n]` of tasks, computed from past groups.

        With `own`, the tasks are those of the past groups, and each group is forecast from the
        others.
        """
        import torch

        self._fit_size(vectors.shape[1])
        groups, solved, sizes = map(torch.from_numpy, (past.vectors, past.solved, past.sizes))
        weights = self._weights
        similar = (vectors * weights["words"].exp()) @ groups.T
        scores = weights["scale"].exp() * similar + sizes.log()
        mean = (solved.sum() / sizes.sum()).expand(len(vectors))
        if own:
            scores = scores.masked_fill(torch.eye(len(vectors), dtype=torch.bool), -math.inf)
            mean = (solved.sum() - solved) / (sizes.sum() - sizes)
        scores = torch.cat([scores, weights["mean"].expand(len(vectors), 1)], 1)
        attention = scores.softmax(1)
        rate = attention[:, :-1] @ (solved / sizes) + attention[:, -1] * mean
        return weights["slope"] * rate.clamp(MARGIN, 1 - MARGIN).logit() + weights["shift"]

    def _step(self, gradients: Sequence[Tensor]) -> None:
        self._steps += 1
        first_decay, second_decay = DECAY
        for name, gradient in zip(self._weights, gradients, strict=True):
            first, second = self._moments[name]
            first = first_decay * first + (1 - first_decay) * gradient
            second = second_decay * second + (1 - second_decay) * gradient.square()
            self._moments[name] = first, second
            mean = first / (1 - first_decay**self._steps)
            spread = (second / (1 - second_decay**self._steps)).sqrt()
            moved = self._weights[name].detach() - self._lr * mean / (spread + 1e-8)
            self._weights[name] = moved

    def state(self) -> Mapping[str, Any]:
        return {
            "weights": {name: value.detach() for name, value in self._weights.items()},
            "first": {name: first for name, (first, _) in self._moments.items()},
            "second": {name: second for name, (_, second) in self._moments.items()},
            "steps": self._steps,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._weights = dict(state["weights"])
        self._moments = {
            name: (state["first"][name], state["second"][name]) for name in self._weights
        }
        self._steps = int(state["steps"])


def value_loss(logits: Tensor, solved: Tensor, sizes: Tensor) -> Tensor:
    """Return the loss of V0, a scalar: the mean over h groups of forecasts given as `logits`.

    `solved` and `sizes` are the numbers of successes and of episodes of the groups. All inputs are
    `[h]`.
    """
    from torch.nn.functional import logsigmoid

    entropy = -(solved * logsigmoid(logits) + (sizes - solved) * logsigmoid(-logits))
    entropy = entropy.sum() / sizes.sum()
    rates = solved / sizes
    better = rates[:, None] > rates[None, :]
    if not better.any():
        return (1 - RANKING) * entropy
    ranking = -logsigmoid(logits[:, None] - logits[None, :])[better].mean()
    return (1 - RANKING) * entropy + RANKING * ranking


def trusted(logits: Array, mean: float, trust: float) -> Array:
    """Return success rates that mix a model's forecasts with a mean rate, by the trust in the
    model.

    They are sigmoid(trust z + (1 - trust) z0), with z = `logits` and z0 = logit(`mean`).
    """
    base = logit(np.array(mean))
    return sigmoid(base + trust * (logits - base))


def fit_trust(logits: Array, means: Array, solved: Array, sizes: Array) -> float:
    """Return the trust g under which the results of h groups are most likely. 0 without groups.

    `logits` `[h]` are the model's logits for each group before it was trained on that group, and
    `means` `[h]` the mean success rates at that time. `solved` and `sizes` are `[h]`.
    """
    if not len(logits):
        return 0.0
    base = logit(means)
    rates = sigmoid(base + TRUSTS[:, None] * (logits - base)).clip(MARGIN, 1 - MARGIN)
    likelihood = (solved * np.log(rates) + (sizes - solved) * np.log1p(-rates)).sum(1)
    return float(TRUSTS[int(likelihood.argmax())])
