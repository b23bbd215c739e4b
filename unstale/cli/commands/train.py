"""`unstale train`: run a recipe, or resume a run."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from unstale.cli.recipe_options import add_recipe, configure, file_values
from unstale.cli.running import exit_code
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.recipes import RECIPES


def add(verbs: Any) -> None:
    parser = verbs.add_parser("train", help="run a recipe, or resume a run")
    add_recipe(parser, required=False)
    parser.add_argument("--resume", type=Path, metavar="RUN", help="resume the run in this folder")
    parser.set_defaults(act=_train)


def _train(chosen: argparse.Namespace) -> int:
    if chosen.resume:
        return _resume(chosen)
    if chosen.recipe is None and chosen.config is None:
        raise ConfigError(
            f"train needs a recipe ({', '.join(RECIPES)}), or --resume and the folder of a run"
        )
    config = configure(chosen)
    from unstale.cli.session import train

    return exit_code(lambda: train(config, command=shlex.join(["unstale", *chosen.given])))


def _resume(chosen: argparse.Namespace) -> int:
    if chosen.recipe is not None:
        raise ConfigError(
            f"a run resumes with its own recipe: leave out {chosen.recipe} or --resume"
        )
    from unstale.cli.resume import load_config
    from unstale.cli.session import resume

    values = file_values(chosen)
    config = load_config(chosen.resume, named_env=values.get("task.env", ""))
    values.pop("recipe", None)
    config = override(config, values)
    return exit_code(lambda: resume(chosen.resume, config))
