"""Test rewards of a sequence-classification model in a process of its own.

Scores are those of the model, in a batch and alone. Concurrent episodes share passes. The name of a
reward has the checksum of the model. Errors name the folder.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from unstale.config import ConfigError
from unstale.envs import EnvError
from unstale.envs.dataset import load_reward
from unstale.rewards.reward_model import RewardModel
from unstale.testing import tiny_policy

TEXTS = ("w5", "w7 w8 w9", "w3 w4", "w60 w61 w62 w63")


def save(folder: Path, *, labels: int = 1, seed: int = 0) -> Path:
    tokenizer = tiny_policy().tokenizer
    tokenizer.pad_token = "w2"
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=16,
        pad_token_id=2,
        num_labels=labels,
        initializer_range=0.3,
    )
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


def test_a_process_that_ends_is_an_error_of_the_episode(folder: Path) -> None:
    broken = RewardModel(folder)
    asyncio.run(broken.reward("w5", {"prompt": "w3"}))
    assert broken._process
    broken._process.kill()
    with pytest.raises(EnvError, match="liking: its process has ended"):
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
