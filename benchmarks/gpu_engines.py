"""Measure engines for `benchmarks.gpu_check`: publication to vLLM, and replayed routed experts.

Where vLLM is not installed, or there is no GPU, the embedded engine takes its place.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.publish import Watched
from benchmarks.routes import scored
from benchmarks.routing import size as log_d_size
from unstale.cluster.gpus import run_gpus
from unstale.config import Dtype, EngineConfig, RunConfig, Transfer
from unstale.engines import Engine, SamplingParams
from unstale.engines.registry import EngineOptions, engine_spec
from unstale.model.policy import Policy
from unstale.records import ContextPiece, ScoredTrajectory, collate
from unstale.testing import tiny_policy
from unstale.weights.publish import DirectPublisher

if TYPE_CHECKING:
    from benchmarks.gpu_check import Check

MEMORY_SHARE = 0.35
"""Share of a GPU's memory for a vLLM server that has the trainer on its GPU."""
EXPERTS = 8
"""Experts of the random MoE policy, which is measured if no other is given."""
TIMED_REPLIES = 3
"""Rounds of replies whose speed is compared. The first of four is not timed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The figure that was measured for a goal, with its verdict."""

    figure: str
    met: bool
    open: str = ""
    """The reason why there is no verdict. A goal that has one is missed or open, but never met."""


def uses_vllm(gpus: int) -> bool:
    return gpus > 0 and find_spec("vllm") is not None


def make_engine(check: "Check", folder: Path, **options: Any) -> Engine:
    """Return a vLLM engine, on other GPUs than the first if there are some, or an embedded one."""
    if not uses_vllm(check.gpus):
        options.pop("transfer", None)
        return engine_spec("embedded").make(EngineOptions(folder, **options))
    apart: tuple[str, ...] = ()
    if check.gpus > 1:
        over_nccl = EngineConfig(backend="vllm", transfer="nccl")
        apart = run_gpus(RunConfig(recipe="", engine=over_nccl)).engines
    share = 0.0 if apart else MEMORY_SHARE
    made = EngineOptions(folder, gpus=apart, gpu_memory_utilization=share, **options)
    return engine_spec("vllm").make(made)


def stand_in(check: "Check") -> str:
    """Return why vLLM was not measured. Empty if it was."""
    return "" if uses_vllm(check.gpus) else "vLLM is not installed: the embedded engine is measured"


def transfers(check: "Check") -> Finding:
    """Measure the standstill of a vLLM server whose weights come in a file, and by NCCL."""
    ways: list[Transfer] = ["file"]
    if uses_vllm(check.gpus) and check.gpus > 1:
        ways.append("nccl")
    seconds = {way: asyncio.run(standstill(check, way)) for way in ways}
    engine = "vLLM" if uses_vllm(check.gpus) else "the embedded engine in place of vLLM"
    return judge_transfers(engine, seconds, open=stand_in(check))


def judge_transfers(engine: str, seconds: Mapping[Transfer, float], *, open: str = "") -> Finding:
    """Judge the standstill of each way. Without NCCL, which needs two GPUs, nothing is met."""
    figures = ", ".join(f"{found:.2f} s by {way}" for way, found in seconds.items())
    missing = "" if "nccl" in seconds else "; nccl needs vLLM and 2 GPUs"
    return Finding(
        f"{engine}: standstill {figures}{missing}",
        max(seconds.values()) <= 2.0 and seconds.get("nccl", 0.0) <= seconds["file"],
        open or missing.lstrip("; "),
    )


async def standstill(check: "Check", transfer: Transfer) -> float:
    """Return the median time in which an engine that replies does not sample, per version."""
    policy = check.size.policy()
    engine: Any = make_engine(
        check, check.size.folder, max_context=2 * check.length, transfer=transfer
    )
    watched = Watched(engine)
    publisher = DirectPublisher(watched, dtype=policy.dtype, in_place=transfer == "nccl")
    found = []
    try:
        await engine.start()
        for version in range(check.repeats + 1):
            policy.version = version
            async with watched.speaking(check.size.vocab) if version else nullcontext():
                await asyncio.to_thread(publisher.prepare, policy)
                await publisher.stage()
                await publisher.publish()
            found.append(watched.standstill_s)
    finally:
        await engine.close()
    return median(found[1:])


def replay(check: "Check") -> Finding:
    """Measure D of an MoE policy with and without replayed routes, and what recording costs."""
    folder = check.moe or random_moe(check)
    batch, plain_rate, rate = asyncio.run(sample_experts(check, folder))
    dtype: Dtype = "float32" if check.moe is None else "bfloat16"
    device = "cuda" if check.gpus else "cpu"
    policy = Policy.load(folder, dtype=dtype, device=device, trained=False)
    policy.replay_experts()
    routed = collate(batch, replay_experts=True)
    assert routed.routed_experts is not None
    missing = 1 - float(routed.routed_experts.complete[routed.sampled].float().mean())
    unrouted = collate(batch)
    own, replayed = (
        float(log_d_size(policy, each).double().quantile(0.99)) for each in (unrouted, routed)
    )
    random = "random weights: give --moe FOLDER of a trained MoE model"
    found = Replay(own, replayed, missing, rate / plain_rate)
    return judge_replay(found, open=stand_in(check) or ("" if check.moe else random))


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


def judge_replay(found: Replay, *, open: str = "") -> Finding:
    return Finding(
        f"p99 of abs log D {found.own:.2g}, replayed {found.replayed:.2g}; {found.missing:.1%} of "
        f"the tokens lack routes; {found.speed:.1%} of the speed without recording",
        found.replayed <= found.own / 2 and not found.missing and found.speed >= 0.95,
        open,
    )


def random_moe(check: "Check") -> Path:
    """Save a small MoE policy with random weights. Return its folder."""
    folder = check.folder / "moe"
    tiny_policy(seed=3, dtype="bfloat16", experts=EXPERTS).save(folder)
    return folder


async def sample_experts(
    check: "Check", folder: Path
) -> tuple[list[ScoredTrajectory], float, float]:
    """Sample with engines that record routes or not. Return what was recorded, and both speeds.

    The speeds are in tokens per second, without recording first.
    """
    batch: Sequence[ScoredTrajectory] = ()
    rates = []
    for records in (False, True):
        engine = make_engine(check, folder, max_context=check.length, record_experts=records)
        try:
            await engine.start()
            weights = Policy.load(folder, dtype="bfloat16", device="cpu", trained=False).weights()
            await engine.load(weights, 0)
            await engine.resume()
            seconds = []
            for turn in range(1 if check.is_tiny else 1 + TIMED_REPLIES):
                began = time.perf_counter()
                batch = await sample_all(engine, check, turn)
                seconds.append(time.perf_counter() - began)
        finally:
            await engine.close()
        sampled = sum(len(each.trajectory.pieces[1].tokens) for each in batch)
        rates.append(sampled / median(seconds[-TIMED_REPLIES:]))
    return list(batch), rates[0], rates[1]


async def sample_all(engine: Engine, check: "Check", turn: int) -> list[ScoredTrajectory]:
    """Sample one reply to each of several random prompts."""
    noise = torch.Generator().manual_seed(turn)
    # ids below 64 are words of every tokenizer
    prompts = torch.randint(64, (check.sequences, check.length // 4), generator=noise).tolist()
    params = SamplingParams(check.length // 2, ())
    replies = await asyncio.gather(*(engine.sample(prompt, params) for prompt in prompts))
    return [
        scored((ContextPiece(tuple(prompt)), reply.piece), number)
        for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
    ]
