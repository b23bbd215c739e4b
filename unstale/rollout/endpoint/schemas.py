"""JSON Schemas of the requests that the endpoint accepts, and their check.

A field that would change the distribution of the samples is refused with the reason. The schemas
are also served as the endpoint's OpenAPI description.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CHOICES = 64
MAX_STOPS = 16

Schema = Mapping[str, Any]
"""A JSON Schema of keywords that `require` checks. A refusal quotes its `description`."""

_ANY: Schema = {}
_SUPPORT = "it would truncate the support, and the trainer's softmax cannot follow"
_CONSTRAINED = "constrained sampling has another distribution than the trainer's"
_PENALTY = "it changes the sampling distribution, and the trainer does not know it"
_RECORDED = "only the sampled token's log-probability is recorded"


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


def _only(reason: str, *values: Any) -> Schema:
    return {"enum": [*values], "description": reason}


def _integer(low: int, high: int) -> Schema:
    description = f"an integer between {low} and {high}"
    return {"type": "integer", "minimum": low, "maximum": high, "description": description}


def _object(
    required: Sequence[str], *, others: Schema | bool = True, **properties: Schema
) -> Schema:
    schema: dict[str, Any] = {
        "type": "object",
        "description": "an object",
        "required": [*required],
        "properties": properties,
    }
    if others is not True:
        schema["additionalProperties"] = others
    return schema


def _list(items: Schema, description: str, **bounds: int) -> Schema:
    return {"type": "array", "items": items, "description": description, **bounds}


def _any_of(description: str, *schemas: Schema) -> Schema:
    return {"anyOf": [*schemas], "description": description}


_BOOLEAN: Schema = {"type": "boolean", "description": "true or false"}
_STRING: Schema = {"type": "string", "description": "a string"}
_NOT_EMPTY: Schema = {"type": "string", "minLength": 1, "description": "a string, not empty"}
_TOKENS = _list(_integer(0, (1 << 31) - 1), "a list of token ids, not empty", minItems=1)
_PROMPT = _any_of("a string or a list of token ids, not empty", _NOT_EMPTY, _TOKENS)

_COMMON: Mapping[str, Schema] = {
    "model": _STRING,
    "stop": _any_of(
        f"a string or up to {MAX_STOPS} of them, none empty",
        _NOT_EMPTY,
        _list(_NOT_EMPTY, "strings", maxItems=MAX_STOPS),
    ),
    "n": _integer(1, MAX_CHOICES),
    "stream": _BOOLEAN,
    "stream_options": _object(
        (), others=False, include_usage=_BOOLEAN, include_obfuscation=_BOOLEAN
    ),
    "temperature": {"type": "number", "description": "a number: the run's (engine.temperature)"},
    "top_p": _only(_SUPPORT, 1),
    "top_k": {"type": "integer", "maximum": 0, "description": f"0 or less, else {_SUPPORT}"},
    "min_p": _only(_SUPPORT, 0),
    "max_tokens": _integer(1, 1 << 31),
    "presence_penalty": _only(_PENALTY, 0),
    "frequency_penalty": _only(_PENALTY, 0),
    "logit_bias": _only(_PENALTY, {}),
    "seed": _only("the episode has its own noise, so that it can be resumed", None),
    "user": _ANY,
    "metadata": _ANY,
    "store": _ANY,
    "service_tier": _ANY,
    "safety_identifier": _ANY,
    "prompt_cache_key": _ANY,
}
"""The fields of both kinds of requests. Those without a type have no influence on sampling."""

_PART = _object(
    ("type", "text"), others=False, type=_only("only text is supported", "text"), text=_STRING
)
_CALL = _object(
    ("function",),
    function=_object(("name", "arguments"), name=_STRING, arguments=_STRING),
)
_TOOL = _object(
    ("type", "function"),
    type=_only("only functions can be called", "function"),
    function=_object(("name",), name=_NOT_EMPTY),
)
_ROLE_FIELDS: Mapping[str, Mapping[str, Schema]] = {
    "assistant": {
        "tool_calls": _list(_CALL, "a list of function calls"),
        "reasoning_content": _STRING,
        "reasoning": _STRING,
    },
    "tool": {"tool_call_id": _ANY},
}
MESSAGES: Mapping[str, Schema] = {
    role: _object(
        ("role",) if role == "assistant" else ("role", "content"),
        others=_only("the endpoint has no use for this field", None, [], ""),
        role=_only("there is no such role", role),
        content=_any_of("a string or a list of parts of type text", _STRING, _list(_PART, "parts")),
        name=_ANY,
        **_ROLE_FIELDS.get(role, {}),
    )
    for role in ("system", "developer", "user", "assistant", "tool")
}
"""The schema of a message by its role."""

CHAT = _object(
    ("messages",),
    others=False,
    messages=_list({"oneOf": [*MESSAGES.values()]}, "a list of at least one message", minItems=1),
    tools=_list(_TOOL, "a list of tools"),
    tool_choice=_only(f"{_CONSTRAINED}; omit it, or omit the tools", "auto", "none"),
    parallel_tool_calls=_only("the number of calls in a reply cannot be forced", True),
    response_format=_only(f"{_CONSTRAINED}; ask for the format in words", {"type": "text"}),
    modalities=_only("only text is sampled", ["text"]),
    logprobs=_BOOLEAN,
    top_logprobs=_only(_RECORDED, 0),
    max_completion_tokens=_integer(1, 1 << 31),
    **_COMMON,
)
"""The schema of a body of `/v1/chat/completions`."""

COMPLETION = _object(
    ("prompt",),
    others=False,
    prompt=_any_of(
        "one string or one list of token ids, not empty",
        _NOT_EMPTY,
        _TOKENS,
        _list(_PROMPT, "one prompt", minItems=1, maxItems=1),
    ),
    logprobs=_only(_RECORDED, 0),
    echo=_only("only the sampled text is returned", False),
    best_of=_only("choosing the best would bias training; use n", 1),
    suffix=_only("text can only be continued", ""),
    **_COMMON,
)
"""The schema of a body of `/v1/completions`."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def require(value: Any, schema: Schema, path: str) -> None:
    """Raise `Refused` at the first place where a value does not match. Null counts as missing."""
    if not _matches(value, schema):
        description = schema["description"]
        got = reprlib.repr(value)
        reason = f"must be {description}, got {got}"
        if "enum" in schema:
            reason = f"cannot be {got}: {description}"
        raise Refused(f"{path or 'the body'} {reason}", param=path or None)
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            require(item, schema["items"], f"{path}[{index}]")
    if isinstance(value, dict):
        _require_fields(value, schema, path)


def _require_fields(value: Mapping[str, Any], schema: Schema, path: str) -> None:
    properties = schema.get("properties", _ANY)
    others = schema.get("additionalProperties", _ANY)
    for name in schema.get("required", ()):
        if value.get(name) is None:
            field = f"{path}.{name}".lstrip(".")
            raise Refused(f"{field} is missing", param=field)
    for name, content in value.items():
        field = f"{path}.{name}".lstrip(".")
        if name not in properties and others is False:
            raise Refused(f"unknown field {field}", code="unknown_parameter", param=field)
        if name not in properties or content is not None:
            require(content, properties.get(name, others), field)


def _matches(value: Any, schema: Schema) -> bool:
    """Check a value without its items or fields, except against the schemas of `anyOf`."""
    if "anyOf" in schema:
        return any(_matches_deeply(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        is_flag = isinstance(value, bool)
        return any(value == each and is_flag == isinstance(each, bool) for each in schema["enum"])
    if kind := schema.get("type"):
        if isinstance(value, bool) != (kind == "boolean"):
            return False
        is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()
        if not is_whole and not isinstance(value, _TYPES[kind]):
            return False
    size = len(value) if isinstance(value, str | list) else value
    low = schema.get("minimum", schema.get("minLength", schema.get("minItems")))
    high = schema.get("maximum", schema.get("maxItems"))
    return (low is None or size >= low) and (high is None or size <= high)


def _matches_deeply(value: Any, schema: Schema) -> bool:
    try:
        require(value, schema, "")
    except Refused:
        return False
    return True
