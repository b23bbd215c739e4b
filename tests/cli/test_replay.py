"""Test runs that stop at non-finite numbers, and their replay.

The run stops before the optimizer step and keeps the batch and the weights. `unstale replay` fails
on them with the same message.
"""

from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save

from tests.cli.test_run import small
from unstale.algorithms import advantages
from unstale.builders import Components, build_components
from unstale.cli.failures import RunFailed
from unstale.cli.main import main
from unstale.cli.replay import replay
from unstale.cli.session import train
from unstale.config import ConfigError, EvalConfig, OldLogpsConfig, RunConfig, TrainerConfig
from unstale.durability.run_folder import RunLog
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.records import Batch, Group, ScoredTrajectory, collate
from unstale.testing import episode
from unstale.trainer import train_on
from unstale.trainer.failed_batch import save_failed_batch
from unstale.trainer.records import NOT_FINITE
from unstale.weights.recording import WENT_WRONG, FailedStep

HUGE = 3e38
"""A finite float32 whose multiples are not."""


def config(folder: Path, route: str = "snapshot_old") -> RunConfig:
    return small(folder, old_logps=OldLogpsConfig(route=route), eval=EvalConfig(tasks=0))  # type: ignore[arg-type]


def a_batch(*, advantage: float = 1.0) -> Batch:
    return collate([episode(i, [4, (6, 0), 2, (3, 0)], advantage=advantage) for i in range(3)])


def goes_wrong(machine: Components, batch: Batch) -> str:
    """Return the trainer's error message."""
    machine.old.on_published(live={0})
    with pytest.raises(NOT_FINITE) as error:
        train_on(machine.trainer, batch)
    return str(error.value)


def tell(run: Path, batch: Path | None = None) -> tuple[bool, str]:
    out = StringIO()
    return replay(run, batch, console=Console(file=out, width=500)), out.getvalue()


@pytest.mark.parametrize("route", ["snapshot_old", "interp_prox_loglinear"])
@pytest.mark.parametrize("what", ["the loss", "a log-probability"])
def test_what_went_wrong_goes_wrong_again_in_the_same_words(
    tmp_path: Path, what: str, route: str
) -> None:
    machine, batch = (
        build_components(config(tmp_path, route)),
        a_batch(advantage=HUGE if what == "the loss" else 1.0),
    )
    RunLog.create(tmp_path / "run", config(tmp_path, route)).close()
    if what == "a log-probability":
        at = int(batch.sampled.nonzero()[2])
        spoilt = batch.behavior_logp.clone()
        spoilt[at] = torch.nan
        batch = replace(batch, behavior_logp=spoilt)
    said = goes_wrong(machine, batch)
    assert "unstale replay" in save_failed_batch(machine.trainer, tmp_path / "run")
    again, told = tell(tmp_path / "run")
    assert again and said in told


def test_all_parts_of_a_streamed_batch_are_saved(tmp_path: Path) -> None:
    """The last part has no gradient. That of the first is not finite, which `step` detects."""
    streamed = replace(config(tmp_path), trainer=TrainerConfig(stream=True))
    machine = build_components(streamed)
    machine.old.on_published(live={0})
    RunLog.create(tmp_path / "run", streamed).close()
    items = [
        episode(i, [4, (6, 0), 2, (3, 0)], advantage=advantage)
        for i, advantage in enumerate((HUGE / 10, -HUGE / 10, 0.0))
    ]
    machine.trainer.add(collate(items[:2]))
    for part in machine.trainer.prepare(collate(items)):
        machine.trainer.backward(part)
    with pytest.raises(NOT_FINITE) as error:
        machine.trainer.step()
    save_failed_batch(machine.trainer, tmp_path / "run")
    wrong = FailedStep.load(tmp_path / "run" / WENT_WRONG)
    assert wrong.batch.episodes[:2] == (0, 1) and wrong.about["divisor"] == "27"
    again, told = tell(tmp_path / "run")
    assert again and str(error.value) in told


def test_a_batch_needs_no_engine_and_its_route_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, closed = build_components(config(tmp_path)), []
    RunLog.create(tmp_path / "run", config(tmp_path)).close()
    goes_wrong(machine, a_batch(advantage=HUGE))
    save_failed_batch(machine.trainer, tmp_path / "run")
    monkeypatch.setattr(
        "unstale.builders.sampling.build_engine", lambda *_: pytest.fail("an engine was made")
    )
    monkeypatch.setattr(SnapshotOld, "close", lambda self: closed.append(self))
    assert tell(tmp_path / "run")[0] and len(closed) == 1


def test_a_batch_that_was_mended_does_not_go_wrong(tmp_path: Path) -> None:
    machine = build_components(config(tmp_path))
    RunLog.create(tmp_path / "run", config(tmp_path)).close()
    goes_wrong(machine, a_batch(advantage=HUGE))
    save_failed_batch(machine.trainer, tmp_path / "run")
    wrong = FailedStep.load(tmp_path / "run" / WENT_WRONG)
    mended = replace(wrong, batch=replace(wrong.batch, advantage=wrong.batch.advantage / HUGE))
    mended.save(tmp_path / "mended.safetensors")
    again, told = tell(tmp_path / "run", tmp_path / "mended.safetensors")
    assert not again and "did not fail again" in told


@pytest.mark.costly
def test_a_run_that_stops_on_a_number_says_how_to_see_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        return [replace(item, advantage=(HUGE,)) for item in advantages.grpo(groups)]

    monkeypatch.setattr("unstale.builders.run.build_advantage", lambda config: blind)
    out = StringIO()
    with pytest.raises(RunFailed, match="the gradient norm of optimizer step 1 is"):
        train(config(tmp_path), console=Console(file=out, width=500))
    assert f"unstale replay {tmp_path / 'run'}" in out.getvalue()
    with pytest.raises(SystemExit) as left:
        main(["replay", str(tmp_path / "run")])
    assert left.value.code == 0


def test_without_a_kept_batch_there_is_nothing_to_replay(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"went_wrong\.safetensors is missing"):
        replay(tmp_path)


def test_a_file_that_is_something_else_is_refused_by_name(tmp_path: Path) -> None:
    RunLog.create(tmp_path / "run", config(tmp_path)).close()
    other = tmp_path / "other.safetensors"
    for content in (b"torn", save({"tokens": torch.zeros(2)})):
        other.write_bytes(content)
        with pytest.raises(
            ConfigError, match=r"other\.safetensors is not a saved batch of a failed step"
        ):
            replay(tmp_path / "run", other)


def test_evidence_that_cannot_be_written_is_said_and_hides_nothing(tmp_path: Path) -> None:
    machine = build_components(config(tmp_path))
    assert (
        save_failed_batch(machine.trainer, tmp_path)
        == "no batch was saved: the trainer had none yet"
    )
    goes_wrong(machine, a_batch(advantage=HUGE))
    assert save_failed_batch(machine.trainer, tmp_path / "no" / "such").startswith(
        "the batch could not be saved: "
    )
