"""Test the registry of environments.

One file declares an environment and its options, and it trains. The options are in the help and are
refused for other environments. Names and options are listed without importing torch. Any error in a
module of the user's own is one line that names the file and the line.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.test_run import quiet, small
from tests.support.distributions import add_distribution
from unstale.cli import session
from unstale.cli.recipe_options import options_help
from unstale.config import ConfigError, make_task
from unstale.config.options import override
from unstale.config.plugins import read_entry_points
from unstale.config.tasks import envs
from unstale.envs import ListedTasks
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset, data_digests
from unstale.observe.trackers import find_trackers
from unstale.recipes import RECIPES, make_recipe
from unstale.testing import check_env

FILE = '''
from dataclasses import dataclass

from unstale.config import TaskConfig
from unstale.config.checks import PositiveInt
from unstale.envs import Message, NumberedTasks, Turn
from unstale.config.tasks import EnvSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoConfig(TaskConfig):
    """The tasks of the echo."""

    env: str = "echo"
    digits: PositiveInt = 2
    """Digits of the number to repeat."""


class EchoTasks(NumberedTasks):
    name = "echo"
    tools = ()

    def __init__(self, digits):
        self.digits = digits

    def env(self, task, seed):
        return Echo(str(self.seed_of(task))[: self.digits])


class Echo:
    def __init__(self, number):
        self.number = number

    async def begin(self):
        return Turn((Message("user", self.number),))

    async def step(self, reply):
        return Turn((), done=True, rewards={"right": float(self.number in reply.content)})


ENV = EnvSpec("echo", lambda options: EchoTasks(options.digits), EchoConfig)
'''


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "echo_env.py").write_text(FILE)
    add_distribution(tmp_path, "echo", {"unstale.environments": {"echo": "echo_env:ENV"}})
    monkeypatch.syspath_prepend(tmp_path)
    forget = (read_entry_points.cache_clear, envs.cache_clear)
    for each in forget:
        each()
    yield
    sys.modules.pop("echo_env", None)
    for each in forget:
        each()


@pytest.mark.usefixtures("echo")
def test_one_file_declares_an_environment_that_trains(tmp_path: Path) -> None:
    task = make_task("echo", digits=3)
    check_env(build_taskset(task), episodes=4)
    rows = session.train(small(tmp_path, task=task, max_steps=2), console=quiet()).metrics
    assert [row["step"] for row in rows] == [0, 1, 2]


@pytest.mark.usefixtures("echo")
def test_its_options_are_in_the_help_where_it_is_chosen() -> None:
    chosen = options_help(["train", "calculator"], {"task.env": "echo"})
    assert "--task.digits INT" in chosen and "Digits of the number to repeat. Now: 2" in chosen
    assert "--task.latency_s" not in chosen
    other = options_help(["train", "retail"], {})
    assert "--task.latency_s" in other and "--task.digits" not in other


@pytest.mark.usefixtures("echo")
def test_its_options_are_refused_with_another_environment() -> None:
    config = RECIPES["calculator"]()
    chosen = override(config, {"task.env": "echo", "task.digits": 4})
    assert chosen.task == make_task("echo", digits=4)
    with pytest.raises(ConfigError, match=r"task\.digits is an option of echo; task.env is retail"):
        override(config, {"task.env": "retail", "task.digits": 4})
    with pytest.raises(ConfigError, match=r"task\.digits must be >= 1, got 0"):
        make_task("echo", digits=0)
    with pytest.raises(ConfigError, match=r"task\.env cannot be 'ecko'; did you mean echo"):
        make_task("ecko")


def test_names_and_options_are_known_without_torch() -> None:
    code = (
        "import sys; from unstale.config.tasks import libraries, shipped_envs; "
        "print(sorted(shipped_envs()), sorted(libraries()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    desks = (
        "'delivery', 'desks', 'instore', 'python', 'reasoning-gym', 'retail', 'synthesis', 'tau2', "
        "'telecom', 'terminal', 'traces', 'vita'"
    )
    envs_ = f"['airline', 'bfcl', 'calculator', 'chain', 'dataset', {desks}]"
    libraries = "['bfcl', 'gymnasium', 'openenv', "
    assert done.stdout.startswith(f"{envs_} {libraries}") and done.stdout.endswith("False\n")


USES: dict[str, Callable[[str], object]] = {
    "task.env": lambda name: build_taskset(make_task(name)),
    "task.reward": lambda name: build_taskset(make_task("dataset:rows.jsonl", reward=name)),
    "recipe": make_recipe,
    "trackers": find_trackers,
}


MISTAKES = {
    "no_colon": ("x = 1\ndef made()\n    pass\n", r"SyntaxError: .* \(no_colon.py, line 2\)"),
    "no_name": (
        "x = 1\nmade = y\n",
        r"NameError: .*'y'.* \(.*no_name.py, line 2, in <module>: made = y\)",
    ),
    "leaves": ("exit(3)\n", "SystemExit: 3 "),
    "nothing": ("", "AttributeError: module 'nothing' has no attribute 'made'"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_in_a_module_of_ones_own_is_one_line(
    use: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, says = MISTAKES[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigError, match=rf"{use}.*{name}:made.*: {says}") as raised:
        USES[use](f"{name}:made")
    assert "\n" not in str(raised.value)


def test_a_module_of_the_current_folder_precedes_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line has the current folder last, so that no other import reads it first."""
    for folder in ("here", "installed"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "taken.py").write_text(f"from {folder}_part import made\n")
        (tmp_path / folder / f"{folder}_part.py").write_text(
            "from types import SimpleNamespace as Made\n"
            f"made = lambda: Made(name={folder!r}, train=0, held_out=0, env=0, tools=())\n"
        )
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *filter(None, sys.path)])
    before = [*sys.path]
    for last, expected in (((), "installed"), (("",), "here"), ((os.getcwd(),), "here")):
        sys.path[:] = [*before, *last]
        monkeypatch.delitem(sys.modules, "taken", raising=False)
        assert build_taskset(make_task("taken:made")).name == expected
        assert sys.path == [*before, *last]


def test_an_error_names_the_installed_module_that_was_imported() -> None:
    with pytest.raises(ConfigError, match=r"\(.*json/__init__.py: this is an installed module"):
        build_taskset(make_task("json:made"))


SPLITS = ("train", "held_out")


def test_a_mixture_has_the_digests_of_the_rows_of_its_parts() -> None:
    def make(name: str, *rows: int) -> ListedTasks:
        class Tasks(ListedTasks):
            tools = ()

        tasks = Tasks()
        tasks.name, tasks.data = name, dict(zip(SPLITS, (list(rows), [0]), strict=True))
        return tasks

    def mixed(*rows: int) -> dict[str, str]:
        inner = MixedTasks("inner", [make("a", 1), make("b", *rows)])
        return data_digests(MixedTasks("outer", [inner, CalculatorTasks()]))

    before = mixed(1, 2)
    assert before == mixed(1, 2)
    changed = {name for name, digest in mixed(1, 3).items() if digest != before[name]}
    assert before.keys() == {f"inner/{name}/{split}" for name in "ab" for split in SPLITS}
    assert changed == {"inner/b/train"}
