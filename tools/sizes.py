"""Print the sizes of the package: lines, files, functions, parameters, private accesses, folders.

The last lines are the sums of the core and its annexes. Nothing is enforced. `--root` measures
another checkout, `--package` another package in it.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path


def python_files(folder: Path) -> list[Path]:
    """Return the Python files below a folder, sorted."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def percentile(values: list[int], share: float) -> int:
    """Return the value at `share` of the sorted list (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters of a function, `self` and `cls` excluded."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def lines_at_100_columns(package: Path) -> int:
    """Count the lines of the package after `ruff format --line-length 100`, on a copy."""
    total = 0
    for path in python_files(package):
        command = [
            sys.executable,
            "-m",
            "ruff",
            "format",
            "--isolated",
            "--line-length",
            "100",
            "-",
        ]
        done = subprocess.run(
            command, input=path.read_text(), capture_output=True, text=True, check=True
        )
        total += len(done.stdout.splitlines())
    return total


def private_accesses(folder: Path) -> int:
    """Count accesses `x._name` in tests where `x` is neither `self` nor `cls`."""
    found = 0
    for path in python_files(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                found += owner not in ("self", "cls")
            elif isinstance(node, ast.ImportFrom):
                found += sum(bool(re.match(r"_[A-Za-z]", alias.name)) for alias in node.names)
    return found


ANNEXES = ("analysis", "research")


def folder_lines(package: Path) -> dict[str, int]:
    """Return the lines of each entry of the package and each part of an annex, then the sums."""
    rows: Counter[str] = Counter()
    sums = Counter(dict.fromkeys(("core", *ANNEXES), 0))
    for path in python_files(package):
        first, *rest = path.relative_to(package).parts
        annex = first if first in ANNEXES else "core"
        rows["/".join((first, *rest[:1])) if annex != "core" else first] += num_lines(path)
        sums[annex] += num_lines(path)
    return {**dict(sorted(rows.items())), **sums}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--package", default="unstale")
    chosen = parser.parse_args()
    package = chosen.root / chosen.package
    sources = python_files(package)
    sizes = [num_lines(path) for path in sources]
    functions = [
        node
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]
    parameters = [num_parameters(node) for node in functions]
    text = "\n".join(path.read_text() for path in sources)
    entries = [
        p for p in package.iterdir() if p.name not in ("__init__.py", "py.typed", "__pycache__")
    ]
    tests = sum(num_lines(path) for path in python_files(chosen.root / "tests"))
    rows = {
        "package lines": sum(sizes),
        "package lines at 100 columns": lines_at_100_columns(package),
        "lines over 100 columns": sum(len(line) > 100 for line in text.splitlines()),
        "fmt: skip": len(re.findall(r"# fmt: skip", text)),
        "files": len(sources),
        "file lines, median / p95 / max": (
            f"{percentile(sizes, 0.5)} / {percentile(sizes, 0.95)} / {max(sizes)}"
        ),
        "function lines, p95 / max": f"{percentile(lengths, 0.95)} / {max(lengths)}",
        "parameters, p95 / max": f"{percentile(parameters, 0.95)} / {max(parameters)}",
        "loop.py": num_lines(package / "loop.py"),
        "top-level entries": len(entries),
        "test lines / package lines": f"{tests / sum(sizes):.2f}",
        "private names used in tests": private_accesses(chosen.root / "tests"),
    }
    for name, value in rows.items():
        print(f"{name:36} {value}")
    print()
    for name, lines in folder_lines(package).items():
        print(f"{name:36} {lines:6}")


if __name__ == "__main__":
    main()
