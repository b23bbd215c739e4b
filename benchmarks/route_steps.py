"""Measure the time that each route takes in a real step, in short runs that differ in nothing else.

    python -m benchmarks.route_steps rollout snapshot_old --rounds 3

`python -m benchmarks.routes` has a shorter form of it for all routes. The runs use the retail
recipe with its embedded engine, and partial rollouts, which mix versions within an episode. In the
trainer's thread, they time the route and the loop's preparation of a batch, the work done in time
that would be spent waiting, the scoring before the optimizer step, and the route's part of
publication.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.tables import CONSOLE, columns, rotated, row, spread, write
from unstale.builders import Components, build_components
from unstale.cli.process import limit_threads
from unstale.cli.session import RunSession
from unstale.config import AuditConfig, CheckpointConfig, EvalConfig, RunConfig, ScheduleConfig
from unstale.durability.console import Console
from unstale.durability.run_folder import RunFolder, RunLog
from unstale.observe.live import LiveDisplay
from unstale.recipes.routes import RECIPES as ROUTES

SCORING, CLOSING, PUBLISHING, IDLE = "scoring", "closing", "publishing", "idle"
PARTS = {
    "before_publish": PUBLISHING,
    "on_published": PUBLISHING,
    "trained": PUBLISHING,
    "before_update": CLOSING,
    "score_while_idle": IDLE,
}
"""The route's methods, and the part of a step that each counts as.

`trained` is the update of an average after a step.
"""


@dataclass(slots=True)
class Clock:
    """A clock of the time that the trainer's thread spends in the route.

    It writes a line after each batch.
    """

    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    lines: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)

    def watch(self, machine: Components) -> None:
        self._time(machine.trainer, "prepare", SCORING)
        for name, part in PARTS.items():
            self._time(machine.old, name, part)
        costs = machine.old.costs

        def recorded() -> Mapping[str, float]:
            self.lines.append((time.perf_counter(), self.spent.copy()))
            return costs()

        machine.old.costs = recorded  # type: ignore[method-assign]

    def _time(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.spent[part] += time.perf_counter() - began

        setattr(owner, name, timed)


@dataclass(frozen=True, slots=True)
class Ran:
    """The seconds of each step of a run, and the route's seconds in a mean step, by part."""

    steps_s: tuple[float, ...]
    parts: Mapping[str, float]
    exact: float
    """Share of the action tokens with exact log-probabilities."""
    mixed: float
    """Share of the episodes with tokens of several versions."""

    @property
    def step_s(self) -> float:
        return fmean(self.steps_s)

    @property
    def route_s(self) -> float:
        """The route's seconds of the trainer's time, without work done while it would wait."""
        return sum(self.parts[part] for part in (SCORING, CLOSING, PUBLISHING))


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all runs share."""

    steps: int
    """Number of steps that are measured, after the first `warm`."""
    groups: int
    """Number of groups of 8 episodes in a step."""
    staleness: int = 2
    """`schedule.max_staleness`."""

    @property
    def warm(self) -> int:
        """Number of steps that are not measured.

        The first `staleness` + 1 batches are sampled before any update.
        """
        return self.staleness + 2


def config_of(name: str, setting: Setting, *, seed: int, runs: Path) -> RunConfig:
    """Return the recipe with a route. Its length and staleness are those of all routes."""
    recipe = next(recipe for recipe in ROUTES if recipe.__name__ == f"route_{name}")
    return recipe(
        runs=runs,
        name=name,
        seed=seed,
        max_steps=setting.warm + setting.steps,
        schedule=ScheduleConfig(
            max_staleness=setting.staleness, groups_per_step=setting.groups, group_size=8
        ),
        audit=AuditConfig(share=0.0),
        eval=EvalConfig(tasks=0),
        checkpoint=CheckpointConfig(interval=1000),
    )


def run(config: RunConfig, warm: int) -> Ran:
    """Run as `unstale train` does, but keep nothing. The first `warm` steps do not count."""
    limit_threads()
    machine, clock = build_components(config), Clock()
    clock.watch(machine)
    folder = config.runs / config.name
    log = RunLog.create(folder, config)
    with LiveDisplay(config, console=Console(quiet=True)) as display:
        RunSession(config, log, machine).run_segment(display)
    log.close()
    lines = clock.lines[warm - 1 :]
    steps_s = tuple(after - before for (before, _), (after, _) in pairwise(lines))
    (_, before), (_, after) = lines[0], lines[-1]
    rows = [line for line in RunFolder(folder).metrics() if line["step"] > warm]
    parts = {
        part: (after[part] - before[part]) / len(steps_s)
        for part in (SCORING, CLOSING, PUBLISHING, IDLE)
    }
    exact, mixed = (
        median(float(line.get(name, 0.0)) for line in rows)
        for name in ("old_logps/exact_share", "schedule/mixed_version_share")
    )
    return Ran(steps_s, parts, exact, mixed)


def measure(names: Sequence[str], repeats: int, setting: Setting) -> dict[str, list[Ran]]:
    """Run every route `repeats` times, each time with another seed and another route first."""
    found: dict[str, list[Ran]] = {name: [] for name in names}
    for turn in range(repeats):
        for name in rotated(names, turn * len(names) // repeats):
            CONSOLE.print(f"end to end, round {turn + 1} of {repeats}: {name}")
            with TemporaryDirectory() as runs:
                config = config_of(name, setting, seed=turn, runs=Path(runs))
                found[name].append(run(config, setting.warm))
    return found


def share(rans: Sequence[Ran]) -> float:
    """Return the route's share of the trainer's time in a step."""
    return median(ran.route_s / ran.step_s for ran in rans)


def table(found: Mapping[str, Sequence[Ran]]) -> list[str]:
    lines = columns(
        "route",
        "mean s a step",
        "over `rollout`",
        "route's share of a step",
        "scoring",
        "closing",
        "publishing",
        "while it waits",
        "exact share",
        "mixed episodes",
    )
    for name, rans in found.items():
        over = spread(
            [ran.step_s / other.step_s for ran, other in zip(rans, found["rollout"], strict=True)]
        )
        parts = [
            median(ran.parts[part] / ran.step_s for ran in rans)
            for part in (SCORING, CLOSING, PUBLISHING, IDLE)
        ]
        rest = [
            f"{median(ran.exact for ran in rans):.0%}",
            f"{median(ran.mixed for ran in rans):.0%}",
        ]
        steps = spread([ran.step_s for ran in rans])
        lines.append(
            row(
                f"`{name}`",
                steps,
                over,
                f"{share(rans):.1%}",
                *(f"{part:.1%}" for part in parts),
                *rest,
            )
        )
    return lines


def section(found: Mapping[str, Sequence[Ran]], setting: Setting) -> list[str]:
    """Return the table with its title and an explanation."""
    if not any(found.values()):
        return ["", "Runs of the real loop: not run."]
    rounds = len(next(iter(found.values())))
    return [
        "",
        "## What a route takes of a real step",
        "",
        f"Runs of the retail recipe with its embedded engine, {setting.groups} groups of 8 a step, "
        f"tokens up to {setting.staleness} versions old, tool calls of 0.6 s. {setting.steps} "
        f"steps count, after {setting.warm} that do not. Rounds: {rounds}; ranges are of rounds. "
        "In each round all routes have the same seed, and they take turns in coming first.",
        "",
        "The route's share is that of the trainer's thread, with the preparation of the batch, "
        "which is all that `rollout` has. What is done while the trainer waits for episodes is in "
        "no share. A step lasts as long as the longer one of its episodes and its training, which "
        "run at the same time. `old_logit_model` has one more process, on the same cores.",
        "",
        *table(found),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [recipe.__name__.removeprefix("route_") for recipe in ROUTES]
    parser.add_argument("routes", nargs="+", choices=known, help="`rollout` is always measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--staleness", type=int, default=2, help="largest age of a token, versions")
    chosen = parser.parse_args()
    names = list(dict.fromkeys(["rollout", *chosen.routes]))
    setting = Setting(chosen.steps, chosen.groups, chosen.staleness)
    found = measure(names, chosen.rounds, setting)
    write("route-steps", "Routes in a real step", section(found, setting)[1:])


if __name__ == "__main__":
    main()
