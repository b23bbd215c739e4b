"""The trainer: a batch becomes optimizer steps.

The loop, the planner and the command line use the Protocols here. `local.LocalTrainer` trains in
this process; a trainer of several ranks implements the same Protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch
    from unstale.trainer.records import Minibatch, PreparedBatch


class Trainer(Protocol):
    """Trains one policy and counts its published versions.

    `prepare`, `backward`, `step` and `state` run in the trainer's thread, one at a time. The loop
    calls the rest while that thread is idle, or reads only what no step changes.
    """

    @property
    def version(self) -> int:
        """The newest version: the number of the weights that are, or will next be, published."""
        ...

    def start_version(self) -> None:
        """Give the current weights the next version number."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return the staleness of each version in `version`, in batches, for the newest version."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the forward weights by name. They are the live tensors: a step changes them."""
        ...

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Divide a batch into optimizer steps, and compute all that is fixed before the first."""
        ...

    def backward(self, minibatch: Minibatch) -> None:
        """Add the gradient of the minibatch's loss.

        FloatingPointError if the loss is not finite.
        """
        ...

    def step(self) -> None:
        """Take one optimizer step on the gradients since the last.

        FloatingPointError if not finite.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the batch prepared last, after all its steps."""
        ...

    def points(self) -> list[dict[str, float]]:
        """Return `log_d`, `log_s` and `lag` of some action tokens of that batch, for plots."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return all that `restore` needs. Its tensors are the live ones."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`."""
        ...


class AuditObserver(Protocol):
    """The part of the audit that the loop calls."""

    def published(self, live: Collection[int]) -> None:
        """Handle that every engine holds the newest version.

        `live` are the versions still needed.
        """
        ...

    def points(self) -> list[dict[str, float]]:
        """Return the audited values of some tokens, for plots."""
        ...
