"""Test the command `sft`: training on reference replies, and the model folder that it writes."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli.main import main
from unstale.cli.sft import RECORD, SftOptions, sft
from unstale.config import ConfigError, RunConfig, TaskConfig, TrainerConfig
from unstale.config.options import override
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.dataset import DatasetConfig
from unstale.envs.mixed import MixedTasks
from unstale.model.policy import Policy
from unstale.recipes import RECIPES


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions with two answers each, of three words."""
    path = tmp_path_factory.mktemp("data") / "talks.jsonl"
    talks = []
    for number in (10, 20):
        talk = []
        for word in (number, number + 1):
            talk.append({"role": "user", "content": f"w{word}"})
            talk.append({"role": "assistant", "content": f"w{word + 30} w{word + 31} w{word + 30}"})
        talks.append(json.dumps({"messages": talk}))
    path.write_text("\n".join(talks))
    return path


def options_of(policy: Path, folder: Path, **changes: object) -> RunConfig:
    trainer = TrainerConfig(lr=3e-2, minibatches_per_batch=1)
    config = tiny_run(policy, folder, max_steps=10, deterministic=False, trainer=trainer)
    return override(config, changes)


def trained(config: RunConfig, data: Path, folder: Path, options: SftOptions) -> list[float]:
    """Return the mean of -log pi of each step."""
    steps = sft(config, data, folder, options, console=Console(file=StringIO()))
    assert [each.step for each in steps] == list(range(1, config.max_steps + 1))
    assert all(each.grad_norm > 0 for each in steps)
    return [each.nll for each in steps]


def test_the_policy_learns_the_replies_and_can_be_loaded(
    policy: Path, data: Path, tmp_path: Path
) -> None:
    config = options_of(policy, tmp_path)
    nll = trained(config, data, tmp_path / "out", SftOptions(batch=2))
    assert nll[-1] < 0.1 * nll[0]
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    assert record["options"]["loss"] == "cross_entropy" and record["references"] == 2
    assert [each["nll"] for each in record["steps"]] == nll
    before, after = (Policy.load(each).weights() for each in (policy, tmp_path / "out"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
    shorter = override(config, {"max_steps": 2})
    again = trained(shorter, data, tmp_path / "again", SftOptions(batch=2))
    assert again == nll[:2]


def test_otr_learns_likely_tokens_first(policy: Path, data: Path, tmp_path: Path) -> None:
    """Both losses start from the same policy. The weights of OTR are at most 1, so it is slower."""
    config = options_of(
        policy, tmp_path, **{"trainer.optimizer": "SGD", "trainer.lr": 0.1, "max_steps": 4}
    )
    plain = trained(config, data, tmp_path / "plain", SftOptions(batch=2))
    exact = trained(config, data, tmp_path / "exact", SftOptions(batch=2, loss="otr"))
    drawn = SftOptions(batch=2, loss="otr", samples=64, beta=-0.1)
    sampled = trained(config, data, tmp_path / "drawn", drawn)
    assert plain[0] == exact[0] == sampled[0]
    assert plain[-1] < exact[-1] < exact[0] and sampled[-1] < sampled[0]


def test_drafts_with_mistakes_are_edited_in_place(tmp_path: Path) -> None:
    """Each row is learned with 0 and with 1 mistake in its last reply."""
    path = tmp_path / "talks.jsonl"
    talk = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "It is 3."}]
    path.write_text(json.dumps({"messages": talk}))
    task = DatasetConfig(
        env="dataset:none.jsonl", reward="a:b", edit_request="Check it.", edits="in_place"
    )
    config = override(RECIPES["calculator"](), {"max_steps": 1, "eval.tasks": 0})
    config = replace(config, task=task)
    trained(config, path, tmp_path / "out", SftOptions(batch=2, mistakes=1))
    assert json.loads((tmp_path / "out" / RECORD).read_text())["references"] == 2
    for other in (replace(task, edits="again"), TaskConfig(env="calculator")):
        with pytest.raises(ConfigError, match=r"--mistakes needs task\.edit_request and"):
            sft(replace(config, task=other), path, tmp_path / "no", SftOptions(mistakes=1))


def test_wrong_options_are_refused_before_training(
    policy: Path, data: Path, tmp_path: Path
) -> None:
    config = options_of(policy, tmp_path)
    with pytest.raises(ConfigError, match="is not an empty folder"):
        sft(config, data, policy, SftOptions())
    with pytest.raises(ConfigError, match="cannot be made: Not a directory"):
        sft(config, data, data / "out", SftOptions())
    with pytest.raises(ConfigError, match="--beta and --samples need --loss otr"):
        SftOptions(samples=4)
    with pytest.raises(ConfigError, match="--beta must be < 1"):
        SftOptions(loss="otr", beta=1.5)
    with pytest.raises(ConfigError, match="sft has no techniques, got 'ess_lr'"):
        sft(override(config, {"techniques": "ess_lr"}), data, tmp_path / "out", SftOptions())
    with pytest.raises(
        ConfigError, match=r"line 1: tools is missing: the tasks of task.env have different"
    ):
        sft(override(config, {"task.env": "desks"}), data, tmp_path / "out", SftOptions())
    for name in ("kl_coef", "entropy_coef"):
        with pytest.raises(ConfigError, match=f"sft needs objective.{name} = 0, got 0.1"):
            regular = override(config, {f"objective.{name}": 0.1})
            sft(regular, data, tmp_path / "out", SftOptions())
    for name, value, words in (
        ("minibatches_per_batch", 2, "= 1, got 2"),
        ("epochs_per_batch", 3, "= 1, got 3"),
        ("stream", True, "= f"),
    ):
        with pytest.raises(ConfigError, match=rf"sft needs trainer\.{name} {words}"):
            sft(override(config, {f"trainer.{name}": value}), data, tmp_path / "out", SftOptions())


def mixed_calculator() -> MixedTasks:
    return MixedTasks("mixed", [CalculatorTasks()])


def test_a_mixture_of_task_sets_with_the_same_tools_is_no_reason_to_refuse(
    policy: Path, data: Path, tmp_path: Path
) -> None:
    task = TaskConfig(env="tests.cli.test_sft:mixed_calculator")
    out = tmp_path / "out"
    sft(replace(options_of(policy, tmp_path), task=task), data, out, SftOptions())
    assert (out / "model.safetensors").exists()


def test_the_command_writes_a_model_folder(
    policy: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["sft", "calculator", str(data), "--folder", str(tmp_path / "out"), "--max_steps", "2"]
    words += ["--model", str(policy), "--task.env", "tests.support.tiny_runs:EvenTasks"]
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--loss", "otr", "--samples", "8", "--batch", "2"])
    out = capsys.readouterr().out
    assert "step 2: -log pi" in out and "the policy is in" in out
    assert Policy.load(tmp_path / "out").version == 0


def test_a_data_set_that_is_not_there_is_not_asked_for(
    policy: Path, data: Path, tmp_path: Path
) -> None:
    task = DatasetConfig(env=f"dataset:{tmp_path / 'missing.jsonl'}", reward="builtins:len")
    out = tmp_path / "out"
    sft(replace(options_of(policy, tmp_path), task=task), data, out, SftOptions())
    assert (out / "model.safetensors").exists()
