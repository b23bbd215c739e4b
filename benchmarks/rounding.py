"""Measure what rounding of float32 weights costs: bytes of a version, changed weights, and time.

    python -m benchmarks.rounding smollm2       # or a folder with a pretrained model
    python -m benchmarks.rounding smollm2 --save runs/smollm2-bfloat16    # the start of the study

The model trains for some steps on sums of two numbers, which it answers with random advantages, at
each learning rate and by each rounding into bfloat16. Bytes are those of a delta from one version
to the next. The weights begin on the grid of bfloat16, or anywhere with `--precise` if the folder
has more digits. Times are medians of one process, on torch's threads.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, cast

from torch import Tensor

from benchmarks.tables import CONSOLE, columns, row, write
from unstale.builders import build_old_logps
from unstale.config import OldLogpsConfig, RunConfig, TrainerConfig
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import (
    Batch,
    ContextPiece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer
from unstale.weights.codec import encode_all

RATES = (1e-6, 3e-6, 1e-5)
ROUNDINGS = ("nearest", "stochastic", "dither")
GROUPS, SIBLINGS = 8, 8


@dataclass
class Measured:
    """Figures of one setting. The lists have an element for each step."""

    nbytes: list[int]
    changed: list[float]
    """Share of the weights that differ from the version before."""
    due: list[float]
    step_s: list[float]
    round_s: list[float]


def batch_of(policy: Policy, step: int, siblings: int) -> Batch:
    """Return groups of answers to sums, half of them with an advantage of 1 and half with -1."""
    draw = random.Random(step)
    episodes = []
    for group in range(GROUPS):
        a, b = draw.randint(2, 60), draw.randint(2, 60)
        message = {"role": "user", "content": f"What is {a} + {b}? Answer with the number only."}
        prompt: Any = policy.tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for sibling in range(siblings):
            text = f"The sum of {a} and {b} is {a + b + draw.randint(-3, 3)}."
            reply = policy.tokenizer.encode(text, add_special_tokens=False)
            pieces = (
                ContextPiece(tuple(prompt)),
                Sampled(tuple(reply), (-1.0,) * len(reply), step),
            )
            number = GROUPS * siblings * step + siblings * group + sibling
            trajectory = Trajectory(
                pieces,
                {"reward": 1.0},
                "done",
                Task("sums", "train", group),
                seed=0,
                episode=number,
            )
            episodes.append(ScoredTrajectory(trajectory, (1.0 if sibling % 2 else -1.0,)))
    return collate(episodes)


def measure(folder: Path, lr: float, rounding: str, options: argparse.Namespace) -> Measured:
    """Train some steps at one learning rate with one rounding."""
    policy = Policy.load(folder, dtype="bfloat16")
    trainer_options = TrainerConfig(dtype="bfloat16", lr=lr, rounding=cast(Any, rounding))
    config = RunConfig(recipe="", max_steps=options.steps, trainer=trainer_options)
    old = build_old_logps(OldLogpsConfig(route="rollout"), LocalScorer(policy, 1.0, 4096))
    trainer = LocalTrainer(policy, config, old)
    found = Measured([], [], [], [], [])
    for step in range(options.steps):
        before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
        policy.version = step
        batch = batch_of(policy, step, options.siblings)
        began = time.perf_counter()
        train_on(trainer, batch)
        found.step_s.append(time.perf_counter() - began)
        found.due.append(trainer.metrics()["trainer/due_weight_share"])
        _compare(before, trainer.weights(), found)
        began = time.perf_counter()
        trainer._masters.round(step + 1, trainer._masters.tensors)  # once more, as before
        found.round_s.append(time.perf_counter() - began)
    return found


def _compare(before: Mapping[str, Tensor], after: Mapping[str, Tensor], found: Measured) -> None:
    deltas = encode_all(before, after, before)
    found.nbytes.append(sum(each.nbytes for each in deltas.values()))
    total = sum(each.words for each in deltas.values())
    found.changed.append(sum(each.changed for each in deltas.values()) / total)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", help="as the option --model of a run")
    parser.add_argument(
        "--save", type=Path, help="only write the policy in bfloat16 to this folder"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--siblings", type=int, default=SIBLINGS, help="answers of a group")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--precise", action="store_true", help="keep the digits of the folder")
    options = parser.parse_args()
    policy = RunConfig(recipe="", model=options.policy).policy_folder
    if options.save:
        Policy.load(policy, dtype="bfloat16").save(options.save)
        return
    lines = columns(
        "lr", "rounding", "MB per version", "changed", "should change", "round, ms", "%"
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = policy
        if not options.precise:
            folder = Path(scratch)
            Policy.load(policy, dtype="bfloat16").save(folder)
        for lr in options.rates:
            for rounding in ROUNDINGS:
                found = measure(folder, lr, rounding, options)
                share = median(found.round_s) / median(found.step_s)
                line = row(
                    f"{lr:g}",
                    rounding,
                    " ".join(f"{nbytes / 1e6:.1f}" for nbytes in found.nbytes),
                    f"{fmean(found.changed):.2%}",
                    f"{fmean(found.due):.2%}",
                    f"{1000 * median(found.round_s):.0f} of {1000 * median(found.step_s):.0f}",
                    f"{share:.2%}",
                )
                CONSOLE.print(line)
                lines.append(line)
    start = "with the digits of the folder" if options.precise else "on the grid of bfloat16"
    head = [
        f"{options.steps} steps of {GROUPS} groups of {options.siblings}; float32 weights begin "
        f"{start}.",
        "MB are those of each version in turn.",
        "",
    ]
    name = "rounding-precise" if options.precise else "rounding"
    write(name, "Bytes and time of rounding weights to bfloat16", [*head, *lines])


if __name__ == "__main__":
    main()
