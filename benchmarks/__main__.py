"""List the benchmarks, or run the main ones in a short form.

    python -m benchmarks              each benchmark with what it measures
    python -m benchmarks short        eight main questions with fewer repeats (less than an hour)
    python -m benchmarks.NAME --help  the options of one benchmark

The short form writes its tables to `benchmarks/results/short`, not into the results. A benchmark
that fails does not stop the others, and its name is printed at the end.
"""

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).parent
SHORT = {
    "generate": "--repeats 2 --sizes 1M",
    "train": "--repeats 2 --models 1M",
    "memory": "--repeats 1 --vocabularies 1000 150000",
    "schedule": "--repeats 1 --live 10 1000",
    "asynchrony": "--repeats 1 --no-curve",
    "routes": "--rounds 1 --repeats 2 --rates 1e-4 --steps 3",
    "publish": "--repeats 2 --models 1M 5M 20M",
    "simulate": "--repeats 1 --turnovers 1",
}
"""The options of the short form, by benchmark."""


def names() -> dict[str, str]:
    """Return what each benchmark measures, by name. Files without a command line are left out."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        text = ast.get_docstring(ast.parse(source)) or ""
        if "__main__" in source and path.name != "__main__.py":
            found[path.stem] = text.partition("\n")[0]
    return found


def run_short() -> list[str]:
    """Run the main benchmarks in the short form. Return the names of those that failed."""
    environment = os.environ | {"BENCH_RESULTS": str(FOLDER / "results" / "short")}
    failed = []
    for name, options in SHORT.items():
        began = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *options.split()]
        code = subprocess.run(command, cwd=FOLDER.parent, env=environment, check=False).returncode
        failed += [name] if code else []
        print(f"{name}: {(time.monotonic() - began) / 60:.0f} minutes", flush=True)
    return failed


def main(words: list[str]) -> str:
    """Return an empty text if all went well, or what did not."""
    if words == ["short"]:
        failed = run_short()
        return f"failed: {' '.join(failed)}" if failed else ""
    if words:
        return f"{' '.join(words)}: write python -m benchmarks.NAME, or `short` for the main ones"
    for name, text in names().items():
        print(f"{name:<20} {text}")
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
