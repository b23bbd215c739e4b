"""Old logits: for each token, the trainer's own log-probability under the version that sampled it, or a stand-in.

One file per route. Exact routes recover it; the others put something in its place, and say so with `exact`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from unstale.algorithms.corrections import has_behavior
from unstale.old_logps.scoring.scorer import Weights
from unstale.records import Batch, PendingPiece


def has_clean_behavior(batch: Batch) -> Tensor:
    """`[T]`: action tokens that come from one version's policy, the only ones an old logit can be exact for."""
    return batch.sampled & batch.clean & has_behavior(batch.provenance)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a route costs, for `build` to size and for the loop to read instead of asking what it holds."""

    now: bool = False
    """`logps` reads `now`: one extra forward pass of the current weights per batch."""
    inline: bool = False
    """`logps` is a function of `now` and the batch alone: asked in every training pass, with that pass's own values."""
    snapshots: bool = False
    """Keeps the weights of every live version. A batch without a token of the newest may then be scored before that
    is `published`."""
    resident_models: int = 0
    """Models resident beside the trained one."""
    closing: bool = False
    """Wants `closing` called, with generation paused, before the step that leaves a version."""
    idle: bool = False
    """Has work for the trainer's thread while the trainer waits for episodes."""


class OldLogps(Protocol):
    """`logps` answers for every action token of a batch.

    `arrived` is called on the event loop, at any time. All else is called one at a time: in the trainer's thread, or
    on the event loop while that thread is idle (`costs`, `events`, `close`).
    """

    needs: Needs

    def publishing(self) -> None:
        """Before any engine gets the current version. May wait for what the route has to do about earlier versions."""
        ...

    def published(self, live: Collection[int]) -> None:
        """Every engine holds the current version, and all pieces of earlier versions have arrived.

        `live` are all versions that some token, queue or engine still needs.
        """
        ...

    def arrived(self, piece: PendingPiece) -> None:
        """A piece came back from an engine. Called on the event loop: must not block."""
        ...

    def idle(self) -> bool:
        """The trainer has nothing to do: a bounded piece of work, at most about one forward pass. False if none."""
        ...

    def closing(self, unscored: Sequence[PendingPiece]) -> None:
        """Last chance to score pieces of the current version with the weights that sampled them.

        `unscored` are all of its pieces that no batch has had: partial, finished and queued.
        """
        ...

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """`(values [T] float32, exact [T] bool)` on the CPU; 0 and False off the mask.

        `exact` is a claim: the value is the trainer's own log-probability at the weights of `version[t]`. `now` is
        `[T]`, the current policy's log-probability, detached (empty unless `needs.now`). Called before the first
        optimizer step on a batch (`needs.inline`: in every training pass, on some of its sequences). LookupError if a
        version that the route needs was not kept.
        """
        ...

    def trained(self, kept: float) -> None:
        """An optimizer step was taken. `kept`: share of its batch's action tokens that the discrepancy control kept."""
        ...

    def costs(self) -> Mapping[str, float]:
        """What it took since the last call (`forward_tokens`, `restore_s`) and what it holds (`resident_bytes`).

        Names without a room of their own are reported as `old_logps/<name>`.
        """
        ...

    def events(self) -> list[dict[str, Any]]:
        """What happened since the last call that somebody should read about (`kind`, and why)."""
        ...

    def state(self) -> Mapping[str, Any]:
        """All that `restore` needs: dicts (by str or int), lists, tensors, numbers, strings, booleans, None.

        As it is at this moment: what it does from then on, an optimizer step aside, changes nothing of it. May wait
        for what the route has to do about the versions published so far.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """After `restore`: what its state lacks of the unconsumed pieces, by version, is made good.

        `past` has no pieces of the policy's own version: these are told to `arrived` once more.
        """
        ...

    def close(self) -> None:
        """Give back processes and files. The last call."""
        ...


class Passive:
    """A route that keeps nothing and costs nothing: what the others do differently is all they have to say."""

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
