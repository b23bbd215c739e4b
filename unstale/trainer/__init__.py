"""The interface of trainers, which turn batches of episodes into optimizer steps.

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
        """The version number of the current weights.

        This version is already published to the engines, or will be published next.
        """
        ...

    def start_version(self) -> None:
        """Give the current weights the next version number."""
        ...

    def lag(self, version: Tensor) -> Tensor:
        """Return the number of batches that were trained on after the weights `version` of each
        token.
        """
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights that forward passes use, by name.

        The next optimizer step changes them.
        """
        ...

    def add(self, part: Batch) -> None:
        """Add the gradient of some groups of the next batch, before the batch is complete.

        `prepare` later receives the whole batch, `part` included. Raises FloatingPointError if the
        loss is not finite.
        """
        ...

    def prepare(self, batch: Batch) -> Sequence[Any]:
        """Compute a batch's old log-probabilities and corrections. Divide it into minibatches.

        Return the minibatches, one for each optimizer step, to be given to `backward`. Sequences
        whose gradient was already added by `add` are left out.
        """
        ...

    def backward(self, minibatch: Any) -> None:
        """Compute the gradient of a minibatch's loss, and add it to the weights' gradients.

        Raises FloatingPointError if the loss is not finite.
        """
        ...

    def step(self) -> None:
        """Take an optimizer step with the gradients that `backward` added.

        If a gradient is not finite, take no step and raise FloatingPointError.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the last batch. Call this after all its optimizer steps."""
        ...

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return three values for some sampled tokens of the last batch, for plots.

        `log_d` is `old_logp - behavior_logp`, and `log_s` is `logp - old_logp`. `lag` is the number
        of batches that the weights have been trained on since the token was sampled.
        """
        ...

    def tokens(self) -> Sequence[TokenValues]:
        """Return values of single trained tokens of the last batch, for the run's journal.

        Only a share of the batch's groups is included (`journal.token_share`). The result is empty
        if the trainer does not collect values.
        """
        ...


def train_on(trainer: Trainer, batch: Batch) -> None:
    """Take all optimizer steps of one batch, without publishing the new weights to engines.

    The training loop makes the same calls, and publishes weights after them.
    """
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
        trainer.step()


class AuditObserver(Protocol):
    """The methods of the audit that the training loop calls.

    The audit measures the error of the run's old log-probabilities.
    """

    def on_published(self, live: Collection[int]) -> None:
        """Handle the event that every engine has loaded the newest version of the weights.

        `live` are the versions whose sampled tokens are still to be trained on.
        """
        ...

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return log D and log S of some audited tokens for plots, one dict for each token.

        D is the ratio of trainer to engine under the same weights, S that of the current to the old
        policy. Both are given with the run's old log-probabilities and with the true ones.
        """
        ...
