"""The seconds to publish a new version of the weights to servers.

A version is staged while engines still sample: each host decodes and checks it, or writes it whole.
Then engines stop sampling only while they load it. Afterwards replies are held back until a probe
(a short sampled reply) shows that the weights are right. Times per byte were measured on one thread
(benchmarks/standstill.py).
"""

from typing import TYPE_CHECKING

from unstale.weights import delta_sizes
from unstale.weights.delta_sizes import WORD

if TYPE_CHECKING:
    from unstale.analysis.planner.models import Model

CHECK_S = 0.045e-9
"""Seconds per byte of weights to compute their checksum, on one core."""
WRITE_S = 0.49e-9
"""Seconds per byte in which one core writes whole weights to /dev/shm. The time to merge LoRA
adapters into them is included.
"""
PROBE_PROMPT, PROBE_REPLY = 32, 32
"""Numbers of tokens of a probe, with which a server's new weights are tested after a publication.
The prompt is random, and the server samples the reply.
"""
_REFERENCE_FLOPS = 200e9
"""Operations per second of the processor core that computes a probe's log-probabilities. Assumed.
"""
_REFERENCE_BANDWIDTH = 11e9
"""Bytes of weights per second that the core of `_REFERENCE_FLOPS` reads. Assumed."""


def decode_s(words: float, rate: float, *, cores: float) -> float:
    """Return the seconds in which a host applies a delta to its `words` weights, and checks them.

    `rate` is the learning rate, on which the size of the delta depends.
    """
    return (delta_sizes.apply_s(words, rate) + CHECK_S * WORD * words) / cores


def reference_s(model: "Model") -> float:
    """Return the seconds in which a core computes the log-probabilities of a probe's tokens.

    The probe is a short reply that tests new weights. Each expert that its tokens use is read once.
    """
    tokens = PROBE_PROMPT + PROBE_REPLY
    computed = tokens * model.forward_flops(tokens / 2)
    return computed / _REFERENCE_FLOPS + model.read_bytes(tokens) / _REFERENCE_BANDWIDTH
