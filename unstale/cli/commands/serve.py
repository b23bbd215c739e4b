"""`unstale serve`: serve a policy behind an OpenAI-compatible endpoint."""

import argparse
import os
from pathlib import Path
from typing import Any

from unstale.cli.recipe_options import add_recipe, configure
from unstale.cli.running import exit_code
from unstale.config import ConfigError, install


def add(verbs: Any) -> None:
    parser = verbs.add_parser("serve", help="serve a policy behind an OpenAI-compatible endpoint")
    parser.add_argument("trained", type=Path, metavar="folder", help="a run folder or model folder")
    add_recipe(parser)
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="port on loopback; 0 takes a free one"
    )
    parser.add_argument(
        "--token",
        default=os.environ.get("UNSTALE_TOKEN"),
        help="API key that clients must send (default: $UNSTALE_TOKEN, or a new one)",
    )
    parser.set_defaults(act=_serve)


def _serve(chosen: argparse.Namespace) -> int:
    config = configure(chosen)
    try:
        from unstale.cli.serve import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serve needs {error.name}: {install('endpoint')}") from error
    return exit_code(lambda: serve(chosen.trained, config, token=chosen.token, port=chosen.port))
