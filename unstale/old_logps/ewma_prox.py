"""The route `ewma_prox`: compute `old_logp` with a moving average of weights, with fixed decay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from unstale.config.checks import Range
from unstale.config.routes import (
    HasPlacement,
    Meaning,
    Needs,
    OldLogpsConfig,
    RouteDocs,
    age_of_average,
    meaning_of_average,
)
from unstale.old_logps import OldLogps

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch

DEFAULT_DECAY = 0.5
"""Default decay of the moving average. The mean age of the averaged weights is then one version."""


class EwmaProx(OldLogps):
    """A method that computes `old_logp` with a moving average of all published weights.

    No `old_logp` counts as exact, because no token was sampled with these weights. With
    `every_step`, the weights after each optimizer step are averaged instead of the published ones.
    """

    needs = Needs(resident_models=1, averages=1, forwards="one")

    def __init__(
        self,
        scorer: Scorer,
        *,
        beta: float,
        every_step: bool = False,
        placement: Literal["twin", "own"] = "twin",
    ) -> None:
        self.needs = self.needs.placed(placement)
        self.average = scorer.make_average(placement=placement)
        self._scorer = scorer
        self._beta = beta
        self._every_step = every_step
        self._version: int | None = None

    def on_published(self, live: Collection[int]) -> None:
        if self._scorer.version == self._version:
            return
        self._version = self._scorer.version
        if not (self._every_step and self.average.weight):
            self.average.update(self._beta)

    def trained(self, kept: float) -> None:
        if self._every_step:
            self.average.update(self._beta)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if not self.average.weight:
            raise LookupError("ewma_prox has no weights to average: no version was published")
        return self.average.score(batch, batch.sampled).logp, batch.sampled & False

    def costs(self) -> Mapping[str, float]:
        return {
            "forward_tokens": float(self._scorer.take_forward_tokens()),
            "memory_bytes": float(self.average.bytes),
            "ewma_age": self.average.age,
        }

    def state(self) -> Mapping[str, Any]:
        return {"average": self.average.state(), "version": self._version}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.average.restore(state["average"])
        self._version = state["version"]


@dataclass(frozen=True, kw_only=True)
class EwmaProxSpec(HasPlacement, OldLogpsConfig):
    """Options of the route `ewma_prox`, which averages past weights with a fixed decay."""

    route: str = "ewma_prox"
    makes: ClassVar[type[OldLogps]] = EwmaProx
    beta: Annotated[float | None, Range(0, 0.9999)] = None
    """Decay of the moving average. None means 0.5 for `ewma_prox`. For `ppo_ewma_async` it means a
    decay that follows the age of the tokens (their staleness).
    """
    update_every: Literal["version", "step"] = "version"
    """Only for `ewma_prox`: update the average with the weights of every published version, or
    after every optimizer step.
    """

    # gives a mean age of 3 versions, the age of this recipe's tokens
    recipe: ClassVar = {"beta": 0.75}
    docs: ClassVar = RouteDocs(
        policy="an average of the weights with fixed decay",
        exact="no",
        holds="one float32 copy, one scoring copy",
        costs="one forward pass",
        choose="to compare with the literature",
    )

    @property
    def decay(self) -> float:
        return DEFAULT_DECAY if self.beta is None else self.beta

    def updates_per_version(self, run: RunConfig) -> int:
        return run.trainer.steps_per_batch if self.update_every == "step" else 1

    def meaning(self, run: RunConfig) -> Meaning:
        age = f"tends to {age_of_average(self, run):.2g}"
        return meaning_of_average(run, age=age, averages=1, placement=self.placement)

    def make(self, scorer: Scorer, *, lockstep: bool) -> EwmaProx:
        return EwmaProx(
            scorer,
            beta=self.decay,
            every_step=self.update_every == "step",
            placement=self.placement,
        )
