"""Test the encoding of reference conversations, with the shipped tokenizer and its tool calls."""

import json
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.envs.test_chat import QWEN
from unstale.config import SHIPPED_POLICY, ConfigError
from unstale.envs import Message, ToolCall, tool_schema
from unstale.envs.chat import Chat
from unstale.envs.draft_edit import change, mistaken
from unstale.envs.references import encode_conversation, load_references
from unstale.model.loading import load_tokenizer

CALL = ToolCall("get_order", {"order_id": 12})
TALK = (
    Message("system", "You serve customers."),
    Message("user", "Where is my order 12?"),
    Message("assistant", "", (CALL,)),
    Message("tool", "order 12: shipped"),
    Message("assistant", "It was shipped."),
    Message("user", "Thanks."),
    Message("assistant", "Bye."),
)


@cache
def chat() -> Chat:
    schema = tool_schema("get_order", "Find an order.", {"order_id": {"type": "integer"}})
    return Chat(load_tokenizer(SHIPPED_POLICY), [schema])


def rows(*conversations: Any) -> str:
    return "".join(json.dumps({"messages": each}) + "\n" for each in conversations)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text(text)
    return path


def test_a_conversation_has_the_tokens_of_a_run_with_these_replies() -> None:
    """The replies read back as the messages, and the rest is what the template writes."""
    found = encode_conversation(chat(), TALK)
    whole = chat().encode_prompt(TALK, add_generation_prompt=False)
    assert found.tokens == whole[: len(found.tokens)]
    assert not chat().text(whole[len(found.tokens) :]).strip()
    replies: list[list[int]] = []
    for token, learnt, before in zip(
        found.tokens, found.replies, (False, *found.replies), strict=False
    ):
        if learnt:
            if not before:
                replies.append([])
            replies[-1].append(token)
    assert [chat().parse(each) for each in replies] == [TALK[2], TALK[4], TALK[6]]
    assert all(each[-1] == chat().stop_tokens[0] for each in replies)
    assert found.tokens[: found.replies.index(True)] == chat().encode_prompt(TALK[:2])


def test_rows_may_have_calls_as_the_openai_api_writes_them(tmp_path: Path) -> None:
    call = {"name": "get_order", "arguments": '{"order_id": 12}'}
    talk = [
        {"role": "user", "content": "Where is 12?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": call}]},
    ]
    same = [talk[0], {**talk[1], "tool_calls": [{**call, "arguments": {"order_id": 12}}]}]
    one, other = load_references(written(tmp_path, rows(talk, same)), chat(), max_tokens=512)
    assert one == other
    reply = [token for token, learnt in zip(one.tokens, one.replies, strict=True) if learnt]
    assert chat().parse(reply).tool_calls == (CALL,)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([{"role": "user", "content": "Hi"}], "end with a reply of the assistant"),
        ([{"role": "assistant", "content": "Hi"}], "begin with a prompt"),
        ([{"role": "agent", "content": "Hi"}], "a message needs a role of system, user,"),
        ("Hi", "messages must be a list of messages"),
        (
            [{"role": "user", "content": "Hi"}, *2 * [{"role": "assistant", "content": "Hi"}]],
            "two replies of the assistant follow each other",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},
            ],
            "the thoughts 'Hm.' are read as ''",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "", "tool_calls": [{"name": "get_order"}]},
            ],
            "a tool call needs a name and arguments",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "", "function_call": {"name": "get_order"}},
            ],
            "function_call is not read",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"name": "get_order", "arguments": '{"order_id": 1e999}'}],
                },
            ],
            "1e999 is too large",
        ),
        (
            [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": '<tool_call>\n{"name": "get_order", "arguments": {}}\n</tool_call>',
                },
            ],
            "give the calls in tool_calls",
        ),
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "w " * 600}], "more"),
    ],
)
def test_a_row_that_cannot_be_learnt_is_refused_with_its_number(
    row: Any, message: str, tmp_path: Path
) -> None:
    good = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    with pytest.raises(ConfigError, match=f"line 2.*{message}"):
        load_references(written(tmp_path, rows(good, row)), chat(), max_tokens=512)


def test_a_file_without_rows_or_of_another_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        load_references(written(tmp_path, "\n"), chat(), max_tokens=512)
    with pytest.raises(ConfigError, match=r"must be an existing file of type .jsonl, .json"):
        load_references(tmp_path / "talks.csv", chat(), max_tokens=512)


def test_the_mistakes_of_a_draft_are_context_and_the_edit_is_learned(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Add 1 and 2."},
        {"role": "assistant", "content": "The sum is 3."},
    ]
    as_edits = partial(mistaken, request="Check it.", most=1, random=Random(0))
    path = written(tmp_path, rows(talk))
    right, wrong = load_references(path, chat(), max_tokens=999, read_as=as_edits)
    said = []
    for found in (right, wrong):
        learnt = [token for token, mark in zip(found.tokens, found.replies, strict=True) if mark]
        said.append(chat().parse(learnt).content)
    assert said[0] == "No change."
    text = chat().text(wrong.tokens)
    (draft,) = (line for line in text.splitlines() if line.startswith("The sum is"))
    assert draft != "The sum is 3." and change(draft, said[1]) == ("The sum is 3.", 1, 0)
    with pytest.raises(ConfigError, match="end with a reply of the assistant that calls no tool"):
        wrong_row = written(tmp_path, rows(talk[:1]))
        load_references(wrong_row, chat(), max_tokens=999, read_as=as_edits)


@pytest.mark.parametrize("template", [QWEN, QWEN.replace("<think>\\n\\n</think>\\n\\n", "")])
def test_thoughts_are_learnt_where_the_template_has_them(tmp_path: Path, template: str) -> None:
    """Also of earlier replies, from which templates remove them: a run's contexts have them."""
    tokenizer = load_tokenizer(SHIPPED_POLICY)
    tokenizer.chat_template = template + "{# </think> #}"
    thinking = Chat(tokenizer, ())
    talk = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "5", "reasoning_content": "two, then three"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes", "reasoning_content": "it is"},
    ]
    (found,) = load_references(written(tmp_path, rows(talk)), thinking, max_tokens=512)
    text = thinking.text(found.tokens, whole=True)
    assert text.count("<think>") == 2
    assert "<think>\ntwo, then three\n</think>\n\n5<|im_end|>" in text
    learnt = [
        token for token, is_reply in zip(found.tokens, found.replies, strict=True) if is_reply
    ]
    assert thinking.text(learnt, whole=True).endswith("<think>\nit is\n</think>\n\nYes<|im_end|>")
