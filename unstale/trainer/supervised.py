"""Objectives of supervised training, which learns from reference replies (`unstale sft`).

The policy of the run did not sample the replies, so there is no discrepancy and no staleness. The
batch has 0 as `behavior_logp`. So the log-ratio that an objective receives is log pi itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unstale.algorithms.objectives import Surrogate
from unstale.config import ObjectiveConfig
from unstale.envs.references import Reference
from unstale.records import Batch, Provenance


def reference_batch(references: Sequence[Reference], *, version: int) -> Batch:
    """Return conversations as a batch that trains on their replies.

    `version` is the current version of the weights. Raises ValueError if there is no conversation.
    """
    if not references:
        raise ValueError("a batch needs at least one conversation")
    tokens = torch.tensor([token for each in references for token in each.tokens])
    replies = torch.tensor([mark for each in references for mark in each.replies])
    offsets = [0]
    for each in references:
        offsets.append(offsets[-1] + len(each.tokens))
    origin = torch.where(replies, int(Provenance.FOREIGN), int(Provenance.ENVIRONMENT))
    return Batch(
        tokens=tokens,
        offsets=tuple(offsets),
        sampled=replies,
        behavior_logp=torch.zeros(len(tokens)),
        version=torch.where(replies, version, -1),
        turn=torch.where(replies, 0, -1),
        provenance=origin,
        clean=torch.ones_like(replies),
        advantage=replies.float(),
        episodes=tuple(range(len(references))),
    )


class CrossEntropy:
    """The objective -log pi(y) for each token y of a reference reply."""

    def __init__(self) -> None:
        self._nll = 0.0
        self._tokens = 0

    def surrogate(self, log_ratio: Tensor, batch: Batch, options: ObjectiveConfig) -> Surrogate:
        """Return the loss of each token. `log_ratio` `[T]` is the log-probability of the tokens."""
        logp = torch.where(batch.sampled, log_ratio, 0.0)
        held = logp.detach()[batch.sampled].double()
        self._nll -= held.sum().item()
        self._tokens += len(held)
        nowhere = torch.zeros_like(batch.sampled)
        return Surrogate(-self.weight(logp.detach()) * logp, nowhere, nowhere)

    def weight(self, logp: Tensor) -> Tensor:
        """Return the factor `[T]` on each token's -log pi. `logp` `[T]` is log pi."""
        return torch.ones_like(logp)

    def take_nll(self) -> float:
        """Return the mean of -log pi over all tokens since the last call, in nats."""
        mean = self._nll / self._tokens
        self._nll, self._tokens = 0.0, 0
        return mean


class Otr(CrossEntropy):
    """The policy gradient of a reward for the reference token (OTR).

    At each position of a reference reply, the policy draws `samples` tokens a_j. The reward R_j is
    1 for the reference token y and `beta` for any other, and the loss is -(1 / samples) sum_j R_j
    log pi(a_j). With `samples` 0 the loss is the expectation of this sum, whose gradient is that of
    -(1 - beta) sg(pi(y)) log pi(y). With `samples` > 0, the draws that miss y are replaced by their
    conditional expectation, because their gradient needs all logits: the number of hits is
    binomial, and the mean of the gradient is the same.
    """

    def __init__(self, *, beta: float = 0.0, samples: int = 0, seed: int = 0) -> None:
        """Create the objective. `beta` is the reward of other tokens than the reference token.

        Raises ValueError for `beta` >= 1, which would not favour the reference token, and for
        negative `samples`.
        """
        if not beta < 1 or samples < 0:
            raise ValueError(f"beta must be < 1 and samples >= 0, got {beta:g} and {samples}")
        super().__init__()
        self._beta = beta
        self._samples = samples
        self._noise = torch.Generator().manual_seed(seed)

    def weight(self, logp: Tensor) -> Tensor:
        chance = logp.double().exp().clamp(max=1)
        if not self._samples:
            return ((1 - self._beta) * chance).to(logp.dtype)
        draws = torch.full_like(chance, self._samples)
        hits = torch.binomial(draws, chance, generator=self._noise) / self._samples
        odds = chance / (1 - chance).clamp(min=torch.finfo(chance.dtype).tiny)
        missed = torch.where(hits < 1, self._beta * (1 - hits) * odds, 0.0)
        return (hits - missed).to(logp.dtype)
