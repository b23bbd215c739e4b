"""The command `attempt`: attempt tasks several times, and choose one of the attempts."""

import argparse
from pathlib import Path

from unstale.cli.preflight import quick_imports
from unstale.cli.recipe_options import print_json
from unstale.cli.verbs import (
    CONFIG,
    COUNT,
    JSON,
    OWN_RECIPE,
    TRAINED,
    argument,
    command,
    console_of,
    options_of,
)
from unstale.config import ConfigError
from unstale.config.checks import bounded, is_served, output_file
from unstale.durability.console import Console


def _attempt(chosen: argparse.Namespace) -> int:
    from unstale.cli.trained import configure_trained

    config = configure_trained(chosen)
    with quick_imports():
        from unstale.research.attempt import AttemptOptions, attempt
        from unstale.research.scores import FolderScorer, Scorer, ServedScorer
        from unstale.research.served_writer import ServedWriter, Writer

    served = is_served(chosen.judge)
    if served != bool(chosen.judge_model):
        raise ConfigError("--judge URL and --judge-model name a served judge together")
    judge: Writer | Scorer | None = None
    if served and chosen.votes:
        judge = ServedWriter(chosen.judge, chosen.judge_model)
    elif served:
        judge = ServedScorer(chosen.judge, chosen.judge_model)
    elif chosen.judge:
        judge = FolderScorer(chosen.judge)
    result = attempt(
        chosen.trained,
        config,
        options_of(AttemptOptions, chosen),
        judge=judge,
        collect=chosen.collect,
        console=console_of(chosen),
    )
    if chosen.json:
        print_json({"task": config.task.env, **result.as_json()})
        return 0
    Console().print(result.table())
    console = Console(soft_wrap=True)
    tokens = ", ".join(f"{count:,} for {name}" for name, count in result.tokens.items())
    for line in filter(None, (result.judge_text(), f"tokens: {tokens}")):
        console.print(line, highlight=False)
    return 0


add = command(
    "attempt",
    "attempt held-out tasks several times, and choose one of the attempts",
    TRAINED,
    OWN_RECIPE,
    CONFIG,
    argument(
        "--attempts", type=COUNT, default=8, metavar="N", help="attempts per task; default: 8"
    ),
    argument(
        "--votes",
        type=bounded(int, 0, 1000),
        default=0,
        metavar="K",
        help="let the policy compare attempts, with K votes on each comparison; "
        "default: 0, the answer that most attempts give",
    ),
    argument(
        "--weigh",
        action="store_true",
        help="weigh answers by the forecasts with which the run pruned episodes (tree.prune mixed)",
    ),
    argument(
        "--group",
        type=bounded(int, 2, 26),
        default=2,
        metavar="G",
        help="attempts in a comparison; default: 2",
    ),
    argument(
        "--distil",
        type=bounded(int, 0, 1000),
        default=0,
        metavar="K",
        help="make a further attempt that reads how the K best ones ended",
    ),
    argument(
        "--rounds",
        type=bounded(int, 0, 100),
        default=0,
        metavar="R",
        help="make R new populations of N attempts in place of a further one; each reads the best "
        "of the population before, and is chosen from in the same way; needs --distil",
    ),
    argument(
        "--plan",
        action="store_true",
        help="make a second attempt with a plan that the policy writes from the first",
    ),
    argument(
        "--summaries",
        action="store_true",
        help="compare summaries that the policy writes, instead of last replies; the further "
        "attempts of --distil read them, too; needs --votes or --distil",
    ),
    argument(
        "--search",
        type=bounded(int, 0, 1000),
        default=0,
        metavar="S",
        help="search in S stages, each with N candidates, which the policy judges",
    ),
    argument(
        "--beam",
        type=COUNT,
        default=2,
        metavar="M",
        help="candidates that the search keeps after a stage; default: 2",
    ),
    argument(
        "--stages",
        type=Path,
        metavar="FILE",
        help="search in the named stages of a file, in place of --search: what the policy reads at "
        "their start, and what is run at their end",
    ),
    argument(
        "--judge",
        default="",
        help="a reward model's folder, which scores attempts and stages; or a served model, "
        "http://host:port/v1, which compares them, or scores them without --votes",
    ),
    argument("--judge-model", default="", metavar="NAME", help="the served judge's name"),
    argument(
        "--collect",
        type=output_file,
        metavar="FILE",
        help="attempt training tasks, and write successes at tasks that also failed, for `sft`",
    ),
    argument(
        "--stage-turns", type=COUNT, default=1, metavar="T", help="replies of a stage; default: 1"
    ),
    JSON,
)(_attempt)
