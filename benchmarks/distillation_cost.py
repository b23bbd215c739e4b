"""What does a teacher of the policy's size add to a step?

    python -m benchmarks.distillation_cost base --rounds 9

Steps without a teacher and with each divergence take turns in one process, on the same tokens. The
ratio is that of the CPU time of neighbouring steps. With `--route rollout` no old log-probability
is scored, so a step is shorter.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unstale.builders import build_old_logps, load_policy
from unstale.config import CorrectionConfig, ObjectiveConfig, OldLogpsConfig, RunConfig
from unstale.config import TrainerConfig as Options
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.records import Batch, collate
from unstale.techniques.distil import DistilConfig
from unstale.techniques.hooks import Techniques
from unstale.testing import episode
from unstale.trainer.local import LocalTrainer

FORMS: Sequence[Any] = ("none", "sampled", "reverse", "forward", "mixed")
SEQUENCES, PROMPT, REPLY = 8, 60, 100


def make_trainers(model: str, route: str, dtype: Any) -> Mapping[str, LocalTrainer]:
    """Return a trainer of each form, all of one policy."""
    base = RunConfig(
        recipe="",
        model=model,
        max_steps=1000,
        objective=ObjectiveConfig(loss_type="none"),
        correction=CorrectionConfig(mode="none"),
        trainer=Options(optimizer="SGD", lr=1e-9, dtype=dtype, max_tokens_per_microbatch=1024),
    )
    policy = load_policy(base)
    old = build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, 1.0, 4096))
    old.on_published(live={0})
    trainers = {}
    for form in FORMS:
        config = base
        if form != "none":
            options = DistilConfig(teacher="start", divergence=form)
            config = replace(base, techniques="distil", technique_options={"distil": options})
        trainers[form] = LocalTrainer(policy, config, old, techniques=Techniques.of(config))
    return trainers


def make_batch(tokens: int) -> Batch:
    """Return sequences of random tokens, whose prompts are not equal."""
    plans = [episode(i, [PROMPT, (REPLY, 0)], advantage=(-1.0) ** i) for i in range(SEQUENCES)]
    batch = collate(plans)
    noise = torch.randint(5, tokens, batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    return replace(batch, tokens=noise)


def time_step(trainer: LocalTrainer, batch: Batch) -> float:
    """Return the CPU seconds of one step."""
    began = time.process_time()
    for minibatch in trainer.prepare(batch):
        trainer.backward(minibatch)
        trainer.step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--route", default="snapshot_old")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    trainers = make_trainers(options.model, options.route, options.dtype)
    batch = make_batch(len(next(iter(trainers.values())).policy.tokenizer))
    for trainer in trainers.values():
        time_step(trainer, batch)
    rounds = [
        {form: time_step(trainer, batch) for form, trainer in trainers.items()}
        for _ in range(options.rounds)
    ]
    sys.stdout.write("| divergence | CPU seconds | over none | range |\n|---|---|---|---|\n")
    for form in FORMS:
        ratios = [row[form] / row["none"] for row in rounds]
        seconds = statistics.median(row[form] for row in rounds)
        middle = statistics.median(ratios)
        span = f"{min(ratios):.2f} to {max(ratios):.2f}"
        sys.stdout.write(f"| {form} | {seconds:.2f} | {middle:.2f} | {span} |\n")


if __name__ == "__main__":
    main()
