"""The parts of a decoder layer other than the matrix products: norms, attention, activation.

The KV cache is paged. `TorchParts` computes the parts with torch's operations on any device.
`gpu_kernels.py` computes the same with Triton kernels on a GPU.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from unstale.engines.embedded.pages import PAGE, Inputs

MAX_KEYS = 1 << 15
"""Largest number of keys that `TorchParts` copies at once for several sequences, with padding."""
Cache = tuple[Tensor, Tensor]
"""The cache of a layer: a tensor of keys `[pages * kv_heads, head_dim, PAGE]`, and one of values
`[pages * kv_heads, PAGE, head_dim]`.
"""


class LayerParts(Protocol):
    """The parts of a decoder layer other than the matrix products, for a batch of T tokens.

    The first R tokens are rows: a row is the newest token of a sequence that is being sampled. The
    other tokens are parts of prompts.
    """

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        """Add `more` to `x` `[T, width]`, in place, unless it is None.

        Return the RMS norm of the sum, times `weight`, `[T, width]`.
        """
        ...

    def place(self, qkv: Tensor, norm: Tensor, inputs: Inputs, cache: Cache) -> Tensor:
        """Write a batch's keys and values to the cache. Return its queries `[T, heads, head_dim]`.

        `qkv` is `[T, heads + 2 * kv_heads, head_dim]`. Queries and keys are normalised, multiplied
        by `norm` `[heads + kv_heads, head_dim]`, and rotated by the angles of their positions.
        """
        ...

    def attend_rows(self, query: Tensor, inputs: Inputs, cache: Cache) -> Tensor:
        """Return the attention output of the R rows, `[R, heads * head_dim]`.

        A row is the newest token of a sequence, and attends to the whole sequence. The keys and
        values of the sequence, the row's included, must be in the cache. `query` is `[R, heads,
        head_dim]` and includes the softmax scale.
        """
        ...

    def gated(self, both: Tensor) -> Tensor:
        """Return `silu(gate) * up`, `[T, width]`.

        Each row of `both` `[T, 2 * width]` has `gate`, then `up`.
        """
        ...


class TorchParts:
    """The parts of a decoder layer (`LayerParts`), computed by torch's operations.

    `rotations` `[positions, head_dim / 2]` are the complex rotary factors. `eps` is the epsilon of
    all norms.
    """

    def __init__(self, kv_heads: int, rotations: Tensor, eps: float) -> None:
        self._kv_heads = kv_heads
        self._rotations = rotations
        self._eps = eps

    def add_norm(self, x: Tensor, more: Tensor | None, weight: Tensor) -> Tensor:
        if more is not None:
            x += more
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def place(self, qkv: Tensor, norm: Tensor, inputs: Inputs, cache: Cache) -> Tensor:
        turned, head_dim = norm.shape
        heads = turned - self._kv_heads
        qk = F.rms_norm(qkv[:, :turned].float(), (head_dim,), None, self._eps) * norm
        pairs = torch.view_as_complex(qk.view(*qk.shape[:2], -1, 2))
        pairs = pairs * self._rotations[inputs.positions][:, None]
        qk = torch.view_as_real(pairs).flatten(2).to(qkv.dtype)
        at = torch.arange(self._kv_heads, device=qkv.device)
        page = (inputs.cells // PAGE)[:, None] * self._kv_heads + at
        place = (inputs.cells % PAGE)[:, None]
        keys, values = cache
        keys.transpose(1, 2)[page, place] = qk[:, heads:]
        values[page, place] = qkv[:, turned:]
        return qk[:, :heads]

    def attend_rows(self, query: Tensor, inputs: Inputs, cache: Cache) -> Tensor:
        positions = inputs.positions[: len(query), None]
        group = query.shape[1] // self._kv_heads
        mask = mask_later(positions, inputs.tables, group, query.dtype)
        at_once = max(1, MAX_KEYS // (inputs.tables.shape[1] * PAGE))
        parts = zip(
            query[:, None].split(at_once),
            mask.split(at_once),
            inputs.tables.split(at_once),
            strict=True,
        )
        return torch.cat([_attend(*part, cache, self._kv_heads) for part in parts])

    def gated(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


def attend_blocks(
    query: Tensor, mask: Tensor, inputs: Inputs, cache: Cache, kv_heads: int
) -> Tensor:
    """Return the attention output of prompt tokens, `[tokens, heads * head_dim]`.

    Prompts are cut into blocks of `pages.BLOCK` tokens. `query` `[T, heads, head_dim]` has the
    queries of all T tokens in the batch. `mask` is the result of `mask_later` for the blocks.
    """
    return _attend(query[inputs.lanes], mask, inputs.reached, cache, kv_heads)[inputs.spots]


def mask_later(positions: Tensor, pages: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to attention scores: -inf for keys after the query, 0 for the others.

    The mask is `[N, 1, group * L, P * PAGE]` for N sequences, each with L queries and P cache
    pages. `positions` `[N, L]` has the positions of the queries in their sequences. `pages` `[N,
    P]` has the first P pages of each sequence. `group` is the number of query heads for each key
    head.
    """
    later = torch.arange(pages.shape[1] * PAGE, device=positions.device) > positions[..., None]
    mask = torch.zeros(later.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(later, -torch.inf).repeat(1, group, 1)[:, None]


def _attend(query: Tensor, mask: Tensor, pages: Tensor, cache: Cache, kv_heads: int) -> Tensor:
    """Return the attention output of L queries of each of N sequences, `[N * L, heads * head_dim]`.

    `query` is `[N, L, heads, head_dim]`. `mask` is the result of `mask_later`. `pages` `[N, P]` has
    the first P cache pages of each sequence.
    """
    count, length, heads, head_dim = query.shape
    at = torch.arange(kv_heads, device=query.device)[:, None]
    chosen = pages[:, None] * kv_heads + at
    keys, values = cache
    its_keys = keys[chosen].transpose(3, 4).flatten(2, 3)
    its_values = values[chosen].flatten(2, 3)
    queries = query.transpose(1, 2).reshape(count, kv_heads, -1, head_dim)
    mixed = F.scaled_dot_product_attention(queries, its_keys, its_values, attn_mask=mask, scale=1.0)
    mixed = mixed.reshape(count, heads, length, head_dim).transpose(1, 2)
    return mixed.reshape(count * length, heads * head_dim)
