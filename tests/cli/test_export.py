"""Test `unstale export`: the policy of a checkpoint as a model folder.

The newest checkpoint of a finished run gives the files that the run saved at its end, also with
adapters. Any other checkpoint has the weights of its step. The run folder does not change. A
missing, damaged or removed checkpoint is refused, and the message names those that are left.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.cli.main import main
from unstale.config import CheckpointConfig, TrainerConfig
from unstale.durability import checkpoint
from unstale.durability.checkpoint import Checkpoints
from unstale.testing import tiny_policy

pytestmark = pytest.mark.usefixtures("forked_children")

TRAINERS = {
    "all weights": TrainerConfig(lr=1e-3),
    "bfloat16": TrainerConfig(lr=1e-3, dtype="bfloat16"),
    "adapters": TrainerConfig(lr=1e-3, lora_rank=4),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that trains for 3 steps, and returns the run folder.

    It has the checkpoints of the last two steps.
    """

    @cache
    def run(trainer: str) -> Path:
        folder = tmp_path_factory.mktemp("runs")
        save_tiny(folder / "model")
        config = tiny_run(
            folder / "model",
            folder,
            max_steps=3,
            trainer=TRAINERS[trainer],
            checkpoint=CheckpointConfig(interval=1, keep=2),
        )
        return session.train(config, console=quiet()).folder

    return run


def as_killed(finished: Path, folder: Path) -> Path:
    """Return a copy of a run as a kill before its end leaves it."""
    shutil.copytree(finished, folder)
    shutil.rmtree(folder / "policy")
    return folder


@pytest.fixture
def killed(tmp_path: Path, finished: Callable[[str], Path]) -> Path:
    return as_killed(finished("all weights"), tmp_path / "killed")


def export(*words: object) -> None:
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, words)])
    assert not left.value.code, left.value.code


def complaint(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    with pytest.raises(SystemExit) as left:
        main(["export", *map(str, words)])
    assert left.value.code == code
    return " ".join(capsys.readouterr().err.split())


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files in a folder, by their path in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def changed_at(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_newest_checkpoint_is_what_the_run_saved_at_its_end(
    finished: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trainer: str,
) -> None:
    whole = finished(trainer)
    killed = as_killed(whole, tmp_path / "killed")
    before = changed_at(killed)
    export(killed, tmp_path / "out")
    assert f"the policy of step 3 is in {tmp_path / 'out'}" in capsys.readouterr().out
    assert contents(tmp_path / "out") == contents(whole / "policy")
    assert changed_at(killed) == before
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_another_checkpoint_has_the_weights_of_its_step(killed: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    export(killed, empty, "--step", 2)
    export(killed, tmp_path / "newest")
    second, third = (load_file(each / "model.safetensors") for each in (empty, tmp_path / "newest"))
    stored = Checkpoints(killed, {}).weights(2)
    assert second.keys() == stored.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in stored.items())
    assert any(not torch.equal(second[name], third[name]) for name in second)


def change_config(run: Path, **options: Any) -> None:
    row = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**row, **options}))


def test_a_run_of_the_users_own_code_is_exported_without_it(killed: Path, tmp_path: Path) -> None:
    change_config(killed, task={"env": "nowhere:tasks"})
    export(killed, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_wrong_folders_and_steps_are_refused(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for words, reason in (
        ((killed, killed), f"{killed} is not an empty folder. Name a new or empty one"),
        ((killed, killed / "policy"), "lies in the run folder"),
        ((killed, out, "--step", 1), "has no checkpoint of step 1. It has those of 2, 3"),
        ((tmp_path, out), f"{tmp_path} is not a run folder: it has no config.json"),
    ):
        assert reason in complaint(capsys, 2, *words)
    shutil.rmtree(killed / "checkpoints")
    assert f"{killed} has no checkpoint" in complaint(capsys, 2, killed, out)
    assert not out.exists() and not (killed / "policy").exists()


@pytest.mark.costly
def test_another_model_than_that_of_the_run_is_refused(
    finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_policy(seed=6).save(tmp_path / "other")
    tiny_policy(experts=4).save(tmp_path / "experts")
    for trainer, model, reason in (
        ("adapters", "other", "the adapters were trained on other weights than those in"),
        ("all weights", "experts", "do not fit the model in"),
        ("all weights", "gone", "policy: no model folder at"),
    ):
        killed = as_killed(finished(trainer), tmp_path / f"run of {model}")
        change_config(killed, policy=str(tmp_path / model))
        assert reason in complaint(capsys, 2, killed, tmp_path / "out")


def newest(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def flip_a_bit(folder: Path) -> None:
    (file,) = (folder / "trainer").glob("*00001*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def lose_a_file(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize("damage", [flip_a_bit, lose_a_file, lose_the_manifest])
def test_a_damaged_checkpoint_is_refused(
    killed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
) -> None:
    damage(newest(killed))
    said = complaint(capsys, 1, killed, tmp_path / "out")
    assert f"{newest(killed)} cannot be read" in said
    assert "Others can be exported: --step 2" in said
    assert not (tmp_path / "out").exists()
    export(killed, tmp_path / "out", "--step", 2)


def prune_once(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the run write a checkpoint of step 4, and remove `name`, while `name` is read."""
    read = checkpoint.read_policy

    def read_policy(folder: Path) -> Any:
        if folder.name == name:
            newer = run / "checkpoints" / "step000004-version000004"
            shutil.copytree(newest(run), newer, dirs_exist_ok=True)
            shutil.rmtree(run / "checkpoints" / name)
        return read(folder)

    monkeypatch.setattr(checkpoint, "read_policy", read_policy)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_named(
    killed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prune_once(killed, monkeypatch, "step000002-version000002")
    said = complaint(capsys, 1, killed, tmp_path / "out", "--step", 2)
    assert "the run removed the checkpoint of step 2 while it was read" in said
    assert "only the newest 2 (checkpoint.keep). Others can be exported: --step 3 or 4" in said


def test_a_newer_checkpoint_replaces_the_newest_if_that_is_removed(
    killed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prune_once(killed, monkeypatch, "step000003-version000003")
    export(killed, tmp_path / "out")
    assert "the policy of step 4 is in" in capsys.readouterr().out
