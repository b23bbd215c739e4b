"""Objectives without a clip: `sapo`, `vespo`, `dro`, `kl_penalty` and `none`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from unstale.config.checks import NonNegative, Positive
from unstale.config.objectives import ObjectiveConfig, ObjectiveDocs


@dataclass(frozen=True, kw_only=True)
class Sapo(ObjectiveConfig):
    """A loss whose gradient fades as the staleness ratio S = pi / pi_old moves away from 1."""

    loss_type: str = "sapo"
    tau_pos: Positive = 1.0
    """Rate at which the gradient shrinks as the staleness ratio pi / pi_old leaves 1, for positive
    advantages.
    """
    tau_neg: Positive = 1.05
    """Rate at which the gradient shrinks as the staleness ratio pi / pi_old leaves 1, for negative
    advantages.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="-4 / tau sigmoid(tau (S - 1)) A, with tau_pos where A > 0, else tau_neg",
        source="arXiv 2511.20347",
        choose="for a soft limit; the paper sets `loss_aggregation = sequence_mean`",
    )
    wide: ClassVar = {"tau_pos": 1.0, "tau_neg": 1.05}

    def limit(self) -> str:
        return (
            f"a gradient that fades as S leaves 1 (tau {self.tau_pos:g} where A > 0, else "
            f"{self.tau_neg:g})"
        )

    def thresholds(self) -> Iterator[float]:
        yield math.log1p(4 / max(self.tau_pos, self.tau_neg))  # there 7% of the gradient remain


@dataclass(frozen=True, kw_only=True)
class Vespo(ObjectiveConfig):
    """REINFORCE with a smooth weight of each sequence, computed from its ratio pi / pi_old."""

    loss_type: str = "vespo"
    vespo_k_pos: NonNegative = 2.0
    """The power k of the weight W^k exp(lambda (1 - W)) of a sequence, for advantages of 0 or more.
    W is the product of its staleness ratios.
    """
    vespo_lambda_pos: Positive = 3.0
    """The rate lambda of the weight W^k exp(lambda (1 - W)) of a sequence, for advantages >= 0."""
    vespo_k_neg: NonNegative = 3.0
    """The power k of the weight W^k exp(lambda (1 - W)) of a sequence, for negative advantages. W
    is as in `vespo_k_pos`.
    """
    vespo_lambda_neg: Positive = 2.0
    """The rate lambda of the weight W^k exp(lambda (1 - W)) of a sequence, for advantages < 0."""

    docs: ClassVar = ObjectiveDocs(
        loss="-sg(W^k exp(lambda (1 - W))) A log pi, where W is the product of S over the sequence",
        source="arXiv 2602.10693; names and defaults of TRL",
        choose="to weight whole sequences without a clip; the weight vanishes where W is far from "
        "1, so for short replies, or a small log S. With `old_logps.route = rollout` it is the "
        "method of the paper",
    )
    ratio: ClassVar = ("sequence", "sum")
    wide: ClassVar = {
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }

    def limit(self) -> str:
        pairs = (
            f"k {self.vespo_k_pos:g} and lambda {self.vespo_lambda_pos:g} where A >= 0, else "
            f"{self.vespo_k_neg:g} and {self.vespo_lambda_neg:g}"
        )
        return f"a weight S^k exp(lambda (1 - S)) ({pairs})"

    def thresholds(self) -> Iterator[float]:
        """Yield the log W above 0 at which the weight has fallen to 7%, for each sign of the
        advantage.

        W is the product of a sequence's ratios pi / pi_old.
        """
        pos = self.vespo_k_pos, self.vespo_lambda_pos
        for k, rate in (pos, (self.vespo_k_neg, self.vespo_lambda_neg)):
            low, high = max(0.0, math.log(k / rate) if k else 0.0), 20.0
            for _ in range(60):
                middle = (low + high) / 2
                weight = k * middle + rate * (1 - math.exp(middle))
                low, high = (middle, high) if weight > math.log(0.07) else (low, middle)
            yield low


@dataclass(frozen=True, kw_only=True)
class PulledBack(ObjectiveConfig):
    """Options of an objective with a penalty on (log S)^2, where S = pi / pi_old."""

    @property
    def trains_zero_advantage(self) -> bool:
        return True

    @property
    def pull(self) -> float:
        """The coefficient of (log S)^2 / 2 in the loss, where S is the ratio pi / pi_old."""
        raise NotImplementedError

    def limit(self) -> str:
        return f"pulled back by {self.pull / 2:g} (log S)^2"

    def unlimited(self, *, capped: bool) -> str:
        return "S is pulled back, not cut"


@dataclass(frozen=True, kw_only=True)
class Dro(PulledBack):
    """A regression of the logarithm of S = pi / pi_old to the advantage."""

    loss_type: str = "dro"
    dro_beta: Positive = 0.05
    """The coefficient c in A log S - c / 2 (log S)^2. S is the staleness ratio pi / pi_old, and A
    the advantage.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="-(A log S - dro_beta / 2 (log S)^2)",
        source="arXiv 2405.19107, arXiv 2501.12599",
        choose="to do without a weight S; in the papers `unit = sequence` and `aggregate = sum`",
    )

    @property
    def pull(self) -> float:
        return self.dro_beta

    @property
    def meaning(self) -> str:
        return f"{super().meaning}; no weight S"


@dataclass(frozen=True, kw_only=True)
class KlPenalty(PulledBack):
    """PPO with a penalty on (log S)^2 instead of a clip, where S = pi / pi_old."""

    loss_type: str = "kl_penalty"
    kl_penalty: NonNegative = 1.0
    """The coefficient c in S A - c / 2 (log S)^2. S is the staleness ratio pi / pi_old, and A the
    advantage.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="-(S A - kl_penalty / 2 (log S)^2)",
        source="arXiv 1707.06347, section 4",
        choose="to pull tokens back instead of dropping their gradient",
    )

    @property
    def pull(self) -> float:
        return self.kl_penalty

    @property
    def bounds_s(self) -> bool:
        return self.kl_penalty > 0


@dataclass(frozen=True, kw_only=True)
class Unlimited(ObjectiveConfig):
    """REINFORCE with the importance weight S = pi / pi_old and no limit on it."""

    loss_type: str = "none"

    docs: ClassVar = ObjectiveDocs(
        loss="-S A",
        source="REINFORCE with an importance weight",
        choose="without staleness, or where a technique limits S",
    )

    @property
    def bounds_s(self) -> bool:
        return False

    @property
    def meaning(self) -> str:
        return "nothing"

    def weight(self, ratio: float) -> tuple[float, str]:
        return ratio, "S"
