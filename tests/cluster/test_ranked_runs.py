"""Test that whole runs with trainer ranks have what runs without ranks have.

One rank gives bitwise the run without ranks. A second model has ranks of its own. A run of two
ranks with adapters records, audits, evaluates and saves its policy. A batch at which the ranks stop
is saved and computed again.
"""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.ranked_runs import config, train
from unstale.analysis.audit import audit
from unstale.cli.evaluate import evaluate
from unstale.cli.failures import RunFailed
from unstale.cli.replay import replay
from unstale.cli.trained import POLICY
from unstale.cluster.ranked_trainer import RankedTrainer
from unstale.config import AuditConfig, CheckpointConfig, EvalConfig, OldLogpsConfig
from unstale.durability.compare_runs import differences
from unstale.durability.run_folder import EVENTS, RunFolder
from unstale.records import Batch
from unstale.weights.recording import RECORDED, WENT_WRONG, Recorded


def require_exact(folder: Path, *, error: float = 0.0) -> None:
    """`error` is the largest mean error, by other passes in which the audit scores again."""
    rows = [row for row in RunFolder(folder).metrics() if row["step"]]
    assert [row["old_logps/exact_share"] for row in rows] == [1.0] * len(rows)
    assert max(row["audit/logp_error_abs_mean"] for row in rows) <= error
    assert any(row["trainer/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("route", ["snapshot_old", "old_logit_model"])
def test_one_rank_gives_bitwise_the_run_without_ranks(route: str, tmp_path: Path) -> None:
    """Weights, checkpoints, versions, journal and metrics are compared.

    With `old_logit_model` only the run without ranks sends whole weights to the engine.
    """
    folders = []
    for name, trainers in (("local", 0), ("rank", 1)):
        made = config(tmp_path, name, trainers=trainers, steps=3)
        old_logps = OldLogpsConfig(route=route)
        recorded = AuditConfig(share=1.0, record=True)
        folders.append(train(replace(made, old_logps=old_logps, audit=recorded)))
    found = differences(*folders)
    if route == "old_logit_model":
        found = [text for text in found if "/publish/bytes is " not in text]
    assert found == []
    require_exact(folders[1], error=0.0 if route == "snapshot_old" else 1e-7)
    local, rank = (Recorded(folder / RECORDED) for folder in folders)
    assert local.versions == rank.versions == [0, 1, 2, 3] and local.steps == rank.steps == [
        1,
        2,
        3,
    ]
    for version in local.versions:
        one, other = local.weights(version), rank.weights(version)
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
        assert one.keys() == other.keys()


def test_a_second_model_on_ranks_is_exact_and_replaced_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, killed = RankedTrainer.step, []

    def step_and_kill(trainer: RankedTrainer) -> None:
        step(trainer)
        if trainer.version == 1 and not killed:
            assert trainer.ranks.scorers is not None
            killed.append(trainer.ranks.scorers.call("pid"))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(RankedTrainer, "step", step_and_kill)
    made = config(tmp_path, "run", steps=3)
    folder = train(
        replace(
            made,
            deterministic=False,
            audit=AuditConfig(share=1.0),
            checkpoint=CheckpointConfig(interval=1),
            old_logps=OldLogpsConfig(route="old_logit_model", ranks=2),
        )
    )
    # when pieces arrive decides how they are packed: errors are roundings, in float32 small ones
    require_exact(folder, error=1e-6)
    events = [row for row in RunFolder(folder).rows(EVENTS) if row["kind"] == "trainer_died"]
    assert len(killed) == len(events) == 1
    assert events[0]["reason"].startswith("an old-logit rank died")


def test_two_ranks_with_adapters_record_audit_and_evaluate(tmp_path: Path) -> None:
    made = config(tmp_path, "run", steps=2)
    folder = train(
        replace(
            made,
            trainer=replace(made.trainer, lora_rank=4),
            audit=AuditConfig(share=1.0, record=True),
            eval=EvalConfig(tasks=4),
        )
    )
    require_exact(folder)
    assert (folder / POLICY / "adapter").is_dir()
    quiet = Console(file=StringIO())
    (row,) = audit(folder, routes=["snapshot_old"], console=quiet)["routes"]
    assert row["exact_fraction"] == 1.0 and row["claimed_error_max"] == 0.0
    result = evaluate(folder, replace(made, eval=EvalConfig(tasks=4)), console=quiet)
    assert result.success == RunFolder(folder).metrics()[-1]["eval/success_rate"]


def test_a_batch_at_which_ranks_stop_is_saved_and_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = RankedTrainer.prepare

    def prepare_infinite(trainer: RankedTrainer, batch: Batch) -> Sequence[int]:
        infinite = torch.full_like(batch.advantage, torch.inf)
        return prepare(trainer, replace(batch, advantage=infinite))

    monkeypatch.setattr(RankedTrainer, "prepare", prepare_infinite)
    text = StringIO()
    folder = tmp_path / "run"
    with pytest.raises(RunFailed, match="FloatingPointError"):
        train(config(tmp_path, "run", steps=2), Console(file=text, soft_wrap=True))
    assert "unstale replay" in text.getvalue()
    assert (folder / WENT_WRONG).is_file()
    assert replay(folder, console=Console(file=StringIO()))
