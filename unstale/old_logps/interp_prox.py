"""Two routes (methods) whose `old_logp` is a mean of the engine's and the current policy's values.

`interp_prox_loglinear` takes a mean of the two log-probabilities, `interp_prox_linear` of the two
probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from unstale.config.checks import Range
from unstale.config.routes import ALWAYS_ONE, WHOLE_RATIO, Meaning, Needs, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch


class InterpProx(OldLogps):
    """A method that mixes the engine's log-probability of a token with the current policy's.

    The mixture is used as `old_logp`, and never counts as exact (arXiv 2512.06547). It is computed
    again in every training pass. `alpha` is the weight of the current policy. If `alpha` is None,
    the weight of a token that was sampled d batches ago (its lag) is (d - 1) / d, or `fresh` if d
    is 0.
    """

    needs = Needs(inline=True)

    def __init__(
        self,
        scorer: Scorer,
        mix: Callable[..., Tensor],
        *,
        alpha: float | None = None,
        fresh: float = 1.0,
    ) -> None:
        """Create the route.

        `mix` is the function `loglinear` or `linear` of `unstale.algorithms.proximal`.
        """
        self._scorer = scorer
        self._mix = mix
        self._alpha = alpha
        self._fresh = fresh

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        from unstale.algorithms.proximal import weight_of_now

        if now.shape != batch.sampled.shape:
            raise ValueError(
                f"an interpolation needs `now` for {len(batch.sampled)} tokens, got {len(now)}"
            )
        alpha: Tensor | float | None = self._alpha
        if alpha is None:
            alpha = weight_of_now(self._scorer.lag(batch.version), fresh=self._fresh)
        values = self._mix(batch.behavior_logp, now, alpha, sampled=batch.sampled)
        return values, batch.sampled & False


@dataclass(frozen=True, kw_only=True)
class InterpProxSpec(OldLogpsConfig):
    """Options of the routes `interp_prox_linear` and `interp_prox_loglinear`.

    Both estimate `old_logp` by a mixture of `behavior_logp` and `logp`.
    """

    alpha: Annotated[float | None, Range(0, 1)] = None
    """Only for `interp_prox_*`: weight of the current policy in the mixture. None means (d - 1) / d
    for a token with a lag of d (sampled d batches ago).
    """
    fresh: Literal["trainer", "behavior"] = "trainer"
    """Only for `interp_prox_*`: where the old log-probability of tokens of the current version (lag
    0) comes from: the trainer or the engine (behavior).
    """

    makes: ClassVar[type[OldLogps]] = InterpProx
    to_free_s: ClassVar = {"old_logps.alpha": 0.5}
    recipe: ClassVar = {"baseline": True}  # the clip acts later than its limits say
    scale: ClassVar[str]
    """Name of the function in `unstale.algorithms.proximal` that computes the mixture."""

    def weight_of_now(self, run: RunConfig) -> float | None:
        bound = run.schedule.staleness_bound
        same_for_all = bound == 0 or (bound == 1 and self.fresh == "behavior")
        if self.alpha is None and same_for_all:
            return self._fresh
        return self.alpha

    def oldest_weight(self, run: RunConfig) -> float:
        """Return the current policy's weight in the mixture for the oldest tokens of a run."""
        if self.alpha is not None:
            return self.alpha
        bound = run.schedule.staleness_bound
        return (bound - 1) / bound if bound else self._fresh

    @property
    def _fresh(self) -> float:
        return 1.0 if self.fresh == "trainer" else 0.0

    def meaning(self, run: RunConfig) -> Meaning:
        alpha = self.weight_of_now(run)
        a, rest = ("a", "(1-a)") if alpha is None else (f"{alpha:g}", f"{1 - alpha:g}")
        policy = f"formed anew in each training pass; the weight of pi is {a}"
        if alpha is None:
            policy += f" = (d - 1) / d at lag d, {self._fresh:g} at lag 0"
        symbol, d, s = self._factors(a, rest)
        if alpha == 0:
            d, s = ALWAYS_ONE, WHOLE_RATIO
        if alpha == 1:
            d, s = WHOLE_RATIO, ALWAYS_ONE
        return Meaning(symbol, policy, d, s, "nothing")

    def make(self, scorer: Scorer, *, lockstep: bool) -> InterpProx:
        from unstale.algorithms import proximal

        mix = getattr(proximal, self.scale)
        return InterpProx(scorer, mix, alpha=self.alpha, fresh=self._fresh)

    def _factors(self, a: str, rest: str) -> tuple[str, str, str]:
        """Return three texts for the linter: the formula of the old policy, and what the ratios D =
        pi_old / mu and S = pi / pi_old contain.

        `a` and `rest` are the weights of the current policy and of the engine's policy, as text.
        """
        raise NotImplementedError

    def variants(self, alphas: Sequence[float]) -> list[OldLogpsConfig]:
        return [type(self)(alpha=alpha) for alpha in alphas]


_docs = partial(RouteDocs, exact="no", holds="nothing", costs="nothing")


@dataclass(frozen=True, kw_only=True)
class InterpProxLoglinearSpec(InterpProxSpec):
    """Options of the route with `old_logp = log mu + alpha (log pi - log mu)`.

    mu is the probability under the engine's policy, pi under the current policy.
    """

    route: str = "interp_prox_loglinear"
    scale: ClassVar = "loglinear"

    docs: ClassVar = _docs(
        policy="a weighted mean of log mu and log pi",
        choose="only if no forward pass is affordable",
    )

    def s_of(self, ratio: float, run: RunConfig) -> float:
        return ratio ** (1 - self.oldest_weight(run))

    def _factors(self, a: str, rest: str) -> tuple[str, str, str]:
        d = f"(pi / mu)^{a}: a power of the whole ratio; staleness and numerics are mixed"
        return f"mu^{rest} pi^{a}", d, f"(pi / mu)^{rest}: the rest of the ratio"


@dataclass(frozen=True, kw_only=True)
class InterpProxLinearSpec(InterpProxSpec):
    """Options of the route with `old_logp = log((1 - alpha) mu + alpha pi)`.

    mu is the probability under the engine's policy, pi under the current policy.
    """

    route: str = "interp_prox_linear"
    scale: ClassVar = "linear"

    docs: ClassVar = _docs(
        policy="an average of the probabilities mu and pi",
        choose="only if no forward pass is affordable; its error is below the log-linear one's",
    )

    def s_of(self, ratio: float, run: RunConfig) -> float:
        alpha = self.oldest_weight(run)
        return ratio / (1 - alpha + alpha * ratio)

    def _factors(self, a: str, rest: str) -> tuple[str, str, str]:
        d = "a part of pi / mu; staleness and numerics are mixed"
        return f"{rest} mu + {a} pi", d, "the rest of pi / mu"
