"""Messages to tokens and back, for any tokenizer with a chat template of the Qwen and Hermes family.

What was said is never tokenised again: a conversation grows by appending. `opening` renders the prompt once;
`following` renders only what comes after a reply, which it finds by rendering a stand-in reply and taking what the
template puts behind it.

What a message says is text, whatever it looks like: only the template writes control tokens, so no tool and no
customer can end a turn or speak in another role.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from afterimage.envs import Message, ToolCall

STAND_IN = "@@reply@@"
"""Stands for the policy's reply while the template renders what follows it."""

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_CLOSE = "</tool_call>"
_OTHERS = 64
"""Sets of tools whose formats are kept."""
_SEAM = "\ue000"
"""Cuts what only looks like a control token, in runs longer than any in the text; none are in what is encoded."""


class Chat:
    """One conversation format: a tokenizer's chat template with a set of tools."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template; save one with the model (chat_template.jinja)")
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-sequence token; a reply could never end")
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._end: str = tokenizer.eos_token
        self._controls = _controls(tokenizer)
        self._others: dict[str, Chat] = {}
        self._around = f"{json.dumps(self._tools, default=str, ensure_ascii=False)}{tokenizer.chat_template}"
        self.stop_tokens: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self.following((Message("user", "?"),), ended=True)  # a template that cannot go on is refused here

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole prompt: these messages, the tools, and the beginning of the assistant's first reply."""
        text, seam = self._render(messages)
        return self._encode(text, seam)

    def following(self, messages: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        """What comes between two replies: the end of the first, the new messages, the beginning of the next.

        With `ended` the reply's own tokens hold its end token; without, it was cut off and the end is given too.
        """
        asked, reply = Message("user", "?"), Message("assistant", STAND_IN)
        text, seam = self._render([asked, reply, *messages])
        before, found, after = text.partition(STAND_IN)
        if not found or not after.startswith(self._end):
            raise ValueError(
                f"the chat template does not write a reply followed by {self._end!r}, so a conversation "
                f"cannot be continued without tokenising it again; it wrote {after[:40]!r} after {before[-40:]!r}"
            )
        return self._encode(after[len(self._end) :] if ended else after, seam)

    def parse(self, tokens: Sequence[int]) -> Message:
        """A reply's tokens as a message. What is no proper call becomes a `ToolCall` that says why in `error`."""
        return self.read(self.text(tokens))

    def text(self, tokens: Sequence[int], *, whole: bool = False) -> str:
        """What a reply's tokens say; without the one that ends it, unless the `whole` is asked for."""
        kept = [token for token in tokens if whole or token not in self.stop_tokens]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def read(self, text: str) -> Message:
        """`parse` of what a reply says."""
        calls = tuple(_read_call(match.group(1), match.group(0).endswith(_CLOSE)) for match in _CALL.finditer(text))
        return Message("assistant", _CALL.sub("", text).strip(), calls)

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thoughts, which end in `</think>`."""
        return "</think>" in str(self._tokenizer.chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """A prompt that somebody rendered already: what looks like a control token is one."""
        whole = text.encode(errors="replace").decode()
        return tuple(self._tokenizer.encode(whole, add_special_tokens=False))

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether these are tokens at all."""
        return 0 <= min(tokens) <= max(tokens) < len(self._tokenizer)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Chat":
        """The same format with other tools."""
        wanted = [dict(tool) for tool in tools]
        if (made := json.dumps(wanted)) == json.dumps(self._tools, default=str):
            return self
        if made not in self._others:
            if len(self._others) == _OTHERS:
                self._others.clear()
            self._others[made] = Chat(self._tokenizer, wanted)
        return self._others[made]

    def _render(self, messages: Sequence[Message]) -> tuple[str, str]:
        """The conversation as text, and the seam at which it is to be cut before it is encoded."""
        said = json.dumps([_as_dict(message) for message in messages], ensure_ascii=False)
        seam = _SEAM * (1 + max(map(len, re.findall(f"{_SEAM}+", said + self._around)), default=0))
        records = json.loads(self._controls.sub(rf"\1{seam}", said))
        tools = self._tools or None
        text = self._tokenizer.apply_chat_template(records, tools=tools, add_generation_prompt=True, tokenize=False)
        return str(text), seam

    def _encode(self, text: str, seam: str) -> tuple[int, ...]:
        """Half a surrogate pair, which JSON can write and UTF-8 cannot, becomes a question mark."""
        parts = text.encode(errors="replace").decode().split(seam)
        return tuple(token for part in parts for token in self._tokenizer.encode(part, add_special_tokens=False))


def _controls(tokenizer: Any) -> re.Pattern[str]:
    """Finds the first character of every control token: all special ones, and the tags that the template writes."""
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.values()
    marks = {token.content for token in added if token.special or token.content in template}
    wide = [re.escape(mark) for mark in sorted(marks) if len(mark.strip()) > 1]
    return re.compile(f"(?={'|'.join(wide) or '(?!)'})(.)", re.DOTALL)


def _as_dict(message: Message) -> dict[str, Any]:
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
    return record


def _read_call(text: str, closed: bool) -> ToolCall:
    """One call from the text between its tags."""
    if not closed:
        return _malformed(f"the call is not closed by {_CLOSE}")
    try:
        record = json.loads(text, object_pairs_hook=_named_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return _malformed(f"the call is not JSON: {error}")
    if not isinstance(record, dict):
        return _malformed("the call is not a JSON object")
    name, arguments = record.get("name"), record.get("arguments", {})
    if not isinstance(name, str) or not name:
        return _malformed('the call has no "name"')
    if not isinstance(arguments, dict):
        return _malformed('"arguments" is not a JSON object')
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
