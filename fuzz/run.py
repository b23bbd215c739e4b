"""Run each target for a while: `python -m fuzz.run [--seconds N] [TARGET ...]`.

With atheris, inputs are guided by coverage; without it they are random, and a notice says so. A
failing input is saved in `fuzz/found/`; `--input FILE` with its target runs it again. Exit status 1
means that a target failed.
"""

import argparse
import importlib.util
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

FOUND = Path(__file__).parent / "found"
SIZE = 600
"""Bytes of an input at most: a sound input that is changed is not part of it."""
MEMORY_MB = 4096
SLOW_S = 20
"""An input that takes longer is a finding."""
NAMES = (
    "config_file",
    "config_knobs",
    "journal",
    "delta",
    "version_chain",
    "checkpoint",
    "tool_call",
    "chat_text",
    "endpoint",
)
BROKEN = 1

console = Console(soft_wrap=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of: {', '.join(NAMES)}. Now: all"
    )
    parser.add_argument("--seconds", type=int, default=120, help="for each target. Now: 120")
    parser.add_argument("--input", type=Path, help="run a target once, on this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - set(NAMES):
        parser.error(
            f"there is no target {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}"
        )
    if chosen.child:
        return _child(chosen.targets[0], chosen.seconds)
    if chosen.input:
        from fuzz.targets import TARGETS

        TARGETS[chosen.targets[0]](chosen.input.read_bytes())
        return 0
    guided = importlib.util.find_spec("atheris") is not None
    if not guided:
        console.print(
            "[bold]atheris is not installed:[/] inputs are drawn at random, and no coverage guides "
            "them"
        )
    table = Table("target", "executions", "a second", "findings")
    rows = [_run(name, chosen.seconds) for name in chosen.targets or NAMES]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return BROKEN if any(row[-1] != "0" for row in rows) else 0


def _run(name: str, seconds: int) -> tuple[str, str, str, str]:
    """Run a target in a process, and restart it after a finding until the time is over."""
    FOUND.mkdir(exist_ok=True)
    executions, findings, until = 0, 0, time.monotonic() + seconds
    while (left := round(until - time.monotonic())) > 0 and findings < 10:
        command = [sys.executable, "-m", "fuzz.run", name, "--child", "--seconds", str(left)]
        threads = {
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
        }
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, errors="replace", env=os.environ | threads
        )
        counted = re.findall(r"^stat::number_of_executed_units: +(\d+)", done.stderr, re.MULTILINE)
        executions += int(counted[-1]) if counted else 0
        if done.returncode:
            findings += 1
            kept = FOUND / f"{name}-{int(time.time())}.txt"
            kept.write_text(done.stderr[-20_000:], encoding="utf-8")
            console.print(
                f"[bold red]{name}[/] broke (exit code {done.returncode}): {kept}", highlight=False
            )
    return name, f"{executions:,}", f"{executions / seconds:,.0f}", str(findings)


def _child(name: str, seconds: int) -> int:
    if importlib.util.find_spec("atheris") is None:
        return _at_random(name, seconds)
    import atheris

    with atheris.instrument_imports(include=["unstale", "fuzz"]):
        from fuzz.targets import TARGETS
    limits = [
        f"-max_total_time={seconds}",
        f"-max_len={SIZE}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={SLOW_S}",
    ]
    options = ["-print_final_stats=1", "-verbosity=0", f"-artifact_prefix={FOUND / name}-"]
    atheris.Setup([sys.argv[0], *limits, *options, "-len_control=0"], TARGETS[name])
    atheris.Fuzz()  # ends the process
    return 0


def _at_random(name: str, seconds: int) -> int:
    from fuzz.targets import TARGETS

    draw, until, done = random.Random(), time.monotonic() + seconds, 0
    while time.monotonic() < until:
        data = draw.randbytes(draw.randrange(SIZE))
        kept = FOUND / f"{name}-last"
        kept.write_bytes(data)  # there if the process dies of it
        TARGETS[name](data)
        kept.unlink()
        done += 1
    sys.stderr.write(f"stat::number_of_executed_units: {done}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
