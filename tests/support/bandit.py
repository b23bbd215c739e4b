"""A softmax policy that learns from groups of one-turn answers, to measure techniques."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tests.support.groups import group, made
from unstale.algorithms.advantages import grpo
from unstale.records import ScoredTrajectory
from unstale.techniques.hooks import Techniques

STOP = 2
"""The last token of an answer that was not cut off."""

SEEDS = 24

Arm = Sequence[tuple[float, Mapping[str, Any]]]
"""The results of an answer, each with its probability. A result has the arguments of `made`."""


class Learner:
    """24 policies that learn independently. They start with `logits`, `[arms]` or `[24, arms]`."""

    def __init__(
        self,
        arms: Sequence[Arm],
        logits: Sequence[float] | Tensor,
        *,
        size: int = 8,
        seed: int = 0,
    ) -> None:
        self._size = size
        self._noise = torch.Generator().manual_seed(seed)
        self._chances = [torch.tensor([chance for chance, _ in arm]).cumsum(0) for arm in arms]
        self._answers = [
            [
                [made(**{"turns": ((arm, STOP),), "episode": seed, **each}) for _, each in results]
                for arm, results in enumerate(arms)
            ]
            for seed in range(SEEDS)
        ]
        self.logits = torch.as_tensor(logits).expand(SEEDS, len(arms))

    @property
    def p(self) -> Tensor:
        """The probability of each arm, mean over the seeds, `[arms]`."""
        return self.logits.softmax(-1).mean(0)

    def step(
        self, parts: Mapping[str, object], *, lr: float = 1.0, num_groups: int = 2
    ) -> list[ScoredTrajectory]:
        """Take a gradient step on new groups. Return the trained answers.

        The first token of an answer is its arm. The episode of a trajectory is the number of its
        policy.
        """
        p = self.logits.softmax(-1)
        count = num_groups * self._size
        arms = torch.multinomial(p, count, replacement=True, generator=self._noise).tolist()
        chances = torch.rand((len(p), count), generator=self._noise).tolist()
        groups = []
        for seed, row in enumerate(zip(arms, chances, strict=True)):
            answers = []
            for arm, chance in zip(*row, strict=True):
                result = int((self._chances[arm] < chance).sum())
                answers.append(self._answers[seed][arm][result])
            groups += [group(*answers[i : i + self._size]) for i in range(0, count, self._size)]
        scored, _ = Techniques(parts).credit(
            groups, progress=0.0, version=0, estimate=grpo, identify=lambda task: task.key
        )
        seeds = torch.tensor([each.trajectory.episode for each in scored])
        taken = torch.tensor([each.trajectory.tokens[0] for each in scored])
        advantage = torch.tensor([each.advantage[0] for each in scored])
        scores = advantage[:, None] * (one_hot(taken, p.shape[1]) - p[seeds])
        trained = torch.zeros(len(p)).index_add(0, seeds, torch.ones(len(seeds))).clamp(min=1)
        gradient = torch.zeros_like(p).index_add(0, seeds, scores) / trained[:, None]
        self.logits = self.logits + lr * gradient
        return scored
