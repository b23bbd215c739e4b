"""Test runs with an MoE policy whose routed experts are replayed.

In a deterministic float32 run of 8 steps, trajectories have two versions, every token is exact and
D is 1 up to 1e-5. Every exact route replays. A resumed run has the routes of its episodes from side
files; routes that are lost are counted, and their tokens are never exact.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_run import quiet
from tests.support.fake_sglang import FakeSglang
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import (
    CheckpointConfig,
    ConfigError,
    EngineConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.durability.journal.expert_files import ROUTED_EXPERTS
from unstale.testing import tiny_policy

pytestmark = pytest.mark.usefixtures("forked_children")

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    save_tiny(folder, experts=8)
    return folder


def configure(model: Path, runs: Path, **changes: Any) -> RunConfig:
    replayed = TrainerConfig(lr=1e-3, routing_replay=True)
    return replace(tiny_run(model, runs, trainer=replayed), **changes)


@pytest.fixture(scope="module")
def rows(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rows]:
    config = configure(model, tmp_path_factory.mktemp("runs"), max_steps=8)
    yield session.train(config, console=quiet()).metrics


@pytest.mark.costly
def test_every_token_of_an_asynchronous_run_is_exact(rows: Rows) -> None:
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert {row["routed_experts/missing_share"] for row in rows} == {0.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) == 0.0
    assert max(row["trainer/packing_noise"] for row in rows) == 0.0
    assert min(row["trainer/grad_norm"] for row in rows) > 0, "every version has other weights"


def test_engine_and_trainer_agree_in_float32(rows: Rows) -> None:
    assert max(row["correction/log_d_abs_p99"] for row in rows) < 1e-5


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("route", ["interrupt_sync", "eager", "old_logit_model"])
def test_every_exact_route_replays(model: Path, tmp_path: Path, route: str) -> None:
    config = configure(
        model,
        tmp_path,
        max_steps=5,
        old_logps=OldLogpsConfig(route=route),
        checkpoint=CheckpointConfig(interval=3),
    )
    rows = session.train(config, console=quiet()).metrics
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) < 1e-6
    assert min(row["trainer/grad_norm"] for row in rows) > 0


@pytest.fixture(scope="module")
def stopped(model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Return the configuration of a run of 6 steps that was stopped after 4."""
    folder = tmp_path_factory.mktemp("stopped")
    config = configure(model, folder, max_steps=4, checkpoint=CheckpointConfig(interval=2))
    session.train(config, console=quiet())
    return replace(config, max_steps=6)


def resumed(stopped: RunConfig, folder: Path, change: Callable[[Path], None]) -> Rows:
    """Change a copy of the stopped run's folder, and return the rows of all steps."""
    shutil.copytree(stopped.runs / "run", folder / "run")
    change(folder / "run" / ROUTED_EXPERTS)
    config = replace(stopped, runs=folder)
    return session.resume(folder / "run", config, console=quiet()).metrics


@pytest.mark.costly
def test_a_resumed_run_replays_the_routes_of_its_episodes(
    stopped: RunConfig, tmp_path: Path
) -> None:
    rows = resumed(stopped, tmp_path, lambda routes: None)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert {row["routed_experts/missing_share"] for row in rows} == {0.0}
    kept = sorted(path.stem for path in (tmp_path / "run" / ROUTED_EXPERTS).iterdir())
    assert "group-000003" not in kept, "the first checkpoint's groups are removed"
    assert "group-000004" in kept, "a run may resume from the checkpoint before the last"


@pytest.mark.costly
def test_lost_routes_are_counted_and_never_exact(stopped: RunConfig, tmp_path: Path) -> None:
    rows = resumed(stopped, tmp_path, shutil.rmtree)
    lost = [row["routed_experts/missing_share"] for row in rows]
    assert lost[:4] == [0.0] * 4 and 0 < lost[4] <= 1
    for row in rows:
        share = 1 - row["routed_experts/missing_share"]
        assert row["old_logps/exact_share"] == pytest.approx(share)


def test_without_replay_the_run_says_nothing_of_routes(model: Path, tmp_path: Path) -> None:
    config = configure(model, tmp_path, max_steps=2)
    config = replace(config, trainer=replace(config.trainer, routing_replay=False))
    rows = session.train(config, console=quiet()).metrics
    assert all("routed_experts/missing_share" not in row for row in rows)
    assert not (tmp_path / "run" / ROUTED_EXPERTS).exists()


@pytest.mark.costly
def test_an_asynchronous_run_on_two_servers_is_exact(model: Path, tmp_path: Path) -> None:
    servers = [FakeSglang(tiny_policy(seed=99, experts=8)) for _ in range(2)]
    with servers[0], servers[1]:
        for server in servers:
            server.record_experts()
        engine = EngineConfig(
            backend="sglang",
            urls=f"{servers[0].url} {servers[1].url}",
            dtype="float32",
            max_context=256,
            max_completion_tokens=16,
        )
        config = configure(model, tmp_path, max_steps=4, deterministic=False, engine=engine)
        rows = session.train(config, console=quiet()).metrics
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    for row in rows:
        missing = row["routed_experts/missing_share"]
        assert row["old_logps/exact_share"] == pytest.approx(1 - missing) and missing < 0.2
        assert row["correction/log_d_abs_mean"] < 1e-4
        assert row["audit/logp_error_abs_mean"] < 1e-5 and row["trainer/grad_norm"] > 0


@pytest.mark.parametrize("targets", ["all-linear", "q_proj v_proj"])
def test_adapters_are_refused_before_the_run_starts(
    model: Path, tmp_path: Path, targets: str
) -> None:
    trainer = TrainerConfig(lr=1e-3, lora_rank=2, lora_targets=targets)
    says = "lora_rank 2 with a model of 8 experts.*: adapters of an MoE policy are not built"
    with pytest.raises(ConfigError, match=says):
        session.train(configure(model, tmp_path / "runs", trainer=trainer), console=quiet())
    assert not (tmp_path / "runs").exists()
