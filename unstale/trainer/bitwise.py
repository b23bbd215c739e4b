"""The check of a run with `engine.bitwise`: equal log-probabilities in engine and trainer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms.corrections import has_behavior
from unstale.records import Batch

COMPARED = "trainer/bitwise_tokens"
"""Metric: the number of comparisons of a token's log-probability with the engine's in a batch. A
token may be compared twice.
"""


class NotBitwise(ValueError):
    """Error: the engine and the trainer computed different log-probabilities of a token."""

    def __init__(self, name: str, value: float, behavior: float, **place: int) -> None:
        """`value` is the trainer's log-probability, `behavior` the engine's.

        `place` is the `episode`, the `token` in its sequence, and the `version`.
        """
        super().__init__(
            f"engine.bitwise: {name} is {value:.9g} and behavior_logp is {behavior:.9g} at token "
            f"{place['token']} of episode {place['episode']}, sampled and scored by version "
            f"{place['version']}; they must be equal. Set engine.bitwise = false to train with a "
            "discrepancy, and report this error"
        )
        self.name, self.value, self.behavior, self.place = name, value, behavior, place

    def __reduce__(self) -> tuple[Any, ...]:
        """Return all arguments, not only the message, so that pickle can copy the error."""
        return partial(type(self), self.name, self.value, self.behavior, **self.place), ()


def require_equal(batch: Batch, name: str, logp: Tensor, where: Tensor) -> int:
    """Compare the trainer's log-probabilities with the engine's.

    Return the number of compared tokens. Raises NotBitwise at the first token that differs. `logp`
    `[T]`, called `name` in the message, has the trainer's log-probabilities of the tokens in
    `where`, under the weights that sampled them. Tokens that the engine sampled in another context,
    or not at all, are left out. So are replayed tokens, which may come from a run without
    `engine.bitwise`.
    """
    where = where & batch.fresh & has_behavior(batch.provenance)
    bad = (where & (logp != batch.behavior_logp)).nonzero()
    if len(bad):
        at = int(bad[0])
        sequence = int(batch.sequence[at])
        raise NotBitwise(
            name,
            logp[at].item(),
            batch.behavior_logp[at].item(),
            episode=batch.episodes[sequence],
            token=int((batch.sequence[:at] == sequence).sum()),
            version=int(batch.version[at]),
        )
    return int(torch.count_nonzero(where))
