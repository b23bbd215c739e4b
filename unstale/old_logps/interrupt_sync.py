"""`interrupt_sync`: generation pauses, and the trainer scores what its weights sampled before it leaves them. Exact."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from unstale.model.policy import Policy
from unstale.old_logps import Needs, Passive, Scoring, Weights, has_clean_behavior
from unstale.old_logps.scored import LogpCache, key_of, require_answers
from unstale.records import Batch, PendingPiece


class InterruptSync(Passive):
    """`old_logp` from the trainer's own weights, while they are still the version's (algorithm.md, section 2).

    Costs no memory but stalls generation: `stall_s` runs from `closing`, through all optimizer steps of the batch,
    until generation goes on with the next version. It is complete when that is published, and so is reported with the
    batch after.
    """

    needs = Needs(closing=True)

    def __init__(self, policy: Policy, *, scoring: Scoring) -> None:
        self._policy = policy
        self._answers = LogpCache(scoring)
        self._paused: float | None = None
        self._stall_s = self._closing_s = 0.0

    def published(self, policy: Policy, live: Collection[int]) -> None:
        if self._paused is not None:
            self._stall_s += time.perf_counter() - self._paused
            self._paused = None
        self._policy = policy
        self._answers.keep(live, policy.version)

    def closing(self, policy: Policy, unscored: Sequence[PendingPiece]) -> None:
        self._paused = began = time.perf_counter()
        self._answers.score(
            policy, {key_of(piece): piece.tokens for piece in self._answers.lacking(unscored)}
        )
        self._closing_s += time.perf_counter() - began

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """LookupError if a token's piece was not among the unscored when its version was closed."""
        values, answered = self._answers.ask(self._policy, batch)
        require_answers(
            batch, answered, why="their pieces were not there when their version was closed"
        )
        return values, has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._answers.spent()),
            "interrupt_sync/closing_s": self._closing_s,
            "interrupt_sync/stall_s": self._stall_s,
        }
        self._stall_s = self._closing_s = 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        return {"answers": self._answers.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._answers.restore(state["answers"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        self._answers.recover(self._policy, past, weights)
