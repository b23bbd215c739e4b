"""The interface of trainers. A trainer turns batches into optimizer steps.

The training loop, the planner and the command line use the Protocols of this file.
`local.LocalTrainer` trains in this process, and `unstale.cluster.ranked_trainer.RankedTrainer` in
several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.records import Batch
    from unstale.token_values import TokenValues


class Trainer(Protocol):
    """A trainer of one policy, which also counts the versions of the policy's weights.

    `add`, `prepare`, `backward` and `step` run in the trainer's thread, one at a time. The other
    methods are called while that thread is idle, or read only values that no step changes.
    """

    @property
    def version(self) -> int:
        """The newest version number of the weights.

        This version is published already, or is the next to be.
        """
        ...

    def start_version(self) -> None:
        """Give the current weights the next version number."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return the lag of each token: the batches trained between its `version` and the
        newest.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the forward pass by name.

        The next optimizer step changes these tensors.
        """
        ...

    def add(self, part: Batch) -> None:
        """Add the gradient of some groups of the next batch, before the batch is complete.

        `prepare` later receives the whole batch. Raises FloatingPointError if the loss is not
        finite.
        """
        ...

    def prepare(self, batch: Batch) -> Sequence[Any]:
        """Compute a batch's old log-probabilities and corrections. Divide it into optimizer steps.

        Each element of the result is a minibatch for one call of `backward`. Sequences whose
        gradient was already added by `add` are left out.
        """
        ...

    def backward(self, minibatch: Any) -> None:
        """Compute the gradient of a minibatch's loss and add it to the weights' gradients.

        Raises FloatingPointError if the loss is not finite.
        """
        ...

    def step(self) -> None:
        """Take an optimizer step with the gradients of `backward`.

        If the gradient is not finite, take no step and raise FloatingPointError.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last batch, after all its steps."""
        ...

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return `log_d`, `log_s` and `lag` of some sampled tokens of the last batch, for plots.

        `log_d` is the log-ratio between trainer and engine, `log_s` the log-ratio between newer and
        older weights.
        """
        ...

    def tokens(self) -> Sequence[TokenValues]:
        """Return the values of the trained tokens of the last batch, for the journal.

        Only the share `journal.token_share` of the batch's groups is included. Empty if the trainer
        does not collect values.
        """
        ...


def train_on(trainer: Trainer, batch: Batch) -> None:
    """Take the optimizer steps of one batch. The new weights are not published to engines.

    The training loop makes the same calls, and publishes weights between them.
    """
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
        trainer.step()


class AuditObserver(Protocol):
    """The audit's methods that the training loop calls.

    The audit measures the error of old log-probabilities.
    """

    def on_published(self, live: Collection[int]) -> None:
        """Handle the event that every engine has loaded the newest version of the weights.

        `live` are the versions that sampled tokens which are still to be trained on.
        """
        ...

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return true and estimated log-ratios of some tokens, for plots."""
        ...
