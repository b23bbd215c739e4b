"""A collector of values of single trained tokens, for the run's journal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unstale.algorithms.corrections import CorrectionWeights
from unstale.algorithms.objectives import Surrogate
from unstale.records import Batch
from unstale.token_values import STORED, TokenFlag, TokenValues, keeps_tokens


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A sequence of the batch whose token values are kept for the journal."""

    group: int
    episode: int
    route: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Part:
    """Values of the sampled tokens of several sequences, concatenated."""

    episodes: tuple[int, ...]
    counts: tuple[int, ...]
    minibatch: int | None
    columns: Mapping[str, Tensor]


class TokenLog:
    """The values of the sampled tokens of some groups of one batch, for the run's journal.

    The forward passes of an optimizer step add their values to another object, which `of_passes`
    returns. `add_passes` then adds it to this one.
    """

    def __init__(self, *, share: float = 0.0, minibatch: int | None = None) -> None:
        """Create an empty log. `share` is the share of groups whose token values are kept.

        `minibatch` is the number of the optimizer step within the batch. None before the first
        step.
        """
        self.share = share
        self._minibatch = minibatch
        self._sequences: list[_Sequence] = []
        self._parts: list[_Part] = []

    def begin(self, batch: Batch, *, route: str) -> None:
        """Record the sequences of a batch, or of some of its groups, and their advantages.

        Sequences without sampled tokens are left out. `route` is the name of the method that
        computes `old_logp` (`old_logps.route`).
        """
        kept = self._kept(batch)
        if not kept:
            return
        counts = batch.count(batch.sampled)
        replayed = set(batch.sequences_with(batch.replayed))
        for i in kept:
            if not counts[i]:
                continue
            sequence = _Sequence(
                group=batch.group[i],
                episode=batch.episodes[i],
                route=STORED if i in replayed else route,
                num_tokens=counts[i],
            )
            self._sequences.append(sequence)
        self._add(batch, advantage=batch.advantage)

    def arrange(self, episodes: Sequence[int]) -> None:
        """Sort the recorded sequences by the order of their episodes in `episodes`."""
        places = {episode: i for i, episode in enumerate(episodes)}
        self._sequences.sort(key=lambda each: places[each.episode])

    def add_correction(
        self,
        batch: Batch,
        old_logp: Tensor,
        correction: CorrectionWeights,
        *,
        exact: Tensor,
        vetoed: Tensor,
    ) -> None:
        """Add old log-probabilities and corrections of sampled tokens, `[T]` each.

        `exact` marks exact values of `old_logp`, and `vetoed` the tokens that the token veto drops.
        """
        flags = _flags(
            {
                TokenFlag.EXACT: exact,
                TokenFlag.VETOED: vetoed,
                TokenFlag.MASKED: ~(correction.keep | vetoed),
            }
        )
        log_d = old_logp - batch.behavior_logp
        self._add(batch, log_d=log_d, weight=correction.factor, flags=flags)

    def add_shaped(self, batch: Batch, *, dropped: Tensor) -> None:
        """Add the advantages after all techniques, and the tokens that they dropped.

        `dropped` is a mask `[T]`.
        """
        flags = _flags({TokenFlag.DROPPED: dropped})
        self._add(batch, advantage=batch.advantage, flags=flags)

    def add_forward(
        self, batch: Batch, logp: Tensor, old_logp: Tensor, *, surrogate: Surrogate, capped: Tensor
    ) -> None:
        """Add values of sampled tokens from a forward pass of the loss, `[T]` each.

        `capped` marks the tokens whose weight `objective.ratio_cap` lowered.
        """
        flags = _flags(
            {
                TokenFlag.CLIPPED_LOW: surrogate.clipped_low,
                TokenFlag.CLIPPED_HIGH: surrogate.clipped_high,
                TokenFlag.CAPPED: capped,
            }
        )
        self._add(batch, log_s=logp - old_logp, flags=flags)

    def add_entropy(self, batch: Batch, entropy: Tensor, *, where: Tensor) -> None:
        """Add the entropies `[T]` of the tokens in the mask `where`."""
        self._add(batch, entropy=torch.where(where, entropy, torch.nan))

    def of_passes(self, minibatch: int) -> "TokenLog":
        """Return an empty log for the forward passes of one optimizer step, for `add_passes`.

        `minibatch` is the number of the step within the batch, from 0.
        """
        return TokenLog(share=self.share, minibatch=minibatch)

    def add_passes(self, passes: "TokenLog") -> None:
        self._parts += passes._parts

    def values(self) -> list[TokenValues]:
        """Return the token values of each recorded sequence, in the order of the batch."""
        columns: dict[int, dict[str, np.ndarray]] = {}
        minibatches: dict[int, int] = {}
        for part in self._parts:
            arrays = {name: tensor.numpy() for name, tensor in part.columns.items()}
            start = 0
            for episode, count in zip(part.episodes, part.counts, strict=True):
                found = columns.setdefault(episode, {})
                for name, array in arrays.items():
                    piece = array[start : start + count]
                    found[name] = _merge(name, found[name], piece) if name in found else piece
                start += count
            if part.minibatch is not None:
                minibatches |= dict.fromkeys(part.episodes, part.minibatch)
        return [
            _values(each, columns.get(each.episode, {}), minibatches.get(each.episode))
            for each in self._sequences
        ]

    def _kept(self, batch: Batch) -> list[int]:
        if not self.share:
            return []
        return [i for i, number in enumerate(batch.group) if keeps_tokens(number, self.share)]

    def _add(self, batch: Batch, **columns: Tensor) -> None:
        """Add values `[T]` at the sampled tokens of the kept sequences."""
        kept = self._kept(batch)
        if not kept:
            return
        counts = batch.count(batch.sampled)
        where = batch.sampled
        if len(kept) < batch.num_sequences:
            chosen = torch.zeros(batch.num_sequences, dtype=torch.bool)
            chosen[kept] = True
            where = where & chosen[batch.sequence]
        index = where.nonzero().squeeze(1)  # several times as fast as a mask
        part = _Part(
            episodes=tuple(batch.episodes[i] for i in kept),
            counts=tuple(counts[i] for i in kept),
            minibatch=self._minibatch,
            columns={name: _narrow(values[index]) for name, values in columns.items()},
        )
        self._parts.append(part)


def _merge(name: str, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Merge two arrays of values of the same tokens. `name` is the kind of the values.

    Flags are combined. Of other values, `after` replaces `before` where it is not NaN.
    """
    if name == "flags":
        return before | after
    return np.where(np.isnan(after), before, after)


def _narrow(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values


def _flags(tensors: Mapping[TokenFlag, Tensor]) -> Tensor:
    """Return a bit field for each token, `[T]` uint8: the sum of its flags that are True."""
    parts = [tensor.to(torch.uint8) * int(flag) for flag, tensor in tensors.items()]
    return torch.stack(parts).sum(0, dtype=torch.uint8)


def _values(
    sequence: _Sequence, columns: Mapping[str, np.ndarray], minibatch: int | None
) -> TokenValues:
    unknown = np.full(sequence.num_tokens, np.nan, np.float32)
    return TokenValues(
        group=sequence.group,
        episode=sequence.episode,
        route=sequence.route,
        minibatch=minibatch,
        log_d=columns.get("log_d", unknown),
        log_s=columns.get("log_s", unknown),
        weight=columns.get("weight", unknown),
        advantage=columns["advantage"],
        entropy=columns.get("entropy", unknown),
        flags=columns.get("flags", np.zeros(sequence.num_tokens, np.uint8)),
    )
