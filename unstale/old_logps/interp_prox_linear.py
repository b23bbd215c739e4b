"""`interp_prox_linear`: the mixture of mu and pi. Costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unstale.config.routes import RouteDocs, register_route
from unstale.old_logps.interp_prox_loglinear import InterpProx, InterpProxSpec

if TYPE_CHECKING:
    from unstale.old_logps.scoring.scorer import Scorer


@register_route
@dataclass(frozen=True, kw_only=True)
class InterpProxLinearSpec(InterpProxSpec):
    """`prox = log((1 - alpha) mu + alpha pi)`."""

    route: str = "interp_prox_linear"

    docs: ClassVar = RouteDocs(
        policy="an average of the probabilities mu and pi",
        exact="no",
        holds="nothing",
        costs="nothing",
        choose="only if no forward pass is affordable; its error is below the log-linear one's",
        report="Approximate. A mean of the engine's probability and the current policy's is taken "
        "for that of the weights that sampled, so both factors follow one ratio.",
    )

    def _factors(self, a: str, rest: str) -> tuple[str, str, str]:
        d = "a part of pi / mu: nothing is told apart"
        return f"{rest} mu + {a} pi", d, "the other part of pi / mu"

    def make(self, scorer: Scorer, *, lockstep: bool) -> InterpProx:
        from unstale.algorithms.proximal import linear

        return InterpProx(scorer, linear, alpha=self.alpha, fresh=self._fresh)
