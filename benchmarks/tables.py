"""Helpers of the benchmarks: alternating rounds, summaries, tables and pictures."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from unstale.durability.console import Console
from unstale.durability.machine import commit, machine, versions

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCH_RESULTS") or ROOT / "benchmarks" / "results")
"""Folder of the results. `make bench` sets BENCH_RESULTS, to keep its shorter runs apart."""
_T = TypeVar("_T")
CONSOLE = Console(soft_wrap=True, highlight=False)

ROUNDS = 5
"""Rounds below which a verdict names their number."""

OURS = {
    name: os.environ[name] for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE")
}
"""Thread and memory settings of `import unstale`, for processes that import torch first."""


def environ(how: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the settings `how`, which are `OURS` or, for peers, empty."""
    return {name: value for name, value in os.environ.items() if name not in OURS} | dict(how)


def rotated(contestants: Sequence[_T], first: int) -> list[_T]:
    """Return the contestants, starting with number `first`.

    >>> rotated("abc", 1)
    ['b', 'c', 'a']
    """
    return [*contestants[first:], *contestants[:first]]


def alternate(
    contestants: Mapping[str, Callable[[], float]], repeats: int
) -> dict[str, list[float]]:
    """Run each contestant once per round and return the results by name. The first one rotates."""
    results: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(repeats):
        for name in rotated(names, turn % len(names)):
            CONSOLE.print(f"round {turn + 1} of {repeats}: {name}")
            results[name].append(contestants[name]())
    return results


def ratios(results: Mapping[str, Sequence[float]], name: str, over: str) -> list[float]:
    """Return the ratios of two contestants' results, round by round.

    >>> ratios({"ours": [6.0, 8.0], "theirs": [2.0, 4.0]}, "ours", over="theirs")
    [3.0, 2.0]
    """
    return [ours / theirs for ours, theirs in zip(results[name], results[over], strict=True)]


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Format the median and the range.

    >>> spread([3.0, 1.0, 2.0])
    '2.00 (1.00 to 3.00)'
    """
    middle, low, high = (form.format(value) for value in (median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def verdict(values: Sequence[float], least: float) -> str:
    """State whether the median meets a goal, with the number of rounds if below `ROUNDS`.

    >>> verdict([3.0, 1.0, 2.0, 2.0, 2.0], least=2.5), verdict([3.0], least=2.5)
    ('missed: 2.00 of 2.5', 'met: 3.00 of 2.5, in 1 round')
    """
    middle = median(values)
    met = middle >= least
    text = f"{middle:.2f}"
    if (float(text) >= least) != met:  # rounding would contradict the verdict
        text = f"{middle:.4f}"
    rounds = f", in {len(values)} round{'s' * (len(values) > 1)}" if len(values) < ROUNDS else ""
    return f"{'met' if met else 'missed'}: {text} of {least:.4g}{rounds}"


def row(*cells: object) -> str:
    """Return a row of a Markdown table.

    >>> row("1M", 2)
    '| 1M | 2 |'
    """
    return f"| {' | '.join(map(str, cells))} |"


def columns(*names: str) -> list[str]:
    """Return the head of a Markdown table."""
    return [row(*names), row(*("---" for _ in names))]


def peers(environment: str, *names: str) -> str:
    """Return the versions of packages in an environment that `make env-peers` created."""
    folders = [str(folder) for folder in (ROOT / environment).glob("lib/python*/site-packages")]
    installed = {package.name: package.version for package in distributions(path=folders)}
    return ", ".join(f"{name} {installed.get(name, 'not installed')}" for name in names)


def revision() -> str:
    """Return the commit, or an empty string outside a repository.

    It ends with `-dirty` if files other than the results have changed.
    """
    name = commit()
    if not name:
        return ""
    status = ["git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!benchmarks/results"]
    changed = subprocess.run(status, capture_output=True, check=False).stdout
    return name if changed else name.removesuffix("-dirty")


def _target(name: str) -> Path:
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / name


def write(question: str, title: str, lines: Sequence[str], *, quiet: bool = False) -> Path:
    """Write a table to `<question>.md`, with the date, command, commit, machine and versions.

    It is also printed, unless it is not complete yet (`quiet`).
    """
    target = _target(f"{question}.md")
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    head = [
        f"# {title}, {date.today()}",
        "",
        f"`{command}` at commit {revision()}, {machine()}, {versions()}.",
        "",
    ]
    target.write_text("\n".join([*head, *lines]) + "\n")
    if not quiet:
        CONSOLE.print(f"{target.read_text()}\n{target}", markup=False)
    return target


def share_axis(panel: Any) -> None:
    """Make the vertical axis of a picture one of shares, from 0% to 100%."""
    panel.set_ylim(-0.03, 1.03)
    panel.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")


def legend_below(*panels: Any, ncols: int = 4, **options: Any) -> None:
    """Draw one legend of some panels below all panels. A label of several panels appears once.

    `options` are those of matplotlib's legend.
    """
    lines: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        lines |= dict(zip(labels, handles, strict=True))
    panels[0].figure.legend(
        lines.values(), lines, loc="outside lower center", ncols=ncols, frameon=False, **options
    )


def written_today(question: str) -> str:
    """Return the table of a question that was written today, an empty string if there is none."""
    target = _target(f"{question}.md")
    return target.read_text() if target.exists() else ""


@contextmanager
def picture(
    question: str, *, width: float = 7.2, height: float = 3.6, panels: int = 1
) -> Iterator[Any]:
    """Yield axes, an array of them for several panels, and save them as `<question>.png`.

    This needs matplotlib, from the extra `bench`.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, panels, figsize=(width, height), dpi=160, layout="constrained"
    )
    for panel in axes if panels > 1 else [axes]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    yield axes
    figure.savefig(_target(f"{question}.png"))
    pyplot.close(figure)
