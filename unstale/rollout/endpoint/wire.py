"""What travels between an agent and the endpoint, in the words of the OpenAI API.

A field that would change what is sampled, and cannot, is refused with the reason. Nothing is ignored that matters.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unstale.envs import Message, ToolCall
from unstale.records import Piece, Sampled
from unstale.rollout.endpoint.conversation import Call, HistoryMessage

MAX_CHOICES, MAX_STOPS = 64, 16

Schema = Mapping[str, Any]
"""The part of JSON Schema that `_require` checks and `openapi` serves; `description` is what a refusal says."""

_ANY: Schema = {}
_SUPPORT = "it would truncate the support, and the trainer's softmax cannot follow"
_CONSTRAINED = "constrained sampling has another distribution than the trainer's"
_PENALTY = "it changes the distribution that is sampled from, and the trainer does not know it"


def _only(why: str, *values: Any) -> Schema:
    """What may be left out, or be one of these."""
    return {"enum": [*values], "description": why}


def _whole(low: int, high: int) -> Schema:
    words = f"a whole number between {low} and {high}"
    return {"type": "integer", "minimum": low, "maximum": high, "description": words}


def _object(
    required: Sequence[str], *, others: Schema | bool = True, **properties: Schema
) -> Schema:
    words = {
        "type": "object",
        "description": "an object",
        "required": [*required],
        "properties": properties,
    }
    return words if others is True else {**words, "additionalProperties": others}


def _list(items: Schema, words: str, **bounds: int) -> Schema:
    return {"type": "array", "items": items, "description": words, **bounds}


_FLAG: Schema = {"type": "boolean", "description": "true or false"}
_TEXT: Schema = {"type": "string", "description": "a text"}
_WORD: Schema = {"type": "string", "minLength": 1, "description": "a text that is not empty"}
_TOKENS = _list(_whole(0, (1 << 31) - 1), "a list of token ids, not empty", minItems=1)

_PROMPT: Schema = {
    "anyOf": [_WORD, _TOKENS],
    "description": "a text or a list of token ids, not empty",
}

_COMMON: Mapping[str, Schema] = {
    "model": _TEXT,
    "stop": {
        "anyOf": [_WORD, _list(_WORD, "texts", maxItems=MAX_STOPS)],
        "description": f"a text or up to {MAX_STOPS} of them, none empty",
    },
    "n": _whole(1, MAX_CHOICES),
    "stream": _FLAG,
    "stream_options": _object((), others=False, include_usage=_FLAG, include_obfuscation=_FLAG),
    "temperature": {"type": "number", "description": "a number: the run's (engine.temperature)"},
    "top_p": _only(_SUPPORT, 1),
    "top_k": {"type": "integer", "maximum": 0, "description": f"0 or less, else {_SUPPORT}"},
    "min_p": _only(_SUPPORT, 0),
    "max_tokens": _whole(1, 1 << 31),
    "presence_penalty": _only(_PENALTY, 0),
    "frequency_penalty": _only(_PENALTY, 0),
    "logit_bias": _only(_PENALTY, {}),
    "seed": _only("the noise belongs to the episode, so that it can be sampled again", None),
    **dict.fromkeys(
        ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"), _ANY
    ),
}
"""What calls of both kinds may say. Where there is no type, the value says nothing about sampling."""

_FUNCTION = _object(("name", "arguments"), name=_TEXT, arguments=_TEXT)
_PART = _object(
    ("type", "text"), others=False, type=_only("only text is heard", "text"), text=_TEXT
)
_TOOL = _object(
    ("type", "function"),
    type=_only("only functions can be called", "function"),
    function=_object(("name",), name=_WORD),
)
_SAYS: Mapping[str, Schema] = {
    "content": {
        "anyOf": [_TEXT, _list(_PART, "parts")],
        "description": "a text or a list of parts of type text",
    },
    "name": _ANY,
}
_OF: Mapping[str, Mapping[str, Schema]] = {
    "assistant": {
        "tool_calls": _list(
            _object(("function",), function=_FUNCTION), "a list of calls of functions"
        ),
        "reasoning_content": _TEXT,
        "reasoning": _TEXT,
    },
    "tool": {"tool_call_id": _ANY},
}
"""What only some say."""
_EMPTY = _only("it is not known here, or cannot be said to the policy", None, [], "")
MESSAGES: Mapping[str, Schema] = {
    role: _object(
        ("role",) if role == "assistant" else ("role", "content"),
        others=_EMPTY, role=_only("there is no such role", role), **_SAYS, **_OF.get(role, {}),
    )
    for role in ("system", "developer", "user", "assistant", "tool")
}  # fmt: skip

CHAT = _object(
    ("messages",),
    others=False,
    messages=_list({"oneOf": [*MESSAGES.values()]}, "a list of messages, with at least one message", minItems=1),
    tools=_list(_TOOL, "a list of tools"),
    tool_choice=_only(f"{_CONSTRAINED}; leave it out and choose by tools, or by what is asked", "auto", "none"),
    parallel_tool_calls=_only("how many calls a reply has cannot be forced", True),
    response_format=_only(f"{_CONSTRAINED}; ask for the format in words", {"type": "text"}),
    modalities=_only("only text is sampled", ["text"]),
    logprobs=_FLAG,
    top_logprobs=_only("only the sampled token's log-probability is recorded", 0),
    max_completion_tokens=_whole(1, 1 << 31),
    **_COMMON,
)  # fmt: skip
"""A body of `/v1/chat/completions`."""

COMPLETION = _object(
    ("prompt",),
    others=False,
    prompt={
        "anyOf": [_WORD, _TOKENS, _list(_PROMPT, "one prompt", minItems=1, maxItems=1)],
        "description": "one text or one list of token ids, and not empty",
    },
    logprobs=_only("only the sampled token's log-probability is recorded", 0),
    echo=_only("only what is sampled is answered", False),
    best_of=_only("choosing the best would bias what is trained on; use n", 1),
    suffix=_only("nothing is filled in before a text", ""),
    **_COMMON,
)
"""A body of `/v1/completions`."""


class Refused(Exception):
    """A request that is answered with an error, which says what to do about it."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
    ):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A call, and how it is to be answered."""

    call: Call
    choices: int
    stops: tuple[str, ...]
    max_tokens: int | None
    logprobs: bool
    stream: bool
    usage: bool
    """Say at the end of a stream how many tokens there were."""
    calls: bool
    """What looks like a call of a tool is handed out as one."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer as it travels: a message (a text, for a prompt), and its tokens with what they say."""

    said: HistoryMessage
    finish: str
    tokens: tuple[tuple[str, float], ...]
    num_prompt_tokens: int
    branch: int


def load(data: bytes) -> dict[str, Any]:
    """A body as an object."""
    try:
        body = json.loads(data, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object", code="invalid_json")
    return body


def read_chat(body: Mapping[str, Any], *, temperature: float) -> CompletionRequest:
    """Raises `Refused`."""
    _require(body, CHAT, "")
    history = tuple(
        _message(message, f"messages[{place}]") for place, message in enumerate(body["messages"])
    )
    for place, said in enumerate(history):
        if said.message.role == "system" and place:
            raise Refused(
                "a system message stands first, and there is one", param=f"messages[{place}]"
            )
    return _request(body, Call(history, tuple(map(dict, body.get("tools") or ()))), temperature)


def read_completion(body: Mapping[str, Any], *, temperature: float) -> CompletionRequest:
    """Raises `Refused`."""
    _require(body, COMPLETION, "")
    prompt = body["prompt"]
    if isinstance(prompt[0], str | list) and isinstance(prompt, list):
        prompt = prompt[0]
    return _request(
        body, Call(prompt if isinstance(prompt, str) else tuple(map(int, prompt))), temperature
    )


def _request(body: Mapping[str, Any], call: Call, temperature: float) -> CompletionRequest:
    asked = body.get("temperature")
    if asked is not None and asked != temperature:
        raise Refused(
            f"temperature must be the run's, {temperature:g} (engine.temperature), got {reprlib.repr(asked)}: it is "
            "part of the policy that is trained. Leave it out",
            param="temperature",
        )
    stop = body.get("stop") or ()
    most = (body.get("max_completion_tokens"), body.get("max_tokens"))
    return CompletionRequest(
        call=call,
        choices=int(body.get("n") or 1),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens=min((int(value) for value in most if value is not None), default=None),
        logprobs=body.get("logprobs") not in (None, False)
        if call.is_chat
        else body.get("logprobs") is not None,
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        calls=bool(call.tools) and body.get("tool_choice") != "none",
    )


def _require(value: Any, schema: Schema, where: str) -> None:
    """Raises `Refused` at the first place where a value is not what a schema says. Null is as good as missing."""
    if not _fits(value, schema):
        words, got = schema["description"], reprlib.repr(value)
        told = f"cannot be {got}: {words}" if "enum" in schema else f"must be {words}, got {got}"
        raise Refused(f"{where or 'the body'} {told}", param=where or None)
    if isinstance(value, list) and "items" in schema:
        for place, item in enumerate(value):
            _require(item, schema["items"], f"{where}[{place}]")
    if isinstance(value, dict):
        properties, others = (
            schema.get("properties", _ANY),
            schema.get("additionalProperties", _ANY),
        )
        for name in schema.get("required", ()):
            if value.get(name) is None:
                raise Refused(
                    f"{where}.{name} is missing".lstrip("."), param=f"{where}.{name}".lstrip(".")
                )
        for name, held in value.items():
            at = f"{where}.{name}".lstrip(".")
            if name not in properties and others is False:
                raise Refused(f"unknown field {at}", code="unknown_parameter", param=at)
            if name not in properties or held is not None:
                _require(held, properties.get(name, others), at)


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "array": (list,), "object": (dict,), "boolean": (bool,),
    "integer": (int,), "number": (int, float),
}  # fmt: skip


def _fits(value: Any, schema: Schema) -> bool:
    """Whether a value is what a schema says of it; what it holds is looked at where there are alternatives."""
    if "anyOf" in schema:
        return any(_holds(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in schema["enum"]
        )
    if kind := schema.get("type"):
        whole = kind == "integer" and isinstance(value, float) and value.is_integer()
        if not (whole or isinstance(value, _KINDS[kind])) or (
            kind != "boolean" and isinstance(value, bool)
        ):
            return False
    size = len(value) if isinstance(value, str | list) else value
    low = schema.get("minimum", schema.get("minLength", schema.get("minItems")))
    high = schema.get("maximum", schema.get("maxItems"))
    return (low is None or size >= low) and (high is None or size <= high)


def _holds(value: Any, schema: Schema) -> bool:
    try:
        _require(value, schema, "")
    except Refused:
        return False
    return True


def _message(record: Any, where: str) -> HistoryMessage:
    if not isinstance(record, dict):
        raise Refused(f"{where} is not an object", param=where)
    role = record.get("role")
    if not isinstance(role, str) or role not in MESSAGES:
        raise Refused(f"{where}.role cannot be {reprlib.repr(role)}", param=f"{where}.role")
    _require(record, MESSAGES[role], where)
    content = record.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    made = tuple(
        _call(call, f"{where}.tool_calls[{at}]")
        for at, call in enumerate(record.get("tool_calls") or ())
    )
    spoken_of = (record.get("reasoning_content"), record.get("reasoning"))
    thoughts = next((one for one in spoken_of if one is not None), None)
    who: Any = "system" if role == "developer" else role
    return HistoryMessage(Message(who, text, made), thoughts)


def _call(record: Any, where: str) -> ToolCall:
    function = record.get("function") if isinstance(record, dict) else None
    name, text = (
        (function.get("name"), function.get("arguments"))
        if isinstance(function, dict)
        else (None, None)
    )
    if not isinstance(name, str) or not isinstance(text, str):
        raise Refused(
            f"{where} is not a call of a function with a name and arguments as text", param=where
        )
    try:
        arguments = json.loads(text or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}.function.arguments is not a JSON object", param=where)
    return ToolCall(name, arguments)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def message(said: HistoryMessage, made: Callable[[int], str]) -> dict[str, Any]:
    """An answer as a record; `made` names its calls."""
    content = said.message.content
    record: dict[str, Any] = {
        "role": "assistant",
        "content": content or (None if said.message.tool_calls else ""),
    }
    if said.thoughts is not None:
        record["reasoning_content"] = said.thoughts
    if said.message.tool_calls:
        record["tool_calls"] = [
            {
                "id": made(place),
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for place, call in enumerate(said.message.tool_calls)
        ]
    return record


def pieces(said: Sequence[Piece]) -> list[dict[str, Any]]:
    """As they are recorded."""
    return [
        {
            "kind": "sampled" if isinstance(piece, Sampled) else "context",
            **asdict(piece),
            "provenance": piece.provenance.name,
        }
        for piece in said
    ]


def logprobs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Of a chat: what was sampled, token by token."""
    return {
        "content": [
            {
                "token": text,
                "logprob": _finite(logp),
                "bytes": list(text.encode(errors="replace")),
                "top_logprobs": [],
            }
            for text, logp in tokens
        ],
        "refusal": None,
    }


def text_logprobs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Of a completion."""
    offsets, at = [], 0
    for text, _ in tokens:
        offsets.append(at)
        at += len(text)
    texts, logps = [text for text, _ in tokens], [_finite(logp) for _, logp in tokens]
    return {"tokens": texts, "token_logprobs": logps, "top_logprobs": None, "text_offset": offsets}


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt, said = choices[0].num_prompt_tokens, sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _finite(logp: float) -> float:
    return logp if math.isfinite(logp) else -9999.0
