"""Log-probabilities of given tokens, computed from hidden states and the output head.

The logits are computed for a part of the vocabulary and some tokens at a time (a tile). So the full
logits `[tokens, vocabulary]` are never in memory at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unstale.kept_sets import KeptSets
from unstale.model import rowwise
from unstale.model.kept_head import kept_logits, kept_logps
from unstale.model.kernels import fits_gpu, gpu_kernels
from unstale.model.linear import FAST, WHOLE, Linear, Products
from unstale.model.rowwise import ROWWISE

TILE = {"cpu": 2**11, "cuda": 2**15}
"""Number of vocabulary entries whose logits are computed at once, by kind of device."""

MAX_LOGITS = {"cpu": 2**20, "cuda": 2**26}
"""Largest number of float32 logits in memory at once (4 and 256 MiB), by kind of device."""

MAX_ROWS = 512
"""Largest number of tokens in one tile on a CPU. Larger tiles do not fit into the CPU's caches and
are no faster.
"""

HEAD_ROWS = 96
"""Number of tokens whose full logits are in memory at once in `_RowwiseHead`."""

LEAST = -1e30
"""A finite number that replaces a log-probability of minus infinity. Minus infinity times the
probability 0 would be NaN.
"""


@dataclass(frozen=True, slots=True)
class LogpQuery:
    """A request for the log-probabilities and entropies of R tokens, one after each hidden state.

    Row `i` of a tensor belongs to the `i`th hidden state.
    """

    targets: Tensor
    """`[R]`: the tokens whose log-probabilities are computed."""
    temperature: float
    with_entropy: bool = False
    """True to compute the entropy of all R distributions, with a gradient."""
    sample: Tensor | None = None
    """`[R]` bool: rows whose entropy is computed without a gradient, for a metric. Used if
    `with_entropy` is False.
    """
    kept_sets: KeptSets | None = None
    """The sets of tokens over which the R distributions are normalised, because sampling was
    truncated to them. None means the whole vocabulary.
    """
    compare: "Callable[[nn.Module, Tensor, LogpQuery], tuple[Tensor, ...]] | None" = None
    """A function that answers the query in place of `token_logps`. It may return further values
    `[R]` after log-probability and entropy.
    """
    logit_bias: Tensor | None = None
    """`[V]`: numbers that are added to the logits before the division by the temperature."""

    def at(self, rows: Tensor) -> "LogpQuery":
        """Return the query for r of its R rows, given by their indices `[r]`."""
        sample = None if self.sample is None else self.sample[rows]
        kept_sets = self.kept_sets.at(rows.cpu()) if self.kept_sets else None
        return replace(self, targets=self.targets[rows], sample=sample, kept_sets=kept_sets)


def query_head(head: nn.Module, rows: Tensor, query: LogpQuery) -> tuple[Tensor, ...]:
    """Answer a query: return log-probabilities and entropies, `[R]` each.

    `head` is the output head, and `rows` `[R, H]` are the hidden states. An entropy that the query
    does not ask for is 0. `query.compare` may add further results `[R]`.
    """
    if query.kept_sets:  # not without rows, which a rank of a context group may lack
        return _query_kept(head, rows, query, query.kept_sets)
    if query.compare:
        return query.compare(head, rows, query)
    scored = partial(token_logps, head, temperature=query.temperature, logit_bias=query.logit_bias)
    logp, entropy = scored(rows, query.targets, with_entropy=query.with_entropy)
    if query.sample is not None and query.sample.any():
        chosen = query.sample
        with torch.no_grad():
            _, some = scored(rows.detach()[chosen], query.targets[chosen], with_entropy=True)
        entropy = torch.zeros_like(logp.detach()).index_put((chosen,), some)
    return logp, entropy


def _query_kept(
    head: nn.Module, rows: Tensor, query: LogpQuery, kept: KeptSets
) -> tuple[Tensor, Tensor]:
    """Answer a query whose distributions are normalised over kept sets."""
    if kept.any_whole:
        sizes = kept.to_tensors()[0]
        parts = [(sizes == 0).nonzero().squeeze(1), sizes.nonzero().squeeze(1)]
        found = []
        for part, is_whole in zip(parts, (True, False), strict=True):
            if not len(part):
                continue
            of_part = query.at(part.to(rows.device))
            of_part = replace(of_part, kept_sets=None) if is_whole else of_part
            found.append(query_head(head, rows[part.to(rows.device)], of_part))
        order = torch.cat(parts).argsort().to(rows.device)
        logp, entropy = (torch.cat(each)[order] for each in zip(*found, strict=True))
        return logp, entropy
    is_linear = type(head).forward in (nn.Linear.forward, Linear.forward)
    logits, sizes, ids = kept_logits(head, rows, kept, is_linear=is_linear)
    if query.logit_bias is not None:
        logits = logits + query.logit_bias[ids]
    logp, entropy = kept_logps(logits / query.temperature, sizes, ids, query.targets)
    if not query.with_entropy:
        entropy = entropy.detach()
        chosen = torch.zeros_like(query.targets, dtype=torch.bool)
        entropy = entropy.where(chosen if query.sample is None else query.sample, 0.0)
    return logp, entropy


def token_logps(  # noqa: PLR0913 - the options of a query
    head: nn.Module,
    rows: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    logit_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability `[R]` of each token in `targets` `[R]`, and the entropy `[R]`.

    `rows` `[R, H]` are the hidden states before these tokens. The entropy is 0 without
    `with_entropy`. Both results are float32, or float64 for float64 rows. If the head is more than
    one linear layer, it is run on parts of the rows, and again in the backward pass. `logit_bias`
    `[V]` is added to the logits before they are divided by `temperature`. A `RowwiseLinear` does
    not support it and raises ValueError.
    """
    if isinstance(head, RowwiseLinear):
        if logit_bias is not None:
            raise ValueError("a rowwise head has no logit bias")
        return _RowwiseHead.apply(
            rows, head.weight, head.bias, (targets, temperature, with_entropy, None)
        )
    if type(head).forward in (nn.Linear.forward, Linear.forward):
        head = cast(nn.Linear, head)
        options = (targets, temperature, with_entropy, logit_bias)
        return _Head.apply(rows, head.weight, head.bias, options)
    vocabulary = rows.shape[1] if isinstance(head, nn.Identity) else len(cast(Tensor, head.weight))
    size = _rows_at_once(rows, vocabulary)
    logps = []
    entropies = []
    for some_rows, some_targets in zip(rows.split(size), targets.split(size), strict=True):
        inputs = (head, some_rows, some_targets, temperature, with_entropy, logit_bias)
        logp, entropy = checkpoint(
            _all_logits, *inputs, use_reentrant=False, preserve_rng_state=False
        )
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of log-probabilities for a model in `dtype`: float32 or float64.

    It is float64 only for a float64 model.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rows_at_once(rows: Tensor, vocabulary: int) -> int:
    size = MAX_LOGITS.get(rows.device.type, MAX_LOGITS["cpu"]) // vocabulary
    size = min(size, MAX_ROWS) if rows.device.type == "cpu" else size
    return max(WHOLE, size // WHOLE * WHOLE)


def _all_logits(  # noqa: PLR0913 - the options of a query
    head: nn.Module,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    logit_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of a few tokens, computed from their full logits."""
    logits = head(rows).to(wide(rows.dtype))
    if logit_bias is not None:
        logits = logits + logit_bias
    logps = F.log_softmax(logits / temperature, dim=-1)
    entropy = -(logps.exp() * logps).sum(-1) if with_entropy else logps.new_zeros(len(rows))
    return logps.gather(1, targets[:, None]).squeeze(1), entropy


class _Head(torch.autograd.Function):
    """Log-probability and entropy by an online softmax (arXiv 1805.02867), with a gradient.

    The sums of a row are rescaled after each part of the vocabulary. Only the hidden states and two
    numbers per row are saved for the backward pass, which computes the logits again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[Tensor, float, bool, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        targets, temperature, with_entropy, logit_bias = options
        logp, total, entropy = rows.new_zeros(3, len(rows), dtype=wide(rows.dtype))
        highest = torch.full_like(logp, LEAST)
        gpu = gpu_kernels() if logit_bias is None and fits_gpu(rows, weight) else None
        scale = None if gpu else temperature
        for tile in _tiles(rows, weight, bias, targets, scale, logit_bias=logit_bias):
            at = tile.rows
            sums = _Sums(logp[at], highest[at], total[at], entropy[at] if with_entropy else None)
            if gpu:
                gpu.add_logits(tile.logits, targets[at], tile.tokens.start, temperature, *sums)
            else:
                _add_logits(tile, sums)
            del tile  # frees the memory before the next tile is made
        entropy = total.log() - entropy.div_(total) if with_entropy else entropy
        total.log_().add_(highest)
        ctx.save_for_backward(rows, weight, bias, targets, total, entropy)
        ctx.options = temperature, with_entropy, logit_bias
        ctx.products = FAST
        return logp.sub_(total), entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, targets, total, entropy = ctx.saved_tensors
        temperature, with_entropy, logit_bias = ctx.options
        products: Products = ctx.products
        # The product of each tile is rounded to the dtype of `rows`. The sum over tiles is not.
        for_rows, for_weight, for_bias = (
            torch.zeros_like(tensor, dtype=total.dtype) if needed else None
            for tensor, needed in zip((rows, weight, bias), ctx.needs_input_grad, strict=False)
        )
        gpu = gpu_kernels() if logit_bias is None and fits_gpu(rows, weight) else None
        scale = None if gpu else temperature
        further = {"products": products, "logit_bias": logit_bias}
        for tile in _tiles(rows, weight, bias, targets, scale, **further):
            at = tile.rows
            entropies = (entropy[at], grad_entropy[at]) if with_entropy else None
            if gpu:
                grad_logits = tile.logits
                gpu.logit_slopes(
                    grad_logits,
                    targets[at],
                    tile.tokens.start,
                    temperature,
                    total[at],
                    grad[at],
                    entropies,
                )
            else:
                grad_logits = _logit_slopes(tile, total[at], grad[at], entropies)
                grad_logits = grad_logits.div_(temperature).to(rows.dtype)
            if for_rows is not None:
                for_rows[at] += products.for_rows(grad_logits, weight[tile.tokens])
            if for_weight is not None:
                for_weight[tile.tokens] += products.for_weight(grad_logits, rows[at], weight.dtype)
            if for_bias is not None:
                for_bias[tile.tokens] += grad_logits.sum(0, dtype=total.dtype)
            del grad_logits, tile
        sums = (for_rows, for_weight, for_bias)
        return *(None if each is None else each.to(rows.dtype) for each in sums), None


class RowwiseLinear(nn.Linear):
    """An output head that computes logits and log-probabilities by `rowwise.c`."""

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 logits, without gradient.

        If `rowwise.c` does not support the weight's dtype, return the logits of `nn.Linear`.
        """
        if self.weight.dtype not in rowwise.DTYPES:
            return super().forward(input)
        rows = input.reshape(-1, self.in_features).float()
        logits = ROWWISE.forward(rows, self.weight, self.bias)
        return logits.view(*input.shape[:-1], self.out_features)


class _RowwiseHead(_Head):
    """Log-probability and entropy of tokens with the same bits as in the engine, by `rowwise.c`.

    The gradient is that of `_Head`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[Tensor, float, bool, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        targets, temperature, with_entropy, _ = options
        panels = rowwise.pack(weight)
        found = []
        for some_rows, some in zip(rows.split(HEAD_ROWS), targets.split(HEAD_ROWS), strict=True):
            logits = rowwise.product(some_rows, panels, bias)
            heat = torch.full((len(some),), temperature)
            found.append(rowwise.score(logits, some, heat, with_entropy=with_entropy))
        logp, total, entropy = (torch.cat(each) for each in zip(*found, strict=True))
        ctx.save_for_backward(rows, weight, bias, targets, total, entropy)
        ctx.options = temperature, with_entropy, None
        ctx.products = ROWWISE
        return logp, entropy


class _Sums(NamedTuple):
    """The running sums of an online softmax over the vocabulary, `[R]` each.

    `highest` is the largest logit so far.
    """

    logp: Tensor
    """The logit of each row's target token. It is 0 until the token's part of the vocabulary is
    added.
    """
    highest: Tensor
    total: Tensor
    """The sum of exp(logit - highest)."""
    entropy: Tensor | None
    """The sum of exp(logit - highest) * (logit - highest). None if no entropy is computed."""


class _Tile(NamedTuple):
    """The logits of some tokens (rows) for a part of the vocabulary (columns)."""

    tokens: slice
    rows: slice
    logits: Tensor
    place: Tensor
    """`[R, 1]`: the column of each row's target token. If the target is in another part of the
    vocabulary, this is the first or the last column, and `inside` is False.
    """
    inside: Tensor
    """`[R]` bool: True if the target token is in this part of the vocabulary."""


def _add_logits(tile: _Tile, sums: _Sums) -> None:
    logits = tile.logits
    sums.logp.add_(logits.gather(1, tile.place).squeeze(1).where(tile.inside, 0.0))
    peak = torch.maximum(sums.highest, logits.amax(-1))
    fall = sums.highest - peak
    sums.highest.copy_(peak)
    logits.sub_(peak[:, None])
    if sums.entropy is not None:
        likely = logits.clamp_(min=LEAST).exp()
        added = logits.mul_(likely).sum(-1)
        sums.entropy.copy_((sums.entropy + fall * sums.total) * fall.exp() + added)
        logits = likely
    else:  # in place, because a second tile would nearly double the memory of the pass
        logits.exp_()
    sums.total.mul_(fall.exp_()).add_(logits.sum(-1))


def _logit_slopes(
    tile: _Tile, total: Tensor, grad: Tensor, entropies: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Return the gradient of the loss with respect to a tile's logits, times the temperature.

    `total` `[R]` is the logarithm of the softmax's denominator. `grad` `[R]` is the gradient with
    respect to the log-probability. `entropies` are the entropy `[R]` and the gradient with respect
    to it, or None if the loss does not depend on the entropy.
    """
    logits = tile.logits.sub_(total[:, None])
    if entropies:
        entropy, grad_entropy = entropies
        slopes = logits.clamp_(min=LEAST).exp()
        slopes *= (logits + entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad[:, None])
    else:
        slopes = logits.exp_().mul_(-grad[:, None])
    return slopes.scatter_add_(1, tile.place, grad.where(tile.inside, 0.0)[:, None])


def _tiles(  # noqa: PLR0913 - the inputs of the products, and how they are computed
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float | None,
    *,
    products: Products = FAST,
    logit_bias: Tensor | None = None,
) -> Iterator[_Tile]:
    """Yield all logits in tiles (some rows, and a part of the vocabulary), in float32 or float64.

    If `temperature` is None, logits are not divided and have the dtype of the rows, because GPU
    kernels do the rest. These kernels do not support `logit_bias`.
    """
    width = min(len(weight), TILE.get(rows.device.type, TILE["cpu"]))
    size = _rows_at_once(rows, width)
    if temperature is None:  # `MAX_LOGITS` counts numbers of 4 bytes
        size = size * 4 // rows.element_size()
    for low in range(0, len(weight), width):
        tokens = slice(low, min(low + width, len(weight)))
        inside = (targets >= low) & (targets < tokens.stop)
        place = (targets - low).clamp(0, tokens.stop - low - 1)
        tile_bias = None if bias is None else bias[tokens]
        added = None if logit_bias is None else logit_bias[tokens]
        for first in range(0, len(rows), size):
            at = slice(first, first + size)
            logits = _logits(products, rows[at], weight[tokens], tile_bias, temperature, added)
            yield _Tile(tokens, at, logits, place[at, None], inside[at])


def _logits(  # noqa: PLR0913 - what logits are made of
    products: Products,
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | None,
    logit_bias: Tensor | None,
) -> Tensor:
    logits = products.forward(rows, weight, bias)
    if temperature is None:
        return logits
    logits = logits.to(wide(rows.dtype))
    if logit_bias is not None:
        logits += logit_bias
    return logits if temperature == 1.0 else logits.div_(temperature)
