"""Test the texts of techniques: corrections of replies and of steps within them, and prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.support.tiny_runs import EVEN_WORDS, EvenTasks, save_tiny
from unstale.config import EngineConfig
from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.isolation import IsolatedTasks
from unstale.model.policy import Policy
from unstale.records import ContextPiece, Sampled, Task, Trajectory
from unstale.rollout.generator import Generator
from unstale.rollout.texts import PolicyTexts

TASK = Task("toy", "train", 0)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    folder = tmp_path_factory.mktemp("texts") / "model"
    save_tiny(folder)
    chat = Chat(Policy.load(folder, dtype="float32").tokenizer, ())
    engine: Any = None
    return Generator(engine, chat, EngineConfig(max_context=256, max_completion_tokens=24))


class Checked(EvenTasks):
    """Tasks whose checker finds a given reply, and its right beginning."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    async def correction(self, task: Task, replies: Sequence[Message]) -> Any:
        assert [reply.content for reply in replies] == ["w4 w5 w6", "w6 w7"]
        return self.found


def attempt(chat: Chat) -> Trajectory:
    first, second = (
        chat.encode_reply(Message("assistant", words)) for words in ("w4 w5 w6", "w6 w7")
    )
    pieces = [
        ContextPiece((2, 3)),
        Sampled(first, (-0.5,) * len(first), 0),
        ContextPiece((2,)),
        Sampled(second, (-0.5,) * len(second), 0),
    ]
    return Trajectory(tuple(pieces), {"r": 0.0}, "done", TASK, 0)


def corrected(generator: Generator, taskset: Any) -> tuple[int, tuple[int, ...]] | None:
    texts = PolicyTexts(taskset, generator)
    return asyncio.run(texts.correction(attempt(generator.chat)))


def test_a_step_within_a_reply_is_corrected_behind_the_right_ones(generator: Generator) -> None:
    chat = generator.chat
    found = corrected(generator, Checked((0, "w4 w8 w6")))
    assert found is not None
    at, tokens = found
    given = attempt(chat).tokens
    assert chat.text([*given[2:at], *tokens]) == "w4 w8 w6"
    assert chat.text(given[2:at]).strip() == "w4" and tokens[-1] not in chat.stop_tokens


def test_a_whole_reply_is_corrected_with_its_end(generator: Generator) -> None:
    right = Message("assistant", "w8")
    number = len(attempt(generator.chat).pieces[1].tokens) + 3
    assert corrected(generator, Checked((1, right))) == (number, generator.chat.encode_reply(right))
    assert corrected(generator, Checked(None)) is None


def test_without_a_checker_the_demonstration_decides(generator: Generator) -> None:
    right = generator.chat.encode_reply(Message("assistant", EVEN_WORDS))
    assert corrected(generator, EvenTasks()) == (2, right)
    workers: Any = None
    assert corrected(generator, IsolatedTasks(EvenTasks(), workers)) == (2, right)
    checked = IsolatedTasks(Checked((0, "w4 w8 w6")), workers)
    assert corrected(generator, checked) == corrected(generator, Checked((0, "w4 w8 w6")))
    config = replace(generator.config, logit_bias=f"{right[0]}=-inf")
    assert corrected(replace(generator, config=config), EvenTasks()) is None, "a banned token"


def test_a_prompt_leaves_room_for_the_text_and_halves_of_characters_are_replaced(
    generator: Generator,
) -> None:
    texts = PolicyTexts(EvenTasks(), generator)
    prompt = texts.prompt("Read.", attempt="w1 " * 4000 + "the end \ud800")
    assert prompt.endswith('the end ?"}') and prompt.startswith("Read.")
    assert len(generator.chat.encode_prompt((Message("user", prompt),))) <= 256 - 24
