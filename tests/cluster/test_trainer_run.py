"""Test whole runs whose trainer has ranks.

A deterministic run with two ranks is bitwise the same again, also if a rank is killed meanwhile and
nobody does anything. A resume may have another number of ranks.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from tests.support.fake_vllm import FakeVllm
from tests.support.ranked_runs import config, train
from tests.support.waits import LIMIT_S, wait_until
from unstale.cli import session
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.config import (
    ClusterConfig,
    ConfigError,
)
from unstale.durability.compare_runs import differences
from unstale.durability.run_folder import EVENTS, METRICS, RunFolder
from unstale.engines.remote import RemoteEngine
from unstale.model.policy import Policy
from unstale.weights.publish import DeltaInParts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in which nothing was killed."""
    return train(config(tmp_path_factory.mktemp("runs"), "undisturbed"))


def test_a_run_whose_rank_is_killed_continues_and_is_bitwise_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Path
) -> None:
    step, steps = RankedTrainer.step, []

    def step_and_kill(trainer: RankedTrainer) -> None:
        step(trainer)
        steps.append(trainer.version)
        if len(steps) == 3:
            os.kill(trainer.call("pid"), signal.SIGKILL)

    monkeypatch.setattr(RankedTrainer, "step", step_and_kill)
    killed = train(config(tmp_path, "killed"))
    assert len(steps) == 5
    kinds = [row["kind"] for row in RunFolder(killed).rows(EVENTS)]
    assert kinds.count("trainer_died") == 1
    assert differences(undisturbed, killed) == []
    rows = RunFolder(killed).metrics()
    assert [row["old_logps/exact_share"] for row in rows if row["step"]] == [1.0] * 4
    assert any(row["trainer/grad_norm"] > 0 for row in rows if row["step"])


def test_ranks_that_divide_each_pass_train_as_ranks_that_do_not(
    tmp_path: Path, undisturbed: Path
) -> None:
    """The run is resumed from a checkpoint after half of its steps.

    A deterministic run refuses another number of ranks, and another division of passes.
    """
    half = train(config(tmp_path, "run", context=2, steps=2))
    config_of_all = config(tmp_path, "run", context=2)
    session.resume(half, config_of_all, console=Console(file=StringIO()))
    weights = [load_file(run / "policy" / "model.safetensors") for run in (undisturbed, half)]
    error = max((weights[1][name] - tensor).abs().max() for name, tensor in weights[0].items())
    assert error <= 5e-6  # Adam turns rounding of small gradients into 2e-6 after four steps
    rows = [row for row in RunFolder(half).metrics() if row["step"]]
    assert [row["old_logps/exact_share"] for row in rows] == [1.0] * 4
    expected = [row for row in RunFolder(undisturbed).metrics() if row["step"]]
    for name in ("trainer/grad_norm", "objective/loss", "trainer/microbatches"):
        assert [row[name] for row in rows] == pytest.approx(
            [row[name] for row in expected], rel=1e-5
        )
    for change, why in (
        ({"context": 1}, r"cluster\.context cannot change from 2 to 1"),
        ({"context": 2, "trainers": 4}, r"cluster\.trainers cannot change from 2 to 4"),
    ):
        with pytest.raises(ConfigError, match=why):
            session.resume(half, config(tmp_path, "run", steps=5, **change))


def test_a_server_gets_whole_weights_once_and_then_the_deltas_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(config(tmp_path, "run"), deterministic=False)
    whole, deltas = [], []
    share = RemoteEngine._share

    def count(self: RemoteEngine, session: Any, update: Any) -> Any:
        (deltas if isinstance(update, DeltaInParts) else whole).append(update)
        return share(self, session, update)

    monkeypatch.setattr(RemoteEngine, "_share", count)
    with FakeVllm(tmp_path, Policy.load(made.policy_folder, dtype="float32")) as server:
        engine = replace(made.engine, backend="vllm", urls=server.url)
        folder = train(replace(made, engine=engine))
    assert len(whole) == 1 and len(deltas) == 4
    rows = [row for row in RunFolder(folder).metrics() if row["step"]]
    assert max(row["engine/probe_logp_error"] for row in rows) < 1e-3
    assert [row["old_logps/exact_share"] for row in rows] == [1.0] * 4
    assert all(row["publish/bytes"] < whole_bytes(whole[0]) for row in rows)


def whole_bytes(weights: Any) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def test_a_run_is_resumed_with_another_number_of_ranks(tmp_path: Path) -> None:
    made = replace(config(tmp_path, "run", steps=2), deterministic=False)
    folder = train(made)
    fewer = replace(made, max_steps=3, cluster=ClusterConfig(trainers=1))
    session.resume(folder, fewer, console=Console(file=StringIO()))
    local = replace(made, max_steps=4, cluster=ClusterConfig())
    session.resume(folder, local, console=Console(file=StringIO()))
    rows = RunFolder(folder).metrics()
    assert [row["old_logps/exact_share"] for row in rows if row["step"]] == [1.0] * 4


def test_a_killed_driver_leaves_a_run_that_a_resume_completes_bitwise(
    tmp_path: Path, undisturbed: Path
) -> None:
    code = (
        "import sys, pathlib; from tests.support.ranked_runs import config, train; "
        "train(config(pathlib.Path(sys.argv[1]), 'killed'))"
    )
    folder = tmp_path / "killed"

    def has_trained() -> bool:
        assert driver.poll() is None, "the driver must not end by itself"
        return (folder / METRICS).is_file() and len(RunFolder(folder).metrics()) >= 3

    driver = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    try:
        wait_until(has_trained, "two steps of the driver")
    finally:
        driver.kill()
        driver.wait(LIMIT_S)
    session.resume(folder, config(tmp_path, "killed"), console=Console(file=StringIO()))
    assert differences(undisturbed, folder) == []
