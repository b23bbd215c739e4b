"""`unstale same`: compare two deterministic runs bit for bit."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from unstale.config import ConfigError


def add(verbs: Any) -> None:
    parser = verbs.add_parser("same", help="compare two deterministic runs bit for bit")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("other", type=Path, help="the folder of a run with the same configuration")
    parser.set_defaults(act=_same)


def _same(chosen: argparse.Namespace) -> int:
    """Return 1 if the runs differ or cannot be read."""
    from unstale.durability.checkpoint import CheckpointError
    from unstale.durability.compare_runs import differences
    from unstale.durability.journal import JournalError

    try:
        lines = differences(chosen.run, chosen.other)
    except OSError as error:
        raise ConfigError(str(error)) from error
    except (CheckpointError, JournalError) as error:
        lines = [str(error)]
    for line in lines:
        Console(soft_wrap=True).print(line, highlight=False, markup=False)
    if not lines:
        Console().print("equal bit for bit, except for measured times", highlight=False)
    return 1 if lines else 0
