"""Test runs whose episodes are sampled to their end with the version that began them.

Every episode has one version, also when later ones were published meanwhile. Its old
log-probabilities are exact. A killed run continues bit for bit.
"""

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.durability.test_resume import killed
from unstale.builders.sampling import build_engine
from unstale.cli import session
from unstale.config import (
    AuditConfig,
    CheckpointConfig,
    ConfigError,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.config.options import override
from unstale.durability import compare_runs

pytestmark = pytest.mark.usefixtures("forked_children")

UNMERGED = EngineConfig(max_context=512, max_running=24, dtype="float32", adapters="unmerged")
PINNED = ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=4, pin_versions=True)


def configured(**changes: Any) -> RunConfig:
    """Return the config of a short retail run with pinned versions."""
    config = RunConfig(
        recipe="toy",
        name="run",
        max_steps=4,
        deterministic=True,
        schedule=PINNED,
        engine=UNMERGED,
        trainer=TrainerConfig(lora_rank=2, lr=1e-2),
        audit=AuditConfig(share=1.0),
        checkpoint=CheckpointConfig(interval=1),
        eval=EvalConfig(tasks=0),
    )
    return replace(config, **changes)


def quiet() -> Console:
    return Console(file=StringIO(), width=300)


@pytest.mark.costly
def test_an_episode_ends_with_its_version_and_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path,
) -> None:
    whole = session.train(configured(runs=tmp_path / "whole"), console=quiet())
    rows = whole.metrics[1:]
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    for row in rows:
        assert row["schedule/mixed_version_share"] == 0 and row["old_logps/exact_share"] == 1
        assert row["audit/logp_error_abs_mean"] < 1e-5
    left = configured(runs=tmp_path / "left")
    with killed("step", 3):
        session.train(left, console=quiet())
    session.resume(tmp_path / "left" / "run", left, console=quiet())
    assert compare_runs.differences(whole.folder, tmp_path / "left" / "run") == []


@pytest.mark.costly
def test_eager_is_exact_although_tokens_of_earlier_versions_follow(tmp_path: Path) -> None:
    route = OldLogpsConfig(route="eager")
    rows = session.train(configured(runs=tmp_path, old_logps=route), console=quiet()).metrics[1:]
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    for row in rows:
        assert row["schedule/mixed_version_share"] == 0 and row["old_logps/exact_share"] == 1
        assert row["audit/logp_error_abs_mean"] < 1e-5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trainer.lora_rank": 0}, "engine.adapters = unmerged needs trainer.lora_rank > 0"),
        ({"engine.quantise": "int8"}, "unmerged needs engine.quantise = none"),
        (
            {"deterministic": False, "engine.backend": "vllm", "engine.transfer": "nccl"},
            "unmerged needs engine.transfer = auto or file",
        ),
        ({"engine.keep_cache": True}, "unmerged needs engine.keep_cache = false"),
        ({"cluster.engine_hosts": 1, "deterministic": False}, "needs cluster.engine_hosts = 0"),
        ({"engine.adapters": "merged"}, "pin_versions = true needs engine.adapters = unmerged"),
        ({"old_logps.route": "interrupt_sync"}, "such as old_logps.route = snapshot_old"),
        ({"old_logps.route": "old_logit_model"}, "scores a version only until the next one"),
        ({"cluster.trainers": 2, "deterministic": False}, "pin_versions = true needs cluster.tr"),
    ],
)
def test_combinations_that_cannot_be_true_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        override(configured(), changes)


def test_routes_that_keep_versions_are_accepted() -> None:
    for route in ("snapshot_old", "eager", "rollout", "ewma_prox"):
        configured(old_logps=OldLogpsConfig(route=route))


def test_a_server_with_one_version_at_a_time_is_refused() -> None:
    servers = {"deterministic": False, "engine.backend": "sglang", "engine.urls": "http://[::1]:1"}
    with pytest.raises(ConfigError, match=r"merged with engine\.backend = sglang, got unmerged"):
        build_engine(override(configured(), servers), None)
