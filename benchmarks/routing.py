"""Measure D of an MoE policy with and without routing replay.

    python -m tools.base_policy --experts 32 --steps 400 --out FOLDER    # 15 minutes
    python -m benchmarks.routing FOLDER

The embedded engine plays retail tasks and records the experts that it chose. The trainer scores the
same tokens in float32 under the same weights, with its own choice of experts and with the recorded
one. D is the ratio of the two programs' probabilities; it should be 1.
"""

import argparse
import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.tables import CONSOLE, columns, row, write
from unstale.build import build_rollout, build_sampler
from unstale.config import Dtype, RunConfig, ScheduleConfig
from unstale.engines import Engine
from unstale.model.experts import RouteRecorder
from unstale.model.policy import Policy
from unstale.recipes import retail
from unstale.records import Batch, GroupRequest, ScoredTrajectory, collate

LARGE = 0.1
"""Size of log D, in nats, above which a token's ratio is off by more than a tenth."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The tokens of one engine, and `|log D|` of each with and without replay."""

    engine: Dtype
    other_experts: float
    """Share of (token, layer) for which the trainer alone chooses another set of experts."""
    plain: Tensor
    replayed: Tensor


def measure(config: RunConfig, groups: int) -> Measured:
    """Play `groups` groups of tasks, and score their tokens in the trainer."""
    torch.set_num_threads(1)
    policy, taskset, generator = build_sampler(config)
    rollout = build_rollout(config, taskset)(generator, taskset, config.rollout)

    async def play() -> list[ScoredTrajectory]:
        engine = cast(Engine, generator.engine)
        try:
            await engine.start()
            await engine.load(policy.weights(), 0)
            await engine.resume()
            scored = []
            for number, task in zip(range(groups), taskset.train(0), strict=False):
                request = GroupRequest(number, task, seed=0, place=number)
                group = await rollout.group(request, size=config.schedule.group_size)
                scored += [ScoredTrajectory(one, (1.0,)) for one in group.trajectories]
            return scored
        finally:
            await engine.close()

    batch = collate(asyncio.run(play()), replay_routes=True)
    assert batch.routes is not None and bool(batch.routes.complete[batch.sampled].all())
    plain = replace(batch, routes=None)
    behavior = batch.behavior_logp[batch.sampled]
    sizes = [(score(policy, each)[batch.sampled] - behavior).abs() for each in (plain, batch)]
    return Measured(cast(Dtype, config.engine.dtype), other_experts(policy, batch), *sizes)


def score(policy: Policy, batch: Batch) -> Tensor:
    scored = policy.score(batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=1024)
    return scored.logp


@torch.no_grad()
def other_experts(policy: Policy, batch: Batch) -> float:
    """Return the share of (token, layer) for which the policy chooses other experts."""
    assert batch.routes is not None
    recorded = batch.routes.rows(batch, batch.sampled).long()
    recorder = RouteRecorder(policy.model)
    differ = []
    for start, end in batch.spans():
        policy.model(input_ids=batch.tokens[None, start:end], use_cache=False)
        own = recorder.take().sort(-1).values
        rows = recorded[start:end].sort(-1).values
        known = rows[:, 0, -1] < own.max() + 1  # the last token's row is missing
        differ.append((own != rows).any(-1)[known].flatten())
    return torch.cat(differ).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("policy", type=Path, help="model folder of an MoE policy")
    parser.add_argument("--groups", type=int, default=12, help="groups of 8 episodes to play")
    options = parser.parse_args()
    lines = [
        *columns(
            "engine",
            "tokens",
            "other experts",
            "experts in training",
            "mean",
            "p99",
            "largest",
            f"> {LARGE:g}",
        )
    ]
    for dtype in ("bfloat16", "float32"):
        config = configure(options.policy, cast(Dtype, dtype))
        measured = measure(config, options.groups)
        for name, size in (("own", measured.plain), ("replayed", measured.replayed)):
            lines.append(line(measured, name, size))
            CONSOLE.print(lines[-1])
    write("routing", "Routing replay", lines)


def configure(policy: Path, engine: Dtype) -> RunConfig:
    config = retail(policy=str(policy), schedule=ScheduleConfig(group_size=8))
    trainer = replace(config.trainer, routing_replay=True)
    return replace(config, trainer=trainer, engine=replace(config.engine, dtype=engine))


def line(measured: Measured, experts: str, size: Tensor) -> str:
    return row(
        measured.engine,
        f"{len(size)}",
        f"{measured.other_experts:.2%}",
        experts,
        f"{size.mean():.2g}",
        f"{size.double().quantile(0.99):.2g}",
        f"{size.max():.2g}",
        f"{(size > LARGE).double().mean():.3%}",
    )


if __name__ == "__main__":
    main()
