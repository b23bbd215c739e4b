"""Convert messages to tokens and back, with the chat template of a tokenizer.

A conversation grows by appending tokens, so no part is encoded twice. `encode_prompt` renders the
prompt. `encode_continuation` renders a conversation with a placeholder for the reply, and encodes
only the text that the template writes after the placeholder. Placeholders also show how a template
ends a reply and writes tool calls, so no list of models is needed. `calls.py` has the formats of
tool calls.

Control tokens come only from the template, never from the content of messages. So no tool or user
can end a turn or write in another role.

Episodes of a group have the same prompt, and often the same tool results. Their tokens are cached,
so they are rendered and encoded once.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import count
from os.path import commonprefix
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from unstale.envs import Image, Message, ToolCall, tool_schema
from unstale.envs.argument_types import schemas_of
from unstale.envs.calls import PROBE, CallForm, JsonCalls, call_id, find_form
from unstale.envs.replies import END_OF_THOUGHT, THOUGHT, ReplyReader, any_of
from unstale.envs.tokens import SEAM, TextTokens, longest_seam
from unstale.envs.tool_prompt import ToolText, tool_text
from unstale.pictures import FIRST, Picture, PictureError, decoded
from unstale.records import ContextPiece, Provenance

if TYPE_CHECKING:
    from unstale.model.pictures import PictureReader

STAND_IN = "@@reply@@"
"""A placeholder that is rendered in place of the policy's reply."""

DAY = datetime(2024, 7, 26)
"""Today's date for templates that ask for it. It is fixed, so that prompts are the same after a
resume.
"""

_CODES = ["%-d", "%-m", *(f"%{letter}" for letter in "AaBbdmYyHIMSpFT")]
_FIXED_DATE = f"""{{% macro strftime_now(form) %}}{{{{ form {
    "".join(f"| replace('{code}', '{DAY.strftime(code)}')" for code in _CODES)
} }}}}{{% endmacro %}}{{{{ '' }}}}"""
_QUESTION = Message("user", "?")
_NO_THOUGHTS = re.compile(rf"\s*{THOUGHT}\s*{END_OF_THOUGHT}\s*")
_REPLY = Message("assistant", STAND_IN)
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError)
_MAX_CACHED = 64
"""Largest number of `Chat` objects with other tools that one `Chat` keeps."""
_MAX_RECENT_BYTES = 32 << 20
"""Bytes of memory for cached tokens. A `Chat` shares its cache with those that `with_tools`
returns.
"""
_TOKEN_BYTES = 36
"""Bytes of memory that a token takes in a tuple."""
_NUMBERS = count()


class Chat:
    """The format of conversations: a tokenizer's chat template with certain tools."""

    def __init__(  # noqa: PLR0913 - what a model and a run choose
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]],
        *,
        ends: Sequence[int] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
        tools_in_prompt: bool = False,
        pictures: "PictureReader | None" = None,
    ) -> None:
        """Find out how the template ends a reply and writes tool calls.

        `ends` are further end tokens, from the model's generation config. Only control tokens among
        them count. `template_kwargs` are variables of the template, such as `enable_thinking`. With
        `tools_in_prompt`, tools that the template leaves out are described in the prompt.
        `pictures` is needed for a vision-language model. Raises `ValueError` if the template does
        not use one of the variables, writes calls in an unknown format, or does not allow messages
        to be appended.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template; save one with the model (chat_template.jinja)"
            )
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token; a reply could never end")
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._tools_in_prompt = tools_in_prompt
        self._pictures = pictures
        self._tool_text: ToolText | None = None
        template = tokenizer.get_chat_template(None, self._tools or None)
        self._template_kwargs = dict(template_kwargs)
        _check_variables(tokenizer, template, self._template_kwargs)
        self.dated = "strftime_now" in template
        self._template = _FIXED_DATE + template if self.dated else template
        self._text = TextTokens(tokenizer, template)
        self.control_texts = self._text.control_texts
        self._mark_start = re.compile(f"(?={any_of(self.control_texts)})(.)", re.DOTALL)
        self._other_chats: dict[str, Chat] = {}
        self._recent = _Recent(_MAX_RECENT_BYTES)
        self._number = next(_NUMBERS)
        """The number of this object in the keys of the cache `_recent`, which several `Chat`
        objects share.
        """
        self._tools_json = json.dumps(self._tools, default=str, ensure_ascii=False)
        self._tools_have_marks = bool(self._mark_start.search(self._tools_json))
        self._longest_seam = max(map(longest_seam, (self._tools_json, self._template)))
        self._takes_lists = pictures is not None and self._omits_strings()
        """True if the template ignores contents that are texts and not lists of parts."""
        self._ends = self._find_ends()
        known = [*map(tokenizer.convert_tokens_to_ids, self._ends), tokenizer.eos_token_id]
        added = tokenizer.added_tokens_decoder
        self.control_tokens = self._text.control_tokens
        known += [token for token in ends if token in added and added[token].special]
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys(known))
        """Ids of the tokens that end a reply. The template writes the first one before a user's
        message.
        """
        prompt = self.render([_QUESTION]).rstrip()
        describes = tools_in_prompt and bool(self._tools) and not self.renders_tools
        self.call_form = self._find_call_form(required=bool(self._tools) and not describes)
        if describes:
            self._tool_text = tool_text(self._tools, self._render_plain, self._write_calls)
            self.call_form = self.call_form or JsonCalls()
        self.reader = ReplyReader(
            self.call_form,
            schemas_of(self._tools),
            self.control_texts,
            thinks=self.thinks and not prompt.endswith(END_OF_THOUGHT),
            begins_thinking=prompt.endswith(THOUGHT),
        )

    def encode_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Return the tokens of a prompt, which has the tools and these messages.

        With `add_generation_prompt`, they end with the tokens that start a reply.
        """
        record = self._prompt_record(messages)
        return self._recent.get(
            (record, self._number, "prompt" if add_generation_prompt else "whole"),
            lambda: self._encode(record, add_generation_prompt),
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        marked: bool = False,
    ) -> str:
        """Return the text of the prompt that `encode_prompt` encodes.

        `encode_prompt` inserts separators into contents that look like control tokens. The text has
        these separators only with `marked`.
        """
        text, seam = self._render(self._prompt_record(messages), add_generation_prompt)
        return text if marked else text.replace(seam, "")

    @property
    def reads_pictures(self) -> bool:
        return self._pictures is not None

    def pictures(self, tokens: Sequence[int]) -> tuple[Picture, ...]:
        """Return the pictures that occur in encoded tokens, each once."""
        return self._pictures.store.pictures(tokens) if self._pictures else ()

    def encode_continuation(
        self, messages: Sequence[Message], *, ended: bool, calls: Sequence[ToolCall] = ()
    ) -> tuple[int, ...]:
        """Return the tokens between two replies: the messages, and the start of the next reply.

        If `ended` is False, the previous reply has no end token, and the tokens begin with it.
        `calls` are the tool calls of the previous reply, whose ids the results in `messages` get.
        """
        record = self._record([_QUESTION, _REPLY, *messages], calls)
        return self._recent.get(
            (record, self._number, "ended" if ended else "cut off"),
            lambda: self._continued(record, ended),
        )

    def _continued(self, record: str, ended: bool) -> tuple[int, ...]:
        text, seam = self._render(record)
        _, placeholder, after = text.partition(STAND_IN)
        end = next(filter(after.startswith, self._ends), None)
        if not placeholder or end is None:
            ends = " or ".join(map(repr, self._ends))
            raise ValueError(
                f"the chat template writes {after[:40]!r} after this reply instead of {ends}"
            )
        before = end if ended else STAND_IN
        text = after.removeprefix(end) if ended else after
        return self._with_pictures(self._text.encode(text, after=before, seam=seam), record)

    def encode_reply(self, reply: Message, following: Sequence[Message] = ()) -> tuple[int, ...]:
        """Return the tokens of a reply that was not sampled, including its end token.

        They are what the template writes if the messages `following` come next, by default a
        user's. Thoughts that it would leave out there are written as a model writes them. Raises
        ValueError if `parse` would read another message from them.
        """
        tokens = self.written_reply(reply, following)
        read = self.parse(tokens)
        if reply.thoughts and read.thoughts != reply.thoughts.strip("\n"):
            tokens = self._with_thoughts(reply, following)
            read = self.parse(tokens)
            if read.thoughts != reply.thoughts.strip("\n"):
                raise ValueError(
                    f"the thoughts {reply.thoughts[:40]!r} are read as {read.thoughts[:40]!r}: "
                    "leave reasoning_content out, for a chat template without <think> or with "
                    "control tokens in it"
                )
        if (read.content, read.tool_calls) != (reply.content.strip(), reply.tool_calls):
            raise ValueError(
                f"the reply {reply.content[:40]!r} with {len(reply.tool_calls)} tool calls is read "
                f"as {read.content[:40]!r} with {len(read.tool_calls)}: give the calls in "
                "tool_calls, and no control tokens in the content"
            )
        return tokens

    def _with_thoughts(self, reply: Message, following: Sequence[Message]) -> tuple[int, ...]:
        """Return a reply's tokens with its reasoning, where the template may write an empty one."""
        plain = self.written_reply(replace(reply, thoughts=""), following)
        lengths = range(len(plain), 0, -1)
        empty = (n for n in lengths if _NO_THOUGHTS.fullmatch(self.text(plain[:n], whole=True)))
        opened = self.render([_QUESTION]).rstrip().endswith(THOUGHT)
        return (
            *(() if opened else self.encode(f"{THOUGHT}\n")),
            *self.encode_content(reply.thoughts.strip("\n")),
            *self.encode(f"\n{END_OF_THOUGHT}\n\n"),
            *plain[next(empty, 0) :],
        )

    def written_reply(self, reply: Message, following: Sequence[Message] = ()) -> tuple[int, ...]:
        """Return a reply's tokens like `encode_reply`, but without the check that `parse` reads
        them.
        """
        after = [*following] or [_QUESTION]
        around, seam = self._render(self._record([_QUESTION, _REPLY, *after], reply.tool_calls))
        text, own_seam = self._render(self._record([_QUESTION, reply, *after]))
        prompt, _ = self._render(self._record([_QUESTION]))
        before, _, rest = around.partition(STAND_IN)
        # Replies of a history may lack what the prompt writes, such as `<think>`. A template may
        # write a blank before text that it does not write before calls.
        start = next(filter(text.startswith, (prompt, before, before.rstrip())), None)
        end = next(filter(rest.startswith, self._ends), None)
        if end is None or start is None or seam != own_seam or not text.endswith(rest):
            raise ValueError(f"the chat template does not write this reply: {reply.content[:40]!r}")
        written = text[len(start) : len(text) - len(rest)] + end
        return self._text.encode(written, after=prompt, seam=seam)

    def parse(self, tokens: Sequence[int]) -> Message:
        """Return a reply's tokens as a message. A malformed tool call has an `error`."""
        return self.reader.message(self.text(tokens))

    def text(self, tokens: Sequence[int], *, whole: bool = False) -> str:
        """Return the text of a reply's tokens. With `whole`, end tokens are included.

        Long replies are decoded mostly without the interpreter lock.
        """
        stops = () if whole else self.stop_tokens
        kept = [token for token in tokens if token not in stops]
        return decoded(kept, self._text.decode) if self._pictures else self._text.decode(kept)

    def bytes_of(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, which may be part of a character."""
        return self._text.bytes_of(token)

    @property
    def thinks(self) -> bool:
        """True if the template handles reasoning text, which ends with `</think>`."""
        return END_OF_THOUGHT in self._template

    def encode(self, text: str, *, after: str = "") -> tuple[int, ...]:
        """Return the tokens that a text has after the text `after`. It may contain control
        tokens.
        """
        return self._text.encode(text, after=after)

    def encode_content(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text inside a message, without control tokens."""
        seam = SEAM * (1 + longest_seam(text))
        return self._text.encode(self._mark_start.sub(rf"\1{seam}", text), seam=seam)

    def are_token_ids(self, tokens: Sequence[int]) -> bool:
        """Return True if all these ids are in the vocabulary."""
        return self._text.are_token_ids(tokens)

    @cached_property
    def renders_tools(self) -> bool:
        """True if the template describes the tools in a prompt."""
        try:
            text = self._tokenizer.apply_chat_template(
                _as_dicts([_QUESTION]),
                [tool_schema("f", STAND_IN, {})],
                chat_template=self._template,
                tokenize=False,
                **self._template_kwargs,
            )
        except _TEMPLATE_ERRORS:
            return False
        return STAND_IN in str(text)

    @property
    def hides_tools(self) -> bool:
        """True if there are tools that no part of the prompt describes."""
        return bool(self._tools) and self._tool_text is None and not self.renders_tools

    def _prompt_record(self, messages: Sequence[Message]) -> str:
        """Return the messages of a prompt as JSON, with the description of tools if it is
        needed.
        """
        return self._record(self._tool_text.prompt(messages) if self._tool_text else messages)

    def _record(self, messages: Sequence[Message], reply_calls: Sequence[ToolCall] = ()) -> str:
        """Return messages as JSON, with tool calls as text if the template cannot render them.

        `reply_calls` are the tool calls of the placeholder `_REPLY`.
        """
        written = self._tool_text.written(messages) if self._tool_text else messages
        for image in (image for message in written for image in message.images):
            if self._pictures is None:
                raise PictureError(
                    "a message has a picture, but the policy reads only text: choose a "
                    "vision-language model (docs/vision.md)"
                )
            self._pictures.tokens(image.data)
        return _record(written, reply_calls)

    def _with_pictures(self, tokens: tuple[int, ...], record: str) -> tuple[int, ...]:
        """Return tokens in which each picture's placeholder is replaced by the picture's tokens.

        `record` is the conversation as JSON, with the digests of the pictures.
        """
        if self._pictures is None:
            return tokens
        contents = (message["content"] for message in json.loads(record))
        parts = (part for content in contents if isinstance(content, list) for part in content)
        digests = [part["digest"] for part in parts if part["type"] == "image"]
        if tokens.count(self._pictures.token) != len(digests):
            raise PictureError(
                f"the chat template writes {tokens.count(self._pictures.token)} pictures for the "
                f"{len(digests)} of the messages"
            )
        found = map(self._pictures.known, digests)
        runs = (next(found) if each == self._pictures.token else (each,) for each in tokens)
        return tuple(token for run in runs for token in run)

    def _omits_strings(self) -> bool:
        """Return True if the template ignores contents that are texts and not lists of parts."""
        self._takes_lists = False
        try:
            return STAND_IN not in self._render(_record([Message("user", STAND_IN)]))[0]
        except _TEMPLATE_ERRORS:
            return True

    def _render_plain(self, messages: Sequence[Message]) -> str:
        return self._render(_record(messages), add_generation_prompt=False)[0]

    def _write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Return the text that the template writes for tool calls. Empty if it writes none."""
        try:
            with_text = self._render(_record([_QUESTION, _REPLY, _QUESTION]))[0]
            text = self._written_calls(calls, with_text)
            return "" if text == self._written_calls([], with_text) else text
        except _TEMPLATE_ERRORS:
            return ""

    @property
    def longest_token(self) -> int:
        """Number of characters of the longest token in the vocabulary."""
        return self._text.longest_token

    def with_tools(
        self,
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Chat":
        """Return a `Chat` with these tools instead, and with further variables of the template."""
        wanted = [dict(tool) for tool in tools]
        variables = self._template_kwargs | dict(template_kwargs)
        key = json.dumps([wanted, variables])
        if key == json.dumps([self._tools, self._template_kwargs], default=str):
            return self
        other = self._other_chats.get(key)
        if other is None:
            if len(self._other_chats) == _MAX_CACHED:
                self._other_chats.clear()
            other = Chat(
                self._tokenizer,
                wanted,
                ends=self.stop_tokens,
                template_kwargs=variables,
                tools_in_prompt=self._tools_in_prompt,
                pictures=self._pictures,
            )
            other._recent = self._recent
            self._other_chats[key] = other
        return other

    def _find_ends(self) -> tuple[str, ...]:
        """Return the control tokens that the template writes at the end of a reply.

        First the one before a user's message, then the one before a tool's result if it differs.
        """
        found: list[str] = []
        for following in (_QUESTION, Message("tool", "?")):
            try:
                text, _ = self._render(_record([_QUESTION, _REPLY, following]))
            except _TEMPLATE_ERRORS:
                if not found:
                    raise
                break  # the template does not support tools
            before, placeholder, after = text.partition(STAND_IN)
            ends = [mark for mark in self.control_texts if after.startswith(mark)]
            if placeholder and ends:
                found.append(max(ends, key=len))
            elif not found:
                raise ValueError(
                    "the chat template does not write a reply followed by a control token, so a "
                    "conversation cannot be continued without tokenising it again; it wrote "
                    f"{after[:40]!r} after {before[-40:]!r}"
                )
        return tuple(dict.fromkeys(found))

    def _find_call_form(self, *, required: bool) -> CallForm | None:
        """Return the format in which the template writes tool calls, or Hermes' if it writes none.

        For an unknown format return None, or raise `ValueError` if the format is `required`.
        """
        try:
            with_text = self._render(_record([_QUESTION, _REPLY, _QUESTION]))[0]
            if self._written_calls([PROBE], with_text) == self._written_calls([], with_text):
                return JsonCalls()
            if form := find_form(lambda calls: self._written_calls(calls, with_text)):
                return form
            why = f"writes a call as {self._written_calls([PROBE], with_text)[-80:]!r}"
        except _TEMPLATE_ERRORS as error:
            why = f"cannot write a call: {error}"
        if required:
            raise ValueError(
                f"the chat template {why}. Calls that can be read back are JSON, with a name and "
                "arguments in tags or alone, tags for each argument, or Python calls in a list: "
                "use such a template, or no tools"
            )
        return None

    def _written_calls(self, calls: Sequence[ToolCall], with_text: str) -> str:
        """Return the text that the template writes for tool calls, without the rest of the
        conversation.

        `with_text` is this conversation as rendered with a text in place of the calls.
        """
        reply = Message("assistant", "", tuple(calls))
        text, _ = self._render(_record([_QUESTION, reply, _QUESTION]))
        text = text[len(commonprefix([text, with_text])) :]  # noqa: RUF071 - by character
        return min((text.partition(end)[0] for end in self._ends), key=len).strip()

    def _render(self, record: str, add_generation_prompt: bool = True) -> tuple[str, str]:
        """Return a conversation as text, and the separator in contents that look like control
        tokens.

        `record` is the conversation as JSON.
        """
        seam = SEAM * (1 + max(longest_seam(record), self._longest_seam))
        tools = self._tools
        if self._tools_have_marks:
            tools = json.loads(self._mark_start.sub(rf"\1{seam}", self._tools_json))
        messages = json.loads(self._mark_start.sub(rf"\1{seam}", record))
        for message in messages if self._takes_lists else ():
            if isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
        text = self._tokenizer.apply_chat_template(
            messages,
            tools or None,
            chat_template=self._template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._template_kwargs,
        )
        return str(text), seam

    def _encode(self, record: str, add_generation_prompt: bool) -> tuple[int, ...]:
        """Return the tokens of a whole conversation, given as JSON."""
        text, seam = self._render(record, add_generation_prompt)
        return self._with_pictures(self._text.encode(text, seam=seam), record)


def context_piece(
    chat: Chat, tokens: tuple[int, ...], provenance: Provenance = Provenance.ENVIRONMENT
) -> ContextPiece:
    """Return encoded tokens as a piece of an episode's record, with the pictures that occur in
    them.
    """
    has_pictures = max(tokens, default=0) >= FIRST
    return ContextPiece(tokens, provenance, chat.pictures(tokens) if has_pictures else ())


_Key = tuple[str, int, str]
"""The key of cached tokens: a conversation as JSON, the number of the `Chat`, and what was encoded
("prompt", "whole", "ended" or "cut off").
"""


class _Recent:
    """A cache of the tokens that were encoded last, with at most `max_bytes`. Threads may share
    it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._lock = Lock()
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tokens: dict[_Key, tuple[int, ...]] = {}
        """Cached tokens by key, least recently used first."""

    def get(self, key: _Key, make: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """Return the cached tokens of a key, or else those that `make` returns."""
        with self._lock:
            if key in self._tokens:
                self._tokens[key] = self._tokens.pop(key)
                return self._tokens[key]
        tokens = make()
        with self._lock:
            if key not in self._tokens:
                self._bytes += _memory(key, tokens)
            self._tokens[key] = tokens
            while self._bytes > self._max_bytes:
                oldest = next(iter(self._tokens))
                self._bytes -= _memory(oldest, self._tokens.pop(oldest))
        return tokens


def _memory(key: _Key, tokens: Sequence[int]) -> int:
    return len(key[0]) + _TOKEN_BYTES * len(tokens)


def _record(messages: Sequence[Message], reply_calls: Sequence[ToolCall] = ()) -> str:
    """Return a conversation as JSON. `reply_calls` are the tool calls of the placeholder
    `_REPLY`.
    """
    return json.dumps(_as_dicts(messages, reply_calls), ensure_ascii=False)


def _check_variables(tokenizer: Any, template: str, variables: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a variable that the template ignores or that the library sets."""
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters}
    for name in variables:
        if name in taken:
            raise ValueError(f"chat_template_kwargs cannot set {name!r}: the library sets it")
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ValueError(f"chat_template_kwargs: the chat template does not read {name!r}")


def _content(message: Message) -> str | list[dict[str, str]]:
    """Return a message's content: a text, or a list of parts if it has pictures."""
    if not message.images:
        return message.content
    return [
        {"type": "image", "digest": part.digest}
        if isinstance(part, Image)
        else {"type": "text", "text": part}
        for part in message.parts
    ]


def _as_dicts(
    messages: Sequence[Message], reply_calls: Sequence[ToolCall] = ()
) -> list[dict[str, Any]]:
    """Return the messages in the form that templates expect, with an id for each tool call.

    The results after a reply get the ids of its calls, in order. `reply_calls` are the tool calls
    of the placeholder `_REPLY`.
    """
    records: list[dict[str, Any]] = []
    num_answers = 0
    ids: list[str] = []
    for message in messages:
        record: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thoughts:
            record["reasoning_content"] = message.thoughts
        if message.role != "tool":
            calls = reply_calls if message is _REPLY else message.tool_calls
            ids = [call_id(index, call.id) for index, call in enumerate(calls)]
        if message.tool_calls:
            record["tool_calls"] = [
                {
                    "id": an_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for an_id, call in zip(ids, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            has_call = num_answers < len(ids)
            record["tool_call_id"] = ids[num_answers] if has_call else call_id(num_answers)
        num_answers = num_answers + 1 if message.role == "tool" else 0
        records.append(record)
    return records
