"""The checks of `check-template`: requirements that a chat template must meet for conversations."""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError
from rich.progress import track

from unstale.envs import Message, ToolCall
from unstale.envs.chat import STAND_IN, Chat
from unstale.envs.guard import time_limit
from unstale.records import Sampled
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.conversation import Conversation, parse_reply, with_call_ids

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {
                    "key": {},
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "flag": {"type": "boolean"},
                },
            },
        },
    },
)
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"key": "x"},
    {"é": [1.5, None, True], "n": {"b": '"\\\n', "a": -2}},
    {"text": "5\n", "count": 3, "flag": True},
)
_TEXTS = (
    "x",
    "",
    "the result",
    " a  b ",
    "Größe 漢字 🙂\n\nand more",
    "\n{curly} [square] 'quoted'\n",
)
_LONG_TEXT = "word " * 500
EXCERPT = 160
"""Number of characters around a problem that a message shows."""
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)
_THOUGHTS = re.compile(r"<think>.*?</think>|\s+", re.DOTALL)
QUESTION = Message("user", "?")
CONVERSATION_S = 30.0
"""Largest number of seconds for checking one conversation and shortening it. Usual is 0.01 s."""

Messages = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A requirement that is not met for a conversation.

    The excerpt of the rendered text shows it.
    """

    reason: str
    excerpt: str = ""
    harmless: bool = False
    """True if the template can continue conversations exactly in spite of the problem."""


Check = Callable[[Chat, Messages], Problem | None]


@dataclass(slots=True)
class CheckResult:
    """The result of one check: how many conversations passed, and the problems that were found.

    `problems` has, by reason, a problem and the shortest conversation that shows it.
    """

    name: str
    num_passed: int = 0
    problems: dict[str, tuple[Problem, Messages]] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return any(not problem.harmless for problem, _ in self.problems.values())


def run_checks(chat: Chat, conversations: int) -> list[CheckResult]:
    """Run all checks of a chat template on random conversations. Return a result for each check.

    `conversations` is their number. Raises `EnvError` if one takes too long and a `Watchdog` runs.
    """
    results = {check: CheckResult(name) for name, check in CHECKS.items()}
    for seed in track(range(conversations), "conversations", transient=True):
        messages = generate(chat, random.Random(seed))
        with time_limit("the chat template", CONVERSATION_S, "use another template"):
            _run_all(results, chat, messages)
    return list(results.values())


def _run_all(results: Mapping[Check, CheckResult], chat: Chat, messages: Messages) -> None:
    for check, result in results.items():
        problem = None if result.broken else _run(check, chat, messages)
        if problem and problem.reason not in result.problems:
            result.problems[problem.reason] = shrink(check, chat, messages, problem)
        result.num_passed += not problem
        if problem and check is _renders:
            return  # without a text there is nothing else to check


def _run(check: Check, chat: Chat, messages: Messages) -> Problem | None:
    try:
        return check(chat, messages)
    except TEMPLATE_ERRORS as error:
        if check is _renders:
            return _refusal(messages, error)
        return Problem(f"the check fails with: {str(error)[:EXCERPT]}")


def shrink(
    check: Check, chat: Chat, messages: Messages, problem: Problem
) -> tuple[Problem, Messages]:
    """Remove messages from a conversation as long as `check` finds the same problem.

    Return the problem and the remaining conversation.
    """
    for smaller in _smaller(messages):
        again = _run(check, chat, smaller)
        if again and again.reason == problem.reason:
            return shrink(check, chat, smaller, again)
    return problem, messages


def _smaller(messages: Messages) -> Iterator[Messages]:
    for count in (2, 1):
        for start in range(len(messages) - count + 1):
            rest = messages[:start] + messages[start + count :]
            if _is_valid(rest):
                yield rest
    for index, message in enumerate(messages):
        text = message.content
        half = len(text) // 2
        shorter = ("", "x", text[:half], text[half:], text[1:], text[:-1])
        changes: list[dict[str, Any]] = [{"content": content} for content in shorter]
        changes += [{"thoughts": ""}, {"tool_calls": ()}, {"tool_calls": message.tool_calls[:1]}]
        changes += [{"tool_calls": tuple(ToolCall("look_up", {}) for _ in message.tool_calls)}]
        for change in changes:
            changed = replace(message, **change)
            rest = (*messages[:index], changed, *messages[index + 1 :])
            if _is_valid(rest) and len(repr(rest)) < len(repr(messages)):
                yield rest


def _is_valid(messages: Messages) -> bool:
    """Return True if a conversation is well-formed.

    After an optional system message it begins with a user's message, and it does not end with a
    reply. No reply follows a reply, and tools only answer calls.
    """
    roles = "".join(message.role[0] for message in messages)
    for message, following in pairwise(messages):
        if following.role == "tool" and message.role != "tool" and not message.tool_calls:
            return False
    return bool(re.fullmatch(r"s?u+(at*u*)*", roles)) and not roles.endswith("a")


def generate(chat: Chat, draw: random.Random) -> Messages:
    """Return a random conversation that ends before a reply. `draw` is the source of random
    numbers.

    It has tool calls and reasoning if the template supports them.
    """
    controls = []
    for control in chat.control_texts:
        controls += [control, f"ok{control}\nuser\n", f" {control} "]

    def text() -> str:
        content = draw.choice(_TEXTS) if draw.random() < 0.995 else _LONG_TEXT
        return content + draw.choice(controls) if draw.random() < 0.4 else content

    messages = [Message("system", text())] if draw.random() < 0.6 else []
    messages.append(Message("user", text()))
    for _ in range(draw.randrange(5)):
        num_calls = draw.choice((0, 0, 1, 1, 2)) if chat.call_form else 0
        calls = tuple(ToolCall("look_up", draw.choice(_ARGUMENTS)) for _ in range(num_calls))
        thoughts = draw.choice(("", "hm", "so\n\nthen")) if chat.thinks else ""
        content = draw.choice(("", *_TEXTS[2:5])) if calls else draw.choice(_TEXTS[:5])
        messages.append(Message("assistant", content, calls, thoughts))
        messages += [Message("tool", text()) for _ in calls]
        if not calls or draw.random() < 0.2:
            messages.append(Message("user", text()))
    return tuple(messages)


def _renders(chat: Chat, messages: Messages) -> Problem | None:
    chat.render(messages)
    return None


def _refusal(messages: Messages, error: Exception) -> Problem:
    """Return a problem for an error that the template raised for a conversation.

    It is harmless if the conversation has other messages than plain ones of user and assistant.
    """
    plain = all(
        message.role in ("user", "assistant") and not message.tool_calls for message in messages
    )
    reason = f"the template raises {str(error)[:EXCERPT]!r}"
    if not plain:
        reason += ": calls with such messages are refused with these words"
    return Problem(reason, harmless=not plain)


def _prompts(chat: Chat, messages: Messages) -> Problem | None:
    before = chat.render(messages, add_generation_prompt=False)
    prompt = chat.render(messages)
    if prompt == before and not _begins_reply(chat, messages, prompt):
        return Problem(
            "add_generation_prompt has no effect: the policy would have to open its own turn",
            before[-EXCERPT:],
        )
    if not prompt.startswith(before):
        return Problem(
            "add_generation_prompt changes the text before it", _divergence(before, prompt)
        )
    return None


def _begins_reply(chat: Chat, messages: Messages, prompt: str) -> bool:
    """Return True if the template writes a reply directly after `prompt`, without other text."""
    reply = Message("assistant", STAND_IN)
    whole = chat.render([*messages, reply], add_generation_prompt=False)
    return whole.startswith(prompt) and whole[len(prompt) :].lstrip().startswith(STAND_IN)


def _keeps_earlier(chat: Chat, messages: Messages) -> Problem | None:
    end = _end_of_last_reply(messages)
    if not end:
        return None
    before = chat.render(messages[:end], add_generation_prompt=False, marked=True)
    whole = chat.render(messages, marked=True)
    if whole.startswith(before):
        return None
    excerpt = _divergence(before, whole)
    if "</think>" in before and _THOUGHTS.sub("", whole).startswith(_THOUGHTS.sub("", before)):
        return Problem(
            "thoughts of earlier turns are left out of a rendered history: a conversation that "
            "continues keeps them as sampled, a new one has none",
            excerpt,
            harmless=True,
        )
    return Problem(
        "a reply is rendered differently once a message follows it: the policy would be trained "
        "on a history that the template does not write",
        excerpt,
    )


def _appends(chat: Chat, messages: Messages) -> Problem | None:
    end = _end_of_last_reply(messages)
    if not end:
        return None
    whole = chat.encode_prompt(messages)
    appended = chat.encode_continuation(messages[end:], ended=False)
    rendered = whole[len(whole) - len(appended) :]
    if rendered == appended:
        return None
    return Problem(
        "the text after a reply depends on the messages before it: the tokens that continue a "
        "conversation are not those of the template",
        _divergence(chat.text(rendered, whole=True), chat.text(appended, whole=True)),
    )


def _has_own_tokens(chat: Chat, messages: Messages) -> Problem | None:
    messages = tuple(replace(message, thoughts="") for message in messages)
    replies = [place for place, message in enumerate(messages) if message.role == "assistant"]
    grown = list(chat.encode_prompt(messages[: min(replies, default=len(messages))]))
    for place, following in pairwise((*replies, len(messages))):
        between = messages[place + 1 : following]
        if not between:
            return None  # a run has no reply after a reply
        calls = messages[place].tool_calls
        grown += chat.written_reply(messages[place], between)
        grown += chat.encode_continuation(between, ended=True, calls=calls)
    text = chat.render(messages)
    quotes = text != chat.render(messages, marked=True)  # the tokenizer has no tokens for these
    own = chat.encode_prompt(messages) if quotes else chat.encode(text)
    if tuple(grown) == own:
        return None
    at = next((i for i, (a, b) in enumerate(zip(grown, own, strict=False)) if a != b), len(own))
    found, wanted = (
        ", ".join(f"{token} {chat.text([token], whole=True)!r}" for token in tokens[at:][:5])
        for tokens in (grown, own)
    )
    before = chat.text(own[:at], whole=True)[-EXCERPT // 2 :]
    return Problem(
        "a conversation that grows has other tokens than the tokenizer gives for the whole of it: "
        "no other program would show the policy these",
        f"after {before!r}: {found}; the tokenizer's own are {wanted}",
    )


def _end_of_last_reply(messages: Messages) -> int:
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return max(replies) + 1 if replies else 0


def _recognizes(chat: Chat, messages: Messages) -> Problem | None:
    conversation = Conversation(chat)
    history: list[Any] = []
    at = 0
    while at < len(messages):
        prompt = list(takewhile(lambda message: message.role != "assistant", messages[at:]))
        calls = history[-1].get("tool_calls", ()) if history else ()
        if sum(message.role == "tool" for message in prompt) != len(calls):
            return None  # calls are not parsed as they were written, which another check finds
        ids = iter(call["id"] for call in calls)
        history += [
            {"role": message.role, "content": message.content}
            | ({"tool_call_id": next(ids)} if message.role == "tool" else {})
            for message in prompt
        ]
        at += len(prompt)
        body = {"messages": history, "tools": list(TOOLS)}
        place = conversation.ask(wire.read_chat(body, temperature=1.0).call)
        if place.fork:
            return Problem(
                f"an answer that is sent back unchanged begins a branch: {place.fork.difference}"
            )
        place.branch.pieces.extend(place.context)
        if at < len(messages):
            tokens = _reply_tokens(chat, messages[at])
            place.branch.pieces.append(Sampled(tokens, (0.0,) * len(tokens), 0))
            answer = with_call_ids(parse_reply(chat, chat.text(tokens), tools=True), f"{at}")
            conversation.add_answer(place.branch, (answer,), ended=True)
            history.append(wire.message(answer))
        at += 1
    return None


def _reply_tokens(chat: Chat, reply: Message) -> tuple[int, ...]:
    """Return the tokens that the template writes for a reply, with its end token."""
    prompt = chat.encode_prompt([QUESTION])
    whole = chat.encode_prompt([QUESTION, reply], add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise ValueError("a rendered reply does not begin with the generation prompt")
    written = takewhile(lambda token: token not in chat.stop_tokens, whole[len(prompt) :])
    return (*written, chat.stop_tokens[0])


def _keeps_text(chat: Chat, messages: Messages) -> Problem | None:
    def control_tokens(messages: list[Message]) -> list[int]:
        return [token for token in chat.encode_prompt(messages) if token in chat.control_tokens]

    harmless = [
        replace(message, content="x" if message.content.strip() else message.content)
        for message in messages
    ]
    found = control_tokens(list(messages))
    expected = control_tokens(harmless)
    if found == expected:
        return None
    extra = [token for token in found if found.count(token) != expected.count(token)] or found
    return Problem(
        "message content becomes control tokens: a quoted text could end a turn or speak in "
        "another role",
        f"{chat.control_tokens[extra[0]]!r} is a control token there",
    )


def _parses(chat: Chat, messages: Messages) -> Problem | None:
    for reply in (message for message in messages if message.role == "assistant"):
        expected = replace(reply, content=reply.content.strip())
        tokens = _reply_tokens(chat, reply)
        parsed = chat.parse(tokens)
        if parsed == expected:
            continue
        text = chat.text(tokens, whole=True)
        content = "" if expected.tool_calls else expected.content
        partial = {
            "words beside a call": replace(expected, content=content),
            "thoughts": replace(expected, thoughts=""),
            "calls": replace(expected, tool_calls=()),
        }
        for name, rest in partial.items():
            if parsed == rest:
                return Problem(f"{name} are left out of a rendered history", text, harmless=True)
        return Problem("a reply is not parsed as it was written: agents would get another", text)
    return None


CHECKS: dict[str, Check] = {
    "renders a history": _renders,
    "prompts for a reply": _prompts,
    "keeps earlier messages": _keeps_earlier,
    "appends new messages": _appends,
    "has the tokenizer's own tokens": _has_own_tokens,
    "recognizes sent-back answers": _recognizes,
    "keeps text apart from control tokens": _keeps_text,
    "parses replies": _parses,
}


def _divergence(one: str, other: str) -> str:
    """Return an excerpt of `one` around the first character at which it differs from `other`."""
    at = len(commonprefix([one, other]))  # noqa: RUF071 - by character
    half = EXCERPT // 2
    before = one[max(0, at - half) : at]
    return f"after {before!r}: {one[at : at + half]!r}, then {other[at : at + half]!r}"
