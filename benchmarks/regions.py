"""Compare trust regions and rejections on the tokens of one run, each as the trainer would use it.

    unstale train llm --model smollm2 --task.env benchmarks.sums:Sums --schedule.max_staleness 8 ...
    python -m benchmarks.regions runs/NAME

The run's journal has the three log-probabilities and the advantage of every trained token. From
these each arm has a coefficient for each token: the derivative of its loss by `logp`. Two runs
differ in all tokens after the first step, but here all arms read the same ones.

`stopped` is the share of the tokens with an advantage that have no gradient, `stale` the same of
tokens at least `OLD` batches old. `size` is the sum of the coefficients' magnitudes, and `like` the
cosine of the coefficients with those of the exact gradient, -D S A: 1 is the same direction in the
space of tokens. `repeats` is the largest difference of `stopped` between halves of the run.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.tables import columns, row, write
from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.durability.journal import JOURNAL, JournalReader
from unstale.durability.run_folder import RunFolder
from unstale.records import Batch, ScoredTrajectory, collate
from unstale.trainer.rules import LossSpec

OLD = 4
"""Lag in batches from which a token counts as stale."""


@dataclass(frozen=True)
class Arm:
    """A limit, with the route of `old_logp`. With `rollout`, pi / mu takes the place of S, and with
    `current_recompute` that of D.
    """

    objective: Mapping[str, Any]
    correction: Mapping[str, Any]
    route: str = "snapshot_old"


UNCORRECTED = {"mode": "none"}
SEQUENCE = {"unit": "sequence"}
ARMS = {
    "none": Arm({"loss_type": "none"}, {}),
    "ppo_clip (default)": Arm({}, {}),
    "ppo_clip of pi / mu": Arm({}, UNCORRECTED, "rollout"),
    "DPPO": Arm({"loss_type": "dppo"}, {}),
    "DPPO of pi / mu": Arm({"loss_type": "dppo"}, UNCORRECTED, "rollout"),
    "DRPO": Arm({"loss_type": "drpo"}, {}),
    "DRPO of pi / mu": Arm({"loss_type": "drpo"}, UNCORRECTED, "rollout"),
    "VACO of pi / mu": Arm({"loss_type": "vaco"}, UNCORRECTED, "rollout"),
    "VESPO": Arm({"loss_type": "vespo"}, {}),
    "VESPO of pi / mu": Arm({"loss_type": "vespo"}, UNCORRECTED, "rollout"),
    "OPSM 0.1": Arm({"opsm_threshold": 0.1}, {}),
    "KPop 0.1": Arm({}, {"mode": "kpop", "kl_limit": 0.1}),
    "KPop 0.001": Arm({}, {"mode": "kpop", "kl_limit": 0.001}),
    "k3, sequences, 0.01": Arm({}, {"mode": "k3_mask", "kl_limit": 0.01} | SEQUENCE),
    "k3, sequences, 0.001": Arm({}, {"mode": "k3_mask", "kl_limit": 0.001} | SEQUENCE),
    "geometric, 0.95 to 1.05": Arm({}, {"mode": "mask", "low": 0.95, "high": 1.05} | SEQUENCE),
    "geometric of pi / mu": Arm(
        {}, {"mode": "mask", "low": 0.95, "high": 1.05} | SEQUENCE, "current_recompute"
    ),
}


@dataclass(frozen=True)
class StepTokens:
    """A batch as it was trained on. The tensors are `[T]`."""

    batch: Batch
    old_logp: Tensor
    logp: Tensor
    lag: Tensor


def read(run: Path) -> list[StepTokens]:
    """Return the batches of a run, with the sequences that a step trained on."""
    found = []
    with JournalReader(run / JOURNAL) as journal:
        groups: dict[int, list[int]] = {}
        for number, trained_at in journal.token_steps().items():
            groups.setdefault(trained_at[0], []).append(number)
        for step, numbers in sorted(groups.items()):
            episodes, ratios = [], []
            for group in map(journal.group, numbers):
                values = {each.episode: each for each in journal.token_values(group.number, step)}
                for each in group.trajectories:
                    known = values.get(each.episode)
                    if known is None or known.minibatch is None:
                        continue
                    where = collate([ScoredTrajectory(each, (0.0,))]).sampled
                    columns = torch.zeros(3, len(where))
                    for column, name in zip(columns, ("advantage", "log_d", "log_s"), strict=True):
                        column[where] = torch.from_numpy(getattr(known, name)).float()
                    episodes.append(ScoredTrajectory(each, tuple(columns[0].tolist())))
                    ratios.append(columns[1:])
            if episodes:
                batch = collate(episodes)
                log_d, log_s = torch.cat(ratios, 1)
                old_logp = batch.behavior_logp + log_d
                lag = torch.where(batch.sampled, step - 1 - batch.version, 0)
                found.append(StepTokens(batch, old_logp, old_logp + log_s, lag))
    return found


def coefficients(arm: Arm, step: StepTokens) -> Tensor:
    """Return the derivative of an arm's loss by the log-probability of each token, `[T]`."""
    rules = LossSpec(CorrectionConfig(**arm.correction), ObjectiveConfig(**arm.objective))
    batch = step.batch
    old_logp = {
        "snapshot_old": step.old_logp,
        "rollout": batch.behavior_logp,
        "current_recompute": step.logp,
    }[arm.route]
    logp = step.logp.clone().requires_grad_()
    loss = rules.correct(old_logp, batch).factor * rules.surrogate(logp, old_logp, batch).loss
    (found,) = torch.autograd.grad(loss.sum(), logp)
    return found


def stopped(coefficients: Tensor, step: StepTokens, *, lag: int = 0) -> tuple[int, int]:
    """Return the number of tokens without a gradient, and of all that have an advantage."""
    counted = step.batch.sampled & (step.batch.advantage != 0) & (step.lag >= lag)
    return int((counted & (coefficients == 0)).sum()), int(counted.sum())


def share(pairs: list[tuple[int, int]]) -> float:
    some, every = map(sum, zip(*pairs, strict=True))
    return some / max(1, every)


def table(steps: list[StepTokens]) -> list[str]:
    exact = [
        -(step.logp - step.batch.behavior_logp).exp() * step.batch.advantage * step.batch.sampled
        for step in steps
    ]
    known = torch.cat(exact)
    lines = columns("arm", "stopped, %", "stale, %", "repeats, points", "size", "like")
    for name, arm in ARMS.items():
        found = [coefficients(arm, step) for step in steps]
        counts = [stopped(*each) for each in zip(found, steps, strict=True)]
        old = [stopped(*each, lag=OLD) for each in zip(found, steps, strict=True)]
        half = len(steps) // 2
        every = torch.cat(found)
        like = float(torch.nn.functional.cosine_similarity(every, known, dim=0))
        lines.append(
            row(
                name,
                f"{100 * share(counts):.2f}",
                f"{100 * share(old):.2f}",
                f"{100 * abs(share(counts[:half]) - share(counts[half:])):.2f}",
                f"{float(every.abs().sum() / known.abs().sum()):.3f}",
                f"{like:.3f}",
            )
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    options = parser.parse_args()
    if not (options.run / JOURNAL).is_file():
        parser.error(f"there is no journal in {options.run}")
    steps = read(options.run)
    if len(steps) < 2:
        parser.error(f"{options.run} trained on the tokens of {len(steps)} steps: it takes two")
    tokens = sum(int(step.batch.sampled.sum()) for step in steps)
    lags = torch.cat([step.lag[step.batch.sampled] for step in steps]).float()
    logs = torch.cat([(s.old_logp - s.batch.behavior_logp)[s.batch.sampled] for s in steps])
    old = torch.cat([(s.logp - s.old_logp)[s.batch.sampled] for s in steps])
    about = (
        f"{len(steps)} steps with {tokens:,} tokens, {lags.mean():.1f} batches old. Mean of "
        f"|log D| {logs.abs().mean():.4f}, of |log S| {old.abs().mean():.4f}"
    )
    started = next(
        each for each in RunFolder(options.run).rows("events.jsonl") if each["kind"] == "started"
    )
    about += f", in the run of `{started['command']}`"
    write("regions", "Trust regions on the same tokens", [about, "", *table(steps)])


if __name__ == "__main__":
    main()
