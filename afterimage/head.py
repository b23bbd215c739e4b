"""From hidden states to log-probabilities of chosen tokens, a few rows at a time: all logits at once are never held."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from afterimage.linear import WHOLE, Linear, product

MAX_LOGITS = {"cpu": 2**22, "cuda": 2**26}
"""Float32 logits that exist at once (16 and 256 MiB), or those of `WHOLE` rows. The gradient forms them once more."""

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
    size = _rows_at_once(rows, rows.shape[1] if isinstance(head, nn.Identity) else len(cast(Tensor, head.weight)))
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
    entropy = -(everything.exp() * everything).sum(-1) if with_entropy else everything.new_zeros(len(rows))
    return everything.gather(1, targets[:, None]).squeeze(1), entropy


class _Head(torch.autograd.Function):
    """Keeps hidden states and two numbers a row; forward and backward hold one chunk of logits each."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, how: tuple[Tensor, float, bool]
    ) -> tuple[Tensor, Tensor]:
        targets, temperature, with_entropy = how
        logp = rows.new_empty(len(rows), dtype=wide(rows.dtype))
        total, entropy = torch.empty_like(logp), torch.zeros_like(logp)
        for at in _chunks(rows, weight):
            logits = _logits(rows[at], weight, bias, temperature)
            chosen, highest = logits.gather(1, targets[at, None]).squeeze(1), logits.amax(-1)
            if with_entropy:
                total[at] = logits.logsumexp(-1)
                logits.sub_(total[at, None]).clamp_(min=LEAST)
                entropy[at] = -logits.mul_(logits.exp()).sum(-1)
            else:  # in place: at large vocabularies a second chunk would be most of what a pass takes
                total[at] = logits.sub_(highest[:, None]).exp_().sum(-1).log_().add_(highest)
            logp[at] = chosen - total[at]
            del logits  # before the next chunk is made
        ctx.save_for_backward(rows, weight, bias, targets, total, entropy)
        ctx.how = temperature, with_entropy
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, total, entropy = ctx.saved_tensors
        temperature, with_entropy = ctx.how
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        for_rows = torch.empty_like(rows) if needs_rows else None
        for_weight = torch.zeros_like(weight, dtype=total.dtype) if needs_weight else None  # over chunks a sum rounds
        for_bias = torch.zeros_like(bias, dtype=total.dtype) if needs_bias else None
        for at in _chunks(rows, weight):
            logits = _logits(rows[at], weight, bias, temperature).sub_(total[at, None])
            if with_entropy:
                outward = logits.clamp_(min=LEAST).exp()
                outward *= (logits + entropy[at, None]).mul_(-grad_entropy[at, None]).sub_(grad[at, None])
            else:
                outward = logits.exp_().mul_(-grad[at, None])
            outward.scatter_add_(1, targets[at, None], grad[at, None])
            outward = outward.div_(temperature).to(rows.dtype)
            if for_rows is not None:
                for_rows[at] = product(outward, weight.t())
            if for_weight is not None:
                if for_weight.dtype == rows.dtype:
                    for_weight.addmm_(outward.t(), rows[at])
                else:
                    for_weight += outward.t() @ rows[at]
            if for_bias is not None:
                for_bias += outward.sum(0, dtype=total.dtype)
            del logits, outward
        return for_rows, *(None if sums is None else sums.to(rows.dtype) for sums in (for_weight, for_bias)), None


def _chunks(rows: Tensor, weight: Tensor) -> list[slice]:
    size = _rows_at_once(rows, len(weight))
    return [slice(start, start + size) for start in range(0, len(rows), size)]


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    logits = product(rows, weight, bias).to(wide(rows.dtype))
    return logits if temperature == 1.0 else logits.div_(temperature)
