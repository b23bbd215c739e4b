"""Old logits: for each token, the trainer's own log-probability under the version that sampled it, or a stand-in.

One file per route. Exact routes recover it; the others put something in its place, and say so with `exact`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from afterimage.corrections import has_behavior
from afterimage.policy import Policy
from afterimage.trajectory import Batch, Open


def has_clean_behavior(batch: Batch) -> Tensor:
    """`[T]`: action tokens that come from one version's policy, the only ones an old logit can be exact for."""
    return batch.sampled & batch.clean & has_behavior(batch.provenance)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a route costs, for `build` to size and for the loop to read instead of asking what it holds."""

    now: bool = False
    """`logps` reads `now`: one extra forward pass of the current weights per batch."""
    snapshots: bool = False
    """Keeps the weights of every live version."""
    resident_models: int = 0
    """Models resident beside the trained one."""
    closing: bool = False
    """Wants `closing` called, with generation paused, before the step that leaves a version."""


class OldLogps(Protocol):
    """`logps` answers for every action token of a batch. Called from the trainer's thread only, but for `arrived`."""

    needs: Needs

    def published(self, policy: Policy, live: Collection[int]) -> None:
        """`policy` is at a new version. `live` are all versions that some token, queue or engine still needs."""
        ...

    def arrived(self, piece: Open) -> None:
        """A piece came back from an engine. Called on the event loop: must not block."""
        ...

    def closing(self, policy: Policy, unscored: Sequence[Open]) -> None:
        """Last chance to score pieces of `policy.version` with the weights that sampled them."""
        ...

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """`(values [T] float32, exact [T] bool)` on the CPU; 0 and False off the mask.

        `exact` is a claim: the value is the trainer's own log-probability at the weights of `version[t]`. `now` is
        `[T]`, the current policy's log-probability, detached (empty unless `needs.now`). Called before the first
        optimizer step on a batch. LookupError if a version that the route needs was not kept.
        """
        ...

    def costs(self) -> Mapping[str, float]:
        """What it took since the last call (`forward_tokens`, `restore_s`) and what it holds (`resident_bytes`)."""
        ...

    def state(self) -> Mapping[str, Any]:
        """All that `restore` needs."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
