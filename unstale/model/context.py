"""Divide the tokens of one forward pass among ranks (DeepSpeed-Ulysses, arXiv 2309.14509).

The ranks of a context group each run the layers on an equal slice of the tokens. For attention,
they exchange data, so that each rank has all tokens of some of the heads. This divides the memory
of activations by the number of ranks.
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
    """The ranks that together run one forward pass: each runs a slice of the pass's tokens."""

    group: ProcessGroup
    rank: int
    """The position of this process in the group."""
    size: int

    @classmethod
    def of(cls, group: ProcessGroup) -> ContextGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    def slice_of(self, num_tokens: int) -> slice:
        """Return this rank's slice of the `num_tokens` tokens of a pass.

        Raises ValueError if the tokens cannot be divided evenly among the ranks.
        """
        length, rest = divmod(num_tokens, self.size)
        if rest:
            raise ValueError(f"{num_tokens} tokens cannot be divided among {self.size} ranks")
        return slice(self.rank * length, (self.rank + 1) * length)

    def mine(self, rows: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Select those token indices in `rows` `[R]` that are in this rank's slice of the tokens.

        Return where the selected indices are in `rows`, `[r]`, and the indices of these tokens
        within the slice, `[r]`. The pass has `num_tokens` tokens.
        """
        tokens = self.slice_of(num_tokens)
        here = ((rows >= tokens.start) & (rows < tokens.stop)).nonzero().squeeze(1)
        return here, rows[here] - tokens.start

    def assemble(self, values: Tensor, here: Tensor, count: int) -> Tensor:
        """Join the values that the ranks computed.

        Every rank receives all `count` values, `[count]`. `here` `[r]` are the positions in the
        result of this rank's `values` `[r]`. The gradient of each value goes to the rank that
        computed it. All ranks compute the same loss from the result, so the sum of their gradients
        is that of one process.
        """
        whole: Tensor = _Assemble.apply(values, here, count, self.group)
        return whole

    def exchange(
        self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], query: Tensor, *keys: Tensor
    ) -> Tensor:
        """Compute attention with `attend` for all tokens and this rank's share of the heads.

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
        """Exchange rows of tokens for rows of heads: send this rank's tokens, receive all tokens.

        `rows` `[n, heads, width]` are of this rank's tokens. The result `[N, heads / size, width]`
        has all N tokens for this rank's share of the heads, without a gradient. If there are fewer
        heads than ranks, heads are repeated.
        """
        parts = self._repeat(rows).unflatten(1, (self.size, -1)).movedim(1, 0)
        return self._all_to_all(parts.contiguous()).flatten(0, 1)

    def to_tokens(self, rows: Tensor, heads: int) -> Tensor:
        """Undo `to_heads`: send this rank's share of the heads, receive all heads of its tokens.

        `rows` is `[N, heads / size, width]`, and the result `[n, heads, width]`. `heads` is the
        number of all heads. Heads that `to_heads` repeated are summed. Only gradients have such
        heads.
        """
        parts = self._all_to_all(rows.unflatten(0, (self.size, -1)).contiguous())
        whole = parts.movedim(0, 1).flatten(1, 2)
        return whole if whole.shape[1] == heads else whole.unflatten(1, (heads, -1)).sum(2)

    def _all_to_all(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received

    def _repeat(self, keys: Tensor) -> Tensor:
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
    """Raise ConfigError if attention heads or key-value heads cannot be divided among ranks.

    Fewer key-value heads than ranks are allowed if their number divides the number of ranks.
    """
    if heads % ranks:
        raise ConfigError(f"cluster.context must divide the {heads} attention heads, got {ranks}")
    if key_heads % ranks and ranks % key_heads:
        raise ConfigError(
            f"cluster.context must divide the {key_heads} key-value heads, or be a multiple of "
            f"them; got {ranks}"
        )


class _Assemble(torch.autograd.Function):
    """The autograd operation of `ContextGroup.assemble`."""

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
