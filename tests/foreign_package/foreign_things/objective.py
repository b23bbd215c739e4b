"""The objective `ceiling`: the importance weight, held below a ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from unstale.config.checks import Positive
from unstale.config.objectives import Bounds, ObjectiveConfig, ObjectiveDocs

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.algorithms.objectives import Surrogate


@dataclass(frozen=True, kw_only=True)
class Ceiling(ObjectiveConfig):
    """A weight with a ceiling."""

    loss_type: str = "ceiling"
    ceiling: Positive = 1.5
    """The largest S that has a gradient."""

    docs: ClassVar = ObjectiveDocs(loss="-min(S, ceiling) A", source="a test", choose="never")

    def surrogate(
        self, log_staleness: Tensor, advantage: Tensor, *, sampled: Tensor | None = None
    ) -> Surrogate:
        from unstale.algorithms.objectives import Surrogate

        if sampled is not None:
            advantage = advantage.where(sampled, 0.0)
        ratio = log_staleness.exp()
        above = ratio > self.ceiling
        return Surrogate(-ratio.clamp(max=self.ceiling) * advantage, above & False, above)

    def limit(self) -> str:
        return f"nothing above {self.ceiling:g}"

    def bounds(self) -> Sequence[Bounds]:
        return (Bounds(high=self.ceiling, name="ceiling of S", about="objective.ceiling"),)

    def weight(self, ratio: float) -> tuple[float, str]:
        return ratio, "S"
