"""Trainer ranks and engines of one machine use different GPUs."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.test_processes import configured
from unstale.builders import build_engine, build_sampler, sampling
from unstale.cluster import components, env_hosts
from unstale.cluster.gpus import (
    GpuShares,
    divide_gpus,
    engine_gpus,
    gpu_memory_utilization,
    host_gpus,
    run_gpus,
)
from unstale.config import ClusterConfig, ConfigError, EngineConfig, RunConfig, TaskConfig
from unstale.engines.embedded import worker
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions, EngineSpec
from unstale.engines.vllm_server import VllmServer


def config(engine: dict[str, Any] | None = None, **cluster: Any) -> RunConfig:
    return RunConfig(
        recipe="x", engine=EngineConfig(**engine or {}), cluster=ClusterConfig(**cluster)
    )


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 80 * 10**9))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")


@pytest.mark.parametrize(
    ("gpus", "trainers", "engines", "shares"),
    [
        ("", 2, 1, ("", "")),
        ("0", 1, 1, ("0", "0")),
        ("01", 1, 1, ("0", "1")),
        ("0123", 3, 0, ("012", "3")),
        ("01234567", 4, 4, ("0123", "4567")),
    ],
)
def test_ranks_get_the_first_gpus_and_engines_the_others(
    gpus: str, trainers: int, engines: int, shares: tuple[str, str]
) -> None:
    expected = GpuShares(*map(tuple, shares))
    assert divide_gpus(gpus, trainers=trainers, engines=engines) == expected
    assert expected.apart == (gpus not in ("", "0"))


@pytest.mark.parametrize(
    ("gpus", "trainers", "engines", "hint"),
    [
        ("0123", 4, 1, "need 5 GPUs, but this machine has 4. Set cluster.trainers to at most 3,"),
        ("0", 2, 1, "need 3 GPUs, but this machine has 1. Lower both, or sample on other GPUs"),
        (
            "01",
            1,
            2,
            r"machine has 2. Lower cluster.trainers and .*engine.processes.*engine\.urls",
        ),
        ("01", 3, 0, r"3 trainer ranks \(cluster.trainers\) need 3 GPUs, .*Set .* or use the"),
    ],
)
def test_too_few_gpus_are_one_message(gpus: str, trainers: int, engines: int, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        divide_gpus(gpus, trainers=trainers, engines=engines)


def test_a_server_takes_the_product_of_its_parallel_sizes() -> None:
    for args, count in (
        ("", 1),
        ("--tensor-parallel-size 2 --max-num-batched-tokens 8192", 2),
        ("-tp=2 --data_parallel_size=3 -O3", 6),
    ):
        assert engine_gpus(config({"backend": "vllm", "args": args})) == count
    assert engine_gpus(config({"backend": "vllm", "urls": "http://127.0.0.1:1"})) == 0
    with pytest.raises(ConfigError, match=r"engine\.args: .*-tp: invalid int value: 'x'"):
        engine_gpus(config({"backend": "vllm", "args": "-tp x"}))


def test_a_run_divides_the_visible_gpus(
    four_gpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = config({"backend": "vllm", "args": "-tp 2"}, trainers=2)
    assert run_gpus(apart) == GpuShares(("7", "6"), ("5", "4"))
    assert gpu_memory_utilization(apart) == 0, "the server's GPUs are its own"
    with pytest.raises(ConfigError, match=r"4 trainer ranks .* engines on 2 GPUs need 6 GPUs"):
        build_engine(config({"backend": "vllm", "args": "-tp 2"}, trainers=4), None)
    assert run_gpus(config({"backend": "vllm"})) == GpuShares()
    placed = config({"backend": "vllm"}, trainers=8, address="head:1")
    assert run_gpus(placed) == GpuShares()
    assert gpu_memory_utilization(placed) == 0, "Ray does not know this machine's GPUs"
    every = config({"processes": 2}, trainers=2)
    assert run_gpus(every) == GpuShares(("7", "6"), ("5", "4"))
    with pytest.raises(ConfigError, match=r"engines on 3 GPUs need 5 GPUs, .* has 4"):
        build_engine(config({"processes": 3}, trainers=2), None)
    hosts = config(trainers=2, engine_hosts=2)
    assert [host_gpus(hosts, number) for number in range(2)] == [("5",), ("4",)]
    started: list[dict[str, str]] = []

    def popen(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append(env)
        raise OSError("not in this test")

    monkeypatch.setattr(subprocess, "Popen", popen)
    for gpus in (("5", "4"), ()):
        server = VllmServer(EngineOptions(tmp_path, gpus=gpus))
        with pytest.raises(OSError, match="not in this test"):
            server.start()
        server.close()
    assert [env["CUDA_VISIBLE_DEVICES"] for env in started] == ["5,4", "7,6,5,4"]


def test_each_process_of_an_engine_computes_on_a_gpu_of_its_own(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[EngineOptions] = []
    used: list[str] = []
    own: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", own.append)

    def make(options: EngineOptions) -> EmbeddedEngine:
        made.append(options)
        return EmbeddedEngine(options)

    def runner(config: Any, *, device: str, **_: Any) -> None:
        used.append(device)

    monkeypatch.setattr(worker, "Qwen3Runner", runner)
    monkeypatch.setattr(sampling, "engine_spec", lambda backend: EngineSpec(make))

    def devices(engine: dict[str, Any], **cluster: Any) -> list[str]:
        made.clear()
        used.clear()
        build_engine(config(engine, **cluster), None)
        for each in made:
            worker.build_runner(
                each.model_folder,
                dtype="float32",
                max_slots=1,
                max_context=64,
                number=each.number,
            )
        return list(used)

    assert devices({"processes": 3}) == ["cuda:0", "cuda:1", "cuda:2"] == own
    with pytest.warns(RuntimeWarning, match="processes is 5, but the number of GPUs .* is 4"):
        assert devices({"processes": 5})[3:] == ["cuda:3", "cuda:0"]
    assert devices({"processes": 2}, trainers=2) == ["cuda:0", "cuda:1"]
    assert {each.gpus for each in made} == {("5", "4")}


def test_an_engine_that_decodes_on_the_cpu_takes_no_gpu(four_gpus: None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    several = replace(config({"processes": 8}, trainers=4), model=str(tmp_path))
    assert run_gpus(several) == GpuShares(("7", "6", "5", "4"))


def test_the_first_connection_to_ray_has_what_hosts_and_environments_need(
    four_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones use it as it is."""
    connections: list[dict[str, Any]] = []
    for module in (components, env_hosts):
        monkeypatch.setattr(
            module, "connect", lambda address, **options: connections.append(options)
        )
    made = replace(
        configured("base"),
        task=TaskConfig(env="tests.support.toy:ToyTasks", isolate="ray"),
        cluster=ClusterConfig(trainers=2, engine_hosts=2),
    )
    build_sampler(made)
    assert connections[0] == {"resources": {"engine_host": 2}, "gpus": ("7", "6")}
