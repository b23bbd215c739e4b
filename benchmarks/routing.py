"""Measure D of an MoE policy with and without routing replay.

    python -m tools.base_policy --experts 32 --steps 400 --out FOLDER    # 15 minutes
    python -m benchmarks.routing FOLDER

The embedded engine plays retail tasks and records the experts that it chose. The trainer scores the
same tokens in float32 under the same weights, with its own choice of experts and with the recorded
one. D is the ratio of the two programs' probabilities; it should be 1.

The dense base policy has the same width and depth, and no experts. Its row shows what rounding
alone does. Without FOLDER only that is measured.
"""

import argparse
import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from benchmarks.tables import CONSOLE, columns, row, write
from unstale.builders import build_rollout, build_sampler
from unstale.config import SHIPPED_POLICY, Dtype, RunConfig, ScheduleConfig
from unstale.model.experts import ExpertRecorder
from unstale.model.policy import Policy
from unstale.recipes import retail
from unstale.records import Batch, GroupRequest, ScoredTrajectory, collate

LARGE = 0.1
"""Size of log D, in nats, above which a token's ratio is off by more than a tenth."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The tokens of one engine, and `|log D|` of each."""

    engine: Dtype
    other_experts: float
    """Share of (token, layer) for which the trainer alone chooses another set of experts."""
    sizes: Mapping[str, Tensor]
    """`|log D|` of each token, by the experts that the trainer uses."""


def measure(config: RunConfig, groups: int) -> Measured:
    """Play `groups` groups of tasks, and score their tokens in the trainer."""
    torch.set_num_threads(1)
    policy, taskset, generator = build_sampler(config)
    rollout = build_rollout(config, taskset)(generator, taskset, config.rollout)

    async def play() -> list[ScoredTrajectory]:
        engine = generator.engine
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

    engine = cast(Dtype, config.engine.dtype)
    batch = collate(asyncio.run(play()), replay_experts=config.trainer.routing_replay)
    if batch.routed_experts is None:
        return Measured(engine, 0.0, {"none (dense)": size(policy, batch)})
    assert bool(batch.routed_experts.complete[batch.sampled].all())
    plain = size(policy, replace(batch, routed_experts=None))
    sizes = {"own": plain, "replayed": size(policy, batch)}
    return Measured(engine, other_experts(policy, batch), sizes)


def size(policy: Policy, batch: Batch) -> Tensor:
    """Return `|log D|` of the sampled tokens."""
    scored = policy.score(batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=1024)
    return (scored.logp - batch.behavior_logp)[batch.sampled].abs()


@torch.no_grad()
def other_experts(policy: Policy, batch: Batch) -> float:
    """Return the share of (token, layer) for which the policy chooses other experts."""
    assert batch.routed_experts is not None
    recorded = batch.routed_experts.rows(batch, batch.sampled).long()
    recorder = ExpertRecorder(policy.model)
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
    parser.add_argument(
        "policy", type=Path, nargs="?", help="model folder of an MoE policy; none: dense only"
    )
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
    policies = [options.policy] if options.policy else []
    for policy in [*policies, SHIPPED_POLICY]:
        for dtype in ("bfloat16", "float32"):
            config = configure(policy, dtype, replay=policy != SHIPPED_POLICY)
            measured = measure(config, options.groups)
            for name, sizes in measured.sizes.items():
                lines.append(line(measured, name, sizes))
                CONSOLE.print(lines[-1])
    write("routing", "Routing replay", lines)


def configure(policy: Path, engine: Dtype, *, replay: bool) -> RunConfig:
    config = retail(model=str(policy), schedule=ScheduleConfig(group_size=8))
    trainer = replace(config.trainer, routing_replay=replay)
    return replace(config, trainer=trainer, engine=replace(config.engine, dtype=engine))


def line(measured: Measured, experts: str, sizes: Tensor) -> str:
    return row(
        measured.engine,
        f"{len(sizes)}",
        f"{measured.other_experts:.2%}",
        experts,
        f"{sizes.mean():.2g}",
        f"{sizes.double().quantile(0.99):.2g}",
        f"{sizes.max():.2g}",
        f"{(sizes > LARGE).double().mean():.3%}",
    )


if __name__ == "__main__":
    main()
