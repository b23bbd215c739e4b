"""From hidden states to log-probabilities of chosen tokens, tile by tile: all logits at once are never held."""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unstale.model.linear import WHOLE, Linear, outer, product

TILE = {"cpu": 2**11, "cuda": 2**15}
"""Tokens of the vocabulary at once, by device."""

MAX_LOGITS = {"cpu": 2**20, "cuda": 2**26}
"""Float32 logits that exist at once (4 and 256 MiB), or those of `WHOLE` rows. The gradient forms them once more."""

MAX_ROWS = 512
"""On a processor, more rows at once leave its caches and gain nothing."""

LEAST = -1e30
"""Log-probability of what cannot be, where it is multiplied by its probability, which is 0."""


def token_logps(
    head: nn.Module, rows: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probability `[R]` of `targets` after hidden states `rows` `[R, H]`, and entropy `[R]` (else zeros).

    Float32, or float64 for float64 rows. A head that is no plain linear map has autograd's own gradient.
    """
    if type(head) in (nn.Linear, Linear):
        return _Head.apply(rows, head.weight, head.bias, (targets, temperature, with_entropy))
    found = []
    size = _rows_at_once(
        rows, rows.shape[1] if isinstance(head, nn.Identity) else len(cast(Tensor, head.weight))
    )
    for some, wanted in zip(rows.split(size), targets.split(size), strict=True):
        given = (head, some, wanted, temperature, with_entropy)
        found.append(checkpoint(_apart, *given, use_reentrant=False, preserve_rng_state=False))
    return torch.cat([logp for logp, _ in found]), torch.cat([entropy for _, entropy in found])


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that log-probabilities are formed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_at_once(rows: Tensor, vocabulary: int) -> int:
    size = MAX_LOGITS.get(rows.device.type, MAX_LOGITS["cpu"]) // vocabulary
    size = min(size, MAX_ROWS) if rows.device.type == "cpu" else size
    return max(WHOLE, size // WHOLE * WHOLE)


def _apart(
    head: nn.Module, rows: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    everything = F.log_softmax(head(rows).to(wide(rows.dtype)) / temperature, dim=-1)
    entropy = (
        -(everything.exp() * everything).sum(-1)
        if with_entropy
        else everything.new_zeros(len(rows))
    )
    return everything.gather(1, targets[:, None]).squeeze(1), entropy


class _Head(torch.autograd.Function):
    """Keeps hidden states and two numbers a row. Sums of a row are scaled from tile to tile (arXiv 1805.02867)."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Tensor, float, bool]
    ) -> tuple[Tensor, Tensor]:
        targets, temperature, with_entropy = how
        logp, total, entropy = rows.new_zeros(3, len(rows), dtype=wide(rows.dtype))
        highest = torch.full_like(logp, LEAST)
        for _, at, logits, place, inside in _tiles(rows, weight, bias, (targets, temperature)):
            logp[at] += logits.gather(1, place).squeeze(1).where(inside, 0.0)
            peak = torch.maximum(highest[at], logits.amax(-1))
            fall, sums, highest[at] = highest[at] - peak, total[at], peak
            logits.sub_(peak[:, None])
            if with_entropy:  # beside the total, the sum of each probability times its logarithm
                likely = logits.clamp_(min=LEAST).exp()
                entropy[at] = (entropy[at] + fall * sums) * fall.exp() + logits.mul_(likely).sum(-1)
                logits = likely
            else:  # in place: a second tile would be most of what a pass takes
                logits.exp_()
            sums.mul_(fall.exp_()).add_(logits.sum(-1))
            del logits  # before the next tile is made
        entropy = total.log() - entropy.div_(total) if with_entropy else entropy
        total.log_().add_(highest)
        ctx.save_for_backward(rows, weight, bias, targets, total, entropy)
        ctx.how = temperature, with_entropy
        return logp.sub_(total), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, total, entropy = ctx.saved_tensors
        temperature, with_entropy = ctx.how
        needed = zip((rows, weight, bias), ctx.needs_input_grad, strict=False)
        for_rows, for_weight, for_bias = (  # over tiles a sum rounds
            torch.zeros_like(given, dtype=total.dtype) if needs else None for given, needs in needed
        )
        for tile, at, logits, place, inside in _tiles(rows, weight, bias, (targets, temperature)):
            logits.sub_(total[at, None])
            if with_entropy:
                outward = logits.clamp_(min=LEAST).exp()
                outward *= (
                    (logits + entropy[at, None]).mul_(-grad_entropy[at, None]).sub_(grad[at, None])
                )
            else:
                outward = logits.exp_().mul_(-grad[at, None])
            outward.scatter_add_(1, place, grad[at].where(inside, 0.0)[:, None])
            outward = outward.div_(temperature).to(rows.dtype)
            if for_rows is not None:
                for_rows[at] += product(outward, weight[tile].t())
            if for_weight is not None:
                for_weight[tile] += outer(outward, rows[at])
            if for_bias is not None:
                for_bias[tile] += outward.sum(0, dtype=total.dtype)
            del logits, outward
        return *(
            None if sums is None else sums.to(rows.dtype)
            for sums in (for_rows, for_weight, for_bias)
        ), None


def _tiles(
    rows: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Tensor, float]
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """`(tokens, rows, their logits, where in these each target is [R, 1], whether it is there [R])`."""
    width = min(len(weight), TILE.get(rows.device.type, TILE["cpu"]))
    (targets, temperature), size = how, _rows_at_once(rows, width)
    for low in range(0, len(weight), width):
        tile = slice(low, min(low + width, len(weight)))
        inside, place = (
            (targets >= low) & (targets < tile.stop),
            (targets - low).clamp(0, tile.stop - low - 1),
        )
        for at in (slice(first, first + size) for first in range(0, len(rows), size)):
            yield (
                tile,
                at,
                _logits(rows[at], weight, bias, (tile, temperature)),
                place[at, None],
                inside[at],
            )


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[slice, float]) -> Tensor:
    tile, temperature = how
    logits = product(rows, weight[tile], None if bias is None else bias[tile]).to(wide(rows.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)
