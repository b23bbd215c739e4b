"""Reader of study files: TOML files with settings, and the configurations (arms) to compare in
each.

A study is a folder with one comparison for each setting. docs/studies.md explains the file.
"""

import argparse
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from unstale.analysis.report.compare import LAUNCHES, PLAN
from unstale.analysis.report.compare_tables import write_comparison
from unstale.analysis.report.study import MEASURES
from unstale.analysis.report.study_tables import write_results
from unstale.cli.recipe_options import configure_recipe, file_values, is_study
from unstale.config import ConfigError, nearest
from unstale.config.files import read_mapping
from unstale.config.options import merged, read_values
from unstale.config.routes import routes
from unstale.durability.run_folder import dumps, write_whole
from unstale.lint.reach import equal_reach
from unstale.research.compare import Arm, ComparisonPlan, naming, plan
from unstale.research.launcher import Plan

TABLES = ("study", "options", "arms", "dials", "parts", "planned")
"""Names of the tables that a study file may have."""
REACH = "reach"
"""Key in a configuration's table. The value `equal` computes the configuration's limits so that the
ratio pi / mu can move as far from 1 as under the reference's limits.
"""

SEEDS = 3
"""Number of runs of each configuration, unless the command or the study sets another number."""

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StudyArm:
    """A configuration (arm) of a study.

    With `equal_reach`, its limits are computed in each setting so that the ratio pi / mu can move
    as far from 1 as under the reference's.
    """

    arm: Arm
    equal_reach: bool = False


@dataclass(frozen=True, slots=True)
class PlannedDifferences:
    """The differences between configurations that a study plans to test before it is run.

    Their p-values are corrected for multiple tests.
    """

    settings: Sequence[str] = ()
    """Names of settings, or of parts of the study, as in `--settings`. Empty means all."""
    arms: Sequence[str] = ()
    """Names of the configurations whose difference from the reference is planned.
    Empty means all.
    """
    at: Sequence[str] = ("steps",)
    """Quantities of training at which configurations are compared, such as equal steps, tokens or
    minutes.
    """


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a study: one position of each dial, with the options of all these positions.

    A dial is a choice between sets of options.
    """

    name: str
    positions: Mapping[str, str]
    """The name of the position of each dial, by the dial's name."""
    values: Values
    parts: Mapping[str, Sequence[str]]
    """The configurations that each part of the study compares in this setting, by the part's name.
    """

    def arms(self, name: str) -> set[str]:
        """Return the configurations of this setting that `name` selects.

        `name` is a pattern, in which `*` matches any text. If it matches the setting's name, it
        selects all configurations. If it matches the name of a part, it selects those of this part.
        """
        chosen = [
            arms
            for part, arms in self.parts.items()
            if fnmatchcase(part, name) or fnmatchcase(self.name, name)
        ]
        return {arm for arms in chosen for arm in arms}


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study, as described by its file."""

    name: str
    recipe: str
    seeds: int
    reference: str
    options: Values
    arms: Mapping[str, StudyArm]
    settings: Mapping[str, Setting]
    differences: PlannedDifferences

    def chosen(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Return name of each chosen setting -> names of the configurations to compare in it.

        `names` has names of settings, or of parts of the study (of which each may contain several
        settings). `*` in a name matches any text. Without names, all settings are chosen. Raises
        `ConfigError` for a name that matches none.
        """
        found: dict[str, set[str]] = {name: set() for name in self.settings}
        for name in names or ["*"]:
            arms = {setting.name: setting.arms(name) for setting in self.settings.values()}
            if not any(arms.values()):
                parts = [part for setting in self.settings.values() for part in setting.parts]
                known = list(dict.fromkeys([*parts, *self.settings]))
                raise ConfigError(f"no setting or part is called {name!r}{nearest(name, known)}")
            for setting, chosen in arms.items():
                found[setting] |= chosen
        return {
            name: [arm for arm in self.arms if arm in chosen]
            for name, chosen in found.items()
            if chosen
        }


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """The runs of a study: one comparison for each chosen setting."""

    folder: Path
    study: Study
    planned: Sequence[tuple[str, str]]
    """The planned differences, as pairs (setting, configuration that is compared with the
    reference).
    """
    comparisons: tuple[ComparisonPlan, ...]

    def remember(self, command: str) -> None:
        """Write the plan of the study and the plans of its comparisons into their folders.

        The study's plan contains all settings of the file, because p-values are corrected for all
        planned differences. After the first run, the planned differences do not change. Differences
        that are planned later remain exploratory.
        """
        path = self.folder / PLAN
        stored = read_mapping(path) if path.is_file() else {}
        planned = {"planned": self.planned, "at": self.study.differences.at}
        if any(self.folder.glob(f"*/{LAUNCHES}")):
            planned = {name: stored.get(name, value) for name, value in planned.items()}
        plan = {
            "commands": list(dict.fromkeys([*stored.get("commands", []), command])),
            "settings": {each.name: each.positions for each in self.study.settings.values()},
            **planned,
        }
        write_whole(path, dumps(plan, indent=2) + "\n")
        for each in self.comparisons:
            each.remember(command)

    def write(self) -> Path:
        """Write the results of the study and of each of its settings.

        Return the path of the study's tables.
        """
        for each in self.comparisons:
            write_comparison(each.folder)
        return write_results(self.folder)


def read_study(path: Path) -> Study:
    """Read a study file. Raises `ConfigError`, with file and place, for a mistake in it."""
    tables = read_mapping(path)
    for name in tables:
        if name not in TABLES:
            raise ConfigError(f"{path}: unknown table {name}{nearest(name, TABLES)}")
    for name in TABLES:
        if not isinstance(tables.setdefault(name, {}), dict):
            raise ConfigError(f"{path}, {name} must be a table, got {tables[name]!r:.40}")
    about = _about(tables["study"], path)
    options = read_values(tables["options"], f"{path}, options")
    if "recipe" in options:
        raise ConfigError(f"{path}: give the recipe as study.recipe, not in options")
    arms = {
        name: _arm(name, table, f"{path}, arms.{name}") for name, table in tables["arms"].items()
    }
    if about["reference"] not in arms:
        raise ConfigError(
            f"{path}: study.reference is {about['reference']!r}, which is not an arm"
            f"{nearest(about['reference'], list(arms))}"
        )
    settings = _settings(tables["dials"], tables["parts"], about["reference"], list(arms), path)
    study = Study(
        name=options.pop("name", "") or path.stem,
        **about,
        options=options,
        arms=arms,
        settings=settings,
        differences=_planned_differences(tables["planned"], list(arms), path),
    )
    with naming("settings", f"{path}, planned"):
        study.chosen(study.differences.settings)
    return study


def _about(table: Values, path: Path) -> dict[str, Any]:
    """Return recipe, number of seeds and reference configuration from the table `study`, by key."""
    kinds = {"recipe": str, "seeds": int, "reference": str}
    for name in table:
        if name not in kinds:
            raise ConfigError(f"{path}: unknown key study.{name}{nearest(name, list(kinds))}")
    for name, kind in kinds.items():
        if type(table.get(name)) is not kind:
            words = "a whole number" if kind is int else "a text"
            raise ConfigError(f"{path}: study.{name} must be {words}, got {table.get(name)!r}")
    return dict(table)


def _planned_differences(table: Values, arms: Sequence[str], path: Path) -> PlannedDifferences:
    """Return the planned differences of a study file. Names of settings are not checked here."""
    known = {"settings": None, "arms": arms, "at": MEASURES}
    for name in table:
        if name not in known:
            raise ConfigError(f"{path}: unknown key planned.{name}{nearest(name, list(known))}")
    return PlannedDifferences(
        **{
            name: _names(value, known[name] or value, f"{path}, planned.{name}")
            for name, value in table.items()
        }
    )


def _arm(name: str, table: Any, where: str) -> StudyArm:
    """Return a configuration from its table in a study file.

    Its route (method to compute `old_logp`) is `old_logps.route`, or else the route that has the
    configuration's name, if there is one.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a table of options, got {table!r:.40}")
    reach = table.get(REACH, "nominal")
    if reach not in ("nominal", "equal"):
        raise ConfigError(f"{where}: {REACH} must be nominal or equal, got {reach!r}")
    values = read_values({key: each for key, each in table.items() if key != REACH}, where)
    route = values.get("old_logps.route", name if name in routes() else None)
    if isinstance(route, str) and route in routes():
        values = {**Arm.of_route(route).values, **values}
    return StudyArm(Arm(name, values), equal_reach=reach == "equal")


def _settings(
    dials: Values, parts: Values, reference: str, arms: Sequence[str], path: Path
) -> dict[str, Setting]:
    """Return all settings of the parts, in the order of the file.

    A dial is a choice between sets of options. Each setting has one position of every dial.
    """
    positions = _dials(dials, path)
    found: dict[str, Setting] = {}
    for part, table in parts.items():
        where = f"{path}, parts.{part}"
        if not isinstance(table, dict):
            raise ConfigError(f"{where} must be a table of lists, got {table!r:.40}")
        for key in table:
            if key != "arms" and key not in positions:
                raise ConfigError(f"{where}: unknown dial {key}{nearest(key, list(positions))}")
        chosen = _names(table.get("arms", list(arms)), arms, f"{where}.arms")
        if reference not in chosen:
            raise ConfigError(f"{where}.arms must have the reference {reference!r}")
        axes = [
            _names(table.get(dial, list(values)[:1]), list(values), f"{where}.{dial}")
            for dial, values in positions.items()
        ]
        for names in itertools.product(*axes):
            each = [positions[dial][name] for dial, name in zip(positions, names, strict=True)]
            name = "-".join(names)
            earlier = found[name].parts if name in found else {}
            found[name] = Setting(
                name,
                dict(zip(positions, names, strict=True)),
                _joined(each, where),
                {**earlier, part: chosen},
            )
    if not found:
        raise ConfigError(f"{path} has no settings: add a table such as [parts.all]")
    return found


def _dials(dials: Values, path: Path) -> dict[str, dict[str, Values]]:
    """Return the options of each position of each dial, by the names of dial and position."""
    if not dials:
        raise ConfigError(f"{path} has no dials: add a table such as [dials.bound]")
    for dial, table in dials.items():
        if not isinstance(table, dict) or not table or dial == "arms":
            raise ConfigError(
                f"{path}, dials.{dial} must be a table of named settings of options, "
                f"and not be called arms; got {table!r:.40}"
            )
        for name in table:
            if not re.fullmatch(r"[A-Za-z0-9_.]+", name):
                raise ConfigError(
                    f"{path}, dials.{dial}: {name!r} must have only letters, digits, _ and ., "
                    "because it becomes a part of a folder name"
                )
    return {
        dial: {
            name: read_values(values, f"{path}, dials.{dial}.{name}")
            for name, values in table.items()
        }
        for dial, table in dials.items()
    }


def _names(value: Any, known: Sequence[str], where: str) -> list[str]:
    """Return the list of names `value` from a study file.

    Raises `ConfigError` if it is not a list, or if a name is not in `known`.
    """
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise ConfigError(f"{where} must be a list of names, got {value!r:.60}")
    for name in value:
        if name not in known:
            raise ConfigError(f"{where}: {name!r} is unknown{nearest(name, known)}")
    return value


def _joined(tables: Sequence[Values], where: str) -> Values:
    """Return the options of several dials in one mapping.

    Raises `ConfigError` if two dials set the same option.
    """
    joined: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            if joined.setdefault(name, value) != value:
                raise ConfigError(f"{where}: two dials set {name}, to {joined[name]} and {value}")
    return joined


def study_plan(study: Study, chosen: argparse.Namespace) -> StudyPlan:
    """Return the runs of a study in the settings that the command line `chosen` selects.

    Raises `ConfigError` if the linter refuses a configuration in a setting.
    """
    shared = merged(study.options, chosen.values)
    folder = configure_recipe(study.recipe, shared).runs / (shared.pop("name", "") or study.name)

    def options_of(setting: str) -> Values:
        values = merged(shared, study.settings[setting].values)
        return {**values, "runs": folder, "name": setting}

    comparisons = []
    for setting, names in study.chosen(chosen.settings).items():
        with naming(setting, "setting"):
            options = options_of(setting)
            arms = _arms_of(study, names, options)
            each = plan(arms, chosen.seeds or study.seeds, recipe=study.recipe, values=options)
            comparisons.append(replace(each, reference=study.reference))
    planned = []
    for setting, names in study.chosen(study.differences.settings).items():
        with naming(setting, "setting"):
            arms = _arms_of(study, names, options_of(setting))
        compared = study.differences.arms or [name for name in names if name != study.reference]
        planned += [(setting, arm.name) for arm in arms if arm.name in compared]
    if not planned:
        raise ConfigError("planned chooses no difference: its settings do not have its arms")
    return StudyPlan(folder, study, planned, tuple(comparisons))


def _arms_of(study: Study, names: Sequence[str], options: Values) -> list[Arm]:
    """Return the configurations of a setting, each with the setting's `options`.

    A configuration is left out if its options are those of the reference or of an earlier one.
    """

    def configure(arm: Arm) -> Any:
        with naming(arm.name):
            return configure_recipe(study.recipe, merged(options, arm.values))

    reference = configure(study.arms[study.reference].arm)
    arms, seen = [], [reference]
    for name in names:
        if name == study.reference:
            arms.append(study.arms[name].arm)
            continue
        arm = study.arms[name].arm
        config = configure(arm)
        if study.arms[name].equal_reach:
            with naming(name):
                reached = {**equal_reach(config, reference), **arm.values}
            arm = replace(arm, values=reached)
            config = configure(arm)
        if config not in seen:
            seen.append(config)
            arms.append(arm)
    return arms


def planned(chosen: argparse.Namespace) -> Plan:
    """Return the runs that the command `compare` was asked for, from a study file or from arms."""
    if is_study(chosen.config):
        if chosen.recipe or chosen.routes or chosen.arms:
            raise ConfigError(f"{chosen.config} is a study: its recipe and arms are in the file")
        return study_plan(read_study(chosen.config), chosen)
    if chosen.settings:
        raise ConfigError("--settings needs a study file, whose settings it chooses")
    values = file_values(chosen)
    recipe = chosen.recipe or values.get("recipe")
    if not recipe:
        raise ConfigError("compare needs a recipe, a study, or --report and a folder of results")
    arms = [*map(Arm.of_route, chosen.routes), *map(Arm.parse, chosen.arms)]
    return plan(arms, chosen.seeds or SEEDS, recipe=recipe, values=values)
