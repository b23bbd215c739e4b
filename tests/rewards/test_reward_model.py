"""Test rewards of a sequence-classification model in a process of its own.

Scores are those of the model, in a batch and alone. Concurrent episodes share passes, except in a
deterministic run. The name of a reward has the checksum of the model. Errors name the folder.
"""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from tests.support.tiny_runs import judge_config
from tests.support.waits import LIMIT_S
from unstale.config import ConfigError
from unstale.durability import virtual_clock
from unstale.envs import EnvError
from unstale.envs.dataset import load_reward
from unstale.envs.elastic import LineProcess
from unstale.rewards.reward_model import ModelEnded, RewardModel
from unstale.testing import tiny_policy

TEXTS = ("w5", "w7 w8 w9", "w3 w4", "w60 w61 w62 w63")


def save(folder: Path, *, labels: int = 1, seed: int = 0) -> Path:
    tokenizer = tiny_policy().tokenizer
    tokenizer.pad_token = "w2"
    torch.manual_seed(seed)
    config = judge_config(labels=labels, length=16)
    config.pad_token_id = 2
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "liking")


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[RewardModel]:
    made = RewardModel(folder, largest_batch=3)
    yield made
    made.close()


def test_scores_are_those_of_the_model_and_share_passes(model: RewardModel, folder: Path) -> None:
    async def score() -> list[dict[str, float]]:
        return await asyncio.gather(*(model.reward(text, {"prompt": "w30"}) for text in TEXTS))

    found = asyncio.run(score())
    plain = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    for text, rewards in zip(TEXTS, found, strict=True):
        tokens = [int(word[1:]) for word in f"w30 {text}".split()]
        with torch.no_grad():
            wanted = plain(input_ids=torch.tensor([tokens])).logits.item()
        assert rewards == {f"liking@{model.version}": pytest.approx(wanted, abs=1e-5)}
    assert sum(model.batches) == len(TEXTS) and max(model.batches) == 3


def test_a_deterministic_run_scores_one_conversation_at_a_time(model: RewardModel) -> None:
    """What waits together depends on the real clock, and padding changes the last digits."""

    async def score() -> list[dict[str, float]]:
        return await asyncio.gather(*(model.reward(text, {"prompt": "w30"}) for text in TEXTS))

    before = len(model.batches)
    one, other = (virtual_clock.run(score(), virtual=True) for _ in range(2))
    assert one == other and model.batches[before:] == [1] * 2 * len(TEXTS)


def test_the_score_of_a_cancelled_episode_does_not_stop_the_others(model: RewardModel) -> None:
    async def score() -> dict[str, float]:
        cancelled = asyncio.create_task(model.reward("w5", {"prompt": "w30"}))
        await asyncio.sleep(0)
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        async with asyncio.timeout(LIMIT_S):
            return await model.reward("w7", {"prompt": "w30"})

    found = asyncio.run(score())
    assert found == asyncio.run(model.reward("w7", {"prompt": "w30"}))


@pytest.mark.costly
def test_the_version_is_that_of_the_weights(model: RewardModel, tmp_path: Path) -> None:
    asyncio.run(model.score([{"role": "user", "content": "w5"}]))
    other = RewardModel(save(tmp_path / "liking", seed=1))
    asyncio.run(other.score([{"role": "user", "content": "w5"}]))
    other.close()
    assert len(model.version) == 8 and other.version != model.version


@pytest.mark.costly
def test_errors_name_the_folder(model: RewardModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward model: no folder at .*nowhere"):
        RewardModel(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config.json: name a model folder"):
        RewardModel(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ConfigError, match=r"has a Qwen3ForCausalLM: name the folder"):
        RewardModel(tmp_path)
    with pytest.raises(EnvError, match=r"reward model .*liking: the conversation has 21 tokens"):
        asyncio.run(model.reward("w5 " * 20, {"prompt": "w3"}))
    two = RewardModel(save(tmp_path / "two", labels=2))
    with pytest.raises(EnvError, match="two cannot be read: it has 2 labels"):
        asyncio.run(two.reward("w5", {"prompt": "w3"}))
    two.close()


def test_two_processes_that_end_are_an_error_of_the_episode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os; print('{}', flush=True); input(); os.kill(os.getpid(), 9)"

    def start(model: RewardModel, number: int) -> LineProcess:
        return LineProcess(["-c", program], os.environ)

    monkeypatch.setattr(RewardModel, "_start", start)
    broken = RewardModel(folder)
    for starts in (2, 4, 6, 6):  # after three, nothing is started any more
        with pytest.raises(ModelEnded, match=r"liking: its process has ended with SIGKILL$"):
            asyncio.run(broken.reward("w5", {"prompt": "w3"}))
        assert broken.pool.starts == starts
    broken.close()


def test_the_last_line_of_a_process_that_could_not_start_is_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not for this processor')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    broken = RewardModel(folder)
    words = "liking: its process has ended with exit code 1: ImportError: not for this processor"
    with pytest.raises(EnvError, match=words):
        asyncio.run(broken.reward("w5", {"prompt": "w3"}))
    broken.close()


def test_its_method_is_a_reward_function(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "liked_by_test.py").write_text(
        "from unstale.rewards.reward_model import RewardModel\n"
        f"reward = RewardModel({str(folder)!r}).reward\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert callable(load_reward("liked_by_test:reward"))
