"""The command `route`: send tasks to one of several policies, by forecasts of their success."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from unstale.cli.recipe_options import configure, print_json
from unstale.cli.verbs import CONFIG, JSON, RECIPE, argument, command
from unstale.config import ConfigError
from unstale.config.checks import bounded
from unstale.durability.console import Console


def _route(chosen: argparse.Namespace) -> int:
    from unstale.envs import task_text
    from unstale.envs.registry import build_taskset, held_out_tasks
    from unstale.research.route import dispatch, read_counts, route

    if len(chosen.saved) < 2:
        raise ConfigError(f"route needs the files of two or more policies, got {len(chosen.saved)}")
    costs = chosen.costs or [1.0] * len(chosen.saved)
    if len(costs) != len(chosen.saved):
        raise ConfigError(f"--costs has {len(costs)} numbers for {len(chosen.saved)} policies")
    config = configure(chosen)
    taskset = build_taskset(config.task)
    tasks = held_out_tasks(taskset, config.eval.tasks)
    texts = {task.key: task_text(taskset, task) for task in tasks}
    results = [read_counts(path) for path in chosen.saved]
    found = route(texts, results, costs, chosen.price)
    if chosen.out:
        places = dispatch(texts, results, costs, chosen.price)
        rows = ({"task": key, "policy": i + 1, "forecasts": p} for key, (i, p) in places.items())
        chosen.out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if chosen.json:
        print_json({name: asdict(each) for name, each in found.items()})
        return 0
    table = Table("who gets the tasks", "success", "mean cost", "shares of the policies")
    for name, each in found.items():
        shares = ", ".join(f"{share:.0%}" for share in each.shares)
        table.add_row(name, f"{each.success:.1%}", f"{each.cost:.3g}", shares)
    Console().print(table)
    return 0


add = command(
    "route",
    "send tasks to one of several policies, by forecasts of their success",
    RECIPE,
    CONFIG,
    argument("saved", nargs="+", type=Path, help="files of `eval --save`, one for each policy"),
    argument(
        "--costs",
        nargs="+",
        type=bounded(float, 1e-9, 1e9),
        metavar="C",
        help="the cost of a task, by policy; 1 each",
    ),
    argument(
        "--price",
        type=bounded(float, 0, 1e9),
        default=0.0,
        metavar="P",
        help="the success that one unit of cost is worth; default: 0, costs do not count",
    ),
    argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the policy for each task, also for tasks without results, as JSON lines",
    ),
    JSON,
)(_route)
