"""The plan of a comparison: several configurations (arms), each trained with several seeds.

A comparison is a folder. For each run it has `<arm>-seed<k>/` and `<arm>-seed<k>.log`. `plan.json`
lists the planned runs, `launches.jsonl` the start and end of each process, and `compare.md` has
the results. `unstale.research.launcher` runs a plan.
"""

import itertools
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unstale.analysis.report.compare import PLAN
from unstale.analysis.report.compare_tables import write_comparison
from unstale.cli.recipe_options import configure_recipe, refuse_unknown, split_options
from unstale.config import ConfigError, RunConfig
from unstale.config.files import read_mapping
from unstale.config.options import merged
from unstale.config.routes import routes
from unstale.durability.run_folder import dumps, write_whole
from unstale.lint import check

SHARED = (
    "runs",
    "name",
    "seed",
    "max_steps",
    "minutes",
    "schedule.groups_per_step",
    "schedule.group_size",
)
"""Options that all configurations of a comparison must have in common. So must the options of
`eval`.
"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration of a comparison: its name, and the recipe options that it changes."""

    name: str
    values: Mapping[str, Any]

    @property
    def folder(self) -> str:
        """The configuration's name with `-` in place of characters that are not allowed in folder
        names.

        The folder name of each of its runs begins with it.
        """
        return re.sub(r"[^A-Za-z0-9_.]+", "-", self.name).strip("-.")

    @classmethod
    def of_route(cls, route: str) -> "Arm":
        arm = cls.parse(f"{route}: old_logps.route={route}")
        return replace(arm, values={**arm.values, **routes()[route].requires})

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Return the configuration that the text `name: section.option=value ...` describes.

        Raises ConfigError for text of another form.

        >>> Arm.parse("no reset: old_logps.route=ppo_ewma_async old_logps.beta=0.75").values
        {'old_logps.route': 'ppo_ewma_async', 'old_logps.beta': 0.75}
        """
        name, colon, changes = text.partition(":")
        name = name.strip()
        words = shlex.split(changes)
        if not colon or not name or not all("=" in word for word in words):
            raise ConfigError(
                f"an arm is written 'name: section.option=value section.option=value', got {text!r}"
            )
        with naming(name):
            rest, values = split_options([f"--{word.removeprefix('--')}" for word in words])
            if rest:
                refuse_unknown(rest)
        return cls(name, values)


@contextmanager
def naming(name: str, kind: str = "arm") -> Iterator[None]:
    """Return a context that adds the name of a configuration to the message of a `ConfigError`.

    `kind` is the word before the name.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{kind} {name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned run of one configuration with one seed.

    `config` is the recipe with the options in `values`.
    """

    arm: str
    values: Mapping[str, Any]
    config: RunConfig

    @property
    def folder(self) -> Path:
        return self.config.runs / self.config.name

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def words(self) -> list[str]:
        """The arguments of the command `unstale` that starts this run."""
        options = [f"--{name}={_word(value)}" for name, value in self.values.items()]
        return ["train", self.config.recipe, *options]

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", "unstale", *self.words]


def _word(value: Any) -> str:
    """Return the value of an option in the form that the command line takes."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonPlan:
    """The runs of a comparison, in order of execution.

    All configurations (arms) of one seed come before the next seed. So the results of an
    interrupted comparison can be compared.
    """

    folder: Path
    runs: tuple[Planned, ...]
    warnings: Mapping[str, Sequence[str]]
    """The linter's warnings about each configuration, by the configuration's name."""
    reference: str = ""
    """Name of the configuration with which the others are compared. If empty, the page of results
    chooses one.
    """

    @property
    def comparisons(self) -> "Sequence[ComparisonPlan]":
        return (self,)

    def remember(self, command: str) -> None:
        """Merge the plan into `plan.json`. Configurations and seeds of earlier commands are kept.

        `command` is the command line, for the results.
        """
        path = self.folder / PLAN
        stored: dict[str, Any] = read_mapping(path) if path.is_file() else {}
        runs = {run["folder"]: run for run in stored.get("runs", [])}
        runs |= {
            run.folder.name: {"arm": run.arm, "seed": run.config.seed, "folder": run.folder.name}
            for run in self.runs
        }
        commands = list(dict.fromkeys([*stored.get("commands", []), command]))
        warnings = stored.get("warnings", {}) | self.warnings
        merged = {"commands": commands, "runs": list(runs.values()), "warnings": warnings}
        if self.reference:
            merged["reference"] = self.reference
        self.folder.mkdir(exist_ok=True)
        write_whole(path, dumps(merged, indent=2) + "\n")

    def write(self) -> Path:
        """Write the results, and return the path of their tables."""
        return write_comparison(self.folder)


def plan(
    arms: Sequence[Arm], seeds: int, *, recipe: str, values: Mapping[str, Any]
) -> ComparisonPlan:
    """Return the runs of a comparison. Raises `ConfigError` if the linter refuses a configuration.

    All configurations (arms) have the options in `values` and train for the same number of steps,
    without the recipe's limit in minutes. If the recipe evaluates only at start and end, the runs
    are evaluated eight times.
    """
    _distinct(arms)
    if len(arms) < 2 or seeds < 1:
        raise ConfigError(
            f"a comparison needs at least 2 arms and 1 seed, got {len(arms)} and {seeds}"
        )
    if "minutes" in values:
        raise ConfigError(
            "minutes would stop slow arms early, and arms are compared at equal steps; "
            "give --max_steps instead"
        )
    config = configure_recipe(recipe, values)
    folder = config.runs / (config.name or f"compare-{config.recipe.rpartition(':')[2]}")
    every = config.eval.interval or max(1, config.max_steps // 8)
    shared = {name: value for name, value in values.items() if name != "recipe"}
    shared |= {"minutes": 0.0, "eval.interval": every, "runs": folder}
    runs: list[Planned] = []
    warnings: dict[str, list[str]] = {}
    for seed, arm in itertools.product(range(config.seed, config.seed + seeds), arms):
        changes = {**merged(shared, arm.values), "seed": seed, "name": f"{arm.folder}-seed{seed}"}
        with naming(arm.name):
            runs.append(Planned(arm.name, changes, configure_recipe(recipe, changes)))
            if arm.name not in warnings:  # the linter does not read the seed
                verdict = check(runs[-1].config)
                verdict.require()
                warnings[arm.name] = [str(warning) for warning in verdict.warnings]
    return ComparisonPlan(folder=folder, runs=tuple(runs), warnings=warnings)


def _distinct(arms: Sequence[Arm]) -> None:
    """Raise ConfigError if configurations share a folder name, or if one sets an option of
    `SHARED`.
    """
    counts = Counter(arm.folder for arm in arms)
    for arm in arms:
        if not arm.folder or counts[arm.folder] > 1:
            raise ConfigError(f"arm {arm.name!r} needs a unique name of letters, digits, _ and .")
        for name in arm.values:
            if name in SHARED or name.startswith("eval."):
                raise ConfigError(
                    f"arm {arm.name!r}: {name} is the same for all arms; give it as --{name}"
                )
