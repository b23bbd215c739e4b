"""`unstale replay`: repeat the batch at which a run failed."""

import argparse
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    parser = verbs.add_parser("replay", help="repeat the batch at which a run failed")
    parser.add_argument("run", type=Path, help="the folder of the failed run")
    parser.add_argument(
        "--batch", type=Path, help="the saved batch (default: went_wrong.safetensors of the run)"
    )
    parser.set_defaults(act=_replay)


def _replay(chosen: argparse.Namespace) -> int:
    """Return 0 if the batch fails again, otherwise 1."""
    from unstale.cli.replay import replay

    return 0 if replay(chosen.run, chosen.batch) else 1
