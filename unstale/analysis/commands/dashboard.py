"""The command `dashboard`: show runs in the browser, also while they train."""

import argparse
from pathlib import Path

from unstale.cli.nice import run_at_low_priority
from unstale.cli.verbs import argument, command
from unstale.config import ConfigError, install
from unstale.config.checks import bounded
from unstale.durability.console import Console


def _dashboard(chosen: argparse.Namespace) -> int:
    try:
        from unstale.analysis.dashboard.server import Dashboard
    except ModuleNotFoundError as error:
        raise ConfigError(f"dashboard needs {error.name}: {install('dashboard')}") from error
    try:
        dashboard = Dashboard(chosen.runs, port=chosen.port)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {chosen.port}: {error.strerror}") from error
    console = Console(soft_wrap=True)
    console.print(dashboard.url, highlight=False, markup=False)
    console.print("Ctrl-C stops the dashboard", style="dim")
    return run_at_low_priority(dashboard.serve)


add = command(
    "dashboard",
    "show runs in the browser, down to the token, while they train",
    argument(
        "runs",
        type=Path,
        nargs="?",
        default=Path("runs"),
        help="a folder of runs, or one run folder (default: runs)",
    ),
    argument(
        "--port",
        type=bounded(int, 0, 65535),
        default=0,
        metavar="N",
        help="port on loopback; 0 takes a free one (default: 0)",
    ),
)(_dashboard)
