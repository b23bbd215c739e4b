"""Compare `check-template` with the tokens that transformers gives for whole conversations.

For each tokenizer, conversations grow as in a run. What `check-template` passes must be equal to
`apply_chat_template` of the whole, token by token. Print the table with
`python -m tests.cli.test_template_tokens [NAME=FOLDER ...]`.
"""

import io
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from tests.envs.test_tokens import KINDS, TEMPLATE, sentencepiece
from tests.support.templates import DIALECTS, tokenizer_of
from unstale.cli.check_template import check_template
from unstale.cli.template_checks import TOOLS
from unstale.envs import Message, ToolCall
from unstale.envs.chat import DAY, Chat

STRIPS: tuple[dict[str, bool], ...] = ({}, {"rstrip": True}, {"lstrip": True})
_UNSPACED = TEMPLATE.replace("\\n", "")
MAKERS: dict[str, Callable[[], Any]] = {
    **{dialect: partial(tokenizer_of, dialect) for dialect in DIALECTS},
    **{
        f"{kind} {' '.join(strip)} {lines}".strip(): partial(
            sentencepiece, kind, template=template, **strip
        )
        for kind in KINDS
        for strip in STRIPS
        for lines, template in (("", TEMPLATE), ("without lines", _UNSPACED))
    },
}
_TEXTS = (
    "x",
    "hello world",
    "the result is 5",
    "how  are you",
    "5",
    "Größe 漢字 🙂\n\nmore",
    "a\n",
)
_ARGUMENTS: tuple[dict[str, Any], ...] = ({}, {"key": "x y"}, {"text": "5", "count": 3})
QUICK = ("shipped", "mistral-v3", "first", "prepended rstrip", "unigram without lines")


class Fixed:
    """A clock that stands on the date of `Chat`."""

    now = staticmethod(lambda: DAY)


def conversation(draw: random.Random, chat: Chat) -> list[Message]:
    """Return a conversation of several turns, which a user begins and ends."""
    messages = [Message("system", draw.choice(_TEXTS))] if draw.random() < 0.4 else []
    messages.append(Message("user", draw.choice(_TEXTS)))
    for place in range(draw.randrange(1, 5)):
        has_call = chat.call_form is not None and draw.random() < 0.4
        arguments = draw.choice(_ARGUMENTS)
        calls = (ToolCall("look_up", arguments, id=f"{place:09}"),) if has_call else ()
        messages.append(Message("assistant", "" if calls else draw.choice(_TEXTS), calls))
        messages.append(Message("tool" if calls else "user", draw.choice(_TEXTS)))
    return messages


def as_client(messages: list[Message]) -> Iterator[dict[str, Any]]:
    """Yield messages in the form of the OpenAI API, with arguments as an object."""
    last_id = ""
    for each in messages:
        record: dict[str, Any] = {"role": each.role, "content": each.content}
        for call in each.tool_calls:
            last_id = call.id
            function = {"name": call.name, "arguments": dict(call.arguments)}
            record["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        if each.role == "tool":
            record["tool_call_id"] = last_id
        yield record


def grown(chat: Chat, messages: list[Message]) -> list[int]:
    """Return the tokens of a run in which the policy writes the replies."""
    replies = [at for at, each in enumerate(messages) if each.role == "assistant"]
    tokens = list(chat.encode_prompt(messages[: replies[0]]))
    for at in replies:
        reply, after = messages[at], messages[at + 1 : at + 2]
        tokens += chat.written_reply(reply, after)
        tokens += chat.encode_continuation(after, ended=True, calls=reply.tool_calls)
    return tokens


def difference(tokenizer: Any, chat: Chat, draw: random.Random, tools: Any) -> str:
    """Return where a random conversation differs. Empty if it does not, or has no rendering."""
    messages = conversation(draw, chat)
    try:
        own = tokenizer.apply_chat_template(
            list(as_client(messages)), tools, add_generation_prompt=True, return_dict=False
        )
    except Exception:  # noqa: BLE001 - a template refuses some conversations
        return ""
    found = grown(chat, messages)
    at = next((at for at, pair in enumerate(zip(found, own, strict=False)) if len({*pair}) > 1), -1)
    if found == own:
        return ""
    return (
        f"{messages}: after {tokenizer.decode(own[:at])[-40:]!r} {found[at:][:4]}, {own[at:][:4]}"
    )


def verdict(folder: Path, conversations: int, differences: int) -> tuple[str, str]:
    """Return what `check-template` says of a folder, and a difference that it does not see."""
    result = check_template(
        folder, conversations=conversations, console=Console(file=io.StringIO())
    )
    if not result:
        problems = [problem for each in result.checks if each.broken for problem in each.problems]
        return f"refused: {(result.error or problems[0])[:90]}", ""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for tools in (None, list(TOOLS)):
        chat = Chat(tokenizer, tools or ())
        for seed in range(differences):
            if wrong := difference(tokenizer, chat, random.Random(seed), tools):
                return "passed", wrong
    return "exact", ""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.costly] * (name not in QUICK)) for name in MAKERS],
)
def test_a_template_that_passes_has_the_tokens_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)
    MAKERS[name]().save_pretrained(tmp_path)
    said, wrong = verdict(tmp_path, 40, 40)
    assert not wrong, f"{said}: {wrong}"
    assert said == "exact" or said.startswith("refused: ")


def test_templates_that_can_be_continued_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)
    for name in ("shipped", "first"):
        MAKERS[name]().save_pretrained(tmp_path / name)
        assert verdict(tmp_path / name, 20, 0) == ("exact", "")


if __name__ == "__main__":
    from tempfile import TemporaryDirectory

    chat_template_utils.datetime = Fixed  # type: ignore[assignment]
    for name, make in MAKERS.items():
        with TemporaryDirectory() as made:
            make().save_pretrained(made)
            print(name, *verdict(Path(made), 80, 200), sep=" | ", flush=True)  # noqa: T201
    for word in sys.argv[1:]:
        name, _, given = word.partition("=")
        print(name, *verdict(Path(given), 80, 200), sep=" | ", flush=True)  # noqa: T201
