"""Measure the tokens of trees of episodes against independent ones, at several fork places.

    python -m benchmarks.tree_cost --turns 2 4 8

On the retail desk, a group of 8 is 2 episodes with 3 forks each before reply `turns`, or 8 episodes
of their own. Writes a dated table under benchmarks/results/.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

from benchmarks.tables import columns, row, write
from unstale.builders.sampling import build_rollout, build_sampler
from unstale.cli.evaluate import running_generator
from unstale.config.options import override
from unstale.recipes import make_recipe
from unstale.records import Failure, Fork, Group, GroupRequest, Task, Trajectory
from unstale.research.techniques.tree import Tree, TreeConfig
from unstale.rollout.episode import Rollout
from unstale.rollout.rounds import reply_spans

ROOTS, FORKS = 2, 3
SIZE = ROOTS * (1 + FORKS)
NO_TEXTS: Any = None


@dataclass(frozen=True)
class Cost:
    """The mean tokens of an episode of some groups."""

    sampled: float
    computed: float
    """Context tokens that the engine computed, as they were not in its cache."""
    before: float = 0.0
    """Of a forked episode: tokens of replies before the fork."""
    after: float = 0.0
    forked: float = 0.0
    """Share of the episodes that are forked."""


async def run(rollout: Rollout, tasks: Sequence[Task], turn: int) -> Cost:
    """Run a group of each task, as trees that fork before reply `turn`, or without forks at 0."""
    tree = Tree(TreeConfig(branch="turn", turn=max(2, turn), continuations=FORKS))
    roots = ROOTS if turn else SIZE
    engine = rollout.generator.engine
    engine.metrics()
    groups: list[Group] = []
    for number, task in enumerate(tasks):

        async def more(results: Sequence[Trajectory | Failure]) -> Sequence[Fork]:
            return await tree.forks([results], NO_TEXTS) if turn and len(results) == ROOTS else ()

        request = GroupRequest(number, task, turn, 0, sizes=(roots,))
        groups.append(await rollout.group(request, size=roots, more=more))
    episodes = [each for group in groups for each in group.trajectories]
    forks = [each for each in episodes if each.fork]
    before = [_replies(each, 0, each.fork.at) for each in forks if each.fork]
    counters = engine.metrics()
    return Cost(
        sampled=sum(each.num_sampled for each in episodes) / len(episodes),
        computed=counters["prefill_tokens"] / len(episodes),
        before=fmean(before) if before else 0.0,
        after=fmean(each.num_sampled for each in forks) if forks else 0.0,
        forked=len(forks) / len(episodes),
    )


def _replies(trajectory: Trajectory, start: int, stop: int) -> int:
    """Return the number of tokens of replies among the tokens `start` to `stop`."""
    spans = reply_spans(trajectory.pieces)
    return sum(max(0, min(end, stop) - max(begin, start)) for begin, end in spans)


async def measure(turns: Sequence[int], number: int) -> list[str]:
    config = override(make_recipe("retail"), {"eval.tasks": 1})
    policy, taskset, generator = build_sampler(config)
    tasks = list(islice(taskset.train(0), number))
    lines = columns(
        "fork before reply",
        "tokens before : after the fork",
        "forked episodes",
        "sampled tokens of a tree / independent",
        "predicted",
        "context tokens computed, tree / independent",
    )
    async with running_generator(config, policy, generator) as running:
        rollout = build_rollout(config, taskset)(running, taskset, config.rollout)
        async with rollout.resources:
            alone = await run(rollout, tasks, 0)
            for turn in turns:
                tree = await run(rollout, tasks, turn)
                whole = tree.before + tree.after
                predicted = 1 - tree.forked * tree.before / whole if whole else 1.0
                lines.append(
                    row(
                        turn,
                        f"{tree.before:.0f} : {tree.after:.0f}",
                        f"{tree.forked:.0%}",
                        f"{tree.sampled / alone.sampled:.2f}",
                        f"{predicted:.2f}",
                        f"{tree.computed / alone.computed:.2f}",
                    )
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--tasks", type=int, default=24)
    options = parser.parse_args()
    lines = asyncio.run(measure(options.turns, options.tasks))
    text = (
        "Predicted: 1 - forked p / (p + s), with p tokens of replies before a fork and s after it. "
        "A forked episode samples s instead of p + s."
    )
    write("tree-cost", "Tokens of trees against independent episodes", [text, "", *lines])


if __name__ == "__main__":
    main()
