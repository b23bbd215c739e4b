"""The divergence of a policy from a teacher, computed together with log-probabilities.

The logits of both models are in memory for only a few tokens at a time. The backward pass computes
them again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unstale.model.head import LogpQuery, wide

MAX_LOGITS = {"cpu": 2**22, "cuda": 2**26}
"""Largest number of logits of one model in memory at once, by kind of device."""

Divergence = Callable[[Tensor, Tensor], Tensor]
"""A function of the policy's and the teacher's log-probabilities of all tokens, `[r, V]` each. It
returns one divergence for each of the r positions, `[r]`.
"""


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """One teacher's hidden states for some of the R target tokens of a `LogpQuery`."""

    index: Tensor
    """`[r]`: which of the R target tokens this teacher has: their indices."""
    rows: Tensor
    """`[r, H]`: the teacher's hidden states before the tokens of `index`, or its logits if `head`
    is the identity.
    """
    head: nn.Module


@dataclass(frozen=True, slots=True)
class Comparison:
    """A function that answers a `LogpQuery` and also computes the divergence from teachers."""

    teachers: Sequence[TeacherRows]
    """The hidden states of all teachers. Each target token of the query has exactly one teacher."""
    divergence: Divergence

    def __call__(self, head: nn.Module, rows: Tensor, query: LogpQuery) -> tuple[Tensor, ...]:
        """Return log-probability, entropy and divergence of the query's target tokens, `[R]` each.

        `rows` `[R, H]` are the policy's hidden states. If policy and teacher have different
        vocabulary sizes, the divergence is over the tokens that both have.
        """
        found = torch.zeros(3, len(rows), dtype=wide(rows.dtype), device=rows.device)
        for teacher in self.teachers:
            index = teacher.index.to(rows.device)
            size = max(1, MAX_LOGITS.get(rows.device.type, MAX_LOGITS["cpu"]) // _width(head, rows))
            values = [
                self._compare(head, rows[at], query.at(at), teacher, some)
                for at, some in zip(index.split(size), teacher.rows.split(size), strict=True)
            ]
            if values:
                found = found.index_put(
                    (torch.arange(3, device=rows.device)[:, None], index[None]),
                    torch.cat(values, 1),
                )
        return tuple(found.unbind(0))

    def _compare(
        self, head: nn.Module, rows: Tensor, query: LogpQuery, teacher: TeacherRows, taught: Tensor
    ) -> Tensor:
        inputs = (head, rows, query, teacher.head, taught, self.divergence)
        found: Tensor = checkpoint(
            _of_logits, *inputs, use_reentrant=False, preserve_rng_state=False
        )
        return found


def _width(head: nn.Module, rows: Tensor) -> int:
    weight: Any = getattr(head, "weight", None)
    return rows.shape[1] if weight is None else len(weight)


def _of_logits(  # noqa: PLR0913 - policy and teacher, each with its head
    head: nn.Module,
    rows: Tensor,
    query: LogpQuery,
    teacher_head: nn.Module,
    teacher_rows: Tensor,
    divergence: Divergence,
) -> Tensor:
    """Return log-probability, entropy and divergence of r target tokens, stacked as `[3, r]`."""
    kind = wide(rows.dtype)
    logits = _at(query.temperature, head(rows).to(kind))
    logps = logits.log_softmax(-1)
    with torch.no_grad():
        taught = _at(query.temperature, teacher_head(teacher_rows).to(kind))
        shared = min(logits.shape[1], taught.shape[1])
        taught = taught[:, :shared].log_softmax(-1)
    compared = logps if shared == logits.shape[1] else logits[:, :shared].log_softmax(-1)
    entropy = logps.new_zeros(len(logps))
    if query.with_entropy:
        entropy = -(logps.exp() * logps).sum(-1)
    elif query.sample is not None and query.sample.any():
        some = logps.detach()[query.sample]
        entropy = entropy.index_put((query.sample,), -(some.exp() * some).sum(-1))
    targets = query.targets[:, None]
    return torch.stack([logps.gather(1, targets).squeeze(1), entropy, divergence(compared, taught)])


def _at(temperature: float, logits: Tensor) -> Tensor:
    """Return the logits at a temperature, without a copy for 1."""
    return logits if temperature == 1 else logits / temperature
