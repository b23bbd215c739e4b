"""Trainer ranks together with engine hosts, on a Ray that begins and ends with the run."""

import asyncio
import tempfile
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.engines.test_processes import configured
from tests.support.ranked_runs import require_complete
from tests.support.tiny_runs import save_tiny
from unstale.cli import session
from unstale.cluster.hosted_engine import HostedEngine
from unstale.cluster.ranks import Ranks, RanksDied
from unstale.config import (
    AuditConfig,
    ClusterConfig,
    ConfigError,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
)
from unstale.durability.run_folder import EVENTS, RunFolder


def config(runs: Path, policy: Path | str = "base", **cluster: int) -> RunConfig:
    base = configured(policy, restarts=4)
    return replace(base, runs=runs, max_steps=3, cluster=ClusterConfig(**cluster))


def test_two_ranks_and_a_host_that_is_killed_train_together(
    disconnected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy has experts. The ranks replay the routes that the embedded engine recorded."""
    import ray

    save_tiny(tmp_path / "moe", experts=8)
    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the processes that Ray starts
    load = HostedEngine.load
    versions: list[int] = []

    async def kill_at_version_2(engine: HostedEngine, update: Any, version: int) -> None:
        versions.append(version)
        if versions.count(2) == 1 and version == 2:
            await asyncio.to_thread(ray.kill, engine._host)
        await load(engine, update, version)

    monkeypatch.setattr(HostedEngine, "load", kill_at_version_2)
    made = config(tmp_path, tmp_path / "moe", trainers=2, engine_hosts=1)
    made = replace(
        made,
        task=TaskConfig(env="tests.support.tiny_runs:EvenTasks"),
        audit=AuditConfig(share=1.0),
        engine=replace(made.engine, max_context=256),
        trainer=TrainerConfig(lr=1e-3, routing_replay=True),
    )
    run = session.train(made, console=Console(file=StringIO()))
    assert versions == [0, 1, 2, 2, 3]
    assert [row["version"] for row in run.metrics] == [0, 1, 2]
    for row in run.metrics:
        assert row["old_logps/exact_share"] == 1 and row["rollout/failed_episodes"] == 0
        assert row["routed_experts/missing_share"] == 0 and row["trainer/grad_norm"] > 0
        assert row["correction/log_d_abs_mean"] < 1e-4 and row["audit/logp_error_abs_mean"] < 1e-5
    kinds = [row["kind"] for row in RunFolder(run.folder).rows(EVENTS)]
    assert kinds.count("engine_lost") == kinds.count("engine_back") == 1
    require_complete(run.folder, steps=3)
    assert not ray.is_initialized(), "the run has ended its Ray"
    assert not list(tmp_path.glob("unstale-ranks-*"))


def test_two_rollout_processes_sample_on_hosts_of_which_one_is_killed(
    disconnected: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes send their requests to the hosts themselves, with and without interrupts."""
    import ray

    monkeypatch.setenv("RAY_TMPDIR", tempfile.gettempdir())
    load = HostedEngine.load
    killed: list[int] = []

    async def kill_at_version_2(engine: HostedEngine, update: Any, version: int) -> None:
        if version == 2 and not killed:
            killed.append(engine._number)
            await asyncio.to_thread(ray.kill, engine._host)
        await load(engine, update, version)

    monkeypatch.setattr(HostedEngine, "load", kill_at_version_2)
    made = config(tmp_path, engine_hosts=2)
    made = replace(
        made,
        max_steps=5,
        rollout=RolloutConfig(processes=2),
        audit=AuditConfig(share=1.0),
        trainer=TrainerConfig(lr=1e-3),
    )
    run = session.train(made, console=Console(file=StringIO()))
    assert [row["version"] for row in run.metrics] == [0, 1, 2, 3, 4]
    for row in run.metrics:
        assert row["old_logps/exact_share"] == 1 and row["rollout/failed_episodes"] == 0
        assert row["correction/log_d_abs_mean"] < 1e-4 and row["audit/logp_error_abs_mean"] < 1e-5
        assert row["schedule/staleness_max"] <= 1
    assert sum(row["engine/sampled_tokens"] for row in run.metrics) > 0
    kinds = [row["kind"] for row in RunFolder(run.folder).rows(EVENTS)]
    assert kinds.count("engine_lost") == 1 and "rollout_process_lost" not in kinds
    require_complete(run.folder, steps=5)


def test_an_error_in_the_options_ends_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = config(tmp_path, trainers=1)
    started: list[Ranks] = []
    make = Ranks.make

    def make_and_note(ranks: Ranks, *arguments: Any) -> None:
        make(ranks, *arguments)
        started.append(ranks)

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(Ranks, "make", make_and_note)
    monkeypatch.setattr(session.RunLog, "create", full)
    with pytest.raises(ConfigError, match="cannot be created"):
        session.train(made, console=Console(file=StringIO()))
    with pytest.raises(RanksDied):
        started[0].call("pid")
