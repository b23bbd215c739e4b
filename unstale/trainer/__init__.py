"""The trainer: a batch becomes optimizer steps.

The loop, the planner and the command line use the Protocols here. `local.LocalTrainer` trains in
this process; a trainer of several ranks implements the same Protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch
    from unstale.trainer.records import Minibatch


class Trainer(Protocol):
    """A trainer of one policy, which also counts the policy's published versions.

    `prepare`, `backward`, `step` and `state` run in the trainer's thread, one at a time. The other
    methods are called while that thread is idle, or read only values that no step changes.
    """

    @property
    def version(self) -> int:
        """The newest version number. Its weights are published, or will be published next."""
        ...

    def start_version(self) -> None:
        """Give the current weights the next version number."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return how many batches the newest version is ahead of each version in `version`."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the forward pass by name. The next step changes these tensors."""
        ...

    def prepare(self, batch: Batch) -> Sequence[Minibatch]:
        """Divide a batch into optimizer steps, with old log-probabilities and corrections."""
        ...

    def backward(self, minibatch: Minibatch) -> None:
        """Add the gradient of a minibatch's loss. FloatingPointError if the loss is not finite."""
        ...

    def step(self) -> None:
        """Take an optimizer step. FloatingPointError, before it, if the gradient is not finite."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last batch, after all its steps."""
        ...

    def points(self) -> list[dict[str, float]]:
        """Return `log_d`, `log_s` and `lag` of some action tokens of the last batch, for plots."""
        ...

    def state(self) -> Mapping[str, Any]:
        """Return a state for a checkpoint. The next step changes its tensors."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`."""
        ...


class AuditObserver(Protocol):
    """The part of the audit that the loop calls."""

    def published(self, live: Collection[int]) -> None:
        """Handle that every engine holds the newest version.

        `live` are the versions that sampled a token which is still to be trained on.
        """
        ...

    def points(self) -> list[dict[str, float]]:
        """Return the audited values of some tokens, for plots."""
        ...
