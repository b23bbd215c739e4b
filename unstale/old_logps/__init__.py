"""Routes: methods to compute the old log-probability of a token (`old_logp`).

`old_logp` is the token's log-probability in the trainer's forward pass, under the weights that
sampled it. Exact routes compute this value, and the other routes an approximation. Each module of
this package is one route, and can be imported without torch. The package `scoring` has code that
several routes share. A piece is a run of adjacent tokens of one episode that one version of the
weights sampled.
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
    """Return a mask `[T]` of the tokens for which an exact old log-probability exists.

    Such a token was sampled by an engine, after the context that is recorded, with a KV cache of
    the same weights. If routed experts are replayed, the experts of every position that the token
    depends on must have been recorded.
    """
    from unstale.algorithms.corrections import has_behavior

    can_be_exact = batch.sampled & batch.clean & has_behavior(batch.provenance)
    return can_be_exact & batch.routed_experts.complete if batch.routed_experts else can_be_exact


class OldLogps:
    """The base class of routes: methods to compute old log-probabilities (`old_logp`).

    `on_piece`, `on_end` and `on_wait` may be called at any time, on the event loop. `costs`,
    `events` and `close` are called on the event loop while the trainer's thread is idle. All other
    methods are called in the trainer's thread, one at a time. A route must override `logps`. The
    other methods of this class do nothing.
    """

    needs = Needs()

    def before_publish(self) -> None:
        """Prepare for the publication of the current weights, before any engine loads them.

        The method may wait until work on earlier versions is complete.
        """

    def on_published(self, live: Collection[int]) -> None:
        """Handle the event that every engine has loaded the current version of the weights.

        All tokens that earlier versions sampled have arrived. `live` has the versions that sampled
        tokens which are still to be trained on.
        """

    def on_piece(self, piece: PendingPiece) -> None:
        """Handle the arrival of a piece: a run of tokens that one version sampled.

        Called on the event loop, so it must not block.
        """

    def on_end(self, pieces: Sequence[PendingPiece]) -> None:
        """Handle the end of an episode. `pieces` has all its sampled tokens.

        Not called for failed episodes. Called on the event loop, so it must not block.
        """

    def on_wait(self, past: Sequence[PendingPiece]) -> None:
        """Handle the event that the trainer begins to wait for episodes.

        `past` has all tokens that versions before the current one sampled and that were in no batch
        yet. No further token of these versions will arrive. Called on the event loop, so it must
        not block. Called only if the route declares `needs.idle` and `needs.snapshots`.
        """

    def score_while_idle(self) -> bool:
        """Compute `old_logp` of some tokens, while the trainer waits for episodes.

        Each call may take about as long as one forward pass. Return False if there was nothing to
        compute.
        """
        return False

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        """Compute `old_logp` of tokens of the current version, before a step changes the weights.

        Called only if the route declares `needs.scores_before_update`. `unscored` has all tokens
        that this version sampled and that were in no batch yet.
        """

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return old log-probabilities `[T]` in float32, and a mask `[T]` of those that are exact.

        Both are on the CPU. For tokens that were not sampled they are 0 and False. `now` `[T]` has
        the log-probabilities under the current policy, without gradient. It is empty unless the
        route declares `needs.now` or `needs.inline`. Raises LookupError if the weights that sampled
        a token were not kept.

        The method is called before the first optimizer step on a batch. With `trainer.stream` it is
        called for some groups of the batch at a time, which a route with `needs.whole_batch` does
        not support. A route with `needs.inline` is called in every training pass instead, on the
        sequences of that pass.
        """
        raise NotImplementedError

    def trained(self, kept: float) -> None:
        """Handle the event that an optimizer step was taken.

        `kept` is the share of tokens, 0 to 1, that the correction for off-policy tokens kept.
        """

    def costs(self) -> Mapping[str, float]:
        """Return metrics of the cost of computing `old_logp`.

        The caller adds the prefix `old_logps/` to their names. Tokens and seconds are counted since
        the last call. Bytes are those in use at the time of the call.
        """
        return {}

    def events(self) -> list[dict[str, Any]]:
        """Return this route's events since the last call, for the run's event log.

        Each event is a dict with the kind of event under the key `kind`.
        """
        return []

    def state(self) -> Mapping[str, Any]:
        """Return the state of this route for a checkpoint: dicts, lists, tensors and plain values.

        The tensors must not change until the next optimizer step. The method may wait until work in
        progress is complete.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state` returned, from a checkpoint."""

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Prepare for tokens that were sampled after the checkpoint. Called after `restore`.

        `past` has, by version, all tokens of earlier versions that were in no batch yet. `weights`
        reads the weights of a version from disk. Tokens of the current version are passed to
        `on_piece` afterwards.
        """

    def close(self) -> None:
        """Stop the processes of this route and close its files."""
