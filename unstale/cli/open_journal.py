"""Open the journal of a run folder for a command."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unstale.cli.running import print_error
from unstale.config import ConfigError

if TYPE_CHECKING:  # the journal imports torch
    from unstale.durability.journal import JournalReader


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run folder; the run may be in progress")


@contextmanager
def open_journal(run: Path) -> "Iterator[JournalReader]":
    """Open the journal of a run folder. A damaged one ends the command with exit code 1."""
    from unstale.durability.journal import Journal, JournalError

    try:
        with Journal.read(run) as journal:
            yield journal
    except OSError as error:
        raise ConfigError(str(error)) from error
    except JournalError as error:
        print_error("damaged", error)
        sys.exit(1)
