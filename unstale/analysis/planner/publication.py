"""Compute the seconds to publish a new version of the weights to inference servers.

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
"""Seconds per byte of weights to compute a checksum on one core."""
WRITE_S = 0.49e-9
"""Seconds per byte to write whole weights to /dev/shm on one core, after merging LoRA adapters."""
PROBE_PROMPT, PROBE_REPLY = 32, 32
"""Numbers of tokens of a probe, which tests a server's new weights: a random prompt, and the reply
that the server samples.
"""
_REFERENCE_FLOPS = 200e9
"""Operations per second of the core that computes the log-probabilities of a probe. Assumed."""
_REFERENCE_BANDWIDTH = 11e9
"""Bytes of weights per second that the core which checks a probe reads. Assumed."""


def decode_s(words: float, rate: float, *, cores: float) -> float:
    """Return the seconds in which a host applies a delta to `words` weights, and checks the result.

    A delta is the difference between two versions. Its size depends on the learning rate `rate`.
    """
    return (delta_sizes.apply_s(words, rate) + CHECK_S * WORD * words) / cores


def reference_s(model: "Model") -> float:
    """Return the seconds in which a core computes the log-probabilities of a probe.

    A probe is a short reply that tests new weights. Each expert that its tokens use is read once.
    """
    tokens = PROBE_PROMPT + PROBE_REPLY
    computed = tokens * model.forward_flops(tokens / 2)
    return computed / _REFERENCE_FLOPS + model.read_bytes(tokens) / _REFERENCE_BANDWIDTH
