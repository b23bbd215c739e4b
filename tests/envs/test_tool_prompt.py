"""Test tools that a chat template does not render: they are described in the prompt, by option.

A conversation with them grows exactly, in templates that have no system messages, no messages of
tools, or no two messages of a user in a row. Without the option, the user is warned.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.templates import tokenizer_of
from unstale.builders.sampling import warn_of_hidden_tools
from unstale.cli.template_checks import TOOLS, run_checks
from unstale.config import SHIPPED_POLICY, RunConfig
from unstale.envs import Message, ToolCall
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
NO_TOOL = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tool') }}{% endif %}"
    "{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first "
    "and loop.previtem.role == 'user' %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}"
)
CALL = ToolCall("look_up", {"key": "x"})
TALK = [
    Message("user", "How much?"),
    Message("assistant", "", (CALL, CALL)),
    Message("tool", "a"),
    Message("tool", "b"),
]


def chat_of(template: str, *, tools_in_prompt: bool = True) -> Chat:
    tokenizer = tokenizer_of("shipped", template)
    return Chat(tokenizer, TOOLS, tools_in_prompt=tools_in_prompt)


@pytest.mark.parametrize("refused", ["", NO_SYSTEM, NO_TOOL, NO_SYSTEM + NO_TOOL + ALTERNATING])
def test_tools_are_in_the_prompt_and_conversations_grow_exactly(refused: str) -> None:
    chat = chat_of(refused + CHATML)
    text = chat.render(TALK)
    assert text.count('"name": "look_up", "parameters"') == 1
    assert text.index("look_up") < text.index("How much?")
    assert text.startswith(f"<|im_start|>{'user' if NO_SYSTEM in refused else 'system'}\n")
    assert text.count('<tool_call>\n{"name": "look_up", "arguments": {"key": "x"}}') == 2
    assert ("<tool_response>\na\n</tool_response>" in text) == (NO_TOOL in refused)
    grown = list(chat.encode_prompt(TALK[:1]))
    reply = chat.encode_reply(TALK[1], TALK[2:])
    assert chat.parse(reply).tool_calls == (CALL, CALL)
    grown += [*reply, *chat.encode_continuation(TALK[2:], ended=True, calls=TALK[1].tool_calls)]
    assert tuple(grown) == chat.encode(text)
    if not refused:
        assert not any(result.problems for result in run_checks(chat, 12))


def test_a_template_that_renders_tools_is_left_alone() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    plain, described = (Chat(tokenizer, TOOLS, tools_in_prompt=each) for each in (False, True))
    assert plain.render(TALK) == described.render(TALK)
    assert not plain.hides_tools and not described.hides_tools


def test_hidden_tools_are_told_to_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(RunConfig(recipe=""), model=str(tmp_path))
    tasks = CalculatorTasks()

    def warning(chat: Chat, config: RunConfig = config, tasks: Any = tasks) -> str:
        warn_of_hidden_tools(config, chat, tasks)
        return capsys.readouterr().err

    hidden = chat_of(CHATML, tools_in_prompt=False)
    assert f"{tmp_path} does not render tools" in warning(hidden)
    assert "Set tools_in_prompt = true" in warning(hidden)
    assert not warning(chat_of(CHATML))
    assert not warning(hidden, replace(config, model=str(SHIPPED_POLICY)))
    assert not warning(hidden.with_tools([]))
    assert not warning(Chat(tokenizer_of("qwen2.5"), TOOLS))
    agent = ExternalAgent(lambda url, task, seed, key: 1.0, ["x"])
    assert "which tools an agent sends" in warning(hidden.with_tools([]), tasks=agent)
    assert "gsm8k" not in warning(hidden.with_tools([]), tasks=agent)
    assert not warning(hidden, replace(config, tools_in_prompt=True), agent)
    assert not warning(Chat(tokenizer_of("qwen2.5"), ()), tasks=agent)
