"""Measure the time of a step with a critic over that of a step without one.

    python -m benchmarks.critic_steps smollm2 --route rollout --repeats 5

Both trainers train the same model on the same batch, in turn, in one process with one thread. The
episodes share no prompts, so nothing is computed for several of them at once. Times are CPU times,
because other work on the cores would fall on one of the two. With SGD a step has the least work
besides the passes, so the ratio is the largest.
"""

import argparse
import random
import time
from functools import partial

import torch

from benchmarks.tables import CONSOLE, alternate, columns, ratios, row, spread, write
from unstale.algorithms.advantages import gae
from unstale.builders import build_old_logps, build_scorer
from unstale.config import (
    AdvantageConfig,
    CriticConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.model.policy import Policy
from unstale.records import Batch, ContextPiece, Group, Sampled, Task, Trajectory, collate
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer

PROMPT, REPLY, RESULT = 96, 36, 20
"""Tokens of a prompt, of each of two replies, and of the text between them."""


def batch_of(episodes: int, vocabulary: int) -> Batch:
    """Return a batch of groups of one episode each, with random tokens and rewards above 0."""
    draw = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    groups = []
    for number in range(episodes):
        task = Task("random", "train", number)
        replies = [Sampled(tokens(REPLY), (-1.0,) * REPLY, version=0) for _ in range(2)]
        pieces = (
            ContextPiece(tokens(PROMPT)),
            replies[0],
            ContextPiece(tokens(RESULT)),
            replies[1],
        )
        rewards = {"reward": 1.0 + number}
        item = Trajectory(pieces, rewards, "done", task, seed=0, episode=number)
        groups.append(Group(task, (item,), number=number))
    return collate(gae(groups), groups=groups)


def trainer_of(policy: Policy, route: str, critic: CriticConfig | None) -> LocalTrainer:
    config = RunConfig(
        recipe="",
        max_steps=10**6,
        advantage=AdvantageConfig(estimator="gae" if critic else "grpo"),
        critic=critic or CriticConfig(),
        trainer=TrainerConfig(
            lr=1e-9, dtype="float32", optimizer="SGD", max_tokens_per_microbatch=256
        ),
    )
    old = build_old_logps(OldLogpsConfig(route=route), build_scorer(config, policy))
    old.on_published(live={0})
    return LocalTrainer(policy, config, old)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", help="as the option --model of a run")
    parser.add_argument("--route", default="rollout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--episodes", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load(
        RunConfig(recipe="", model=options.policy).policy_folder, dtype="float32", device="cpu"
    )
    batch = batch_of(options.episodes, len(policy.tokenizer))
    trainers = {
        "without": trainer_of(policy, options.route, None),
        "trunk": trainer_of(policy, options.route, CriticConfig()),
    }

    def step(name: str) -> float:
        policy.version = 0
        began = time.process_time()
        train_on(trainers[name], batch)
        return time.process_time() - began

    for name in trainers:  # the first step allocates
        step(name)
    found = alternate({name: partial(step, name) for name in trainers}, options.repeats)
    lines = columns("critic", "CPU s per step", "times the step without")
    for name, values in found.items():
        lines.append(row(name, spread(values), spread(ratios(found, name, over="without"))))
    CONSOLE.print("\n".join(lines))
    head = [
        f"{options.policy} in float32, route {options.route}, {options.episodes} episodes of "
        f"{PROMPT} + {REPLY} + {RESULT} + {REPLY} tokens, {options.repeats} rounds in turn.",
        "",
    ]
    write("critic-steps", "What a critic on the trunk adds to a step", [*head, *lines])


if __name__ == "__main__":
    main()
