"""Test what a command does before it imports torch.

It refuses what cannot run. It starts the processes of the engines that it will use, and no others.
"""

import asyncio
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_runs import tiny_run
from tests.support.waits import LIMIT_S
from unstale.cli.main import parse
from unstale.cli.preflight import start_engines
from unstale.cli.recipe_options import configure
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import RunLog
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.testing import tiny_policy
from unstale.weights import child_process

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tiny_policy().save(path)
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the processes that are started from now on. They are killed at the end."""
    processes: list[Any] = []
    begin = child_process.subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        processes.append(begin(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(child_process.subprocess, "Popen", counted)
    monkeypatch.setattr(child_process, "_early", {})
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_the_engines_use_the_processes_that_were_started(
    folder: Path, tmp_path: Path, started: list[Any]
) -> None:
    config = tiny_run(folder, tmp_path, deterministic=False)
    config = replace(config, engine=replace(config.engine, processes=2))
    start_engines(config)
    assert len(started) == 2

    async def use() -> None:
        options = EngineOptions(folder, threads=config.engine.threads)
        for _ in range(2):
            engine = EmbeddedEngine(options)
            async with asyncio.timeout(LIMIT_S):
                await engine.start()
            await engine.close()

    asyncio.run(use())
    assert len(started) == 2


def test_no_process_is_started_for_engines_elsewhere(
    folder: Path, tmp_path: Path, started: list[Any]
) -> None:
    config = tiny_run(folder, tmp_path, deterministic=False)
    for section, changes in (
        ("engine", {"backend": "vllm"}),
        ("cluster", {"engine_hosts": 2}),
        ("cluster", {"trainers": 2}),
    ):
        start_engines(replace(config, **{section: replace(getattr(config, section), **changes)}))
    assert started == []


@pytest.mark.parametrize(
    ("before", "during", "enabled", "frozen"),
    [
        ("", "import json", True, True),
        ("", "import no_such_module", True, True),
        ("gc.disable()", "import json", False, False),
        ("sys.modules['torch'] = sys", "import json", True, False),
    ],
)
def test_garbage_is_collected_after_the_imports_as_before(
    before: str, during: str, enabled: bool, frozen: bool
) -> None:
    """A host program may have disabled it. One that has imported torch has nothing to save."""
    program = f"""
import contextlib, gc, sys
from unstale.cli.preflight import quick_imports
{before}
with contextlib.suppress(ImportError), quick_imports():
    print(gc.isenabled())
    {during}
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(not frozen and enabled), str(enabled), str(frozen)]


def test_what_cannot_run_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Otherwise each of these messages would come some seconds later."""
    train = ["train", "calculator", "--runs", str(tmp_path)]
    run = tmp_path / "first"
    with RunLog.create(run, configure(parse([*train, "--name", "first"]))), Journal(run / JOURNAL):
        pass
    streamed = ["--trainer.stream", "true", "--schedule.group_size", "1"]  # rules that need torch
    refused = [
        ("keeps its cache", [*train, "--engine.keep_cache", "true"]),
        ("first already holds a run", [*train, "--name", "first"]),
        ("there is no folder nowhere/at-all", [*train, "--model", "nowhere/at-all"]),
        ("no model folder at nowhere", [*train, "--model", "./nowhere"]),
        ("the policy has 2048", [*train, *streamed, "--engine.max_context", "4096"]),
        ("seed cannot change from 0 to 3", ["train", "--resume", str(run), "--seed", "3"]),
        ("nowhere is neither", ["eval", "./nowhere"]),
        ("nowhere is neither", ["serve", "./nowhere", "calculator"]),
        ("nowhere must be a folder", ["plan", "--model", "./nowhere", "--gpus", "8"]),
        *(
            ("nowhere is not a run folder", [command, "./nowhere", *rest])
            for command, *rest in (
                ("audit",),
                ("probe-distillation", "teacher"),
                ("export", "out"),
                ("push-to-hub",),
                ("replay",),
                ("same", str(run)),
            )
        ),
        ("nowhere is not a run folder", ["simulate", "--like", "./nowhere"]),
    ]
    program = f"""
import sys
from unstale.cli.main import main
for command in {[command for _, command in refused]!r}:
    try:
        main(command)
    except SystemExit as end:
        assert end.code == 2
    assert "torch" not in sys.modules, command
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (says, command), line in zip(refused, done.stderr.splitlines(), strict=True):
        assert says in line, command


def test_the_standard_streams_are_not_replaced_while_modules_are_imported() -> None:
    """Imported modules may keep a reference to them, for example in a handler of `logging`."""
    program = """
import sys
before = sys.stdout, sys.stderr
from unstale.cli.preflight import quick_imports
with quick_imports():
    assert (sys.stdout, sys.stderr) == before
"""
    terminal, end = pty.openpty()
    try:
        environment = {**os.environ, "TERM": "xterm"}
        command = [sys.executable, "-c", program]
        subprocess.run(command, env=environment, stderr=end, check=True, timeout=LIMIT_S)
        assert b"loading torch" in os.read(terminal, 10_000)
    finally:
        os.close(end)
        os.close(terminal)
