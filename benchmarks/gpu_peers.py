"""The speed of other trainers, and how `benchmarks.gpu_check` compares a run with them."""

from collections.abc import Sequence
from dataclasses import dataclass

from unstale.analysis.planner.hardware import DEVICES
from unstale.analysis.planner.models import PRESETS, Model

GOAL = 0.8
"""Share of a peer's speed that counts as met."""


SOURCES = {
    "prime-rl": "PrimeIntellect-ai/prime-rl 559b447, benchmarks/baselines: all weights, by the "
    "tokens of a sequence",
    "torchtitan": "pytorch/torchtitan b5bcd76, benchmarks: Llama 3.1 8B, FSDP2",
}
"""Where the speeds of the peers come from."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The committed or published speed of a trainer of all weights."""

    name: str
    preset: str
    gpus: str
    """Number and name of the GPUs that trained."""
    how: str
    """The setting in which the peer measured it, such as the length of sequences."""
    tokens_per_s: float
    """Trained tokens per second of one GPU that trains."""
    mfu: float
    """Share of the data sheet's peak."""

    def __str__(self) -> str:
        return f"{self.name} {self.preset}, {self.gpus}, {self.how}"


def _titan(how: str, tokens_per_s: float) -> Peer:
    """Return a speed for 8 GPUs, in sequences of 8,192 tokens."""
    flops = 3 * PRESETS["8B"].forward_flops(4096)
    mfu = tokens_per_s * flops / DEVICES["H100"].flops
    return Peer("torchtitan", "8B", "8 H100", how, tokens_per_s, mfu)


PEERS = (
    Peer("prime-rl", "0.6B", "1 H100", "16k", 11_896, 0.11),
    Peer("prime-rl", "4B", "8 H100", "16k", 26_025 / 8, 0.139),
    Peer("prime-rl", "4B", "8 H100", "65k", 28_966 / 8, 0.354),
    Peer("prime-rl", "30B-A3B", "8 H100", "16k", 6_113 / 8, 0.029),
    Peer("prime-rl", "30B-A3B", "8 H200", "65k", 12_748 / 8, 0.154),
    _titan("eager", 5_762),
    _titan("compile", 6_667),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a trainer that never waits for episodes."""

    model: Model
    tokens_per_s: float
    """Trained tokens per second of one GPU that trains."""
    mfu: float

    def share_of(self, peer: Peer) -> tuple[float, str]:
        """Return the share of a peer's speed, and what it is a share of.

        That is tokens per second, or the MFU if the models differ.
        """
        if PRESETS[peer.preset] == self.model:
            each = f"{peer.tokens_per_s:,.0f} tokens/s a GPU"
            return self.tokens_per_s / peer.tokens_per_s, each
        return self.mfu / peer.mfu, f"its MFU of {peer.mfu:.1%}"


def nearest(model: Model, name: str, peers: Sequence[Peer] = PEERS) -> Peer:
    """Return the peer `name` whose model is nearest in size. Of several, the fastest one."""
    named = [peer for peer in peers if peer.name == name]

    def distance(peer: Peer) -> tuple[float, float]:
        sizes = PRESETS[peer.preset].parameters, model.parameters
        return max(sizes) / min(sizes), -peer.tokens_per_s

    return min(named, key=distance)
