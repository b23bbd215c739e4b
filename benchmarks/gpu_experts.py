"""Measure replayed routed experts for `benchmarks.gpu_check`.

Where vLLM is not installed, or there is no GPU, the embedded engine takes its place.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from benchmarks.routes import scored
from benchmarks.routing import size as log_d_size
from unstale.engines import Engine, SamplingParams
from unstale.engines.registry import EngineOptions, engine_spec
from unstale.model.policy import Policy
from unstale.records import ContextPiece, ScoredTrajectory, collate
from unstale.testing import tiny_policy

MEMORY_SHARE = 0.35
"""Share of a GPU's memory for a vLLM server that has the trainer on its GPU."""
EXPERTS = 8
"""Experts of the random MoE policy, which is measured if no other is given."""
TIMED_REPLIES = 3
"""Rounds of replies whose speed is compared. The first of four is not timed."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The measurements of replayed routed experts."""

    own: float
    """99th percentile of abs log D, in nats, with the experts that the trainer chooses."""
    replayed: float
    missing: float
    """Share of the tokens without routes."""
    speed: float
    """Speed of an engine that records routes, relative to one that does not."""


@dataclass(frozen=True, slots=True)
class Sizes:
    sequences: int
    length: int
    """Number of tokens of a trajectory."""
    rounds: int


def uses_vllm() -> bool:
    return torch.cuda.is_available() and find_spec("vllm") is not None


def measure(folder: Path, moe: Path | None, *, is_tiny: bool) -> tuple[Replay, str]:
    """Measure D of an MoE policy with and without replayed routes, and what recording costs.

    `moe` is the folder of a trained policy. None takes a small one with random weights, which is
    saved in `folder`. Also return what was measured, in words.
    """
    on_gpu = torch.cuda.is_available()
    sizes = Sizes(4, 64, 1) if is_tiny else Sizes(128, 1024, 1 + TIMED_REPLIES)
    policy_folder = moe or random_moe(folder)
    batch, plain_rate, rate = asyncio.run(sample_experts(policy_folder, sizes))
    policy = Policy.load(
        policy_folder,
        dtype="float32" if moe is None else "bfloat16",
        device="cuda" if on_gpu else "cpu",
        trained=False,
    )
    policy.replay_experts()
    routed = collate(batch, replay_experts=True)
    assert routed.routed_experts is not None
    missing = 1 - float(routed.routed_experts.complete[routed.sampled].float().mean())
    own, replayed = (
        float(log_d_size(policy, each).double().quantile(0.99)) for each in (collate(batch), routed)
    )
    engine = "vLLM" if uses_vllm() else "embedded engine, for vLLM is not there"
    weights = "random weights" if moe is None else moe.name
    return Replay(own, replayed, missing, rate / plain_rate), f"{engine}, {weights}"


def random_moe(folder: Path) -> Path:
    """Save a small MoE policy with random weights. Return its folder."""
    made = folder / "moe"
    tiny_policy(seed=3, dtype="bfloat16", experts=EXPERTS).save(made)
    return made


async def sample_experts(folder: Path, sizes: Sizes) -> tuple[list[ScoredTrajectory], float, float]:
    """Sample with engines that record routes or not. Return what was recorded, and both speeds.

    The speeds are in tokens per second, without recording first.
    """
    batch: Sequence[ScoredTrajectory] = ()
    rates = []
    for records in (False, True):
        engine = make_engine(folder, sizes, records=records)
        try:
            await engine.start()
            weights = Policy.load(folder, dtype="bfloat16", device="cpu", trained=False).weights()
            await engine.load(weights, 0)
            await engine.resume()
            seconds = []
            for turn in range(sizes.rounds):
                began = time.perf_counter()
                batch = await sample_all(engine, sizes, turn)
                seconds.append(time.perf_counter() - began)
        finally:
            await engine.close()
        sampled = sum(len(each.trajectory.pieces[1].tokens) for each in batch)
        rates.append(sampled / median(seconds[-TIMED_REPLIES:]))
    return list(batch), rates[0], rates[1]


def make_engine(folder: Path, sizes: Sizes, *, records: bool) -> Engine:
    share = MEMORY_SHARE if uses_vllm() else 0.0
    options = EngineOptions(
        folder, max_context=sizes.length, record_experts=records, gpu_memory_utilization=share
    )
    return engine_spec("vllm" if uses_vllm() else "embedded").make(options)


async def sample_all(engine: Engine, sizes: Sizes, turn: int) -> list[ScoredTrajectory]:
    """Sample one reply to each of several random prompts."""
    noise = torch.Generator().manual_seed(turn)
    # ids below 64 are words of every tokenizer
    shape = (sizes.sequences, sizes.length // 4)
    prompts = torch.randint(64, shape, generator=noise).tolist()
    params = SamplingParams(sizes.length // 2, ())
    replies = await asyncio.gather(*(engine.sample(prompt, params) for prompt in prompts))
    return [
        scored((ContextPiece(tuple(prompt)), reply.piece), number)
        for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
