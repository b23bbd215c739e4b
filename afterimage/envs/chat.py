"""Messages to tokens and back, for any tokenizer with a chat template of the Qwen and Hermes family.

What was said is never tokenised again: a conversation grows by appending. `opening` renders the prompt once;
`following` renders only what comes after a reply, which it finds by rendering a stand-in reply and taking what the
template puts behind it.
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
        self.stop_tokens: tuple[int, ...] = (int(tokenizer.eos_token_id),)
        self.following((Message("user", "?"),), ended=True)  # a template that cannot go on is refused here

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole prompt: these messages, the tools, and the beginning of the assistant's first reply."""
        return self._encode(self._render(messages))

    def following(self, messages: Sequence[Message], *, ended: bool) -> tuple[int, ...]:
        """What comes between two replies: the end of the first, the new messages, the beginning of the next.

        With `ended` the reply's own tokens hold its end token; without, it was cut off and the end is given too.
        """
        asked, reply = Message("user", "?"), Message("assistant", STAND_IN)
        text = self._render([asked, reply, *messages])
        before, found, after = text.partition(STAND_IN)
        if not found or not after.startswith(self._end):
            raise ValueError(
                f"the chat template does not write a reply followed by {self._end!r}, so a conversation "
                f"cannot be continued without tokenising it again; it wrote {after[:40]!r} after {before[-40:]!r}"
            )
        return self._encode(after[len(self._end) :] if ended else after)

    def parse(self, tokens: Sequence[int]) -> Message:
        """A reply's tokens as a message. What is no proper call becomes a `ToolCall` that says why in `error`."""
        kept = [token for token in tokens if token not in self.stop_tokens]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        calls = tuple(_read_call(match.group(1), match.group(0).endswith(_CLOSE)) for match in _CALL.finditer(text))
        return Message("assistant", _CALL.sub("", text).strip(), calls)

    def _render(self, messages: Sequence[Message]) -> str:
        rendered = [_as_dict(message) for message in messages]
        tools = self._tools or None
        text = self._tokenizer.apply_chat_template(rendered, tools=tools, add_generation_prompt=True, tokenize=False)
        return str(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


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
        record = json.loads(text)
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


def _malformed(reason: str) -> ToolCall:
    return ToolCall("", {}, error=reason)
