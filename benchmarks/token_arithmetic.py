"""Measure the arithmetic on all tokens of a batch, which trainer ranks do not divide.

    python -m benchmarks.token_arithmetic          # 1 minute, one core, 1 GB

The run's process collates a batch and serialises it. Every rank reads it, computes corrections and
divisors of the loss, and distributes the sequences over passes. The first rank computes the
metrics. The passes of the model, which are divided, are replaced by constants. Times are those of
one thread, as a rank has one.
"""

import argparse
import pickle
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeVar

import torch

from benchmarks import tables
from unstale.builders import build_scorer, build_trainer
from unstale.config import OldLogpsConfig, RunConfig, TrainerConfig
from unstale.records import (
    ContextPiece,
    Group,
    Piece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
)
from unstale.testing import tiny_policy
from unstale.trainer.local import LocalTrainer

GROUPS, SIZE, TURNS, REPLY, ANSWER, PROMPT = 20, 16, 16, 200, 10, 100
"""The shape of a batch: the episodes of `benchmarks.large_fleets`, 1.1 million tokens."""
PASS = 32768
VERSION = 3
WHERE = {
    "collate": "the run's process",
    "serialise": "the run's process",
    "read": "every rank",
    "prepare": "every rank",
    "pack": "every rank",
    "metrics": "the first rank",
}
_T = TypeVar("_T")
Times = dict[str, float]
"""Seconds for each token of the batch, by the name of a piece of work."""


def group_of(number: int, noise: random.Random) -> Group:
    prompt = tuple(noise.choices(range(200), k=PROMPT))
    task = Task("tokens", "train", number)
    episodes = []
    for i in range(SIZE):
        pieces: list[Piece] = [ContextPiece(prompt)]
        for _ in range(TURNS):
            logps = tuple(-noise.random() for _ in range(REPLY))
            tokens = tuple(noise.choices(range(200), k=REPLY))
            pieces.append(Sampled(tokens, logps, version=VERSION - noise.randrange(3)))
            pieces.append(ContextPiece(tuple(noise.choices(range(200), k=ANSWER))))
        rewards = {"won": float(i % 2)}
        episode = number * SIZE + i
        episodes.append(Trajectory(tuple(pieces), rewards, "done", task, i, episode=episode))
    return Group(task, tuple(episodes), number=number)


def timed(times: Times, name: str, work: Callable[[], _T]) -> _T:
    began = time.process_time()
    result = work()
    times[name] = time.process_time() - began
    return result


def without_passes(trainer: LocalTrainer) -> None:
    """Replace the model's passes by constants."""
    zero = torch.zeros((), requires_grad=True)

    def compared(run: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        values = torch.full((len(run.place),), -0.5)
        return values + zero, torch.zeros_like(values), torch.zeros_like(values)

    trainer.policy.compared = compared  # type: ignore[method-assign, assignment]


def measure(trainer: LocalTrainer, groups: Sequence[Group]) -> Times:
    times: Times = {}
    credited = [
        ScoredTrajectory(each, (1.0 if each.rewards["won"] else -1.0,))
        for group in groups
        for each in group.finished
    ]
    batch = timed(times, "collate", lambda: collate(credited, groups=groups))
    written = timed(times, "serialise", lambda: pickle.dumps(batch, 5))
    batch = timed(times, "read", lambda: pickle.loads(written))
    (minibatch,) = timed(times, "prepare", lambda: trainer.prepare(batch))
    where = batch.sampled
    timed(times, "pack", lambda: trainer.policy.pack(batch, batch.spans(), PASS, where=where))
    trainer.backward(minibatch)
    timed(times, "metrics", lambda: (trainer.metrics(), trainer.scatter_sample()))
    return {name: seconds / len(batch.tokens) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig(
        recipe="",
        old_logps=OldLogpsConfig(route="rollout"),
        trainer=TrainerConfig(max_tokens_per_microbatch=PASS),
    )
    policy = tiny_policy(seed=3)
    policy.version = VERSION
    trainer, _ = build_trainer(config, policy, build_scorer(config, policy))
    without_passes(trainer)
    noise = random.Random(0)
    groups = [group_of(number, noise) for number in range(options.groups)]
    rounds = [measure(trainer, groups) for _ in range(options.repeats)]
    tokens = options.groups * SIZE * (PROMPT + TURNS * (REPLY + ANSWER))
    rows = [
        tables.row(name, where, tables.spread([1e9 * each[name] for each in rounds], "{:.0f}"))
        for name, where in WHERE.items()
    ]
    total = 1e9 * median(sum(each.values()) for each in rounds)
    text = [
        f"{options.groups * SIZE:,} episodes of {TURNS} turns, {tokens:,} tokens; medians of",
        f"{options.repeats} rounds with the range, in nanoseconds of one core for each token. The",
        f"median of the sums is {total:.0f} ns.",
        "",
        *tables.columns("piece", "done by", "ns a token"),
        *rows,
    ]
    tables.write("token-arithmetic", "Arithmetic on all tokens of a batch", text)


if __name__ == "__main__":
    main()
