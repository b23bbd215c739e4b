"""Requests and answers of Anthropic's Messages API.

A request is read into the same `CompletionRequest` as a chat request with this content, so both are
answered and recorded in the same way.
"""

import json
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unstale.config import EndpointConfig
from unstale.envs import Image, Message, ToolCall
from unstale.envs.chat import Chat
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.answers import ChatFormat, Fields
from unstale.rollout.endpoint.conversation import Call, HistoryMessage
from unstale.rollout.endpoint.schemas import (
    BLOCKS,
    MESSAGE,
    RESULT_BLOCKS,
    TURNS,
    Refused,
    is_json_format,
    mismatched,
    require,
)
from unstale.rollout.endpoint.wire import STRICT, Choice, CompletionRequest, SentMessage

_TERMS = wire.ResultTerms(
    "tool_use_id", "The next message must begin with a tool_result block for each"
)
_BILLING = "x-anthropic-billing-header:"
"""Start of a system block that Claude Code writes for billing. Its text differs in each call."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
}


def read_messages(
    body: Mapping[str, Any], *, temperature: float, config: EndpointConfig = STRICT
) -> CompletionRequest:
    """Check and read a request of the Messages API.

    `temperature` is the run's. Raises `Refused` if the request is invalid or, without
    `endpoint.lenient`, if its sampling options differ from the run's.
    """
    body, overridden, reply_format = _without_overridden(body, temperature, config)
    require(body, MESSAGE, "")
    tools = body.get("tools") or ()
    named = {tool["name"]: tool for tool in tools}
    sent: list[SentMessage] = []
    if body.get("system"):
        system = Message("system", _read_content(body["system"], "system")[0])
        sent.append(SentMessage(HistoryMessage(system), "system"))
    for index, record in enumerate(body["messages"]):
        sent += _read_message(record, f"messages[{index}]", named)
    history, moved = wire.in_order(sent, _TERMS, config)
    if reply_format:
        history = reply_format.instruct(history)
    shown = (tool for tool in tools if not tool.get("defer_loading"))
    call = Call(history, tuple(map(_as_function, shown)))
    calls = bool(tools) and (body.get("tool_choice") or {}).get("type") != "none"
    options = {**body, "stop": body.get("stop_sequences")}
    request = wire.completion_request(options, call, temperature, logprobs=False, calls=calls)
    return replace(request, format=reply_format, overridden=(*overridden, *moved))


def _without_overridden(
    body: Mapping[str, Any], temperature: float, config: EndpointConfig
) -> tuple[Mapping[str, Any], tuple[str, ...], wire.ReplyFormat | None]:
    """Return a request without what `endpoint.lenient` ignores, the names of the ignored options,
    and the format that the reply must have, or None.
    """
    if not config.lenient:
        return body, (), None
    output = body.get("output_config")
    requested = output.get("format") if isinstance(output, dict) else None
    reply_format = None
    if isinstance(output, dict) and isinstance(requested, dict) and is_json_format(requested):
        wanted = {"type": requested["type"], "json_schema": requested}
        reply_format = wire.read_format(wanted, config)
        body = {**body, "output_config": {**output, "format": None}}
    overridden = [*mismatched(body, MESSAGE)]
    if isinstance(body.get("temperature"), int | float) and body["temperature"] != temperature:
        overridden.append("temperature")
    body = {name: value for name, value in body.items() if name not in overridden}
    blocks = body.get("system")
    first = blocks[0] if isinstance(blocks, list) and blocks else blocks
    text = first.get("text") if isinstance(first, dict) else None
    if isinstance(blocks, list) and isinstance(text, str) and text.startswith(_BILLING):
        body["system"] = blocks[1:]
        overridden.append("billing_header")
    return body, tuple(overridden), reply_format


def _read_content(
    content: str | Sequence[Mapping[str, Any]], path: str
) -> tuple[str, tuple[Image, ...]]:
    """Return the text of content blocks, and their pictures. Other blocks are left out.

    Raises `Refused` for a picture that is not base64.
    """
    if isinstance(content, str):
        return content, ()
    text, images = "", []
    for index, block in enumerate(content):
        if block["type"] == "text":
            text += block["text"]
        elif block["type"] == "image":
            place = f"{path}[{index}].source.data"
            try:
                data = b64decode(block["source"]["data"], validate=True)
            except ValueError as error:
                raise Refused(f"{place} is not base64: {error}", param=place) from None
            images.append(Image(data, len(text)))
    return text, tuple(images)


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of a chat request, without fields that only Anthropic's API has."""
    function = {"name": tool["name"]}
    for name, own in (
        ("description", "description"),
        ("parameters", "input_schema"),
        ("strict", "strict"),
    ):
        if tool.get(own) is not None:
            function[name] = tool[own]
    return {"type": "function", "function": function}


def _read_message(
    record: Any, path: str, tools: Mapping[str, Mapping[str, Any]]
) -> list[SentMessage]:
    """Return a message as chat messages. Each result of a tool call becomes a message.

    `tools` are the request's tools by name. A result may refer to one of them.
    """
    if not isinstance(record, dict):
        raise Refused(f"{path} is not an object", param=path)
    role = record.get("role")
    if not isinstance(role, str) or role not in TURNS:
        raise Refused(f"{path}.role must be {', '.join(TURNS)}", param=f"{path}.role")
    require(record, TURNS[role], path)
    blocks = record["content"]
    if isinstance(blocks, str):
        return [SentMessage(HistoryMessage(Message(record["role"], blocks)), path)]
    _require_blocks(blocks, BLOCKS[role], f"{path}.content")
    text, images = _read_content(blocks, f"{path}.content")
    if role == "assistant":
        calls = tuple(
            ToolCall(block["name"], block["input"], id=block["id"])
            for block in blocks
            if block["type"] == "tool_use"
        )
        thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
        reply = Message("assistant", text, calls)
        return [SentMessage(HistoryMessage(reply, "".join(thoughts) if thoughts else None), path)]
    sent = [
        _read_result(block, f"{path}.content[{index}]", tools)
        for index, block in enumerate(blocks)
        if block["type"] == "tool_result"
    ]
    if len(sent) < len(blocks):
        shown = Message(record["role"], text, images=images)
        sent.append(SentMessage(HistoryMessage(shown), path))
    return sent


def _read_result(
    block: Mapping[str, Any], path: str, tools: Mapping[str, Mapping[str, Any]]
) -> SentMessage:
    content = block.get("content") or ""
    if not isinstance(content, str):
        _require_blocks(content, RESULT_BLOCKS, f"{path}.content")
        content = [
            _as_text(part, f"{path}.content[{index}]", tools) for index, part in enumerate(content)
        ]
    text, images = _read_content(content, f"{path}.content")
    message = HistoryMessage(Message("tool", text, images=images))
    return SentMessage(message, path, block["tool_use_id"])


def _as_text(
    block: Mapping[str, Any], path: str, tools: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return a content block of a tool's result, with a reference to a tool replaced by a text.

    For a tool with `defer_loading`, which the policy does not see otherwise, the text is the tool's
    description. For any other tool it is the name.
    """
    if block["type"] != "tool_reference":
        return block
    name = block["tool_name"]
    if name not in tools:
        raise Refused(f"{path}.tool_name is {name!r}, which no tool has", param=path)
    is_hidden = tools[name].get("defer_loading")
    text = json.dumps(_as_function(tools[name])) if is_hidden else name
    return {"type": "text", "text": f"{text}\n"}


def _require_blocks(
    blocks: Sequence[Any], schemas: Mapping[str, Mapping[str, Any]], path: str
) -> None:
    """Raise `Refused` for an invalid block, and for blocks not in the order of `schemas`."""
    kinds = [*schemas]
    last = 0
    for index, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in schemas:
            raise Refused(
                f"{path}[{index}] is not a block of type {' or '.join(kinds)}",
                param=f"{path}[{index}]",
            )
        require(block, schemas[kind], f"{path}[{index}]")
        rank = kinds.index("text" if kind in ("image", "tool_reference") else kind)
        if rank < last:
            raise Refused(
                f"{path}[{index}] is a block of type {kind} after one of type {kinds[last]}: the "
                f"order must be {', '.join(kinds)}",
                param=f"{path}[{index}]",
            )
        last = rank


class MessageFormat(ChatFormat):
    """The JSON format of answers to `/messages`."""

    id_prefix = "msg"
    last = ""

    def __init__(self, model: str, chat: Chat) -> None:
        super().__init__(model, chat)
        self._open: list[Fields] = []
        """The content blocks that the stream has begun. The last one may be incomplete."""

    def whole(self, choices: list[Choice], request: CompletionRequest) -> Fields:
        (choice,) = choices
        counts = {
            "input_tokens": choice.num_prompt_tokens,
            "output_tokens": len(choice.tokens),
        }
        return self._answer(self._blocks(choice), self._end(choice), counts)

    def _blocks(self, choice: Choice) -> list[Fields]:
        reply = choice.message
        calls = reply.message.tool_calls
        blocks = [self._thinking(reply.thoughts)] if reply.thoughts else []
        if reply.message.content or not calls:
            blocks.append({"type": "text", "text": reply.message.content})
        for call in calls:
            given = dict(call.arguments)
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
        return blocks

    def _thinking(self, thoughts: str) -> Fields:
        """Return a block of reasoning text. It has a signature, since some clients drop it
        otherwise.
        """
        return {"type": "thinking", "thinking": thoughts, "signature": self.id}

    def _answer(self, blocks: list[Fields], end: Fields, counts: Mapping[str, int]) -> Fields:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            **end,
            "usage": {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, **counts},
        }

    def _end(self, choice: Choice) -> Fields:
        reason = _STOP_REASONS[choice.finish]
        is_stopped = choice.finish == "stop" and bool(choice.stop_text)
        return {
            "stop_reason": "stop_sequence" if is_stopped else reason,
            "stop_sequence": choice.stop_text if is_stopped else None,
        }

    def begin(self, request: CompletionRequest) -> Iterator[Fields]:
        no_end = {"stop_reason": None, "stop_sequence": None}
        counts = {"input_tokens": self.num_prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": self._answer([], no_end, counts)}

    def grow(self, index: int, text: str, request: CompletionRequest) -> Iterator[Fields]:
        known = self.final_text(text, request)
        if known["reasoning_content"]:
            yield from self._add_thoughts(known["reasoning_content"])
        if known["content"]:
            yield from self._add_text(known["content"])

    def end(self, choices: list[Choice], request: CompletionRequest) -> Iterator[Fields]:
        (choice,) = choices
        for block in self._blocks(choice):
            match block["type"]:
                case "thinking":
                    yield from self._add_thoughts(block["thinking"])
                case "text":
                    yield from self._add_text(block["text"])
                    yield self._close()
                case "tool_use":
                    yield self._start({**block, "input": {}})
                    yield self._delta("input_json_delta", partial_json=json.dumps(block["input"]))
                    yield self._close()
        answer = self.whole(choices, request)
        yield {"type": "message_delta", "delta": self._end(choice), "usage": answer["usage"]}
        yield {"type": "message_stop"}

    @staticmethod
    def error(refused: Refused) -> Fields:
        return error_body(refused)

    def _start(self, block: Fields) -> Fields:
        self._open.append(block)
        index = len(self._open) - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _delta(self, kind: str, **fields: Any) -> Fields:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": len(self._open) - 1, "delta": delta}

    def _close(self) -> Fields:
        return {"type": "content_block_stop", "index": len(self._open) - 1}

    def _add_thoughts(self, thoughts: str) -> Iterator[Fields]:
        """Yield the events that send the whole reasoning text, unless it was sent."""
        if self._open:
            return
        block = self._thinking(thoughts)
        yield self._start({**block, "thinking": "", "signature": ""})
        yield self._delta("thinking_delta", thinking=thoughts)
        yield self._delta("signature_delta", signature=block["signature"])
        yield self._close()

    def _add_text(self, text: str) -> Iterator[Fields]:
        """Yield the events that send the unsent rest of the text."""
        if not self._open or self._open[-1]["type"] != "text":
            yield self._start({"type": "text", "text": ""})
        sent = self._sent[0].get("content", "")
        if len(text) > len(sent):
            yield self._delta("text_delta", text=text[len(sent) :])
            self._sent[0]["content"] = text


def error_body(refused: Refused) -> Fields:
    """Return a refusal in the form of Anthropic's errors, with the request's field and OpenAI's
    code.
    """
    error = refused.body()["error"]
    kind = "invalid_request_error" if refused.status < 500 else "api_error"
    error["type"] = _ERRORS.get(refused.status, kind)
    return {"type": "error", "error": error}
