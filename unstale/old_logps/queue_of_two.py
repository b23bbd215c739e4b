"""The route `queue_of_two`: compute every `old_logp` with the version before the newest one.

This is the rule of slime's and miles' `--keep-old-actor`: the trainer keeps the two versions that
it published last, and treats the older one as the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unstale.config.routes import HasPlacement, Meaning, Needs, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps, has_clean_behavior

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch


class QueueOfTwo(OldLogps):
    """A method that computes every `old_logp` with the version published before the newest one.

    Before the second publication, the only version is used. Values are exact for tokens that the
    used version sampled.
    """

    needs = Needs(resident_models=1, averages=2, whole_versions=True, forwards="one")

    def __init__(self, scorer: Scorer, *, placement: Literal["twin", "own"] = "twin") -> None:
        self.needs = self.needs.placed(placement)
        self._scorer = scorer
        self._copies = [scorer.make_average(placement=placement) for _ in range(2)]
        """Copies of the weights, the older version first."""
        self._versions: list[int] = []
        """The version numbers of the weights in `_copies`, the last two that were published."""

    def on_published(self, live: Collection[int]) -> None:
        if self._versions[-1:] == [self._scorer.version]:
            return
        if len(self._versions) == 2:
            self._versions.pop(0)
            self._copies.reverse()
        self._copies[len(self._versions)].update(None)
        self._versions.append(self._scorer.version)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        if not self._versions:
            raise LookupError("queue_of_two has no weights: no version was published")
        scored = self._copies[0].score(batch, batch.sampled)
        return scored.logp, has_clean_behavior(batch) & (batch.version == self._versions[0])

    def costs(self) -> Mapping[str, float]:
        return {
            "forward_tokens": float(self._scorer.take_forward_tokens()),
            "memory_bytes": float(sum(copy.bytes for copy in self._copies)),
        }

    def state(self) -> Mapping[str, Any]:
        return {
            "copies": [copy.state() for copy in self._copies],
            "versions": list(self._versions),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        for copy, kept in zip(self._copies, state["copies"], strict=True):
            copy.restore(kept)
        self._versions = list(state["versions"])


@dataclass(frozen=True, kw_only=True)
class QueueOfTwoSpec(HasPlacement, OldLogpsConfig):
    """Options of the route `queue_of_two`, which uses the version before the newest one."""

    route: str = "queue_of_two"
    makes: ClassVar[type[OldLogps]] = QueueOfTwo

    exactness: ClassVar = "for tokens of lag 1"
    docs: ClassVar = RouteDocs(
        policy="the version published before the newest",
        exact="at lag 1",
        holds="two float32 copies, one scoring copy",
        costs="one forward pass",
        choose="to compare with slime's and miles' `--keep-old-actor`",
    )

    @property
    def partly_exact(self) -> bool:
        return True

    def meaning(self, run: RunConfig) -> Meaning:
        place = " in main memory" if self.placement == "own" else " and one movable copy"
        return Meaning(
            symbol="pi_last",
            policy="the trainer's weights of the version published before the newest",
            d="numerics at lag 1; for other tokens staleness, too",
            s="learning since the version before the newest",
            cost=f"two copies of the weights{place}; one more forward pass a batch",
        )
