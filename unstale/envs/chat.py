"""Messages to tokens and back, for any tokenizer whose chat template writes calls as JSON.

Tokens are never encoded twice: a conversation grows by appending. `encode_prompt` renders the prompt
once. `encode_continuation` renders a stand-in reply and encodes only what the template writes after
it. The end of a reply and the format of calls are found in the same way, not by a model's name.

The content of messages is always text: only the template writes control tokens. So no tool or user
can end a turn or write in another role.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from typing import Any

from jinja2 import TemplateError

from unstale.envs import Message, ToolCall

STAND_IN = "@@reply@@"
"""Stand-in for the policy's reply."""

DAY = datetime(2024, 7, 26)
"""Date for templates that need today's, so that prompts are the same in a resumed run."""

_CODES = [
    "%A",
    "%a",
    "%B",
    "%b",
    "%-d",
    "%d",
    "%-m",
    "%m",
    "%Y",
    "%y",
    "%H",
    "%I",
    "%M",
    "%S",
    "%p",
    "%F",
    "%T",
]
_TODAY = f"""{{% macro strftime_now(form) %}}{{{{ form {
    "".join(f"| replace('{code}', '{DAY.strftime(code)}')" for code in _CODES)
} }}}}{{% endmacro %}}{{{{ '' }}}}"""
_ASKED, _REPLY = Message("user", "?"), Message("assistant", STAND_IN)
_CALLED = ToolCall("a_tool", {"an_argument": "x"})
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_BARE = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')
"""The start of a call without a tag."""
_BETWEEN = re.compile(r"[\s;,]*")
_OTHERS = 64
"""Number of cached chats with other tools."""
_SEAM = "\ue000"
"""Splits text that looks like a control token. Removed before encoding."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The format of calls: JSON objects with a name and, under `key`, arguments; tags are optional."""

    opens: str = "<tool_call>"
    closes: str = "</tool_call>"
    key: str = "arguments"

    def __str__(self) -> str:
        return f'{self.opens}{{"name": ..., "{self.key}": {{...}}}}{self.closes}'


class Chat:
    """A conversation format: a tokenizer's chat template with a set of tools."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], *, ends: Sequence[int] = ()
    ) -> None:
        """`ends` are more end tokens, from the model's generation config; only control tokens count.

        Raises `ValueError` for a template that cannot be continued, or has an unknown call format.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; save one with the model (chat_template.jinja)"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token; a reply could never end")
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        template = tokenizer.get_chat_template(None, self._tools or None)
        self.dated = "strftime_now" in template
        self._template = _TODAY + template if self.dated else template
        self.control_texts = _marks(tokenizer, template)
        """Texts of all control tokens."""
        any_mark = (
            "|".join(re.escape(mark) for mark in self.control_texts if len(mark.strip()) > 1)
            or "(?!)"
        )
        self._seen = re.compile(f"(?={any_mark})(.)", re.DOTALL)
        self._lead = re.compile(rf"\s*(?:(?:{any_mark})\s*)*")
        self._others: dict[str, Chat] = {}
        self._told = json.dumps(self._tools, default=str, ensure_ascii=False)
        self._end = self._find_end()
        known = [tokenizer.convert_tokens_to_ids(self._end), tokenizer.eos_token_id]
        added = tokenizer.added_tokens_decoder
        self.control_tokens = {token: mark.content for token, mark in added.items()}
        """Texts of control tokens and tags by token id."""
        known += [token for token in ends if token in added and added[token].special]
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys(known))
        """End tokens of a reply. The template writes the first one."""
        self._begins_thinking = self.render([_ASKED]).rstrip().endswith(_THOUGHT)
        self.call_form = self._find_call_form()

    def encode_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """The whole prompt: these messages, the tools, and, if `add_generation_prompt`, the beginning of the assistant's reply."""
        return self._encode(*self._render(messages, add_generation_prompt=add_generation_prompt))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        marked: bool = False,
    ) -> str:
        """What `encode_prompt` says; `marked` where something only looks like a control token."""
        text, seam = self._render(messages, add_generation_prompt=add_generation_prompt)
        return text if marked else text.replace(seam, "")

    def encode_continuation(self, messages: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        """Return the tokens between two replies: end of the first, new messages, start of the next.

        `ended` is False for a reply that was cut off: its end token is then included.
        """
        text, seam = self._render([_ASKED, _REPLY, *messages])
        _, found, after = text.partition(STAND_IN)
        if not found or not after.startswith(self._end):
            raise ValueError(
                f"the chat template does not write {self._end!r} after this reply, but {after[:40]!r}"
            )
        return self._encode(after[len(self._end) :] if ended else after, seam)

    def parse(self, tokens: Sequence[int]) -> Message:
        """Return a reply as a message. A malformed call becomes a `ToolCall` with an `error`."""
        thoughts, message = self.parse_text(self.text(tokens))
        return replace(message, thoughts=thoughts or "")

    def text(self, tokens: Sequence[int], *, whole: bool = False) -> str:
        """Decode a reply, without its end token unless `whole`."""
        kept = [token for token in tokens if whole or token not in self.stop_tokens]
        return str(
            self._tokenizer.decode(
                kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def parse_text(self, text: str, *, calls: bool = True) -> tuple[str | None, Message]:
        """Return a reply's finished thoughts, or None, and its message.

        Without `calls` the message is plain text. Calls in thoughts are not calls.
        """
        thoughts = None
        if self.thinks and _END_OF_THOUGHT in text:
            thoughts, _, text = text.partition(_END_OF_THOUGHT)
            thoughts, text = thoughts.removeprefix(_THOUGHT).strip("\n"), text.lstrip("\n")
        elif self.thinks and (self._begins_thinking or text.startswith(_THOUGHT)):
            calls = False
        return thoughts, self.parse_content(text) if calls else Message("assistant", text)

    def parse_partial(self, text: str, *, calls: bool = True) -> tuple[str, str]:
        """Return the parts of thoughts and content that no continuation of the text can change."""
        thoughts, form = "", self.call_form
        if self.thinks:
            thoughts, ended, text = text.partition(_END_OF_THOUGHT)
            if not ended:  # they may yet be content
                return "", ""
            thoughts, text = thoughts.removeprefix(_THOUGHT).strip("\n"), text.lstrip("\n")
        if not calls:
            return thoughts, text
        if text[:1].isspace():  # left out, but beside a call that is none
            return thoughts, ""
        if form and form.opens:
            text = text.partition(form.opens)[0]
            begun = (n for n in range(len(form.opens) - 1, 0, -1) if text.endswith(form.opens[:n]))
            text = text[: len(text) - next(begun, 0)]
        elif form and any(
            mark.startswith(text[: len(mark)]) for mark in ("{", *self.control_texts)
        ):
            return thoughts, ""
        return thoughts, text.rstrip()

    def parse_content(self, text: str) -> Message:
        """Return the message of a reply without thoughts, with its calls."""
        form = self.call_form
        if form is None:
            return Message("assistant", text.strip())
        if not form.opens:
            return self._read_bare(text.strip(), form)
        close = (
            f"(?:{re.escape(form.closes)}|$)" if form.closes else f"(?={re.escape(form.opens)}|$)"
        )
        pattern = re.compile(f"{re.escape(form.opens)}(.*?){close}", re.DOTALL)
        calls = tuple(
            _read_call(m.group(1), form, m.group().endswith(form.closes))
            for m in pattern.finditer(text)
        )
        return Message("assistant", pattern.sub("", text).strip(), calls)

    def _read_bare(self, text: str, form: CallForm) -> Message:
        """Parse a sequence of calls without tags. A control token before them marks them as calls."""
        lead = self._lead.match(text)
        at = lead.end() if lead else 0
        meant, calls = bool(at), list[ToolCall]()
        if not meant and not _BARE.match(text):
            return Message("assistant", text)
        while at < len(text) or not calls:
            try:
                record, at = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                calls.append(_malformed(f"the call is not JSON: {error}"))
                break
            if not meant and not calls and not {form.key, "arguments"} & set(record):
                return Message("assistant", text)
            calls.append(_made(record, form))
            if gap := _BETWEEN.match(text, at):
                at = gap.end()
        return Message("assistant", "", tuple(calls))

    @property
    def thinks(self) -> bool:
        """True if the template supports thoughts, which end in `</think>`."""
        return _END_OF_THOUGHT in self._template

    def encode(self, text: str) -> tuple[int, ...]:
        """Encode a rendered prompt, with control tokens in its text."""
        whole = text.encode(errors="replace").decode()
        return tuple(self._tokenizer.encode(whole, add_special_tokens=False))

    def are_token_ids(self, tokens: Sequence[int]) -> bool:
        """Return True if all are ids of the vocabulary."""
        return 0 <= min(tokens) <= max(tokens) < len(self._tokenizer)

    @cached_property
    def renders_tools(self) -> bool:
        """True if the template writes the descriptions of tools."""
        tool = {
            "type": "function",
            "function": {"name": "f", "description": STAND_IN, "parameters": {}},
        }
        asked, form = [_as_dict(_ASKED)], self._template
        text = self._tokenizer.apply_chat_template(
            asked, [tool], chat_template=form, tokenize=False
        )
        return STAND_IN in str(text)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Chat":
        """Return the same format with other tools."""
        wanted = [dict(tool) for tool in tools]
        if (made := json.dumps(wanted)) == json.dumps(self._tools, default=str):
            return self
        if made not in self._others:
            if len(self._others) == _OTHERS:
                self._others.clear()
            self._others[made] = Chat(self._tokenizer, wanted, ends=self.stop_tokens)
        return self._others[made]

    def _find_end(self) -> str:
        """Return the control token that the template writes after a reply."""
        before, found, after = self._render([_ASKED, _REPLY, _ASKED])[0].partition(STAND_IN)
        ends = [mark for mark in self.control_texts if after.startswith(mark)]
        if not found or not ends:
            raise ValueError(
                f"the chat template does not write a reply followed by a control token, so a conversation "
                f"cannot be continued without tokenising it again; it wrote {after[:40]!r} after {before[-40:]!r}"
            )
        return max(ends, key=len)

    def _find_call_form(self) -> CallForm | None:
        """Return the format in which the template writes calls.

        A template that writes none has Hermes' format. Returns None for an unknown format, or raises
        `ValueError` if there are tools.
        """
        silent, called = Message("assistant", ""), Message("assistant", "", (_CALLED,))
        try:
            said, spoken, nothing = (
                self._render([_ASKED, one, _ASKED])[0] for one in (called, _REPLY, silent)
            )
        except (TemplateError, TypeError, ValueError) as error:
            why = f"cannot write a call: {error}"
        else:
            if said == nothing:
                return CallForm()
            said = said[len(commonprefix([said, spoken])) :]  # noqa: RUF071 - character by character it is
            if form := _form_of(said, self._end):
                return form
            why = f"writes a call as {said.partition(self._end)[0][-80:]!r}"
        if self._tools:
            raise ValueError(
                f"the chat template {why}. Calls that can be read back are JSON objects with a name and arguments, "
                "in tags or alone: give the tokenizer a template that writes them so, or use no tools"
            )
        return None

    def _render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[str, str]:
        """Return the conversation as text, and the seam at which to split it before encoding."""
        said = json.dumps([_as_dict(message) for message in messages], ensure_ascii=False)
        around = f"{said}{self._told}{self._template}"
        seam = _SEAM * (1 + max(map(len, re.findall(f"{_SEAM}+", around)), default=0))
        records, tools = json.loads(self._seen.sub(rf"\1{seam}", said)), self._tools
        if self._seen.search(self._told):
            tools = json.loads(self._seen.sub(rf"\1{seam}", self._told))
        text = self._tokenizer.apply_chat_template(
            records,
            tools or None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
        )
        return str(text), seam

    def _encode(self, text: str, seam: str) -> tuple[int, ...]:
        """Encode the parts between seams. Lone surrogates become question marks."""
        parts = text.encode(errors="replace").decode().split(seam)
        return tuple(
            token
            for part in parts
            for token in self._tokenizer.encode(part, add_special_tokens=False)
        )


def _marks(tokenizer: Any, template: str) -> list[str]:
    """Return all special tokens and the added tokens in the template, as text."""
    added = tokenizer.added_tokens_decoder.values()
    told = (token.content for token in added if token.special or token.content in template)
    return sorted({tokenizer.eos_token, *told})


def _form_of(said: str, end: str) -> CallForm | None:
    """Return the tags around a rendered call and the key of its arguments."""
    try:
        record, after = json.JSONDecoder().raw_decode(said, start := max(said.find("{"), 0))
    except ValueError:
        return None
    opens, closes = said[:start].strip(), said[after:].partition(end)[0].strip()
    keys = (
        [key for key, value in record.items() if value == _CALLED.arguments]
        if isinstance(record, dict)
        else []
    )
    if not keys or record.get("name") != _CALLED.name or (closes and not opens):
        return None
    return CallForm(opens, closes, keys[0])


def _as_dict(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.thoughts:
        record["reasoning_content"] = message.thoughts
    if message.tool_calls:
        record["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return record


def _read_call(text: str, form: CallForm, closed: bool) -> ToolCall:
    """Parse the text between two tags."""
    if not closed:
        return _malformed(f"the call is not closed by {form.closes}")
    try:
        return _made(_DECODER.decode(text), form)
    except (ValueError, RecursionError) as error:
        return _malformed(f"the call is not JSON: {error}")


def _made(record: Any, form: CallForm) -> ToolCall:
    if not isinstance(record, dict):
        return _malformed("the call is not a JSON object")
    name, arguments = record.get("name"), record.get(form.key, record.get("arguments", {}))
    if not isinstance(name, str) or not name:
        return _malformed('the call has no "name"')
    if not isinstance(arguments, dict):
        return _malformed(f'"{form.key}" is not a JSON object')
    return ToolCall(name, arguments)


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice in one object")
    return found


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, error=reason)


_DECODER = json.JSONDecoder(object_pairs_hook=_named_once, parse_constant=_no_number)
