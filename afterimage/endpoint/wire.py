"""What travels between an agent and the endpoint, in the words of the OpenAI API.

A field that would change what is sampled, and cannot, is refused with the reason. Nothing is ignored that matters.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from afterimage.endpoint.conversation import Call, History, Said
from afterimage.engines import SamplingParams, require_full_support
from afterimage.envs import Message, ToolCall
from afterimage.trajectory import Piece

MAX_CHOICES, MAX_STOPS = 64, 16

_UNHEARD = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Fields that may have any value: they say nothing about sampling."""
_SUPPORT = "they cut the support, and the trainer's softmax cannot follow"
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), "it changes the distribution that is sampled from, and the trainer does not know it"),
    "frequency_penalty": ((0,), "it changes the distribution that is sampled from, and the trainer does not know it"),
    "logit_bias": (({},), "it changes the distribution that is sampled from, and the trainer does not know it"),
    "min_p": ((0,), _SUPPORT),
    "seed": ((), "the noise belongs to the episode, so that it can be sampled again"),
    "response_format": (({"type": "text"},), "constrained sampling has another distribution than the trainer's"),
    "tool_choice": (("auto",), "constrained sampling has another distribution than the trainer's; choose by tools"),
    "parallel_tool_calls": ((True,), "how many calls a reply has cannot be forced"),
    "top_logprobs": ((0,), "only the sampled token's log-probability is recorded"),
    "modalities": ((["text"],), "only text is sampled"),
    "echo": ((False,), "only what is sampled is answered"),
    "best_of": ((1,), "choosing the best would bias what is trained on; use n"),
    "suffix": (("",), "nothing is filled in before a text"),
}
"""Fields with the values that they may have, null apart, and why no others."""
_OWN = ("model", "stop", "n", "stream", "stream_options", "logprobs", "temperature", "top_p", "top_k", "max_tokens")


_ROLES: Mapping[str, Literal["system", "user", "assistant", "tool"]] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}  # fmt: skip


class Refused(Exception):
    """A request that is answered with an error, which says what to do about it."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_value", param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Request:
    """A call, and how it is to be answered."""

    call: Call
    choices: int
    stops: tuple[str, ...]
    max_tokens: int | None
    logprobs: bool
    stream: bool
    usage: bool
    """Say at the end of a stream how many tokens there were."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer as it travels: a message (a text, for a prompt), and its tokens with what they say."""

    said: Said
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


def read_chat(body: Mapping[str, Any], *, temperature: float) -> Request:
    """A body of `/v1/chat/completions`. Raises `Refused`."""
    known = (*_OWN, "messages", "tools", "max_completion_tokens")
    logprobs = bool(_value(body, "logprobs", bool, "true or false"))
    tools = tuple(_tool(tool) for tool in _value(body, "tools", list, "a list of tools") or ())
    messages = _value(body, "messages", list, "a list of messages")
    if not messages:
        raise Refused("messages must be a list with at least one message", param="messages")
    history = tuple(_message(message, f"messages[{place}]") for place, message in enumerate(messages))
    for place, said in enumerate(history):
        if said.message.role == "system" and place:
            raise Refused("a system message stands first, and there is one", param=f"messages[{place}]")
    return _request(body, known, Call(history, tools), (temperature, logprobs))


def read_completion(body: Mapping[str, Any], *, temperature: float) -> Request:
    """A body of `/v1/completions`. Raises `Refused`."""
    wanted = _value(body, "logprobs", int, "0")
    if wanted:
        raise Refused("logprobs can only be 0: only the sampled token's is recorded", param="logprobs")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    history: History = ()
    if isinstance(prompt, str):
        history = prompt
    elif isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt):
        history = tuple(prompt)
    if not history:
        raise Refused("prompt must be one text or one list of token ids, and not empty", param="prompt")
    return _request(body, (*_OWN, "prompt"), Call(history), (temperature, wanted is not None))


def _request(body: Mapping[str, Any], known: Sequence[str], call: Call, told: tuple[float, bool]) -> Request:
    """What the two kinds of calls have in common. `told` are the run's temperature, and whether to give logprobs."""
    temperature, logprobs = told
    for name, value in body.items():
        if name in _NEUTRAL:
            allowed, why = _NEUTRAL[name]
            if value is not None and value not in allowed:
                raise Refused(f"{name} cannot be {_short(value)}: {why}", param=name)
        elif name not in known and name not in _UNHEARD:
            raise Refused(f"unknown field {name}", code="unknown_parameter", param=name)
    if not isinstance(body.get("model", ""), str | None):
        raise Refused("model must be a string", param="model")
    asked = _value(body, "temperature", float, "a number")
    if asked is not None and asked != temperature:
        raise Refused(
            f"temperature must be the run's, {temperature:g} (engine.temperature), got {asked:g}: it is part of the "
            "policy that is trained. Leave it out",
            param="temperature",
        )
    _require_support(body)
    limits = [name for name in ("max_completion_tokens", "max_tokens") if name in known]
    most = [value for name in limits if (value := _count(body, name, 1 << 31)) is not None]
    options = _value(body, "stream_options", dict, "an object") or {}
    if set(options) - {"include_usage", "include_obfuscation"} or not all(type(v) is bool for v in options.values()):
        raise Refused("stream_options has include_usage, true or false, and nothing else", param="stream_options")
    return Request(
        call=call,
        choices=_count(body, "n", MAX_CHOICES) or 1,
        stops=_stops(body.get("stop")),
        max_tokens=min(most, default=None),
        logprobs=logprobs,
        stream=bool(_value(body, "stream", bool, "true or false")),
        usage=bool(options.get("include_usage")),
    )


def _require_support(body: Mapping[str, Any]) -> None:
    top_p, top_k = _value(body, "top_p", float, "a number"), _value(body, "top_k", int, "a whole number") or 0
    if top_p is not None and not 0 < top_p <= 1:
        raise Refused("top_p must be 1", param="top_p")
    try:
        require_full_support(SamplingParams(1, (), top_p=1.0 if top_p is None else top_p, top_k=max(top_k, 0)))
    except ValueError as error:
        raise Refused(str(error), param="top_k" if top_p in (None, 1) else "top_p") from None


def _stops(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else [] if stop is None else [0]
    if len(texts) > MAX_STOPS or not all(isinstance(text, str) and text for text in texts):
        raise Refused(f"stop must be a text or up to {MAX_STOPS} of them, none empty", param="stop")
    return tuple(texts)


def _message(record: Any, where: str) -> Said:
    if not isinstance(record, dict):
        raise Refused(f"{where} is not an object", param=where)
    role = _ROLES.get(str(record.get("role")))
    if role is None:
        raise Refused(f"{where}.role cannot be {_short(record.get('role'))}", param=f"{where}.role")
    known = {"role", "content", "name"}
    known |= {"assistant": {"tool_calls", "reasoning_content", "reasoning"}, "tool": {"tool_call_id"}}.get(role, set())
    for name, value in record.items():
        if name not in known and value not in (None, [], ""):
            raise Refused(f"{where}.{name} is not known here, or cannot be said to the policy", param=f"{where}.{name}")
    calls = record.get("tool_calls") or []
    if not isinstance(calls, list):
        raise Refused(f"{where}.tool_calls is not a list", param=f"{where}.tool_calls")
    content = _content(record.get("content"), where)
    if content is None and role != "assistant":
        raise Refused(f"{where}.content is missing", param=f"{where}.content")
    thoughts = record.get("reasoning_content", record.get("reasoning"))
    if thoughts is not None and not isinstance(thoughts, str):
        raise Refused(f"{where}.reasoning_content is not a text", param=f"{where}.reasoning_content")
    made = tuple(_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls))
    return Said(Message(role, content or "", made), thoughts)


def _content(content: Any, where: str) -> str | None:
    """A text, or parts of one."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_part(part) for part in content):
        return "".join(part["text"] for part in content)
    raise Refused(f"{where}.content is neither a text nor a list of parts of type text", param=f"{where}.content")


def _is_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and set(part) == {"type", "text"} and part["type"] == "text" and _is_text(part["text"])
    )


def _call(record: Any, where: str) -> ToolCall:
    function = record.get("function") if isinstance(record, dict) else None
    name, text = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        raise Refused(f"{where} is not a call of a function with a name and arguments as text", param=where)
    try:
        arguments = json.loads(text or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{where}.function.arguments is not a JSON object", param=where)
    return ToolCall(name, arguments)


def _tool(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not _is_text(function.get("name")) or not function["name"]:
        raise Refused("tools are of type function, with a function that has a name", param="tools")
    return dict(tool)


def _count(body: Mapping[str, Any], name: str, most: int) -> int | None:
    value = _value(body, name, int, "a whole number")
    if value is not None and not 1 <= value <= most:
        raise Refused(f"{name} must be between 1 and {most}, got {_short(value)}", param=name)
    return None if value is None else int(value)


def _value(body: Mapping[str, Any], name: str, kind: type, words: str) -> Any:
    """None where it is missing."""
    value = body.get(name)
    fits = isinstance(value, int | float if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if value is not None and not fits:
        raise Refused(f"{name} must be {words}, got {_short(value)}", param=name)
    return value


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _short(value: Any) -> str:
    return repr(value)[:60]


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def message(said: Said, made: Callable[[int], str]) -> dict[str, Any]:
    """An answer as a record; `made` names its calls."""
    content = said.message.content
    record: dict[str, Any] = {"role": "assistant", "content": content or (None if said.message.tool_calls else "")}
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
        {"kind": type(piece).__name__.lower(), **asdict(piece), "provenance": piece.provenance.name} for piece in said
    ]


def logprobs(tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Of a chat: what was sampled, token by token."""
    return {
        "content": [
            {"token": text, "logprob": _finite(logp), "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
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
