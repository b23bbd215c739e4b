"""What every benchmark does: take turns, sum up, and leave a dated table and a picture."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from rich.console import Console

from unstale.durability.machine import commit, machine, versions

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCH_RESULTS") or ROOT / "benchmarks" / "results")
"""`make bench` has its shorter answers in a folder of their own, beside those of the questions' own verbs."""
_T = TypeVar("_T")
CONSOLE = Console(soft_wrap=True, highlight=False)

ROUNDS = 5
"""A median of fewer is told as one."""

OURS = {
    name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
}
"""How threads wait and memory is paged, as `import unstale` has set it, for a process that loads torch first."""


def environ(how: Mapping[str, str]) -> dict[str, str]:
    """This environment with `OURS` or, for peers, with nothing of it: they run as their libraries do."""
    return {name: value for name, value in os.environ.items() if name not in OURS} | dict(how)


def rotated(contestants: Sequence[_T], first: int) -> list[_T]:
    """All of them, another one first.

    >>> rotated("abc", 1)
    ['b', 'c', 'a']
    """
    return [*contestants[first:], *contestants[:first]]


def alternate(
    contestants: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """What each gives in each of `repeats` rounds. They take turns in coming first."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        for name in rotated(names, turn % len(names)):
            CONSOLE.print(f"round {turn + 1} of {repeats}: {name}")
            found[name].append(contestants[name]())
    return found


def ratios(found: Mapping[str, Sequence[float]], name: str, over: str) -> list[float]:
    """Round by round: what one gave over what the other gave in the same round.

    >>> ratios({"ours": [6.0, 8.0], "theirs": [2.0, 4.0]}, "ours", over="theirs")
    [3.0, 2.0]
    """
    return [ours / theirs for ours, theirs in zip(found[name], found[over], strict=True)]


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The median and the range.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    return " ".join(
        [form.format(median(values)), f"({form.format(min(values))} to {form.format(max(values))})"]
    )


def verdict(values: Sequence[float], least: float) -> str:
    """Whether the median meets a goal, said as it is: fewer than five rounds say little.

    >>> verdict([3.0, 1.0, 2.0, 2.0, 2.0], least=2.5), verdict([3.0], least=2.5)
    ('missed: 2.00 of 2.5', 'met: 3.00 of 2.5, in 1 round')
    """
    found, few = (
        median(values),
        f", in {len(values)} round{'s' * (len(values) > 1)}" if len(values) < ROUNDS else "",
    )
    told = (
        f"{found:.2f}" if (float(f"{found:.2f}") >= least) == (found >= least) else f"{found:.4f}"
    )
    return f"{'met' if found >= least else 'missed'}: {told} of {least:.4g}{few}"


def row(*cells: object) -> str:
    """
    >>> row("1M", 2)
    '| 1M | 2 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def columns(*names: str) -> list[str]:
    """The head of a table."""
    return [row(*names), row(*("---" for _ in names))]


def peers(environment: str, *names: str) -> str:
    """The versions of these packages in an environment that `make bench-peers` has set up."""
    places = [str(place) for place in (ROOT / environment).glob("lib/python*/site-packages")]
    held = {found.name: found.version for found in distributions(path=places)}
    return ", ".join(f"{name} {held.get(name, 'not there')}" for name in names)


def revision() -> str:
    """The commit, `-dirty` if more than tables and pictures was changed since; empty outside a repository."""
    only = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    told = commit()
    if not told:
        return ""
    return (
        told
        if subprocess.run(only, capture_output=True, check=False).stdout
        else told.removesuffix("-dirty")
    )


def _dated(name: str) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / f"{date.today()}-{name}"


def write(question: str, title: str, lines: Sequence[str]) -> Path:
    """`<date>-<question>.md` in `RESULTS`: the table, under what it was run on and the command that made it."""
    target = _dated(f"{question}.md")
    command = " ".join([f"python -m benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    head = [
        f"# {title}, {date.today()}",
        "",
        f"`{command}` at commit {revision()}, {machine()}, {versions()}.",
        "",
    ]
    target.write_text("\n".join([*head, *lines]) + "\n")
    CONSOLE.print(f"{target.read_text()}\n{target}", markup=False)
    return target


@contextmanager
def picture(
    question: str, *, width: float = 7.2, height: float = 3.6, panels: int = 1
) -> Iterator[Any]:
    """Axes to draw on (an array of them for more than one panel); they become `<date>-<question>.png` by the table.

    Needs matplotlib: the extra `bench`.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=(width, height), dpi=160, layout="constrained"
    )
    for one in axes if panels > 1 else [axes]:
        one.spines[["top", "right"]].set_visible(False)
        one.grid(axis="y", alpha=0.25)
    yield axes
    figure.savefig(_dated(f"{question}.png"))
    pyplot.close(figure)
