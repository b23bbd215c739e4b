"""Whether conversations in a chat template go on exactly: generated ones, and the smallest that do not."""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from unstale.config import ConfigError
from unstale.envs import Message, ToolCall
from unstale.envs.chat import DAY, Chat
from unstale.model.loading import load_tokenizer
from unstale.records import Sampled
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.conversation import Conversation, parse_reply

TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"key": {}}},
        },
    },
)
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"key": "x"},
    {"é": [1.5, None, True], "n": {"b": '"\\\n', "a": -2}},
)
_PLAIN = (
    "x",
    "",
    " a  b ",
    "Größe 漢字 🙂\n\nand more",
    "\n{curly} [square] 'quoted'\n",
    "word " * 500,
)
_SHOWN = 160
_WRONG = (TemplateError, TypeError, ValueError)
_THOUGHTS = re.compile(r"<think>.*?</think>|\s+", re.DOTALL)
_ASKED = Message("user", "?")

Told = tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Break:
    """`says` what is otherwise, and what that means for training; `around` is the text where it shows."""

    says: str
    around: str = ""
    harmless: bool = False
    """What was sampled is gone on with exactly all the same."""


@dataclass(slots=True)
class Verdict:
    """Of one check: on how many conversations it held, and the smallest ones found on which it did not."""

    name: str
    held: int = 0
    found: dict[str, tuple[Break, Told]] = field(default_factory=dict)

    @property
    def broken(self) -> bool:
        return any(not found.harmless for found, _ in self.found.values())


def check_template(
    folder: Path, *, conversations: int = 1000, console: Console | None = None
) -> bool:
    """Check the tokenizer of a model folder; the verdict is printed. False where something breaks.

    Raises `ConfigError` for a folder without a tokenizer or a template.
    """
    if conversations < 1:
        raise ConfigError(f"--conversations must be at least 1, got {conversations}")
    console = console or Console(soft_wrap=True)
    tokenizer, ends = load_tokenizer(folder), ends_of(folder)
    tokenizer.model_max_length = sys.maxsize  # else it warns
    facts, verdicts = Table(show_header=False, box=None), Table("check", "verdict", "what it means")
    try:
        chat = Chat(tokenizer, (), ends=ends)
        for name, fact in _facts(chat):
            facts.add_row(f"[bold]{name}[/]", escape(fact))
        console.print(facts, highlight=False)
        chat = chat.with_tools(TOOLS)
    except _WRONG as error:
        console.print(f"[bold red]breaks:[/] {escape(str(error))}", highlight=False)
        return False
    found = verdicts_of(chat, conversations)
    for verdict in found:
        limits = [
            f"[yellow]{escape(one.says)}[/]" for one, _ in verdict.found.values() if one.harmless
        ]
        breaks = [
            f"[red]{escape(one.says)}[/]" for one, _ in verdict.found.values() if not one.harmless
        ]
        word = "[bold red]breaks[/]" if breaks else "holds, but" if limits else "[green]holds[/]"
        verdicts.add_row(
            verdict.name, word, "\n".join((*breaks, *limits)) or f"{verdict.held:,} conversations"
        )
    console.print(verdicts, highlight=False)
    for verdict in found:
        for one, told in verdict.found.values():
            console.print(f"[bold]{escape(one.says)}[/]", highlight=False)
            for message in told:
                console.print(f"    {escape(_short(message))}", highlight=False)
            console.print(
                f"    [dim]{escape(one.around)}[/]" if one.around else "", highlight=False
            )
    return not any(verdict.broken for verdict in found)


def ends_of(folder: Path) -> tuple[int, ...]:
    """The tokens that end a reply, as a model folder names them."""
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            try:
                named = json.loads((folder / name).read_text()).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise ConfigError(f"{folder / name} cannot be read: {error}") from error
            if named is not None:
                return tuple(named) if isinstance(named, list) else (named,)
    return ()


def verdicts_of(chat: Chat, conversations: int) -> list[Verdict]:
    """Every check on as many generated conversations."""
    verdicts = {check: Verdict(name) for name, check in CHECKS.items()}
    for seed in track(range(conversations), "conversations", transient=True):
        told = generate(chat, random.Random(seed))
        for check, verdict in verdicts.items():
            found = None if verdict.broken else _run(check, chat, told)
            if found and found.says not in verdict.found:
                verdict.found[found.says] = shrink(check, chat, told, found)
            verdict.held += not found
            if found and check is _written:
                break  # there is nothing to look at
    return list(verdicts.values())


Check = Callable[[Chat, Told], Break | None]


def _run(check: Check, chat: Chat, told: Told) -> Break | None:
    try:
        return check(chat, told)
    except _WRONG as error:
        return (
            _refusal(told, error)
            if check is _written
            else Break(f"this much fails: {str(error)[:_SHOWN]}")
        )


def shrink(check: Check, chat: Chat, told: Told, found: Break) -> tuple[Break, Told]:
    """The smallest conversation that breaks in the same way, as far as leaving something out leads there."""
    for less in _smaller(told):
        if (again := _run(check, chat, less)) and again.says == found.says:
            return shrink(check, chat, less, again)
    return found, told


def _smaller(told: Told) -> Iterator[Told]:
    for many in (2, 1):
        for at in range(len(told) - many + 1):
            if _sound(less := told[:at] + told[at + many :]):
                yield less
    for at, message in enumerate(told):
        text, half = message.content, len(message.content) // 2
        changes: list[dict[str, Any]] = [
            {"content": less} for less in ("", "x", text[:half], text[half:], text[1:])
        ]
        changes += [{"content": text[:-1]}, {"thoughts": ""}]
        changes += [{"tool_calls": ()}, {"tool_calls": message.tool_calls[:1]}]
        changes += [{"tool_calls": tuple(ToolCall("look_up", {}) for _ in message.tool_calls)}]
        for change in changes:
            less = (*told[:at], replace(message, **change), *told[at + 1 :])
            if _sound(less) and len(repr(less)) < len(repr(told)):
                yield less


def _sound(told: Told) -> bool:
    """Somebody asks first, and last; nobody answers twice; tools answer calls."""
    roles = "".join(message.role[0] for message in told)
    calls = all(
        one.role == "tool" or one.tool_calls
        for one, after in pairwise(told)
        if after.role == "tool"
    )
    return calls and bool(re.fullmatch(r"s?u+(at*u*)*", roles)) and not roles.endswith("a")


def generate(chat: Chat, draw: random.Random) -> Told:
    """A conversation that waits for a reply: with odd text, and with calls and thoughts where the template has them."""
    marks = [
        form.format(mark) for mark in chat.control_texts for form in ("{}", "ok{}\nuser\n", " {} ")
    ]

    def text() -> str:
        odd = draw.choice(_PLAIN[:-1]) if draw.random() < 0.995 else _PLAIN[-1]
        return odd + draw.choice(marks) if draw.random() < 0.4 else odd

    told = [Message("system", text())] if draw.random() < 0.6 else []
    told.append(Message("user", text()))
    for _ in range(draw.randrange(5)):
        many = draw.choice((0, 0, 1, 1, 2)) if chat.call_form else 0
        calls = tuple(ToolCall("look_up", draw.choice(_ARGUMENTS)) for _ in range(many))
        thoughts = draw.choice(("", "hm", "so\n\nthen")) if chat.thinks else ""
        content = draw.choice(("", *_PLAIN[2:4])) if calls else draw.choice(_PLAIN[:4])
        told.append(Message("assistant", content, calls, thoughts))
        told += [Message("tool", text()) for _ in calls]
        if not calls or draw.random() < 0.2:
            told.append(Message("user", text()))
    return tuple(told)


def _written(chat: Chat, told: Told) -> Break | None:
    chat.render(told)
    return None


def _refusal(told: Told, error: Exception) -> Break:
    """Of a plain conversation nothing else is left; the rest only matters where it was not sampled."""
    plain = all(
        message.role in ("user", "assistant") and not message.tool_calls for message in told
    )
    means = (
        ""
        if plain
        else ": where such messages have to be written as text, they are refused in these words"
    )
    return Break(f"the template says {str(error)[:_SHOWN]!r}{means}", harmless=not plain)


def _asks(chat: Chat, told: Told) -> Break | None:
    silent, asking = chat.render(told, add_generation_prompt=False), chat.render(told)
    if asking == silent:
        return Break(
            "nothing asks for a reply: the policy would have to open its own turn", silent[-_SHOWN:]
        )
    if not asking.startswith(silent):
        return Break("asking for a reply changes what stands before it", _parting(silent, asking))
    return None


def _stays(chat: Chat, told: Told) -> Break | None:
    if not (at := _last_reply(told)):
        return None
    before, whole = (
        chat.render(told[:at], add_generation_prompt=False, marked=True),
        chat.render(told, marked=True),
    )
    if whole.startswith(before):
        return None
    if "</think>" in before and _THOUGHTS.sub("", whole).startswith(_THOUGHTS.sub("", before)):
        return Break(
            "thoughts of earlier turns are left out when a history is written: a conversation that goes on keeps them "
            "as they were sampled, and one that begins anew has none",
            _parting(before, whole),
            harmless=True,
        )
    return Break(
        "a reply is written otherwise once something follows it: the policy is trained on a history that the template "
        "would not write",
        _parting(before, whole),
    )


def _goes_on(chat: Chat, told: Told) -> Break | None:
    at, whole = _last_reply(told), chat.encode_prompt(told)
    given = (chat.stop_tokens[0], *chat.encode_continuation(told[at:], ended=True)) if at else ()
    if (came := whole[len(whole) - len(given) :]) == given:
        return None
    return Break(
        "what comes after a reply depends on what stood before it: what is given when a conversation goes on is not "
        "what the template would write",
        _parting(chat.text(came, whole=True), chat.text(given, whole=True)),
    )


def _last_reply(told: Told) -> int:
    """How many messages there are up to it, with it."""
    return max(
        (at + 1 for at, message in enumerate(told) if message.role == "assistant"), default=0
    )


def _is_known(chat: Chat, told: Told) -> Break | None:
    conversation, history, at = Conversation(chat), list[Any](), 0
    while at < len(told):
        asked = list(takewhile(lambda message: message.role != "assistant", told[at:]))
        history += [{"role": message.role, "content": message.content} for message in asked]
        at += len(asked)
        body = {"messages": history, "tools": list(TOOLS)}
        found = conversation.ask(wire.read_chat(body, temperature=1.0).call)
        if found.fork:
            return Break(
                f"an answer that is sent back as it was handed out begins a branch: {found.fork.reason}"
            )
        found.branch.pieces.extend(found.context)
        if at < len(told):
            tokens = _spoken(chat, told[at])
            found.branch.pieces.append(Sampled(tokens, (0.0,) * len(tokens), 0))
            said = parse_reply(chat, chat.text(tokens), tools=True)
            conversation.add_answer(found.branch, (said,), ended=True)
            history.append(wire.message(said, "call_{}".format))
        at += 1
    return None


def _spoken(chat: Chat, reply: Message) -> tuple[int, ...]:
    """A reply's tokens as the template writes them, with its end. Raises `ValueError` where it cannot be found."""
    head, whole = (
        chat.encode_prompt([_ASKED]),
        chat.encode_prompt([_ASKED, reply], add_generation_prompt=False),
    )
    if whole[: len(head)] != head:
        raise ValueError("a reply does not begin as it is asked for")
    return whole[len(head) : whole.index(chat.stop_tokens[0], len(head)) + 1]


def _is_text(chat: Chat, told: Told) -> Break | None:
    def harmless(message: Message) -> Message:
        return replace(message, content="x" if message.content.strip() else message.content)

    mine = [token for token in chat.encode_prompt(told) if token in chat.control_tokens]
    plain = [
        token
        for token in chat.encode_prompt([harmless(message) for message in told])
        if token in chat.control_tokens
    ]
    if mine == plain:
        return None
    more = [token for token in mine if mine.count(token) != plain.count(token)] or mine
    return Break(
        "what a message says becomes control tokens: whoever is quoted in it can end a turn, or speak in another role",
        f"{chat.control_tokens[more[0]]!r} stands there as a control token",
    )


def _is_heard(chat: Chat, told: Told) -> Break | None:
    for reply in (message for message in told if message.role == "assistant"):
        want = replace(reply, content=reply.content.strip())
        heard = chat.parse(tokens := _spoken(chat, reply))
        if heard == want:
            continue
        less = {
            "words beside a call": replace(want, content="" if want.tool_calls else want.content),
            "thoughts": replace(want, thoughts=""),
            "calls": replace(want, tool_calls=()),
        }
        text = chat.text(tokens, whole=True)
        for what, rest in less.items():
            if heard == rest:
                return Break(f"{what} are left out when a history is written", text, harmless=True)
        return Break(
            "a reply is not read back as what it was: agents would not get what the policy says",
            text,
        )
    return None


CHECKS: dict[str, Check] = {
    "a history can be written": _written,
    "a reply is asked for": _asks,
    "what was said stays": _stays,
    "what is new stands behind it": _goes_on,
    "what was answered is known again": _is_known,
    "what is said is text": _is_text,
    "a reply is read back": _is_heard,
}


def _facts(chat: Chat) -> Iterator[tuple[str, str]]:
    """How the template does what templates do in different ways."""
    yield (
        "a reply ends with",
        " or ".join(chat.text([token], whole=True) for token in chat.stop_tokens),
    )
    yield "calls", str(chat.call_form)
    yield "thoughts", "end in </think>" if chat.thinks else "are not known"
    if chat.dated:
        yield (
            "today",
            f"is asked for, and is always {DAY:%d %b %Y}: prompts are the same after midnight",
        )
    system = [Message("system", "x"), _ASKED]
    if chat.render(system) == chat.with_tools(TOOLS).render(system):
        yield "tools", "are not written: the policy only hears of them if the prompt tells it"


def _parting(one: str, other: str) -> str:
    """The text where two begin to differ."""
    at = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    before = one[max(0, at - _SHOWN // 2) : at]
    return (
        f"after {before!r}: {one[at : at + _SHOWN // 2]!r}, then {other[at : at + _SHOWN // 2]!r}"
    )


def _short(message: Message) -> str:
    thoughts = f" (thinks {message.thoughts[:_SHOWN]!r})" if message.thoughts else ""
    calls = "".join(
        f" {call.name}({json.dumps(dict(call.arguments))})" for call in message.tool_calls
    )
    return f"{message.role}:{thoughts} {message.content[:_SHOWN]!r}{calls}"
