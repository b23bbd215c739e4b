"""Test the process of a vLLM server, without vLLM.

It leaves no unused folder and takes the user's environment variables except those of the run. When
its parent dies it is terminated, then killed with all its children.
"""

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.support.waits import LIMIT_S, wait_until
from unstale.cli.session import train
from unstale.cluster.gpus import gpu_memory_utilization
from unstale.config import SHIPPED_POLICY, ConfigError, EngineConfig, RunConfig
from unstale.engines import EngineDied, vllm_server
from unstale.engines.registry import EngineOptions
from unstale.engines.servers import vllm
from unstale.engines.vllm_server import VllmServer, gpu_share, server_environment
from unstale.lint.policy_files import num_weights
from unstale.recipes import RECIPES
from unstale.testing import tiny_policy


def made(folder: Path) -> VllmServer:
    return VllmServer(EngineOptions(folder))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        yield Path(folder)


def test_a_server_that_is_never_begun_leaves_nothing(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    made(short_path).close()
    never_closed = made(short_path)
    assert not never_closed.alive and not list(short_path.iterdir())


def test_a_folder_whose_path_is_too_long_for_sockets_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uuid = "0" * 36  # vLLM's names of sockets
    for length in (44, 45, 46):
        monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'é' * 10}".ljust(length - 10, "x"))
        if length <= 44:
            folder = Path(made(tmp_path).url.removeprefix("unix:")).parent
            assert len(os.fsencode(folder / uuid)) == 107
            continue
        with pytest.raises(
            ValueError, match=rf"has a path of {length} bytes, .* most 44 .* TMPDIR"
        ):
            made(tmp_path)


def test_flags_of_the_user_are_passed_on_and_those_of_the_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("--max-num-batched-tokens", "8192", "-O3", "--no-enable-chunked-prefill")
    options = EngineOptions(tmp_path, args=flags, gpu_memory_utilization=0.4)
    started: list[list[str]] = []

    def popen(command: list[str], **_: Any) -> None:
        started.append(command)
        raise OSError("not in this test")

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    server = VllmServer(options)
    with pytest.raises(OSError, match="not in this test"):
        server.start()
    server.close()
    (command,) = started
    assert command[-4:] == list(flags) and "--gpu-memory-utilization=0.4" in command
    refused = {
        "--model=x": "set policy instead",
        "--max_model_len": r"set engine\.max_context instead",
        "--max-": r"set engine\.max_running or engine\.max_context instead",
        "--mod": "set policy instead",
        "--dtype=half": r"set engine\.dtype instead",
        "--gpu-memory-utilization=1": r"set engine\.gpu_memory_utilization instead",
        "--uds": "the run sets it itself",
    }
    for flag, remedy in refused.items():
        with pytest.raises(ValueError, match=f"engine.args cannot set {flag}: {remedy}"):
            VllmServer(EngineOptions(tmp_path, args=(flag,)))


def test_a_server_that_is_closed_during_its_start_does_not_outlive_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` comes while a thread still prepares the start. A later start works again."""
    preparing, may_start = threading.Event(), threading.Event()
    programs = iter([["sleep", "600"], ["true"]])
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen

    def prepare(folder: Path, prefix: str) -> None:
        preparing.set()
        assert may_start.wait(LIMIT_S)

    def popen(command: list[str], **_: Any) -> "subprocess.Popen[bytes]":
        started.append(begin(next(programs), stdin=subprocess.PIPE, start_new_session=True))
        return started[-1]

    tiny_policy().save(tmp_path)
    monkeypatch.setattr(vllm_server, "find_spec", lambda name: object())
    monkeypatch.setattr(vllm_server, "remove_leftovers", prepare)
    monkeypatch.setattr(subprocess, "Popen", popen)
    engine = vllm.SPEC.make(EngineOptions(tmp_path))

    async def main() -> None:
        starting = asyncio.create_task(engine.start())
        await asyncio.to_thread(preparing.wait, LIMIT_S)
        starting.cancel()
        closing = asyncio.create_task(engine.close())
        await asyncio.wait([closing], timeout=0.2)
        may_start.set()
        await closing
        await asyncio.get_running_loop().shutdown_default_executor()
        assert [process.poll() is None for process in started] == [False]

    async def start_again() -> None:
        with pytest.raises(EngineDied, match="the server ended with exit code 0"):
            await engine.start()
        await engine.close()

    asyncio.run(main())
    asyncio.run(start_again())
    assert len(started) == 2


def test_without_vllm_the_run_ends_before_anything_starts(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm"):
        pytest.skip("vLLM is installed")
    tiny_policy().save(tmp_path / "model")
    config = replace(
        RECIPES["retail"](),
        model=str(tmp_path / "model"),
        runs=tmp_path / "runs",
        engine=EngineConfig(backend="vllm"),
    )
    with pytest.raises(ConfigError, match=r"engine\.backend = vllm needs vLLM"):
        train(config, console=Console(file=StringIO()))
    assert not (tmp_path / "runs").exists()


def test_the_servers_share_of_a_gpu_is_what_the_trainer_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"total": 80 * 10**9, "trainer_bytes": 18, "engine_bytes": 2}
    assert gpu_share(10**9, **options) == 0.62  # 1 - 0.15 - 18 / 80, rounded down
    assert gpu_share(10**6, **options) == 0.84
    with pytest.raises(ValueError, match=r"80 GB hold no engine \(8 GB.* trainer \(72 GB"):
        gpu_share(4 * 10**9, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 10**9))
    weights = num_weights(SHIPPED_POLICY)

    def share(**engine: Any) -> float:
        return gpu_memory_utilization(RunConfig(recipe="x", engine=EngineConfig(**engine)))

    assert share(backend="vllm") == pytest.approx(0.85 - weights * 20 / 10**9, abs=0.01)
    assert share(backend="vllm", gpu_memory_utilization=0.3) == 0.3
    assert share(backend="vllm", urls="http://127.0.0.1:1") == share() == 0


def test_options_of_a_started_server_need_one() -> None:
    for wrong in ({"args": "-O3"}, {"backend": "vllm", "urls": "http://x", "args": "-O3"}):
        with pytest.raises(ConfigError, match="for a vLLM server that the run starts"):
            EngineConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="No closing quotation"):
        EngineConfig(backend="vllm", args='"')


_RUN = """
import sys
from pathlib import Path
from unstale.engines.registry import EngineOptions
from unstale.engines.vllm_server import VllmServer
server = VllmServer(EngineOptions(Path()))
server.start()
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


@pytest.mark.costly
def test_the_next_server_removes_what_a_killed_run_left(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> "subprocess.Popen[str]":
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "env": {**os.environ, "TMPDIR": str(short_path)},
        }
        return subprocess.Popen([sys.executable, "-c", _RUN], text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def folder(run: "subprocess.Popen[str]") -> Path:
        assert run.stdout is not None
        return Path(run.stdout.readline().strip().removeprefix("unix:")).parent

    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    with begin() as killed, begin() as living:
        left, kept = folder(killed), folder(living)
        killed.kill()
        killed.wait()
        assert {left, kept} == set(short_path.iterdir())
        server = made(short_path)
        server.start()
        own = Path(server.url.removeprefix("unix:")).parent
        assert {kept, own} == set(short_path.iterdir()) and own.stat().st_mode & 0o777 == 0o700
        server.start()
        assert own.is_dir()
        server.close()
    assert not list(short_path.iterdir())


def test_variables_of_the_environment_hold_but_for_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    usual = server_environment(tmp_path, python=sys.executable, threads=1)
    assert (usual["VLLM_CPU_OMP_THREADS_BIND"], usual["VLLM_CPU_KVCACHE_SPACE"]) == ("nobind", "1")
    mine = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "VLLM_CPU_KVCACHE_SPACE": "8",
        "VLLM_LOGGING_LEVEL": "DEBUG",
    }
    not_mine = {"VLLM_HOST_IP": "0.0.0.0", "VLLM_RPC_BASE_PATH": "/", "VLLM_SERVER_DEV_MODE": "0"}
    for name, value in (mine | not_mine).items():
        monkeypatch.setenv(name, value)
    found = server_environment(tmp_path, python=sys.executable, threads=1)
    assert {name: found[name] for name in mine} == mine
    assert all(found[name] != value for name, value in not_mine.items())


_WORKER = """
import signal, subprocess, sys, threading, time
from pathlib import Path
from unstale.engines import vllm_worker

def asked(*_):
    Path(sys.argv[1]).write_text("asked")
    time.sleep(float(sys.argv[2]))
    sys.exit()

vllm_worker.TERMINATE_S = 5
signal.signal(signal.SIGTERM, asked)
subprocess.Popen(["sleep", "600"])
threading.Thread(target=vllm_worker.end_with_parent, daemon=True).start()
print(flush=True)
while True:
    signal.pause()
"""


@pytest.mark.costly
@pytest.mark.parametrize("hangs_s", [0, 600])
def test_a_server_whose_run_is_gone_is_asked_to_end_and_then_killed(
    tmp_path: Path, hangs_s: int
) -> None:
    command = [sys.executable, "-c", _WORKER, str(tmp_path / "asked"), str(hangs_s)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as server:  # type: ignore[call-overload]
        try:
            server.stdout.readline()
            assert group_lives(server.pid)
            server.stdin.close()
            assert server.wait(LIMIT_S) == (-signal.SIGKILL if hangs_s else 0)
            wait_until(lambda: not group_lives(server.pid), "the end of the group")
            assert (tmp_path / "asked").exists()
        finally:
            if group_lives(server.pid):
                os.killpg(server.pid, signal.SIGKILL)


def group_lives(group: int) -> bool:
    """Return True if a process of the group runs. Zombies do not count."""
    return bool(group_members(group))


def group_members(group: int) -> list[Path]:
    """Return the members of a process group, from `/proc`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(stat.parent)
    return found
