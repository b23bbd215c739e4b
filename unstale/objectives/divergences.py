"""Objectives that limit a divergence instead of a ratio: `dppo`, `drpo` and `vaco`."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from unstale.config.checks import NonNegative, Positive
from unstale.config.objectives import ObjectiveConfig, ObjectiveDocs
from unstale.objectives.clips import LOOSE_ABOVE


@dataclass(frozen=True, kw_only=True)
class ByDivergence(ObjectiveConfig):
    """Options of an objective that limits a divergence and weights tokens by S = pi / pi_old."""

    ratio: ClassVar = ("token", "mean")

    def unlimited(self, *, capped: bool) -> str:
        return "" if capped else f"{LOOSE_ABOVE} (ratio_cap sets one)"


@dataclass(frozen=True, kw_only=True)
class Dppo(ByDivergence):
    """REINFORCE with the weight pi / pi_old and a limit on each token's divergence from pi_old."""

    loss_type: str = "dppo"
    divergence: Literal["tv", "kl"] = "tv"
    """The divergence of pi from pi_old, over two events: this token, and any other. `tv` is
    |pi - pi_old|, `kl` is KL(pi_old, pi) in nats.
    """
    divergence_low: Positive = 0.2
    """A token with a negative advantage has no gradient if it became less likely and its divergence
    is above this limit. `divergence` = kl needs about 0.05.
    """
    divergence_high: Positive = 0.2
    """A token with a positive advantage has no gradient if it became likelier and its divergence is
    above this limit. `divergence` = kl needs about 0.05.
    """
    kl_tau: NonNegative = 0.0
    """The coefficient of (log S)^2 with S = pi / pi_old, which is added to the loss of every token.
    prime-rl sets 1e-3.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="-S A, and 0 where the divergence of pi from pi_old is above its limit and A moves "
        "the token further away; plus kl_tau (log S)^2",
        source="arXiv 2602.04879, eq. 12 to 14; with `kl_tau`, the default loss of prime-rl",
        choose="to let rare tokens move and to hold likely ones; with `old_logps.route = rollout` "
        "it is the method of the paper, with an exact route it limits staleness only",
    )
    inputs: ClassVar = ("old_logp",)
    wide: ClassVar = {"divergence_low": 0.2, "divergence_high": 0.2}
    no_limit: ClassVar = ("divergence_low", "divergence_high")

    def limit(self) -> str:
        name = {"tv": "|pi - pi_old|", "kl": "the KL of {token, others}"}[self.divergence]
        pull = f"; pulled back by {self.kl_tau:g} (log S)^2" if self.kl_tau else ""
        return (
            f"no gradient for moving further where {name} is above {self.divergence_low:g} (down) "
            f"or {self.divergence_high:g} (up){pull}"
        )

    def thresholds(self) -> Iterator[float]:
        """Yield the smallest log S at which a token can lose its gradient, for each of the two
        limits.

        S is pi / pi_old. For `kl`, this is the value for a token with probability 1/2.
        """
        for limit in (self.divergence_low, self.divergence_high):
            if self.divergence == "kl":
                yield math.sqrt(2 * limit)
            elif limit < 1:
                yield -math.log1p(-limit)

    @property
    def bounds_s(self) -> bool:
        return any(limit < math.inf for limit in self.thresholds())

    @property
    def trains_zero_advantage(self) -> bool:
        return self.kl_tau > 0


@dataclass(frozen=True, kw_only=True)
class Drpo(ByDivergence):
    """REINFORCE with a weight that shrinks, then turns negative, as a probability changes."""

    loss_type: str = "drpo"
    drpo_delta: Positive = 0.2
    """The change of probability |pi - pi_old| at which a token has no gradient in the direction of
    its advantage. Beyond it the gradient points back. The runs of the paper set 12.5, with which
    the gradient changes by at most 8%.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="-(S A - \\|A\\| / (2 drpo_delta) pi_old (S - 1)^2)",
        source="arXiv 2606.09821, eq. 8",
        choose="as `dppo`, to pull tokens back instead of dropping their gradient",
    )
    inputs: ClassVar = ("old_logp", "sampled")
    wide: ClassVar = {"drpo_delta": 0.2}
    no_limit: ClassVar = ("drpo_delta",)

    def limit(self) -> str:
        return (
            f"a gradient that fades to 0 at |pi - pi_old| = {self.drpo_delta:g} where A moves the "
            "token away, and points back beyond"
        )

    def thresholds(self) -> Iterator[float]:
        """Yield the smallest log S (S = pi / pi_old) at which the gradient of a token can be 0."""
        if self.drpo_delta < 1:
            yield -math.log1p(-self.drpo_delta)

    @property
    def bounds_s(self) -> bool:
        return self.drpo_delta < math.inf


@dataclass(frozen=True, kw_only=True)
class Vaco(ByDivergence):
    """REINFORCE with the weight pi / pi_old and a limit on a sequence's total variation."""

    loss_type: str = "vaco"
    vaco_delta: Positive = 0.2
    """A token has no gradient if its advantage moves S = pi / pi_old further from 1 and the mean of
    |S - 1| over its sequence is above this limit.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="-S A, and 0 where A log S > 0 in a sequence with a mean of \\|S - 1\\| above "
        "vaco_delta",
        source="arXiv 2603.01365; per sequence as in open-instruct",
        choose="to stop single tokens only in sequences that are far as a whole; the advantages "
        "are not computed again, as the paper does with a critic",
    )
    inputs: ClassVar = ("sequence", "sampled")
    wide: ClassVar = {"vaco_delta": 0.2}
    no_limit: ClassVar = ("vaco_delta",)

    def limit(self) -> str:
        return (
            "no gradient for moving further in a sequence with a mean of |S - 1| above "
            f"{self.vaco_delta:g}"
        )

    def thresholds(self) -> Iterator[float]:
        yield math.log1p(self.vaco_delta)

    @property
    def bounds_s(self) -> bool:
        return self.vaco_delta < math.inf
