"""Test the vLLM servers that a run starts: their interpreter, their number and their GPUs.

A fake package `vllm` is installed for another interpreter alone. Its server runs a tiny model.
"""

import asyncio
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_processes import configured
from unstale.builders import build_engine
from unstale.cluster.gpus import GpuShares, engine_gpus, run_gpus
from unstale.config import ClusterConfig, ConfigError, EngineConfig, RunConfig
from unstale.engines import Engine, SamplingParams
from unstale.engines.registry import EngineOptions
from unstale.engines.vllm_server import VllmServer, require_vllm
from unstale.testing import nudge, tiny_policy

ROOT = Path(__file__).parents[2]
_FAKE = """
import sys, time
from collections.abc import Sequence
from pathlib import Path
import torch
import unstale_vllm_worker
from tests.support.fake_vllm import FakeVllm

def main():
    torch.set_num_threads(1)
    options = dict(each[2:].split("=", 1) for each in sys.argv[1:] if "=" in each)
    assert options["worker-extension-cls"] == "unstale_vllm_worker.Extension"
    assert unstale_vllm_worker.Extension.unstale_load
    path = Path(options["uds"])
    server = FakeVllm(path.parent, max_model_len=int(options["max-model-len"]))
    server._path = path
    with server:
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another interpreter, in which a fake vLLM can be imported. It cannot be in this one."""
    folder = tmp_path_factory.mktemp("servers")
    module = folder / "fake/vllm/entrypoints/launchers/api_server/entry.py"
    module.parent.mkdir(parents=True)
    module.write_text(_FAKE)
    command = [sys.executable, "-m", "venv", "--without-pip", folder / "venv"]
    subprocess.run(command, check=True)
    (packages,) = folder.glob("venv/lib/python*/site-packages")
    paths = [folder / "fake", ROOT, *{sysconfig.get_path("purelib"), *sys.path[1:]}]
    (packages / "paths.pth").write_text("\n".join(map(str, paths)))
    return folder / "venv/bin/python"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_policy(seed=99).save(folder)
    return folder


def server_of(engine: Engine) -> VllmServer:
    server: VllmServer = engine.server  # type: ignore[attr-defined]
    return server


def sampled(engines: Sequence[Engine]) -> list[float]:
    return [engine.metrics()["sampled_tokens"] for engine in engines]


@pytest.mark.costly
def test_two_servers_run_under_their_interpreter_and_keep_their_contexts(
    python: Path, model: Path
) -> None:
    """Both get each version, both sample, and a context stays where its beginning is cached."""
    options = {"backend": "vllm", "python": str(python), "servers": 2, "max_running": 3}
    pool = build_engine(configured(model, **options), None)
    assert pool.max_running == 2 and not pool.takes_deltas
    policy = tiny_policy(seed=99)
    nudge(policy, seed=1, size=0.05)

    async def story() -> None:
        await pool.start()
        for engine in pool.engines:
            commands = Path(f"/proc/{server_of(engine).pid}/cmdline").read_bytes
            assert commands().split(b"\0")[0] == bytes(python)
        await pool.interrupt()
        await pool.load(policy.weights(), 1)
        await pool.resume()
        contexts = [[5 + number] * 40 for number in range(2)]
        first = await asyncio.gather(
            *(pool.sample(each, SamplingParams(3, ())) for each in contexts)
        )
        assert {reply.piece.version for reply in first} == {1}
        assert sampled(pool.engines) == [3, 3]
        longer = [*contexts[1], *first[1].piece.tokens, 7]
        for _ in range(2):
            await pool.sample(longer, SamplingParams(3, ()))
        assert sorted(sampled(pool.engines)) == [0, 6], "one server has the context"

    async def run() -> None:
        try:
            await story()
        finally:
            await pool.close()

    asyncio.run(run())


def test_an_interpreter_that_cannot_serve_is_one_message(tmp_path: Path, python: Path) -> None:
    require_vllm(str(python))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such thing >&2; exit 3\n")
    broken.chmod(0o755)
    for path, why in (
        (str(tmp_path / "none"), "is not a program that can be run: give the path of a Python"),
        (sys.executable, r"has no vLLM: install it there \(.* -m pip install vllm\)"),
        (str(broken), r"it ended with exit code 3: no such thing"),
    ):
        with pytest.raises(ConfigError, match=f"engine.python = {path} .*{why}"):
            build(tmp_path, python=path)


def build(folder: Path, **engine: Any) -> None:
    from unstale.builders.sampling import build_generator

    tiny_policy().save(folder)
    config = configured(folder, backend="vllm", **engine)
    build_generator(config, tiny_policy(), None)  # type: ignore[arg-type]


def test_options_of_started_servers_need_vllm_and_no_urls() -> None:
    for wrong in ({"servers": 2}, {"backend": "vllm", "urls": "http://x", "python": "python3"}):
        with pytest.raises(ConfigError, match=r"engine\.python and engine\.servers are for a vLLM"):
            EngineConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine.max_running must be >= 4 \(engine.servers\)"):
        EngineConfig(backend="vllm", servers=4, max_running=3)
    assert EngineConfig(backend="vllm", servers=4, prefill_engines=3).num_engines == 4
    with pytest.raises(
        ConfigError, match=r"prefill_engines must be < 2 \(the engines of .*servers"
    ):
        RunConfig(recipe="x", engine=EngineConfig(backend="vllm", servers=2, prefill_engines=2))


def test_each_server_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(gpus: int, **cluster: Any) -> RunConfig:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        engine = EngineConfig(backend="vllm", servers=2, args="-tp 2")
        return RunConfig(recipe="x", engine=engine, cluster=ClusterConfig(**cluster))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_gpus(config(8)) == 4
    assert run_gpus(config(8)) == GpuShares(("0",), tuple("1234567"))
    assert run_gpus(config(8, trainers=4)) == GpuShares(tuple("0123"), tuple("4567"))
    few = "servers = 2 needs 1 GPU for the trainer and 4 for servers, .* has 4: .*, or lower engine"
    with pytest.raises(ConfigError, match=few):
        run_gpus(config(4))
    for gpus, expected in ((tuple("4567"), ["4", "5"]), ((), ["2", "3"])):
        options = EngineOptions(tmp_path, gpus=gpus, gpus_each=2, number=0 if gpus else 1)
        assert list(VllmServer(options)._gpus) == expected
    with pytest.raises(ValueError, match=r"server 3 .* needs GPUs 4 to 5, but its host has 4"):
        VllmServer(EngineOptions(tmp_path, gpus_each=2, number=2))
