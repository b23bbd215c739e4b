"""Sampling of tokens. The random number of a token depends only on the seed and its position."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_BITS = 48


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return `[B]` uniform random numbers in (0, 1), one for each seed and position.

    Each number is a hash of its seed and position (twice the splitmix64 finaliser), so it does not
    depend on the order or the batch. It has 48 bits. With more bits, it could be rounded to 1 when
    it is multiplied by a sum of probabilities.
    """
    with np.errstate(over="ignore"):
        stream = _mix(seeds + _GOLDEN)
        bits = _mix(stream ^ _mix((positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN))
    return ((bits >> np.uint64(64 - _BITS)).astype(np.float64) + 0.5) / 2.0**_BITS


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))


def draw(logits: Tensor, temperature: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return sampled tokens `[B]` and their log-probabilities `[B]` in nats, on the CPU.

    The cumulative distribution of `logits [B, V]`, which may be on any device, is inverted at
    `noise` (`[B]` float64 in (0, 1)). `temperature` is `[B]` float32. At 0 the token is the argmax
    and its log-probability 0. Raises FloatingPointError for logits that are not finite.
    """
    temperature = temperature.to(logits.device)
    noise = noise.to(logits.device)
    greedy = temperature == 0
    if bool((temperature != 1).any()):
        logits = logits / temperature.masked_fill(greedy, 1)[:, None]
    logp = logits.log_softmax(-1)
    below = logp.exp().cumsum(-1, dtype=torch.float64)
    total = below[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise FloatingPointError(
            "the logits are not finite: check the weights for NaN and infinity"
        )
    tokens = torch.searchsorted(below, noise[:, None] * total, right=True)
    chosen = logp.gather(1, tokens)[:, 0]
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
        chosen = chosen.masked_fill(greedy, 0)
    return tokens[:, 0].cpu(), chosen.cpu()
