"""Log-probabilities of tokens under truncated sampling, such as top-p.

Each distribution is normalised over the tokens that the truncation kept. Only the logits of kept
tokens are computed. This is less work than the logits of the whole vocabulary, unless a
distribution is nearly uniform.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unstale.kept_sets import KeptSets

PRODUCTS = 2**22
"""Largest number of products of a hidden feature and a head weight that are in memory at once."""
ROWS = 64
"""Number of hidden states whose gradient is computed at once."""


def kept_logps(
    logits: Tensor, sizes: Tensor, ids: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy `[R]` of distributions over kept sets, with a gradient.

    A kept set has the tokens among which truncated sampling drew. The sets have N tokens together.
    `ids` `[N]` are these tokens, set after set, and `logits` `[N]` their logits, divided by the
    temperature. `sizes` `[R]` has the size of each set, at least 1. Each set contains its target
    token in `targets` `[R]`.
    """
    row = torch.repeat_interleave(sizes)
    top = torch.segment_reduce(logits.detach(), "max", lengths=sizes)
    x = logits - top[row]
    likely = x.exp()
    total = torch.segment_reduce(likely, "sum", lengths=sizes)
    chosen = x[ids == targets[row]]
    mean = torch.segment_reduce(likely * x, "sum", lengths=sizes) / total
    return chosen - total.log(), total.log() - mean


def kept_logits(
    head: nn.Module, rows: Tensor, kept: KeptSets, *, is_linear: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits `[N]` of all kept tokens, the sets' sizes `[R]` and the tokens' ids `[N]`.

    `kept` has one set of tokens for each row. `rows` `[R, H]` are hidden states, or logits if
    `head` is the identity. The result is float32, or float64 for float64 rows. If the head is not
    one linear layer (`is_linear` False), it is run on parts of the rows, and again in the backward
    pass.
    """
    sizes, ids = (each.to(rows.device) for each in kept.to_tensors())
    ids = ids.long()
    row = torch.repeat_interleave(sizes)
    if is_linear:
        layer: Any = head
        return _KeptLogits.apply(rows, layer.weight, layer.bias, (row, ids)), sizes, ids
    if isinstance(head, nn.Identity):
        return rows[row, ids].to(_wide(rows)), sizes, ids
    found = []
    counts = [int(each.sum()) for each in sizes.split(ROWS)]
    parts = zip(rows.split(ROWS), row.split(counts), ids.split(counts), strict=True)
    for number, (some, own_row, own_ids) in enumerate(parts):
        place = own_row - number * ROWS
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        found.append(checkpoint(_some_logits, head, some, place, own_ids, **options))
    return torch.cat(found), sizes, ids


def _some_logits(head: nn.Module, rows: Tensor, row: Tensor, ids: Tensor) -> Tensor:
    return head(rows)[row, ids].to(_wide(rows))


def _wide(rows: Tensor) -> torch.dtype:
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


class _KeptLogits(torch.autograd.Function):
    """The products of hidden states with those rows of a linear head that belong to kept tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, at: tuple[Tensor, Tensor]
    ) -> Tensor:
        row, ids = at
        dtype = _wide(rows)
        logits = rows.new_empty(len(ids), dtype=dtype)
        size = max(1, PRODUCTS // rows.shape[1])
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            # Summed for each token by itself: its logit does not depend on the others.
            logits[part] = (rows[row[part]].to(dtype) * weight[ids[part]].to(dtype)).sum(-1)
        ctx.save_for_backward(rows, weight, row, ids)
        ctx.has_bias = bias is not None
        return logits if bias is None else logits.add_(bias[ids])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, row, ids = ctx.saved_tensors
        needed = ctx.needs_input_grad
        for_rows, for_weight = (
            torch.zeros_like(tensor, dtype=grad.dtype) if is_needed else None
            for tensor, is_needed in zip((rows, weight), needed, strict=False)
        )
        edges = torch.searchsorted(row, torch.arange(0, len(rows) + ROWS, ROWS, device=row.device))
        bounds = edges.tolist()
        for number in range(len(bounds) - 1):
            at = slice(bounds[number], bounds[number + 1])
            some = slice(number * ROWS, (number + 1) * ROWS)
            # Products of small matrices: sums by index are not deterministic on a GPU.
            tokens, place = ids[at].unique(return_inverse=True)
            slopes = grad.new_zeros(len(rows[some]), len(tokens))
            slopes[row[at] - some.start, place] = grad[at]
            if for_rows is not None:
                for_rows[some] = slopes @ weight[tokens].to(grad.dtype)
            if for_weight is not None:
                for_weight[tokens] += slopes.T @ rows[some].to(grad.dtype)
        for_bias = None
        if ctx.has_bias and needed[2]:
            for_bias = grad.new_zeros(len(weight)).index_put((ids,), grad, accumulate=True)
        sums = (for_rows, for_weight, for_bias)
        return *(None if each is None else each.to(rows.dtype) for each in sums), None
