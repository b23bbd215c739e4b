"""`unstale export-trajectories`: write a run's trajectories for other tools."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from unstale.cli.open_journal import add_run, open_journal
from unstale.config import ConfigError


def add(verbs: Any) -> None:
    parser = verbs.add_parser(
        "export-trajectories", help="write a run's trajectories for other tools"
    )
    add_run(parser)
    parser.add_argument(
        "--format", choices=("jsonl", "parquet"), default="jsonl", help="default: jsonl"
    )
    parser.add_argument(
        "--content",
        choices=("tokens", "text", "samples"),
        default="tokens",
        help="token columns, readable conversations, or samples of trained tokens; default: tokens",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="default for jsonl: standard output"
    )
    parser.set_defaults(act=_export)


def _export(chosen: argparse.Namespace) -> int:
    from unstale.durability.journal import export_rows, write_jsonl, write_parquet
    from unstale.durability.journal.conversations import load_decoder

    if chosen.format == "parquet" and not chosen.out:
        raise ConfigError("--format parquet needs --out FILE")
    with open_journal(chosen.run) as journal:
        try:
            decode = load_decoder(chosen.run) if chosen.content == "text" else str
        except ValueError as error:
            raise ConfigError(str(error)) from error
        rows = export_rows(journal, chosen.content, decode)
        if chosen.format == "parquet":
            write_parquet(rows, chosen.content, chosen.out)
        elif chosen.out:
            with chosen.out.open("w", encoding="utf-8") as file:
                write_jsonl(rows, file)
        else:
            _print(rows, write_jsonl)
    return 0


def _print(rows: Any, write_jsonl: Any) -> None:
    try:
        write_jsonl(rows, sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe: write nothing more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
