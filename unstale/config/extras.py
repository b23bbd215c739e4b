"""The optional groups of packages (extras), and the commands that install them."""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path


def install(extra: str) -> str:
    """Return the command, for messages, that installs an extra (an optional group of packages).

    In a checkout, the command installs from its folder, because no release is in a package
    registry. Elsewhere it lists the packages of the extra.
    """
    if not (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return shlex.join([sys.executable, "-m", "pip", "install", *packages_of(extra)])
    if extra in ("openenv", "verifiers"):  # their environments are docs/libraries.md#installation
        return f"make env-{extra}, then use .venv-adapters/{extra}/bin/python -m unstale"
    return f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"


def packages_of(extra: str) -> Iterator[str]:
    """Yield the packages that an extra of the installed project requires, nested extras included.

    >>> list(packages_of("tensorboard"))
    ['tensorboard']
    """
    for line in requires("unstale") or ():
        package, _, marker = line.partition(";")
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        nested = re.fullmatch(r"unstale\[([\w,-]+)\]", package.strip())
        for name in nested[1].split(",") if nested else ():
            yield from packages_of(name)
        if not nested:
            yield package.strip()
