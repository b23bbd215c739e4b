"""Old log-probabilities: for each token, the trainer's own under the version that sampled it.

One file per route. Exact routes recover it; the others put a stand-in in its place and say so with
`exact`. Every module here is a route and imports no torch before the route is made; what routes
share is in `scoring`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unstale.config.routes import Needs as Needs

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.old_logps.scoring.scorer import Weights
    from unstale.records import Batch, PendingPiece


def has_clean_behavior(batch: Batch) -> Tensor:
    """Return the action tokens (`[T]` bool) that one version's policy sampled.

    Only these can have an exact old log-probability.
    """
    from unstale.algorithms.corrections import has_behavior

    return batch.sampled & batch.clean & has_behavior(batch.provenance)


class OldLogps(Protocol):
    """A route: old log-probabilities for every action token of a batch.

    `arrived` is called on the event loop, at any time. All else is called one at a time: in the
    trainer's thread, or on the event loop while that thread is idle (`costs`, `events`, `close`).
    """

    needs: Needs

    def publishing(self) -> None:
        """Run before any engine gets the current version. May wait for work on earlier versions."""
        ...

    def published(self, live: Collection[int]) -> None:
        """Run once every engine holds the current version and all earlier pieces have arrived.

        `live` are all versions that some token, queue or engine still needs.
        """
        ...

    def arrived(self, piece: PendingPiece) -> None:
        """Take a piece that an engine returned. Called on the event loop: must not block."""
        ...

    def idle(self) -> bool:
        """Do at most about one forward pass of work. Return False if there is none."""
        ...

    def closing(self, unscored: Sequence[PendingPiece]) -> None:
        """Score pieces of the current version before the weights leave it.

        `unscored` are all of its pieces that no batch has had: partial, finished and queued.
        """
        ...

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(values [T] float32, exact [T] bool)` on the CPU; 0 and False off the mask.

        `exact` claims that the value is the trainer's own log-probability at the weights of
        `version[t]`. `now` `[T]` is the current policy's log-probability, detached, empty unless
        `needs.now`. Called before the first optimizer step on a batch, or with `needs.inline` in
        every training pass on some of its sequences. LookupError if a version that the route needs
        was not kept.
        """
        ...

    def trained(self, kept: float) -> None:
        """Run after an optimizer step. `kept` is the share of tokens that the correction kept."""
        ...

    def costs(self) -> Mapping[str, float]:
        """Return what was spent since the last call (`forward_tokens`, `restore_s`) and bytes held.

        Names without a slash are reported as `old_logps/<name>`.
        """
        ...

    def events(self) -> list[dict[str, Any]]:
        """Return the events since the last call, each with `kind` and the reason."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return what `restore` needs: dicts (by str or int), lists, tensors and plain values.

        Only an optimizer step may change its tensors afterwards. May wait for work on the versions
        published so far.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Complete a restored state: `past` are the unconsumed pieces by version.

        Pieces of the current version are not among them: they are given to `arrived` again.
        """
        ...

    def close(self) -> None:
        """Release processes and files. The last call."""
        ...


class Passive:
    """A route that keeps nothing and costs nothing. Routes override what they do differently."""

    needs = Needs()

    def publishing(self) -> None: ...

    def published(self, live: Collection[int]) -> None: ...

    def arrived(self, piece: PendingPiece) -> None: ...

    def idle(self) -> bool:
        return False

    def closing(self, unscored: Sequence[PendingPiece]) -> None: ...

    def trained(self, kept: float) -> None: ...

    def costs(self) -> Mapping[str, float]:
        return {}

    def events(self) -> list[dict[str, Any]]:
        return []

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None: ...

    def close(self) -> None: ...
