"""Sampling of tokens. A token's random number depends only on the seed and the token's position.

On a CPU, `sampling.c` samples. On other devices, and without a compiler, torch samples the same
tokens.
"""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from unstale.engines.embedded.kernels import divided
from unstale.kept_sets import KeptSets, Truncation
from unstale.native import NotCompiled, compile_library
from unstale.signals import Signals

SOURCE = Path(__file__).with_name("sampling.c")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 48
_SUM_BLOCK = 512
"""Number of tokens in a block of the vocabulary. To sample a token, the probabilities of each block
are summed, and then those of the tokens in one block. With about the square root of a large
vocabulary, both sums are short.
"""
_LEAST_LOGP = -1e30
"""Finite number instead of minus infinity, so that its product with a probability of 0 is 0."""
_NOT_FINITE = "the logits are not finite: check the weights for NaN and infinity"


class Drawn(NamedTuple):
    """Sampled tokens `[B]`, their log-probabilities `[B]` in nats, and the sets of tokens that
    truncated sampling kept.
    """

    tokens: NDArray[np.int64]
    logp: NDArray[np.float32]
    kept_sets: KeptSets | None = None
    """For each row, the tokens that truncation (`top_p`, `top_k`, `min_p`) kept. None if no
    distribution was truncated.
    """


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[B]` uniform random numbers in (0, 1), one for each pair of seed and position.

    Each number is a hash of its seed and position (the splitmix64 finaliser, applied twice), so it
    does not depend on other tokens of the batch. It has 48 bits. With more bits, its product with a
    sum of probabilities could be rounded to that sum.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds + _GOLDEN)
        bits = _mix(stream ^ _mix((positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN))
    return ((bits >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) / 2.0**_BITS


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


class Sampler:
    """A callable that draws tokens as `draw` does, with the random numbers of `uniforms`.

    `logit_bias` has pairs of a token and a number that is added to the token's logit.
    """

    def __init__(self, logit_bias: Sequence[tuple[int, float]] = ()) -> None:
        self._biased = torch.tensor([token for token, _ in logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([value for _, value in logit_bias])
        self._helpers = ThreadPoolExecutor(max(torch.get_num_threads() - 1, 1))
        self._kept = np.empty((0, 0), np.int32)
        """`[rows, vocabulary]`: memory for the ids of kept tokens, most of it never written."""
        self._library: ctypes.CDLL | None = None
        try:
            self._library = library = compile_library(SOURCE, ("-DLANES=16",))
        except NotCompiled:  # the runner has the warning
            return
        library.scratch.restype = ctypes.c_int64
        library.scratch.argtypes = [ctypes.c_int64]
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        library.draw.restype = None
        library.draw.argtypes = [pointer, number, *[pointer] * 9, number, number]

    @property
    def compiled(self) -> bool:
        """True if compiled code samples from logits on the CPU. False without a compiler."""
        return self._library is not None

    def __call__(
        self,
        logits: Tensor,
        temperature: NDArray[np.float32],
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int64],
        truncations: Sequence[Truncation] = (),
    ) -> Drawn:
        """Sample one token for each row. Return tokens, log-probabilities in nats and kept sets.

        `logits` are `[B, V]`. `temperature`, `seeds` and `positions` are `[B]`. `truncations` has
        one entry for each row, or is empty: then there are no kept sets. Raises FloatingPointError
        for logits that are not finite.
        """
        logits = self._with_bias(logits)
        truncates = any(truncations)
        if self._library is None or logits.device.type != "cpu":
            noise = torch.from_numpy(uniforms(seeds, positions))
            heat = torch.from_numpy(temperature)
            kept = None
            if truncates:
                logits, kept = truncated(logits, heat, truncations)
            drawn = draw(logits, heat, noise)
            return Drawn(drawn[0].numpy(), drawn[1].numpy(), kept)
        rows, vocab = logits.shape
        logits = logits.contiguous()
        tokens, logp = np.empty(rows, np.int64), np.empty(rows, np.float32)
        sizes = np.zeros(rows, np.int64)
        if truncates and (self._kept.shape[1] != vocab or len(self._kept) < rows):
            self._kept = np.empty((rows, vocab), np.int32)
        limits = [np.array(truncations, np.float64)] * truncates
        arrays = [np.ascontiguousarray(array) for array in (temperature, seeds, positions)]
        inputs = [logits.data_ptr(), vocab, *map(_address, arrays)]
        inputs += [_address(each) for each in limits] or [0]
        outputs = (tokens, logp, sizes, self._kept)
        divided(self._helpers, partial(self._draw, inputs, outputs), rows)
        if (tokens < 0).any():
            raise FloatingPointError(_NOT_FINITE)
        if not truncates:
            return Drawn(tokens, logp)
        ids = [row[:size] for row, size in zip(self._kept, sizes.tolist(), strict=False)]
        return Drawn(tokens, logp, KeptSets(sizes, np.concatenate(ids)))

    def measure(self, logits: Tensor, temperature: NDArray[np.float32]) -> Signals:
        """Return the signals (such as the entropy) of the distributions of `logits` `[B, V]`.

        `temperature` is `[B]`. A row at temperature 0 is measured at 1.
        """
        heat = torch.from_numpy(np.where(temperature == 0, np.float32(1), temperature))
        logp = (self._with_bias(logits).float() / heat[:, None].to(logits.device)).log_softmax(-1)
        entropy = -(logp.exp() * logp.clamp_min(_LEAST_LOGP)).sum(-1)
        top = logp.topk(2)
        return Signals(
            entropy.cpu().numpy(), top.indices.int().cpu().numpy(), top.values.cpu().numpy()
        )

    def _with_bias(self, logits: Tensor) -> Tensor:
        if not len(self._biased):
            return logits
        added = self._bias.to(logits.device).expand(len(logits), -1)
        return logits.float().index_add(1, self._biased.to(logits.device), added)

    def _draw(
        self, inputs: list[int], outputs: tuple[NDArray[Any], ...], first: int, last: int
    ) -> None:
        assert self._library is not None
        scratch = np.empty(self._library.scratch(inputs[1]), np.uint8)
        to = list(map(_address, outputs))
        self._library.draw(*inputs, _address(scratch), *to, first, last)


def _address(array: NDArray[Any]) -> int:
    return torch.from_numpy(array).data_ptr()


def truncated(
    logits: Tensor, temperature: Tensor, truncations: Sequence[Truncation]
) -> tuple[Tensor, KeptSets]:
    """Return logits `[B, V]` with minus infinity for tokens that are cut off, and the sets of kept
    tokens.

    `temperature` is `[B]` float32. `truncations` has the limits of each row. A row without limits,
    or at temperature 0, keeps all tokens.
    """
    limits = torch.tensor(truncations, dtype=torch.float64, device=logits.device)
    top_p, top_k, min_p = limits.T[..., None]
    heat = temperature.masked_fill(temperature == 0, 1)[:, None].to(logits.device)
    likely, order = (logits / heat).softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    keeps = (likely >= min_p * likely[:, :1]) & ((rank < top_k) | (top_k == 0)) & (likely > 0)
    total = likely.double().where(keeps, 0.0)
    before = total.cumsum(-1) - total
    keeps &= (before < top_p * total.sum(-1, keepdim=True)) | (top_p >= 1) | (rank == 0)
    whole = torch.tensor([not each for each in truncations]) | (temperature == 0)
    keeps |= whole[:, None].to(keeps.device)
    kept = torch.zeros_like(keeps).scatter_(1, order, keeps)
    sizes = kept.sum(-1).cpu().masked_fill_(whole, 0)
    of_rows = kept & ~whole[:, None].to(kept.device)
    ids = of_rows.nonzero()[:, 1].int().cpu()
    return logits.masked_fill(~kept, -torch.inf), KeptSets.of_tensors(sizes, ids)


def draw(logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return sampled tokens `[B]` and their log-probabilities `[B]` in nats, on the CPU.

    A token is the first at which the cumulative distribution of its row of `logits` `[B, V]`
    exceeds `noise`, `[B]` float64 in (0, 1). `temperature` is `[B]` float32. At temperature 0 the
    token is the argmax and its log-probability 0. `logits` may be on any device, the other
    arguments are on the CPU. Raises FloatingPointError for logits that are not finite.
    """
    greedy = temperature == 0
    if bool((temperature != 1).any()):
        divisor = temperature.masked_fill(greedy, 1)[:, None]
        logits = logits / divisor.to(logits.device)
    logp = logits.log_softmax(-1)
    tokens, total = _inverted(logp.exp(), noise.to(logits.device)[:, None])
    chosen = logp.gather(1, tokens)
    if bool(greedy.any()):
        tokens = torch.where(
            greedy[:, None].to(logits.device), logits.argmax(-1, keepdim=True), tokens
        )
    # in one copy, because each waits for the device
    drawn = torch.cat([tokens.double(), chosen.double(), total], 1).cpu()
    if not bool(torch.isfinite(drawn[:, 2]).all()):
        raise FloatingPointError(_NOT_FINITE)
    return drawn[:, 0].long(), drawn[:, 1].float().masked_fill(greedy, 0)


def _inverted(likely: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token `[B, 1]` at which each row's cumulative sum exceeds a share of its whole
    sum.

    Also return the whole sums. `likely` `[B, V]` has probabilities that need not sum to 1. `noise`
    `[B, 1]` has the shares, in (0, 1). The block of a token is found first, then the token in the
    block. So only one block of a row is summed token by token.
    """
    vocab = likely.shape[1]
    blocks = F.pad(likely, (0, -vocab % _SUM_BLOCK)).unflatten(1, (-1, _SUM_BLOCK))
    ends = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = ends[:, -1:]
    wanted = noise * total
    block = torch.searchsorted(ends, wanted, right=True).clamp_max(ends.shape[1] - 1)
    begin = torch.where(block > 0, ends.gather(1, (block - 1).clamp_min(0)), 0.0)
    its_likely = blocks.gather(1, block[:, None].expand(-1, -1, _SUM_BLOCK))[:, 0]
    below = its_likely.cumsum(-1, dtype=torch.float64) + begin
    place = torch.searchsorted(below, wanted, right=True)
    # Rounding can leave the sum of a block's tokens below the block's end.
    last = (its_likely > 0).cumsum(-1).argmax(-1, keepdim=True)
    return block * _SUM_BLOCK + torch.minimum(place, last), total
