"""Requests and answers of OpenAI's Responses API.

A request is translated into a chat request, so it is checked, answered and recorded like one. The
endpoint stores no responses: a client must send the whole input with each call.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from unstale.config import EndpointConfig
from unstale.envs.chat import Chat
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.answers import ChatFormat, Fields
from unstale.rollout.endpoint.schemas import (
    ITEMS,
    RESPONSE,
    SENT_TEXT,
    Refused,
    is_json_format,
    require,
)
from unstale.rollout.endpoint.wire import STRICT, Choice, CompletionRequest

_LOGPROBS = "message.output_text.logprobs"
"""Entry of a request's field `include` that asks for log-probabilities."""
_SAME_IN_CHAT = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "tool_choice",
    "parallel_tool_calls",
)
_MESSAGE = re.compile(r"messages\[(\d+)\](\.content)?(?:\.tool_calls(?:\[(\d+)\])?)?")
"""Pattern of the path of a message, its content or a tool call in errors about chat requests."""
_CHAT_TERMS = {
    "A message of role tool with the tool_call_id": "A function_call_output with the call_id",
    "tool_call_id": "call_id",
    "max_completion_tokens": "max_output_tokens",
    ".function.": ".",
    ".image_url.url": ".image_url",
}
"""Term in an error about a chat request -> term of the Responses API."""


def read_response(
    body: Mapping[str, Any], *, temperature: float, config: EndpointConfig = STRICT
) -> CompletionRequest:
    """Check and read a request of the Responses API.

    `temperature` is the run's. Raises `Refused` if the request is invalid or, without
    `endpoint.lenient`, if its sampling options differ from the run's.
    """
    text = body.get("text")
    requested = text.get("format") if config.lenient and isinstance(text, dict) else None
    if is_json_format(requested):
        body = {**body, "text": {**(text or {}), "format": None}}
    body, overridden = wire.without_overridden(body, RESPONSE, temperature, config)
    require(body, RESPONSE, "")
    chat, fields = _as_chat(body)
    if not chat["messages"]:
        raise Refused("input has no message: there is nothing to answer", param="input")
    if isinstance(requested, dict) and is_json_format(requested):
        chat["response_format"] = {"type": requested["type"], "json_schema": requested}
    try:
        request = wire.read_chat(chat, temperature=temperature, config=config)
    except Refused as error:
        param = fields.rename(error.param) if error.param else None
        raise Refused(fields.rename(str(error)), code=error.code, param=param) from None
    return replace(request, overridden=(*overridden, *request.overridden), field="input")


@dataclass(frozen=True, slots=True)
class _Fields:
    """Paths in a Responses request from which the messages of a chat request were made."""

    of_message: list[str] = field(default_factory=list)
    """Path of each message, such as `input[2]`. The first path if several items became one
    message.
    """
    of_calls: dict[int, list[str]] = field(default_factory=dict)
    """Index of a message with tool calls -> path of each call, such as `input[3]`."""
    of_results: set[str] = field(default_factory=set)
    """The paths of results of tool calls."""

    def rename(self, text: str) -> str:
        """Return the text of an error about the chat request, in terms of the Responses request."""
        for name, own in _CHAT_TERMS.items():
            text = text.replace(name, own)
        return _MESSAGE.sub(self._own, text)

    def _own(self, found: re.Match[str]) -> str:
        index, content, call = found.groups()
        try:
            own = self.of_message if call is None else self.of_calls[int(index)]
            path = own[int(call or index)]
            is_output = content and path in self.of_results
            return path + (".output" if is_output else content or "")
        except LookupError:  # a text of the client, such as an id
            return found.group()


def _as_chat(body: Mapping[str, Any]) -> tuple[dict[str, Any], _Fields]:
    """Return the body of the chat request that a Responses request means, and the paths of the
    items from which its messages were made.
    """
    items = body["input"]
    messages: list[dict[str, Any]] = []
    fields = _Fields()
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
        fields.of_message.append("instructions")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
        fields.of_message.append("input")
        items = ()
    for index, item in enumerate(items):
        path = f"input[{index}]"
        _add_item(messages, item, path)
        if len(messages) > len(fields.of_message):
            fields.of_message.append(path)
        if item.get("type") == "function_call_output":
            fields.of_results.add(path)
        if item.get("type") == "function_call":
            fields.of_calls.setdefault(len(messages) - 1, []).append(path)
    _merge_instructions(messages, fields)
    names = ("name", "description", "parameters", "strict")
    chat = {
        "messages": messages,
        "tools": [
            {
                "type": "function",
                "function": {name: tool[name] for name in names if tool.get(name) is not None},
            }
            for tool in body.get("tools") or ()
        ],
        "max_completion_tokens": body.get("max_output_tokens"),
        "logprobs": _LOGPROBS in (body.get("include") or ()),
        **{name: body[name] for name in _SAME_IN_CHAT if name in body},
    }
    return chat, fields


def _merge_instructions(messages: list[dict[str, Any]], fields: _Fields) -> None:
    """Merge all system messages at the start into one."""
    leading = list(takewhile(lambda each: each["role"] in ("system", "developer"), messages))
    if len(leading) < 2:
        return
    content = "\n\n".join(each["content"] for each in leading)
    messages[: len(leading)] = [{"role": "system", "content": content}]
    del fields.of_message[1 : len(leading)]
    merged = len(leading) - 1
    moved = {index - merged: calls for index, calls in fields.of_calls.items()}
    fields.of_calls.clear()
    fields.of_calls.update(moved)


def _add_item(messages: list[dict[str, Any]], item: Any, path: str) -> None:
    """Add an input item to the chat messages. Successive items of one reply form one message.

    `path` is the item's place in the request. Raises `Refused` if the item is invalid.
    """
    kind = item.get("type") or "message" if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind not in ITEMS:
        raise Refused(f"{path} is not an item of type {', '.join(ITEMS)}", param=path)
    require(item, ITEMS[kind], path)
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match kind:
        case "message":
            content = item["content"]
            if item["role"] == "user":
                content = _parts(content)
            else:
                require(content, SENT_TEXT, f"{path}.content")
                content = _text(content)
            if item["role"] == "assistant" and last and not {"content", "tool_calls"} & set(last):
                last["content"] = content
            else:
                messages.append({"role": item["role"], "content": content})
        case "reasoning":
            if thoughts := _text(item.get("content") or item.get("summary") or ""):
                messages.append({"role": "assistant", "reasoning_content": thoughts})
        case "function_call":
            if last is None:
                last = {"role": "assistant"}
                messages.append(last)
            function = {"name": item["name"], "arguments": item["arguments"]}
            last.setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
        case "function_call_output":
            content = _parts(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})


def _text(content: str | Sequence[Mapping[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _parts(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a Responses message in the form of a chat message. It may have
    pictures.
    """
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": {"url": part.get("image_url")}}
        if part["type"] == "input_image"
        else {"type": "text", "text": part.get("text")}
        for part in content
    ]


class ResponseFormat(ChatFormat):
    """The JSON format of answers to `/responses`."""

    id_prefix = "resp"
    last = ""

    def __init__(self, model: str, chat: Chat) -> None:
        super().__init__(model, chat)
        self._num_events = 0
        self._items: list[Fields] = []
        """The output items that the stream has begun. The last one may be incomplete."""

    def whole(self, choices: list[Choice], request: CompletionRequest) -> Fields:
        (choice,) = choices
        parts = self.content_of(choice)
        logprobs = wire.chat_logprobs(choice.tokens)["content"] if request.logprobs else []
        calls = parts.get("tool_calls", ())
        output = [_thoughts(parts["reasoning_content"])] if parts.get("reasoning_content") else []
        if parts["content"] or not calls:
            output.append(_text_item(parts["content"] or "", logprobs))
        output += [_call(call) for call in calls]
        output = [self._with_id(item, index) for index, item in enumerate(output)]
        return self._response(output, choice)

    def _with_id(self, item: Fields, index: int) -> Fields:
        return {"id": f"{_ID_PREFIXES[item['type']]}_{self.id}_{index}", **item}

    def _response(self, output: list[Fields], choice: Choice | None = None) -> Fields:
        """Return a response object. Without `choice` its status is `in_progress`."""
        is_cut = choice is not None and choice.finish == "length"
        status = "incomplete" if is_cut else "completed"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status if choice else "in_progress",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": None,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "metadata": {},
            "temperature": None,
            "top_p": None,
            "usage": _usage(wire.usage([choice])) if choice else None,
        }

    def begin(self, request: CompletionRequest) -> Iterator[Fields]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._response([]))

    def grow(self, index: int, text: str, request: CompletionRequest) -> Iterator[Fields]:
        known = self.final_text(text, request)
        if known["reasoning_content"]:
            yield from self._add_thoughts(known["reasoning_content"])
        if known["content"]:
            yield from self._add_text(known["content"])

    def end(self, choices: list[Choice], request: CompletionRequest) -> Iterator[Fields]:
        answer = self.whole(choices, request)
        for item in answer["output"]:
            match item["type"]:
                case "reasoning":
                    yield from self._add_thoughts(item["content"][0]["text"])
                case "message":
                    yield from self._add_text(item["content"][0]["text"])
                    yield from self._end_text(item)
                case "function_call":
                    yield from self._add_call(item)
        yield self._event(answer["status"], response=answer)

    def fail(self, refused: Refused) -> Fields:
        return {"type": "error", "sequence_number": self._num_events, **refused.body()}

    def _event(self, kind: str, **fields: Any) -> Fields:
        self._num_events += 1
        return {"type": f"response.{kind}", "sequence_number": self._num_events - 1, **fields}

    def _open(self, item: Fields) -> Iterator[Fields]:
        item = self._with_id(item, len(self._items))
        self._items.append(item)
        empty = {name: [] if name == "content" else item[name] for name in item}
        if "arguments" in item:
            empty["arguments"] = ""
        empty["status"] = "in_progress"
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=empty)

    def _at(self) -> Fields:
        """Return the fields with which an event names its output item."""
        return {"output_index": len(self._items) - 1, "item_id": self._items[-1]["id"]}

    def _close(self, item: Fields) -> Fields:
        return self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _add_thoughts(self, thoughts: str) -> Iterator[Fields]:
        """Yield the events that send the whole reasoning text, unless it was sent."""
        if self._items:
            return
        yield from self._open(_thoughts(thoughts))
        at = {**self._at(), "content_index": 0}
        yield self._event("reasoning_text.delta", **at, delta=thoughts)
        yield self._event("reasoning_text.done", **at, text=thoughts)
        yield self._close(self._items[-1])

    def _add_text(self, text: str) -> Iterator[Fields]:
        """Yield the events that send the unsent rest of the text."""
        if not self._items or self._items[-1]["type"] != "message":
            yield from self._open(_text_item("", []))
            part = self._items[-1]["content"][0]
            yield self._event("content_part.added", **self._at(), content_index=0, part=part)
        sent = self._sent[0].get("content", "")
        if len(text) > len(sent):
            delta = text[len(sent) :]
            at = {**self._at(), "content_index": 0}
            yield self._event("output_text.delta", **at, delta=delta, logprobs=[])
            self._sent[0]["content"] = text

    def _end_text(self, item: Fields) -> Iterator[Fields]:
        (part,) = item["content"]
        at = {**self._at(), "content_index": 0}
        fields = {"text": part["text"], "logprobs": part["logprobs"]}
        yield self._event("output_text.done", **at, **fields)
        yield self._event("content_part.done", **at, part=part)
        yield self._close(item)

    def _add_call(self, item: Fields) -> Iterator[Fields]:
        yield from self._open(item)
        name = "function_call_arguments"
        yield self._event(f"{name}.delta", **self._at(), delta=item["arguments"])
        fields = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event(f"{name}.done", **self._at(), **fields)
        yield self._close(item)


_ID_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _thoughts(thoughts: str) -> Fields:
    content = [{"type": "reasoning_text", "text": thoughts}]
    return {"type": "reasoning", "status": "completed", "summary": [], "content": content}


def _text_item(text: str, logprobs: list[Fields]) -> Fields:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"type": "message", "status": "completed", "role": "assistant", "content": [part]}


def _call(call: Fields) -> Fields:
    head = {"type": "function_call", "status": "completed", "call_id": call["id"]}
    return {**head, **call["function"]}


def _usage(counts: Mapping[str, int]) -> Fields:
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
