"""The old-logit route `shifted`: the engine's log-probability, shifted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from unstale.config import RunConfig
from unstale.config.checks import Share
from unstale.config.routes import Meaning, Needs, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch


class ShiftedLogps(OldLogps):
    def __init__(self, shift: float) -> None:
        self.shift = shift

    def logps(self, batch: Batch, now: Tensor | None) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp - self.shift * batch.sampled, batch.sampled & False


@dataclass(frozen=True, kw_only=True)
class Shifted(OldLogpsConfig):
    """The engine's log-probability, shifted."""

    route: str = "shifted"
    shift: Share = 0.1
    """How far the log-probability is shifted."""

    docs: ClassVar = RouteDocs(
        policy="a shifted mu",
        exact="no",
        holds="nothing",
        costs="nothing",
        choose="never",
    )

    @property
    def needs(self) -> Needs:
        return Needs()

    def meaning(self, run: RunConfig) -> Meaning:
        return Meaning("mu - shift", "the engine's, shifted", "the shift", "the rest", "nothing")

    def make(self, scorer: Any, *, lockstep: bool) -> ShiftedLogps:
        return ShiftedLogps(self.shift)
