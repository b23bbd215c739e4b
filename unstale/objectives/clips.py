"""Objectives with a clip: `ppo_clip`, `dual_clip`, `gspo` and `cispo`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from unstale.config.checks import NonNegative, Range, Share
from unstale.config.objectives import Bounds, ObjectiveConfig, ObjectiveDocs

LOOSE_ABOVE = "S from above where A < 0: the loss of a token that became likelier has no limit"
"""Part of a sentence about an objective, which says where the ratio S has no limit. For objectives
that remove a token's gradient only if S has moved in the direction of the advantage A.
"""


@dataclass(frozen=True, kw_only=True)
class ClippedObjective(ObjectiveConfig):
    """Options of an objective that limits the ratio S = pi / pi_old below and above 1."""

    clip_low: Share = 0.2
    """A token has no gradient to lower the staleness ratio S below 1 - clip_low. `cispo` limits the
    weight S instead. `gspo` needs about 3e-4.
    """
    clip_high: NonNegative = 0.28
    """A token has no gradient to raise the staleness ratio S above 1 + clip_high. `cispo` limits
    the weight S instead. `gspo` needs about 4e-4.
    """

    wide: ClassVar[Mapping[str, float]] = {"clip_low": 0.2, "clip_high": 0.28}
    no_limit: ClassVar[tuple[str, ...]] = ("clip_high",)

    @property
    def low(self) -> float:
        return 1 - self.clip_low

    @property
    def high(self) -> float:
        return 1 + self.clip_high

    @property
    def band(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"

    def limit(self) -> str:
        return f"no gradient for moving further outside {self.band}"

    def bounds(self) -> Sequence[Bounds]:
        limits = Bounds(
            low=self.low,
            high=self.high,
            below="negative",
            above="positive",
            name="limits of S",
            about=f"1 - objective.clip_low and 1 + clip_high ({self.loss_type})",
            unit=self.ratio_unit,
        )
        return (limits,)

    def weight(self, ratio: float) -> tuple[float, str] | None:
        return ratio, "S"


@dataclass(frozen=True, kw_only=True)
class PpoClip(ClippedObjective):
    """PPO's clipped loss on the ratio S = pi / pi_old of each token."""

    loss_type: str = "ppo_clip"

    docs: ClassVar = ObjectiveDocs(
        loss="-min(S A, clip(S, 1 - clip_low, 1 + clip_high) A)",
        source="arXiv 1707.06347; different limits on the two sides: arXiv 2503.14476",
        choose="in general",
    )

    def unlimited(self, *, capped: bool) -> str:
        return "" if capped else f"{LOOSE_ABOVE} (dual_clip sets one)"


@dataclass(frozen=True, kw_only=True)
class Gspo(PpoClip):
    """PPO's clipped loss on the geometric mean of the staleness ratios of a sequence."""

    loss_type: str = "gspo"
    ratio: ClassVar = ("sequence", "mean")

    docs: ClassVar = ObjectiveDocs(
        loss="that of `ppo_clip`, with the geometric mean of S over the sequence",
        source="arXiv 2507.18071",
        choose="to clip whole sequences, with a clip near 3e-4 and `loss_aggregation = "
        "sequence_mean`",
    )


@dataclass(frozen=True, kw_only=True)
class DualClip(ClippedObjective):
    """PPO's clipped loss, with an upper limit on the loss where the advantage is negative."""

    loss_type: str = "dual_clip"
    dual_clip: Annotated[float, Range(above=1)] = 3.0
    """Limit of the loss where the advantage A is negative, as a multiple of |A|. With 1, even
    tokens with S = 1 would have no gradient.
    """

    docs: ClassVar = ObjectiveDocs(
        loss="that of `ppo_clip`, at most dual_clip \\|A\\| where A < 0",
        source="arXiv 1912.09729",
        choose="if tokens with A < 0 that became likelier dominate the loss",
    )
    wide: ClassVar = {**ClippedObjective.wide, "dual_clip": 3.0}
    no_limit: ClassVar = ("clip_high", "dual_clip")

    @property
    def meaning(self) -> str:
        return f"{super().meaning}; where A < 0 the loss is at most {self.dual_clip:g} |A|"

    def bounds(self) -> Sequence[Bounds]:
        largest = Bounds(
            high=self.dual_clip,
            above="negative",
            name="limit of S if A < 0",
            about="objective.dual_clip",
            unit=self.ratio_unit,
        )
        return (*super().bounds(), largest)


@dataclass(frozen=True, kw_only=True)
class Cispo(ClippedObjective):
    """REINFORCE weighted by the clipped staleness ratio. Tokens beyond a limit keep a gradient."""

    loss_type: str = "cispo"
    stops: ClassVar[bool] = False

    docs: ClassVar = ObjectiveDocs(
        loss="-sg(clip(S, 1 - clip_low, 1 + clip_high)) A log pi",
        source="arXiv 2506.13585",
        choose="to keep the gradient of rare tokens; the paper sets `clip_low = 1`, no lower limit",
    )

    def limit(self) -> str:
        return f"a weight held within {self.band}"

    def bounds(self) -> Sequence[Bounds]:
        (limits,) = super().bounds()
        effect = "keeps its gradient, with the limit as its weight"
        return (replace(limits, below="any", above="any", effect=effect),)

    def weight(self, ratio: float) -> tuple[float, str]:
        limited = min(max(ratio, self.low), self.high)
        return limited, "S" if limited == ratio else "limit of S"
