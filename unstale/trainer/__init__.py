"""The contract of trainers. A trainer turns batches into optimizer steps.

The training loop, the planner and the command line use the Protocols of this file.
`local.LocalTrainer` trains in this process, and
`unstale.cluster.ranked_trainer.RankedTrainer` in several.
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
        """The newest version number.

        The weights of this version are published already, or will be published next.
        """
        ...

    def start_version(self) -> None:
        """Give the current weights the next version number."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return the lag of each token: batches between its `version` and the newest version."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights of the forward pass by name.

        The next optimizer step changes these tensors.
        """
        ...

    def add(self, part: Batch) -> None:
        """Add the gradient of some groups of the next batch, which is not complete yet.

        The next call of `prepare` receives the whole batch. Raises FloatingPointError if the loss
        is not finite.
        """
        ...

    def prepare(self, batch: Batch) -> Sequence[Any]:
        """Compute old log-probabilities and corrections of a batch. Divide the batch into optimizer
        steps.

        Each element of the result is for one call of `backward`. Sequences whose gradient was added
        already are left out.
        """
        ...

    def backward(self, minibatch: Any) -> None:
        """Compute the gradient of a minibatch's loss and add it to the weights' gradients.

        Raises FloatingPointError if the loss is not finite.
        """
        ...

    def step(self) -> None:
        """Take an optimizer step.

        Raises FloatingPointError instead if the gradient is not finite.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last batch, after all its steps."""
        ...

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return `log_d`, `log_s` and `lag` of some sampled tokens of the last batch, for plots.

        log_d is the discrepancy between trainer and engine, log_s the change by newer weights.
        """
        ...

    def tokens(self) -> Sequence[TokenValues]:
        """Return the values of the trained tokens of the last batch, for the journal.

        Only the share `journal.token_share` of the batch's groups has values. Empty if the trainer
        does not collect values.
        """
        ...


def train_on(trainer: Trainer, batch: Batch) -> None:
    """Take the optimizer steps of one batch, without publishing the new weights to engines.

    The training loop makes the same calls, and publishes weights between them.
    """
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
        trainer.step()


class AuditObserver(Protocol):
    """The methods of the audit that the training loop calls.

    The audit measures the error of old log-probabilities.
    """

    def on_published(self, live: Collection[int]) -> None:
        """Receive the notice that every engine has loaded the newest version of the weights.

        `live` are the versions that sampled tokens which are still to be trained on.
        """
        ...

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return the true and the estimated ratios of some tokens (as logarithms), for plots."""
        ...
