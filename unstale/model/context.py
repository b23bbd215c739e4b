"""Divide one forward pass among ranks by its tokens (DeepSpeed-Ulysses, arXiv 2309.14509).

Each rank of a context group runs the layers on an equal slice of the tokens. For attention, the
ranks exchange data so that each has all tokens of some of the heads. So the memory of activations
is divided by the number of ranks, and attention is computed as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_to_all_single_autograd,
)

from unstale.config import ConfigError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """The ranks of a context group, which run a forward pass together by dividing its tokens.

    `rank` is the position in the group of the process that has this object.
    """

    group: ProcessGroup
    rank: int
    """The position of this rank in the group."""
    size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> ContextGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def slice_of(self, num_tokens: int) -> slice:
        """Return the range of the pass's `num_tokens` tokens that this rank runs.

        Raises ValueError if the tokens cannot be divided evenly.
        """
        length, rest = divmod(num_tokens, self.size)
        if rest:
            raise ValueError(f"{num_tokens} tokens cannot be divided among {self.size} ranks")
        return slice(self.rank * length, (self.rank + 1) * length)

    def mine(self, rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Select the token indices in `rows` `[R]` that are in this rank's slice of the tokens.

        Return the positions `[r]` of these indices in `rows`, and the indices `[r]` of the tokens
        within the slice.
        """
        tokens = self.slice_of(num_tokens)
        here = ((rows >= tokens.start) & (rows < tokens.stop)).nonzero().squeeze(1)
        return here, rows[here] - tokens.start

    def assemble(self, values: Tensor, here: Tensor, count: int) -> Tensor:
        """Join the values that the ranks computed. Return all of them, `[count]`, on every rank.

        This rank gives `values` `[r]` for the places `here` `[r]` of the result. The gradient of
        each value goes to the rank that computed it. All ranks compute the same loss from the
        result, so the sum of their gradients is that of one process.
        """
        whole: Tensor = _Assemble.apply(values, here, count, self.group)
        return whole

    def exchange(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, *keys: Tensor
    ) -> Tensor:
        """Call `attend` on the tokens of all ranks, for this rank's share of the heads.

        `query`, and the key and value in `keys`, are `[1, heads, n, width]`, for this rank's slice
        of the tokens. `attend` must return `[1, N, heads, width]` for all `N = size * n` tokens and
        a share of the heads. The result is `[1, n, heads, width]` for this rank's slice. Raises
        ConfigError if the heads cannot be divided among the ranks.
        """
        check_heads(query.shape[1], keys[0].shape[1], self.size)
        key, value = (self._repeat(each) for each in keys)
        out = attend(*(self._swap(each) for each in (query, key, value)))
        return self._swap(out)

    def to_heads(self, rows: Tensor) -> Tensor:
        """Exchange data among the ranks: give this rank's tokens, and get a share of the heads.

        `rows` are `[n, heads, width]` of this rank's tokens. The result is `[N, heads / size,
        width]` of all N tokens, without a gradient. Heads that are fewer than the ranks are
        repeated.
        """
        parts = self._repeat(rows).unflatten(1, (self.size, -1)).movedim(1, 0)
        return self._all_to_all(parts.contiguous()).flatten(0, 1)

    def to_tokens(self, rows: Tensor, heads: int) -> Tensor:
        """Exchange data among the ranks: give a share of the heads, and get this rank's tokens.

        This is the reverse of `to_heads`. `heads` is the number of all heads. Repeated heads are
        summed, as their gradients must be.
        """
        parts = self._all_to_all(rows.unflatten(0, (self.size, -1)).contiguous())
        whole = parts.movedim(0, 1).flatten(1, 2)
        return whole if whole.shape[1] == heads else whole.unflatten(1, (heads, -1)).sum(2)

    def _all_to_all(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received

    def _repeat(self, keys: Tensor) -> Tensor:
        """Repeat the heads of keys or values if there are fewer heads than ranks."""
        heads = keys.shape[1]
        return keys if heads >= self.size else keys.repeat_interleave(self.size // heads, 1)

    def _swap(self, tensor: Tensor) -> Tensor:
        """Divide dimension 1 of `[1, a, b, d]` among the ranks. Join the parts in dimension 2.

        The result is `[1, a / size, size * b, d]`. Before attention, this turns all heads of a
        slice of the tokens into all tokens of a share of the heads. After attention it does the
        reverse.
        """
        parts = tensor.unflatten(1, (self.size, -1)).movedim(1, 0)
        flat = parts.flatten()
        sizes = [flat.numel() // self.size] * self.size
        received = all_to_all_single_autograd(flat, sizes, sizes, self.group)
        joined = received.view(parts.shape).movedim(0, 2).flatten(2, 3)
        # With one head a rank, all of this is a view, and the values may still be on their way.
        return joined.clone() if isinstance(joined, AsyncCollectiveTensor) else joined


def check_heads(heads: int, key_heads: int, ranks: int) -> None:
    """Raise ConfigError unless attention heads and key-value heads can be divided among ranks.

    Fewer key-value heads than ranks are repeated.
    """
    if heads % ranks:
        raise ConfigError(f"cluster.context must divide the {heads} attention heads, got {ranks}")
    if key_heads % ranks and ranks % key_heads:
        raise ConfigError(
            f"cluster.context must divide the {key_heads} key-value heads, or be a multiple of "
            f"them; got {ranks}"
        )


class _Assemble(torch.autograd.Function):
    """The autograd operation of `ContextGroup.assemble`, which joins the values of all ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, here: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(here)
        whole = values.new_zeros(count)
        whole[here] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (here,) = ctx.saved_tensors
        return grad[here], None, None, None
