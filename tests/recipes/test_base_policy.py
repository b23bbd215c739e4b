"""Test the shipped policy `base` and the script that makes it.

The short form of the script gives the same tokenizer, configuration and recipe hash, and its loss
falls. The policy has at most 4 MB. Numbers of the demo's level are single tokens. On held-out tasks
tool calls are well formed, and success is between 20% and 48% of a sample (38% of all 256 tasks).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import unstale
from benchmarks.demo import continue_training
from tools.base_policy.make import SHIPPED, make, shortened
from tools.base_policy.measure import Played, play
from tools.base_policy.retail import RetailPractice
from tools.base_policy.train import pad
from unstale.envs.retail import RetailTasks

FOLDER = Path(unstale.__file__).parent / "recipes" / "base_policy"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("short")
    return folder, make(shortened(SHIPPED, 21), folder)


@pytest.fixture(scope="module")
def played(model: Any, tokenizer: Any) -> list[Played]:
    return play(model, tokenizer, RetailTasks().held_out(96), temperature=1.0, seed=3)


@pytest.mark.costly
def test_the_script_makes_the_same_tokenizer_and_configuration(
    made: tuple[Path, dict[str, list[float]]],
) -> None:
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (made[0] / name).read_bytes() == (FOLDER / name).read_bytes(), name
    assert json.loads((made[0] / "config.json").read_text()) == json.loads(
        (FOLDER / "config.json").read_text()
    )


def test_the_shipped_recipe_is_the_one_in_the_code() -> None:
    record = json.loads((FOLDER / "recipe.json").read_text())
    assert record["hash"] == SHIPPED.hash
    assert list(record["losses"]) == [stage.name for stage in SHIPPED.stages]


@pytest.mark.costly
def test_the_loss_falls_in_the_short_form_and_in_what_is_shipped(
    made: tuple[Path, dict[str, list[float]]],
) -> None:
    first = made[1]["look-ups"]
    assert first[-1] < first[0]
    shipped = json.loads((FOLDER / "recipe.json").read_text())["losses"]
    assert shipped["demonstrations"][-1] < 0.2 < 2.0 < shipped["look-ups"][0]


def test_it_is_small(model: Any) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert model.config.model_type == "qwen3"


def test_numbers_and_names_are_one_token(tokenizer: Any) -> None:
    for text in (*map(str, range(10, 100)), "lamp", "kettle", "blue", "gift"):
        assert len(tokenizer.encode(f" {text}", add_special_tokens=False)) == 1, text
        assert tokenizer.encode(f'{{"a": {text}}}')[-2] == tokenizer.encode(f" {text}")[0], text


@pytest.mark.parametrize(
    "text", ["Straße, 東京 🙂", "a  b\n\n\tc", '{"x": [1.5, "—"]}', " leading", "12345 67 8"]
)
def test_text_comes_back_as_it_was(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_numbers_are_copied_and_looked_up(model: Any, tokenizer: Any) -> None:
    practice = RetailPractice(tokenizer)
    tokens, weights = pad([practice.drill(10**7 + index) for index in range(24)])
    asked = (weights[:, 1:] == 1.0) & (tokens[:, 1:] != 0)
    with torch.no_grad():
        found = model(input_ids=tokens[:, :-1]).logits.argmax(-1)
    assert (found == tokens[:, 1:])[asked].float().mean() > LOOKED_UP


@pytest.mark.costly
def test_calls_are_well_formed(played: list[Played]) -> None:
    calls = sum(len(message.tool_calls) for episode in played for message in episode.messages)
    assert sum(episode.malformed for episode in played) / calls < 0.03
    assert sum(episode.errors for episode in played) / calls < 0.08
    assert sum(episode.done for episode in played) == len(played)


@pytest.mark.costly
def test_decisions_are_often_wrong_and_often_right(
    played: list[Played], model: Any, tokenizer: Any
) -> None:
    assert 0.2 < sum(episode.success for episode in played) / len(played) < 0.48
    greedy = play(model, tokenizer, RetailTasks().held_out(96), temperature=0.0)
    assert sum(episode.success for episode in greedy) / len(greedy) < 0.45


def test_more_supervised_training_runs_for_its_time_and_changes_the_weights(tokenizer: Any) -> None:
    control = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    before = control.model.embed_tokens.weight.detach().clone()
    losses = continue_training(control, RetailPractice(tokenizer), seconds=1.0)
    assert losses
    assert not torch.equal(before, control.model.embed_tokens.weight)


LOOKED_UP = 0.9
"""Share of names whose number is found, in a record of five to eight."""
