"""`unstale compare`: run variants of a recipe and compare them."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from unstale.cli.recipe_options import (
    add_recipe,
    configure,
    file_values,
    refuse_unknown,
    split_options,
)
from unstale.cli.running import INTERRUPTED
from unstale.config import ConfigError, RunConfig


def add(verbs: Any) -> None:
    parser = verbs.add_parser("compare", help="run variants of a recipe and compare them")
    add_recipe(parser, required=False)
    add_argument = parser.add_argument
    add_argument("--routes", nargs="+", default=[], metavar="ROUTE", help="one variant per route")
    add_argument(
        "--arms",
        nargs="+",
        default=[],
        metavar="'NAME: OPTION=VALUE ...'",
        help="one variant for each of these",
    )
    add_argument("--seeds", type=int, default=3, metavar="N", help="runs per variant (default: 3)")
    add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    add_argument("--report", type=Path, metavar="FOLDER", help="only write the page again")
    parser.set_defaults(act=_compare)


def _compare(chosen: argparse.Namespace) -> int:
    from unstale.cli.compare import Arm, compare, plan
    from unstale.observe.report.compare_page import write_comparison

    if chosen.report:
        Console(soft_wrap=True).print(str(write_comparison(chosen.report)), highlight=False)
        return 0
    if not chosen.recipe:
        raise ConfigError("compare needs a recipe, or --report and the folder of a comparison")
    values = file_values(chosen)
    base = [f"--{name}={_word(value)}" for name, value in values.items() if name != "recipe"]

    def configure_words(words: Sequence[str]) -> RunConfig:
        positional, values = split_options(words)
        if positional:
            refuse_unknown(positional[0])
        return configure(argparse.Namespace(recipe=chosen.recipe, config=None, values=values))

    arms = [*map(Arm.of_route, chosen.routes), *map(Arm.parse, chosen.arms)]
    command = shlex.join(["unstale", *chosen.given])
    try:
        planned = plan(arms, chosen.seeds, base=base, configure=configure_words)
        compare(planned, jobs=chosen.jobs, command=command)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _word(value: Any) -> str:
    """Return an option's value as the command line takes it."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
