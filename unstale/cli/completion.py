"""The script with which a shell completes commands, recipes, options and their choices."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import shtab

from unstale.cli.recipe_options import SHORT, option_names
from unstale.config.options import options
from unstale.recipes import recipe_names

MakeParser = Callable[[], tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]]


def completion(shell: str, make_parser: MakeParser) -> str:
    """Return the script with which a shell (`shell` is its name) completes the command line.

    `make_parser` returns the parser of the command line, and the parsers of its commands by name.
    """
    parser, verbs = make_parser()
    for verb in verbs.values():
        for action in list(verb._actions):
            if action.dest == "recipe":
                action.choices = recipe_names()
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
        if verb.get_default("takes_options"):
            for name in option_names():
                option = options()[SHORT.get(name, name)]
                choices = option.choices or (("true", "false") if bool in option.kinds else None)
                verb.add_argument(f"--{name}", choices=choices)
    return shtab.complete(parser, shell)
