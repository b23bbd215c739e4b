"""`ppo_ewma_async`: averages of the weights, kept as old as the data is, and begun anew when they are too old."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms import proximal
from unstale.old_logps import Needs, Passive
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch

BETA_MAX = 0.95
"""No average gets older than 19 versions."""


@dataclass(frozen=True, slots=True)
class Reset:
    """When the reference is given up: the kept share stays under `below` for `patience` batches.

    At most once in `cooldown` batches. `below` 0 never resets.
    """

    below: float = 0.0
    patience: int = 3
    cooldown: int = 10


class PpoEwmaAsync(Passive):
    """`prox` from averages whose age follows the staleness of the batch (arXiv 2605.12070; algorithm.md, section 3).

    The weights of a version are added once, when its first batch is scored, with the decay that leaves the average as
    old as the batch's action tokens with an advantage are in the mean. With several averages these tokens are ranked by
    lag and cut into equal shares: each average follows the mean of one share, and a token takes the one nearest to its
    own lag.
    `beta` fixes the decay (of a single average) instead. Never exact.
    """

    needs = Needs(resident_models=1)

    def __init__(
        self,
        scorer: Scorer,
        *,
        averages: int = 1,
        beta: float | None = None,
        reset: Reset | None = None,
    ) -> None:
        if beta is not None and averages > 1:
            raise ValueError(
                f"a fixed decay gives all {averages} averages the same age; leave beta out, or keep one"
            )
        self.averages = [scorer.make_average() for _ in range(averages)]
        self._scorer = scorer
        self._beta = beta
        self._reset = reset or Reset()
        self._version: int | None = None
        self._judged: int | None = None
        self._low: list[float] = []
        self._since_reset = self._reset.cooldown
        self._due = ""
        self._events: list[dict[str, Any]] = []
        self._forward_tokens = 0

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if self._version != self._scorer.version:
            self._take(batch)
        lag = self._scorer.lag(batch.version)
        choice = proximal.nearest_age(lag, [average.age for average in self.averages])
        values = torch.zeros_like(batch.behavior_logp)
        for number, average in enumerate(self.averages):
            where = batch.sampled & (choice == number)
            if where.any():
                scored = average.score(batch, where)
                values = torch.where(where, scored.logp, values)
                self._forward_tokens += scored.forward_tokens
        return values, torch.zeros_like(batch.sampled)

    def _take(self, batch: Batch) -> None:
        """Add the policy's weights, which are still those of its version."""
        if not self._scorer.at_version:
            raise RuntimeError(
                f"version {self._scorer.version} is gone: its first batch was not scored before a step"
            )
        self._version = self._scorer.version
        targets = staleness_targets(
            self._scorer.lag(batch.version[batch.sampled]), len(self.averages)
        )
        for average, target in zip(self.averages, targets, strict=True):
            if self._due or not average.weight:
                average.update(None)
                continue
            beta = self._beta
            if beta is None:
                beta = proximal.beta_for_age(
                    average.weight, average.age, target=target, beta_max=BETA_MAX
                )
            average.update(beta)
        if self._due:
            self._events.append(
                {"kind": "ewma_reset", "version": self._version, "reason": self._due}
            )
            self._due, self._since_reset = "", 0

    def trained(self, kept: float) -> None:
        """Counts batches, not the optimizer steps of one: the kept share is the batch's."""
        if self._judged == self._version:
            return
        self._judged = self._version
        self._since_reset += 1
        self._low = [*self._low, kept] if kept < self._reset.below else []
        if len(self._low) >= self._reset.patience and self._since_reset >= self._reset.cooldown:
            shares = ", ".join(f"{share:.3f}" for share in self._low[-self._reset.patience :])
            self._due = (
                f"the discrepancy control kept {shares} of the tokens, under {self._reset.below:g}"
            )
            self._low = []

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._forward_tokens),
            "memory_bytes": float(sum(average.bytes for average in self.averages)),
            "ewma_age": self.averages[0].age,
        }
        spent |= {
            f"ewma_age_{number}": average.age
            for number, average in enumerate(self.averages)
            if number
        }
        self._forward_tokens = 0
        return spent

    def events(self) -> list[dict[str, Any]]:
        happened, self._events = self._events, []
        return happened

    def state(self) -> Mapping[str, Any]:
        return {
            "averages": [average.state() for average in self.averages],
            "version": self._version,
            "judged": self._judged,
            "low": list(self._low),
            "since_reset": self._since_reset,
            "due": self._due,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for average, held in zip(self.averages, state["averages"], strict=True):
            average.restore(held)
        self._version, self._judged = state["version"], state["judged"]
        self._low, self._since_reset, self._due = (
            list(state["low"]),
            state["since_reset"],
            state["due"],
        )


def staleness_targets(lag: Tensor, number: int) -> list[float]:
    """Mean lags of `number` equal shares of the tokens, from fresh to stale.

    >>> staleness_targets(torch.tensor([3, 0, 1, 2]), 2)
    [0.5, 2.5]
    """
    if not len(lag):
        return [0.0] * number
    shares = lag.sort().values.float().tensor_split(number)
    return [float(share.mean()) if len(share) else float(lag.max()) for share in shares]
