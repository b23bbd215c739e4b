"""The check of a run with `engine.bitwise`: engine and trainer have equal log-probabilities."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms.corrections import has_behavior
from unstale.records import Batch

COMPARED = "trainer/bitwise_tokens"
"""Name of a metric: how often a log-probability of a batch was compared with the engine's. A token
may be compared twice.
"""


class NotBitwise(ValueError):
    """Error: engine and trainer computed different log-probabilities of a token."""

    def __init__(self, name: str, value: float, behavior: float, **place: int) -> None:
        """Create the error for the trainer's log-probability `value` and the engine's, `behavior`.

        `name` is what the trainer's value is called in the message. `place` has the numbers
        `episode`, `token` (in its sequence) and `version`.
        """
        super().__init__(
            f"engine.bitwise: {name} is {value:.9g} and behavior_logp is {behavior:.9g} at token "
            f"{place['token']} of episode {place['episode']}, sampled and scored by version "
            f"{place['version']}; they must be equal. Set engine.bitwise = false to train with a "
            "discrepancy, and report this error"
        )
        self.name, self.value, self.behavior, self.place = name, value, behavior, place

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.name, self.value, self.behavior, **self.place), ()


def require_equal(batch: Batch, name: str, logp: Tensor, where: Tensor) -> int:
    """Check that the trainer's log-probabilities equal the engine's, bit for bit.

    `logp` `[T]` are the trainer's values for the tokens in the mask `where`, under the weights that
    sampled them, and `name` is what they are called in the message. Tokens that the engine sampled
    in another context, or not at all, are left out. So are replayed tokens, which may come from a
    run without `engine.bitwise`. Return the number of compared tokens. Raises NotBitwise at the
    first token that differs.
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
