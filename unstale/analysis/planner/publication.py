"""The seconds to publish a version to servers: before, during and after their standstill.

A version is staged while engines still sample: each host decodes and checks it, or writes it whole.
Engines then stand still only while they load it. Afterwards replies are held back until the probe
has passed. Times per byte were measured on one thread (benchmarks/standstill.py).
"""

from typing import TYPE_CHECKING

from unstale.weights import delta_sizes
from unstale.weights.delta_sizes import WORD

if TYPE_CHECKING:
    from unstale.analysis.planner.models import Model

CHECK_S = 0.045e-9
"""Seconds per byte of the checksum of weights, on one core."""
WRITE_S = 0.49e-9
"""Seconds per byte to write whole weights to /dev/shm, which one core does. Merging adapters counts
as part of it.
"""
PROBE_PROMPT, PROBE_REPLY = 32, 32
"""Tokens of the probe: its random prompt, and the reply that the server samples."""
_REFERENCE_FLOPS = 200e9
"""Operations per second of one core that computes the probe's log-probabilities. Assumed."""
_REFERENCE_BANDWIDTH = 11e9
"""Bytes of weights per second that this core reads. Assumed."""


def decode_s(words: float, rate: float, *, cores: float) -> float:
    """Return the seconds in which a host applies a delta to its weights, and checks these."""
    return (delta_sizes.apply_s(words, rate) + CHECK_S * WORD * words) / cores


def reference_s(model: "Model") -> float:
    """Return the seconds in which a core computes the log-probabilities of the probe.

    All experts that its tokens use are read once.
    """
    tokens = PROBE_PROMPT + PROBE_REPLY
    computed = tokens * model.forward_flops(tokens / 2)
    return computed / _REFERENCE_FLOPS + model.read_bytes(tokens) / _REFERENCE_BANDWIDTH
