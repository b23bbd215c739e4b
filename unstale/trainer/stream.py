"""The parts of a batch that are trained on while the rest is still being generated.

The gradient of a step is a sum over tokens, divided by the number of tokens or sequences of the
whole batch (`objectives.loss_divisor`). So the gradients of a batch's parts can be added in any
order, without the divisor, which is applied before the gradient is clipped. The weights do not
change before the batch is complete, as in the paper Periodic Asynchrony.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unstale.records import Batch, token_positions
from unstale.trainer.records import Minibatch


class AddedParts:
    """The parts of the next batch whose gradients have been added before it is complete."""

    def __init__(self) -> None:
        self._parts: list[Batch] = []
        self._scored: list[tuple[Batch, Tensor]] = []
        """For each part: its sequences that got forward passes, and their `old_logp` `[T]`."""
        self._minibatches: list[Minibatch] = []

    def __bool__(self) -> bool:
        return bool(self._parts)

    @property
    def num_groups(self) -> int:
        return len({number for part in self._parts for number in part.group})

    def append(self, part: Batch, scored: Batch, old_logp: Tensor, minibatch: Minibatch) -> None:
        """Add a part of the batch.

        `scored` has those of its sequences that got forward passes, and `old_logp` `[T]` their
        values.
        """
        self._parts.append(part)
        self._scored.append((scored, old_logp))
        self._minibatches.append(minibatch)

    def rest(self, batch: Batch) -> list[int]:
        """Return the indices of the sequences in the complete batch that are in no added part.

        Raises ValueError if a part is not in the batch, or has other tokens or advantages there.
        """
        added: set[int] = set()
        for part in self._parts:
            index = _positions(batch, part)
            if not torch.equal(part.tokens, batch.tokens[index]):
                raise ValueError(f"the episodes {part.episodes} have other tokens in their batch")
            _require_equal_advantages(part, batch.advantage[index])
            added |= set(part.episodes)
        return [i for i, episode in enumerate(batch.episodes) if episode not in added]

    def join(self, batch: Batch, scored: Batch, old_logp: Tensor) -> tuple[Batch, Tensor]:
        """Return all sequences of the batch that got forward passes, and their `old_logp` `[T]`.

        `scored` and `old_logp` are those of the sequences in no added part. The result has the
        order of the batch. Its `old_logp` is empty if it is computed in every training pass.
        """
        found = [*self._scored, (scored, old_logp)]
        whole, order = _assemble(batch, [part for part, _ in found])
        return whole, _arrange([values for _, values in found], order)

    def whole_minibatch(self, batch: Batch, last: Minibatch) -> Minibatch:
        """Return one minibatch with all parts and with `last`, the sequences in no added part."""
        found = [*self._minibatches, last]
        whole, order = _assemble(batch, [each.batch for each in found])
        return Minibatch(
            batch=whole,
            old_logp=_arrange([each.old_logp for each in found], order),
            factor=_arrange([each.factor for each in found], order),
            norm=_arrange([each.norm for each in found], order),
            reference_logp=_arrange([each.reference_logp for each in found], order),
            lag=_arrange([each.lag for each in found], order),
            teacher_logp=_arrange([each.teacher_logp for each in found], order),
        )


def _assemble(batch: Batch, parts: Sequence[Batch]) -> tuple[Batch, Tensor]:
    """Return the sequences of the parts in the order of the batch, with the parts' advantages.

    The second result is an index `[T]` that brings the concatenated values of the parts into that
    order.
    """
    index = torch.cat([_positions(batch, part) for part in parts])
    advantage = batch.advantage.clone()
    advantage[index] = torch.cat([part.advantage for part in parts])
    numbers = {episode for part in parts for episode in part.episodes}
    sequences = [i for i, episode in enumerate(batch.episodes) if episode in numbers]
    whole, _ = replace(batch, advantage=advantage).select(sequences)
    return whole, index.argsort()


def _arrange(columns: Sequence[Tensor], order: Tensor) -> Tensor:
    """Concatenate tensors, one for each part of a batch, and bring them into an order.

    Return an empty tensor if all are empty.
    """
    values = torch.cat(list(columns))
    return values[order] if len(values) else values


def _positions(batch: Batch, part: Batch) -> Tensor:
    """Return the position in the batch of each token of a part, `[T]`.

    Raises ValueError if an episode of the part is not in the batch.
    """
    places = {episode: i for i, episode in enumerate(batch.episodes)}
    if lost := [episode for episode in part.episodes if episode not in places]:
        raise ValueError(f"the episodes {lost} were added to the gradient, but are in no batch")
    spans = batch.spans()
    return token_positions(spans[places[each]] for each in part.episodes)


def _require_equal_advantages(part: Batch, advantage: Tensor) -> None:
    """Raise ValueError if the advantages `[T]` of a part changed when its batch became complete."""
    differs = ~torch.isclose(part.advantage, advantage, rtol=1e-5, atol=1e-7)
    if differs.any():
        at = int(differs.nonzero()[0])
        episode = part.episodes[int(part.sequence[at])]
        raise ValueError(
            f"episode {episode} had the advantage {part.advantage[at]:g} before its batch was "
            f"complete, and then {advantage[at]:g}. With trainer.stream, advantages must not "
            "depend on other groups: set trainer.stream false, or use another estimator"
        )
