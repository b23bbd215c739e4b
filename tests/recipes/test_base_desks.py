"""Test the shipped policy `base-desks`, and the practice that comes from a desk's `Domain`.

Every word and number of level 1 is a single token. Look-ups and calls of the practice have the
numbers of the records. The script gives the same tokenizer, configuration and recipe hash. The
policy has at most 6 MB. On held-out tasks of every desk, tool calls are well formed, every episode
ends, and decisions are often wrong and often right.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.base_policy.make import DESKS, make, shortened
from tools.base_policy.measure import Played, play
from tools.base_policy.practice import Practice, texts
from tools.base_policy.tokenizer import PIECES
from unstale.config import SHIPPED_POLICIES
from unstale.envs.desk import desk_names, shipped_desks
from unstale.lint.desks import PRACTISED

FOLDER = SHIPPED_POLICIES["base-desks"]
every_desk = pytest.mark.parametrize("name", desk_names())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def practices(tokenizer: Any) -> dict[str, Practice]:
    return dict(zip(DESKS.desks, DESKS.practices(tokenizer), strict=True))


@pytest.fixture(scope="module")
def played(tokenizer: Any) -> list[Played]:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return [
        episode
        for tasks in shipped_desks(level="1").values()
        for episode in play(model, tokenizer, tasks.held_out(8), temperature=1.0)
    ]


@pytest.mark.costly
def test_the_recipe_in_the_code_makes_the_tokenizer_and_the_configuration(tmp_path: Path) -> None:
    record = json.loads((FOLDER / "recipe.json").read_text())
    assert record["hash"] == DESKS.hash
    assert PRACTISED["base-desks"] == DESKS.desks == tuple(record["recipe"]["desks"])
    losses = make(shortened(DESKS, 1), tmp_path)
    assert losses["look-ups"][0] < 6.0, "it starts from base; random weights have a loss of 7"
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), name
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(
        (FOLDER / "config.json").read_text()
    )
    assert (FOLDER / "model.safetensors").stat().st_size <= 6_000_000


@every_desk
def test_every_word_of_level_1_is_one_token(name: str, tokenizer: Any) -> None:
    domain = shipped_desks(level="1")[name].domain
    words = {piece for text in texts(domain, 40) for piece in re.findall(PIECES, text)}
    assert {" 34", " 97"} & words
    for word in words:
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1, word


@every_desk
def test_the_look_ups_of_practice_are_right(
    name: str, practices: dict[str, Practice], tokenizer: Any
) -> None:
    for index in range(5):
        *records, pairs = tokenizer.decode(practices[name].drill(index).tokens).split("\n")
        asked = [pair.split() for pair in pairs.split(",")]
        assert len(asked) == 30
        for word, number in asked:
            assert f" {word} {number}" in " ".join(records)
        *talk, last = tokenizer.decode(practices[name].dictation(index).tokens).split("assistant\n")
        numbers = re.findall(r": (\d\d)\b", last)
        assert "<tool_call>" in last and len(numbers) > 1
        for number in numbers:
            assert f" {number}" in "".join(talk), "it was in a record, or the customer named it"


@every_desk
def test_replies_alone_have_the_full_weight(
    name: str, practices: dict[str, Practice], tokenizer: Any
) -> None:
    example = practices[name].session(3, requests=2)
    replies = [
        token
        for token, weight in zip(example.tokens, example.weights, strict=True)
        if weight == 1.0
    ]
    written = tokenizer.decode(replies)
    assert written.count("<|im_end|>") == tokenizer.decode(example.tokens).count("assistant\n")
    assert "<tool_call>" in written and "<tool_response>" not in written


@pytest.mark.costly
def test_calls_are_well_formed_and_decisions_often_wrong(played: list[Played]) -> None:
    calls = sum(len(message.tool_calls) for episode in played for message in episode.messages)
    assert sum(episode.malformed for episode in played) / calls < 0.03
    assert sum(episode.errors for episode in played) / calls < 0.15
    assert all(episode.done for episode in played)
    assert 0.2 < sum(episode.success for episode in played) / len(played) < 0.55
