"""Another package adds a thing of every kind by entry points: each is one module of it.

`tests/foreign_package` is such a package. Its metadata is written from its `pyproject.toml`, as pip
writes it, and the commands run in a process that has both on its path.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions import add_distribution
from unstale.config.checks import ConfigError
from unstale.config.plugins import Plugins, read_entry_points
from unstale.durability.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "foreign_package"

PROGRAM = """
import contextlib, io, json, pickle, subprocess, sys
from importlib import import_module
from unstale.cli.main import main
from unstale.recipes import make_recipe

READ = "import pickle, sys; c = pickle.load(sys.stdin.buffer); print(c.task, c.old_logps)"

def run(words):
    if words[0] == "page":
        print(import_module(words[1]).page())
    elif words[0] == "pickle":
        config = pickle.dumps(make_recipe(words[1]))
        read = [sys.executable, "-c", READ]
        print(subprocess.run(read, input=config, capture_output=True, check=True).stdout.decode())
    else:
        main(words)

for words in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(words)
        except SystemExit as end:
            code = end.code
    names = [name for name in sys.modules if name.partition(".")[0] in ("foreign_things", "torch")]
    row = {"code": code, "out": out.getvalue(), "err": err.getvalue(), "modules": names}
    print(json.dumps(row))
"""


def run_commands(path: Sequence[Path], commands: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run commands in one process. Return exit code, output and imported modules of each."""
    words = [command.split() for command in commands]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "COLUMNS": "200"},
        cwd=path[0],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    return dict(zip(commands, map(json.loads, done.stdout.splitlines()), strict=True))


CHOSEN = "lint tiny_echo --objective.ceiling 1.0001 --old_logps.shift 0.2 --task.digits 1"
TRAIN = "train tiny_echo --runs . --name"
TRAINED = f"{TRAIN} all --task.isolate process --task.workers 1 --task.digits 1"
CONSTANT = f"{TRAIN} constant --engine.backend constant --engine.args 7 --max_steps 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("foreign")


@pytest.fixture(scope="module")
def told(folder: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return what each command prints where the foreign package is installed."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    add_distribution(folder, project["name"], project["entry-points"])
    commands = ["--help", "shout hi", "recipes", "train tiny_echo --help", CHOSEN, "techniques"]
    pages = ["page tools.options_page", "page tools.techniques_page", "pickle tiny_echo"]
    return run_commands([folder, PACKAGE, ROOT], [*commands, *pages, TRAINED, CONSTANT])


def test_every_kind_has_a_thing_in_one_module() -> None:
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    values = [each for group in project["entry-points"].values() for each in group.values()]
    modules = [path.stem for path in (PACKAGE / "foreign_things").glob("*.py")]
    named = [value.partition(":")[0].removeprefix("foreign_things.") for value in values]
    assert sorted(named) == sorted(set(modules) - {"__init__"})


def test_names_are_listed_without_an_import(told: Mapping[str, Mapping[str, Any]]) -> None:
    assert "a command of foreign-things 0.1" in told["--help"]["out"]
    assert told["--help"]["modules"] == []
    assert told["shout hi"]["out"] == "HI!\n"
    assert told["shout hi"]["modules"] == ["foreign_things", "foreign_things.verb"]


def test_declarations_need_no_torch(told: Mapping[str, Mapping[str, Any]]) -> None:
    modules = told["techniques"]["modules"]
    assert "foreign_things.technique" in modules and "torch" not in modules
    assert "foreign_things.engine" not in modules and "foreign_things.tracker" not in modules


def test_help_and_tables_list_it(told: Mapping[str, Mapping[str, Any]]) -> None:
    text = told["train tiny_echo --help"]["out"]
    for option in ("task.digits", "old_logps.shift", "objective.ceiling", "gentle.factor"):
        assert f"--{option} " in text
    for choice in ("shifted", "ceiling", "reward_alone", "constant"):
        assert choice in text
    assert "Two steps of the echo." in told["recipes"]["out"]
    assert "gentle" in told["techniques"]["out"]
    options = told["page tools.options_page"]["out"]
    assert "| `ceiling` | -min(S, ceiling) A | a test | never |" in options
    for option in ("task.digits", "old_logps.shift", "objective.ceiling", "gentle.factor"):
        assert f"| `{option}` |" in options
    assert "### `gentle`" in told["page tools.techniques_page"]["out"]


def test_lint_uses_its_meaning_and_bounds(told: Mapping[str, Mapping[str, Any]]) -> None:
    text = told[CHOSEN]["out"]
    assert "the shift" in text and "ceiling: nothing above 1.0001" in text
    assert "S at 0.0001" in text, "the bound is narrower than the noise"
    assert "gentle: the learning rate times 0.5" in text


def test_a_run_trains_with_it(told: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    assert told[TRAINED]["code"] == 0, told[TRAINED]["err"]
    *steps, outcome = (folder / "all" / "lines.txt").read_text().splitlines()
    assert [line.split()[0] for line in steps] == ["1", "2"] and outcome == "finished"
    rows = RunFolder(folder / "all").metrics()
    assert {row["gentle/factor"] for row in rows[-2:]} == {0.5}
    assert "|log D| 0.1000" in told[TRAINED]["out"], "D is the shift of the route"


def test_a_run_samples_with_its_engine(told: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    assert told[CONSTANT]["code"] == 0, told[CONSTANT]["err"]
    rows = RunFolder(folder / "constant").metrics()
    assert rows[-1]["step"] == 1


def test_another_process_reads_a_configuration(told: Mapping[str, Mapping[str, Any]]) -> None:
    assert "digits=2" in told["pickle tiny_echo"]["out"]
    assert "shifted" in told["pickle tiny_echo"]["out"]


def test_broken_packages_break_only_runs_that_use_them(tmp_path: Path) -> None:
    broken = {
        "unstale.objectives": {"gone": "no_such_module:Gone"},
        "unstale.techniques": {"wrong": "json:dumps", "trainer": "json:loads"},
        "unstale.environments": {"retail": "json:loads", "lost": "no_such_module:ENV"},
        "unstale.engines": {"vllm": "json:loads"},
        "unstale.verbs": {"fail": "builtins:id"},
        "unstale.recipes": {"both": "json:loads"},
    }
    add_distribution(tmp_path, "broken", broken)
    add_distribution(tmp_path, "second", {"unstale.recipes": {"both": "json:loads"}})
    use = {
        "lint retail --objective.loss_type gone": "'gone' of broken 0.1 in the group "
        "unstale.objectives cannot be used: ModuleNotFoundError: No module named 'no_such_module'",
        "lint retail --techniques wrong": "'wrong' of broken 0.1 in the group unstale.techniques "
        "cannot be used: json:dumps is of type function, not Entry with this name",
        "lint retail --task.env lost": "'lost' of broken 0.1 in the group unstale.environments "
        "cannot be used: ModuleNotFoundError",
        "lint both": "'both' of broken 0.1 and second 0.1 in the group unstale.recipes cannot be "
        "used: both have it",
        "fail": "'fail' of broken 0.1 in the group unstale.verbs cannot be used: it adds no "
        "command with this name",
    }
    told = run_commands([tmp_path, ROOT], ["lint retail", "lint calculator", *use])
    assert told["lint retail"]["code"] == 0 == told["lint calculator"]["code"]
    warnings = [line for line in told["lint retail"]["err"].splitlines() if "broken" in line]
    names = ("gone", "lost", "retail", "trainer", "vllm", "wrong")
    assert sorted(line.split("'")[1] for line in warnings) == list(names)
    assert all("unstale has this name" in line for line in warnings if "'vllm'" in line)
    assert told["lint calculator"]["err"] == "", "each warning is printed once"
    for command, words in use.items():
        assert told[command]["code"] == 2
        assert words in " ".join(told[command]["err"].split())


def test_an_entry_point_that_ends_the_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_here.py").write_text("raise SystemExit('no licence')")
    add_distribution(tmp_path, "ending", {"unstale.tests": {"it": "ends_here:x"}})
    monkeypatch.syspath_prepend(tmp_path)
    read_entry_points.cache_clear()
    plugins = Plugins("unstale.tests", object)
    with pytest.raises(ConfigError, match="cannot be used: SystemExit: no licence"):
        plugins.load("it")
    assert plugins.load("another") is None
