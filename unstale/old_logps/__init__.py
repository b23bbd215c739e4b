"""Routes: ways to compute a token's old log-probability.

That is its log-probability in the trainer's forward pass, under the weights that sampled the token.
Exact routes compute it. The others return an approximation. Every module here holds a route and
imports no torch before the route is made. Code that routes share is in `scoring`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unstale.config.routes import Needs as Needs

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.old_logps.scoring.scorer import Weights
    from unstale.records import Batch, PendingPiece


def has_clean_behavior(batch: Batch) -> Tensor:
    """Return the tokens (`[T]` bool) that can have an exact old log-probability.

    These were sampled in the context they have now, and not from a KV cache of older weights.
    """
    from unstale.algorithms.corrections import has_behavior

    return batch.sampled & batch.clean & has_behavior(batch.provenance)


class OldLogps:
    """A route that keeps nothing and costs nothing. Routes override `logps` and what they need.

    `arrived` is called on the event loop, at any time. All other methods are called one at a time:
    `costs`, `events` and `close` on the event loop while the trainer's thread is idle, the rest in
    that thread.
    """

    needs = Needs()

    def publishing(self) -> None:
        """Prepare for a publication: no engine has the current version yet.

        May wait for work on earlier versions.
        """

    def published(self, live: Collection[int]) -> None:
        """Handle that every engine holds the current version.

        All pieces that earlier versions sampled have arrived. `live` are the versions that sampled
        a token which is still to be trained on.
        """

    def arrived(self, piece: PendingPiece) -> None:
        """Receive a piece that an engine returned. Called on the event loop: must not block."""

    def idle(self) -> bool:
        """Do at most about one forward pass of work. Return False if there was no work."""
        return False

    def closing(self, unscored: Sequence[PendingPiece]) -> None:
        """Score pieces of the current version, before the optimizer step that changes the weights.

        `unscored` are all pieces that this version sampled and no batch has contained.
        """

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return old log-probabilities `[T]` float32, and where they are exact, `[T]` bool.

        Both are on the CPU, and 0 and False for tokens that were not sampled. `now` `[T]` are the
        current policy's log-probabilities, without gradient; empty unless `needs.now` or
        `needs.inline`. Called before the first optimizer step on a batch. A route with
        `needs.inline` is called in every training pass instead, on the sequences of that pass.
        LookupError if the weights that sampled a token were not kept.
        """
        raise NotImplementedError

    def trained(self, kept: float) -> None:
        """Handle an optimizer step. `kept` is the share of tokens that the correction kept."""

    def costs(self) -> Mapping[str, float]:
        """Return the metrics `old_logps/<name>` by name.

        Tokens and seconds count from the last call; bytes are those held now.
        """
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call as columns of the event log, with a `kind`."""
        return []

    def state(self) -> Mapping[str, Any]:
        """Return a state for a checkpoint: dicts, lists, tensors and plain values.

        Its tensors stay unchanged until the next optimizer step. May wait for unfinished work.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`."""

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Complete a restored state with pieces that were sampled after the checkpoint.

        `past` holds, by version, all pieces of earlier versions that no batch has contained.
        `weights` reads a version from disk. Pieces of the current version go to `arrived` again.
        """

    def close(self) -> None:
        """Release processes and files."""
