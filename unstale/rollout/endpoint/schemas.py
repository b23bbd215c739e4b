"""JSON Schemas of the requests that the endpoint accepts, and the check against them.

A field that would change the distribution of the samples is refused with the reason.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

MAX_CHOICES = 64
MAX_STOPS = 16

Schema = Mapping[str, Any]
"""A JSON Schema, with only those keywords that `require` supports. An error quotes its
`description`.
"""

_ANY: Schema = {}
LENIENT = "--endpoint.lenient true"
"""The command-line form of the option `endpoint.lenient`, for error texts."""
_LENIENT = f"omit it, or start the endpoint with {LENIENT} to override it"
_SUPPORT = f"only the run's options truncate the support (engine.top_p); {_LENIENT}"
_CONSTRAINED = f"constrained sampling has another distribution than the trainer's; {_LENIENT}"
_EFFORT = f"the policy itself decides how much it reasons; {_LENIENT}"
_PENALTY = f"it changes the sampling distribution, and the trainer does not know it; {_LENIENT}"
_RECORDED = "only the sampled token's log-probability is recorded"
_VERBOSITY = f"the policy itself decides how much it writes; {_LENIENT}"
_ENDS = f"a reply ends where the policy ends it; {_LENIENT}"
_UNUSED = f"the endpoint has no use for this field; omit it, or start it with {LENIENT}"


class Refused(Exception):
    """Error: a request is refused, with the text and status of the HTTP answer."""

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
    "temperature": {"type": "number", "description": "a number: the run's (--engine.temperature)"},
    "top_p": _only(_SUPPORT, 1),
    "top_k": {"type": "integer", "maximum": 0, "description": f"0 or less, else {_SUPPORT}"},
    "min_p": _only(_SUPPORT, 0),
    "max_tokens": _integer(1, 1 << 31),
    "repetition_penalty": _only(_PENALTY, 1),
    "presence_penalty": _only(_PENALTY, 0),
    "frequency_penalty": _only(_PENALTY, 0),
    "logit_bias": _only(_PENALTY, {}),
    "ignore_eos": _only(_ENDS, False),
    "min_tokens": _only(_ENDS, 0),
    "skip_special_tokens": _only(f"the text of an answer has no end token; {_LENIENT}", True),
    "return_token_ids": _only(f"an answer has no token ids; {_LENIENT}", False),
    "seed": _only(f"the episode has its own noise, so that it can be resumed; {_LENIENT}", None),
    "user": _ANY,
    "metadata": _ANY,
    "store": _ANY,
    "service_tier": _ANY,
    "safety_identifier": _ANY,
    "prompt_cache_key": _ANY,
    "prompt_cache_retention": _ANY,
}
"""Fields that chat and text requests share. Those with the schema `_ANY` are ignored, because they
do not affect sampling.
"""

_EMPTY = _only(_UNUSED, None, [], "")
_PART = _object(
    ("type", "text"), others=_EMPTY, type=_only("only text is supported", "text"), text=_STRING
)
_PICTURE_PART = _object(
    ("type",),
    others=_EMPTY,
    type=_only("only text and image_url are supported", "text", "image_url"),
    text=_STRING,
    image_url=_object(("url",), others=_EMPTY, url=_STRING, detail=_ANY),
)
_CALL = _object(
    ("id", "function"),
    id=_NOT_EMPTY,
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
    "tool": {"tool_call_id": _NOT_EMPTY},
}
PICTURED = ("user", "tool")
"""The roles whose messages can have pictures."""
MESSAGES: Mapping[str, Schema] = {
    role: _object(
        ("role",) if role == "assistant" else ("role", "content"),
        others=_EMPTY,
        role=_only("there is no such role", role),
        content=_any_of("a string or a list of parts", _STRING, _list(_PICTURE_PART, "parts"))
        if role in PICTURED
        else _any_of("a string or a list of parts of type text", _STRING, _list(_PART, "parts")),
        name=_ANY,
        **_ROLE_FIELDS.get(role, {}),
    )
    for role in ("system", "developer", "user", "assistant", "tool")
}
"""Role of a chat message -> schema of the message."""

CHAT = _object(
    ("messages",),
    others=False,
    messages=_list({"oneOf": [*MESSAGES.values()]}, "a list of at least one message", minItems=1),
    tools=_list(_TOOL, "a list of tools"),
    tool_choice=_only(_CONSTRAINED, "auto", "none"),
    parallel_tool_calls=_only(f"the number of calls in a reply cannot be forced; {_LENIENT}", True),
    response_format=_only(
        f"{_CONSTRAINED} by retries; or ask for the format in words", {"type": "text"}
    ),
    modalities=_only("only text is sampled", ["text"]),
    chat_template_kwargs=_object(()),
    logprobs=_BOOLEAN,
    top_logprobs=_only(f"{_RECORDED}; {_LENIENT}", 0),
    max_completion_tokens=_integer(1, 1 << 31),
    reasoning_effort=_only(_EFFORT, None),
    verbosity=_only(_VERBOSITY, "medium"),
    prediction=_ANY,
    **_COMMON,
)
"""The schema of the body of a request to `/v1/chat/completions`."""

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
"""The schema of the body of a request to `/v1/completions`."""

_SENT_KINDS = ("input_text", "output_text", "text")
_SENT_PART = _object(
    ("type", "text"), type=_only("only text is supported", *_SENT_KINDS), text=_STRING
)
SENT_TEXT = _any_of("a string or a list of parts with text", _STRING, _list(_SENT_PART, "parts"))
"""The schema of content in an input item of `/v1/responses` that can have no pictures."""
_SENT_PICTURE_PART = _object(
    ("type",),
    type=_only("only text and input_image are supported", *_SENT_KINDS, "input_image"),
    text=_STRING,
    image_url=_STRING,
    file_id=_only("the endpoint keeps no files: send a data URL in image_url", None),
)
_SENT_CONTENT = _any_of("a string or a list of parts", _STRING, _list(_SENT_PICTURE_PART, "parts"))
_THOUGHTS = _list(_object(("text",), text=_STRING), "a list of parts with text")


def _item(kind: str, *required: str, **properties: Schema) -> Schema:
    of_message = kind == "message"
    return _object(
        required if of_message else ("type", *required),
        others=_EMPTY,
        type=_only("there is no such item", kind),
        id=_ANY,
        status=_ANY,
        **properties,
    )


ITEMS: Mapping[str, Schema] = {
    "message": _item(
        "message",
        "role",
        "content",
        role=_only("there is no such role", "system", "developer", "user", "assistant"),
        content=_SENT_CONTENT,
        phase=_ANY,
    ),
    "reasoning": _item("reasoning", summary=_THOUGHTS, content=_THOUGHTS, encrypted_content=_ANY),
    "function_call": _item(
        "function_call",
        "name",
        "arguments",
        "call_id",
        name=_STRING,
        arguments=_STRING,
        call_id=_NOT_EMPTY,
    ),
    "function_call_output": _item(
        "function_call_output", "output", "call_id", output=_SENT_CONTENT, call_id=_NOT_EMPTY
    ),
}
"""Type of an input item of `/v1/responses` -> schema of the item."""

_SHARED = ("model", "stream", "stream_options", "temperature", "top_p", "user", "metadata", "store")
_STATELESS = "the endpoint keeps no responses: send the whole input"

RESPONSE = _object(
    ("input",),
    others=False,
    input=_any_of(
        "a string, not empty, or a list of at least one item",
        _NOT_EMPTY,
        _list({"oneOf": [*ITEMS.values()]}, "items", minItems=1),
    ),
    instructions=_STRING,
    tools=_list(
        _object(
            ("type", "name"),
            type=_only("only functions can be called", "function"),
            name=_NOT_EMPTY,
        ),
        "a list of functions",
    ),
    tool_choice=CHAT["properties"]["tool_choice"],
    parallel_tool_calls=CHAT["properties"]["parallel_tool_calls"],
    text=_object(
        (),
        others=False,
        format=CHAT["properties"]["response_format"],
        verbosity=_only(_VERBOSITY, "medium"),
    ),
    reasoning=_object((), others=_EMPTY, effort=_only(_EFFORT, None), summary=_ANY),
    max_output_tokens=_integer(1, 1 << 31),
    top_logprobs=_only(f"{_RECORDED}; {_LENIENT}", 0),
    include=_list(_STRING, "a list of strings"),
    previous_response_id=_only(_STATELESS, None),
    conversation=_only(_STATELESS, None),
    prompt=_only(_STATELESS, None),
    background=_only("an answer is sent to the client that waits for it", False),
    truncation=_only("a context is never cut", "disabled"),
    max_tool_calls=_ANY,
    service_tier=_ANY,
    safety_identifier=_ANY,
    prompt_cache_key=_ANY,
    prompt_cache_retention=_ANY,
    **{name: _COMMON[name] for name in _SHARED},
)
"""The schema of the body of a request to `/v1/responses`."""

_CACHED: Mapping[str, Schema] = {"cache_control": _ANY}


def _block(kind: str, *required: str, **properties: Schema) -> Schema:
    kinds = _only("only text is supported", kind)
    return _object(("type", *required), others=_EMPTY, type=kinds, **_CACHED, **properties)


_TEXT_BLOCK = _block("text", "text", text=_STRING)
_TEXT_BLOCKS = _any_of(
    "a string or a list of blocks of type text", _STRING, _list(_TEXT_BLOCK, "text blocks")
)
CONTENT_BLOCKS: Mapping[str, Schema] = {
    "text": _TEXT_BLOCK,
    "image": _block(
        "image",
        "source",
        source=_object(
            ("type", "data"),
            others=_EMPTY,
            type=_only("the endpoint fetches no pictures: send the file as base64", "base64"),
            media_type=_STRING,
            data=_STRING,
        ),
    ),
}
"""Type of a block with content -> schema of the block."""
RESULT_BLOCKS: Mapping[str, Schema] = {
    **CONTENT_BLOCKS,
    "tool_reference": _block("tool_reference", "tool_name", tool_name=_NOT_EMPTY),
}
"""Type of a block in the result of a tool -> schema of the block. A block of type `tool_reference`
names one of the request's tools.
"""
BLOCKS: Mapping[str, Mapping[str, Schema]] = {
    "user": {
        "tool_result": _block(
            "tool_result",
            "tool_use_id",
            tool_use_id=_NOT_EMPTY,
            content=_any_of(
                "a string or a list of blocks", _STRING, _list(_object(("type",)), "blocks")
            ),
            is_error=_BOOLEAN,
        ),
        **CONTENT_BLOCKS,
    },
    "assistant": {
        "thinking": _block("thinking", "thinking", thinking=_STRING, signature=_STRING),
        "text": _TEXT_BLOCK,
        "tool_use": _block(
            "tool_use", "id", "name", "input", id=_NOT_EMPTY, name=_STRING, input=_object(())
        ),
    },
    "system": {"text": _TEXT_BLOCK},
}
"""Role of a message of `/v1/messages` -> type of a content block -> schema of the block. Blocks
must be in the order of these types, because chat templates write them so. Text and pictures may
alternate.
"""
TURNS: Mapping[str, Schema] = {
    role: _object(
        ("role", "content"),
        others=_EMPTY,
        role=_only("there is no such role", role),
        content=_any_of(
            "a string or a list of blocks",
            _STRING,
            _list({"oneOf": [*blocks.values()]}, "blocks", minItems=int(role != "assistant")),
        ),
    )
    for role, blocks in BLOCKS.items()
}
"""Role of a message of `/v1/messages` -> schema of the message."""

MESSAGE = _object(
    ("messages",),
    others=False,
    messages=_list({"oneOf": [*TURNS.values()]}, "a list of at least one message", minItems=1),
    system=_TEXT_BLOCKS,
    tools=_list(
        _object(
            ("name",),
            type=_only("only the client's own tools can be called", "custom"),
            name=_NOT_EMPTY,
            input_schema=_object(()),
            defer_loading=_BOOLEAN,
        ),
        "a list of tools",
    ),
    tool_choice=_object(
        ("type",),
        others=_EMPTY,
        type=_only(_CONSTRAINED, "auto", "none"),
        disable_parallel_tool_use=_only(
            f"the number of calls in a reply cannot be limited; {_LENIENT}", False
        ),
    ),
    max_tokens=_integer(1, 1 << 31),
    stop_sequences=_list(_NOT_EMPTY, "strings", maxItems=MAX_STOPS),
    thinking=_object(
        ("type",), others=_EMPTY, type=_only(_EFFORT, "adaptive"), display=_ANY, budget_tokens=_ANY
    ),
    output_config=_object(
        (),
        others=_EMPTY,
        effort=_only(_EFFORT, None),
        format=_only(f"{_CONSTRAINED} by retries; or ask for the format in words", None),
    ),
    context_management=_only(f"a context is never cut; {_LENIENT}", {}),
    container=_only("the endpoint has no containers", None),
    mcp_servers=_only("only the client's own tools can be called", []),
    inference_geo=_ANY,
    speed=_ANY,
    diagnostics=_ANY,
    **{
        name: _COMMON[name]
        for name in ("model", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier")
    },
    **_CACHED,
)
"""The schema of the body of a request to `/v1/messages`."""

OVERRIDABLE = (
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "return_token_ids",
    "top_logprobs",
    "seed",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning_effort",
    "reasoning",
    "verbosity",
    "text",
    "thinking",
    "output_config",
    "context_management",
)
"""Sampling options of a request that `endpoint.lenient` replaces with the run's if they do not
match the request's schema. `temperature` is not in this list, because it is compared with the run's
value.
"""

_WITHOUT_INFLUENCE = (
    "cache_control",
    "provider_specific_fields",
    "thinking_blocks",
    "continuous_usage_stats",
)
"""Fields of messages, content parts, tools and stream options that affect no reply. They are
ignored with `endpoint.lenient`.
"""

JSON_FORMATS: Mapping[str, Schema] = {
    "json_object": _object((), type=_STRING),
    "json_schema": _object(("json_schema",), json_schema=_object(("schema",), schema=_object(()))),
}
"""Type of a `response_format` -> its schema."""


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


def require(value: Any, schema: Schema, path: str) -> None:
    """Raise `Refused` at the first place where `value` does not match the schema.

    A null counts as a missing value. `path` is the place of `value` in the request, for the error's
    text.
    """
    if not _matches(value, schema):
        for each in schema.get("anyOf", ()):
            if _matches(value, each):
                require(value, each, path)  # names the field or item that does not match
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


def is_json_format(requested: Any) -> bool:
    """Return True if a `response_format` asks for JSON, with or without a schema."""
    kind = requested.get("type") if isinstance(requested, dict) else None
    return isinstance(kind, str) and kind in JSON_FORMATS


def mismatched(body: Mapping[str, Any], schema: Schema) -> tuple[str, ...]:
    """Return the names of the `OVERRIDABLE` options of a request that do not match the schema."""
    properties = schema["properties"]
    return tuple(
        name
        for name in OVERRIDABLE
        if name in properties
        and body.get(name) is not None
        and not _matches_deeply(body[name], properties[name])
    )


def without_influence(body: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a request without fields that affect no reply, and the names of the removed fields.

    `_WITHOUT_INFLUENCE` has these fields. Those whose value is null are removed but not named.
    """
    found: set[str] = set()

    def cleaned(record: Any) -> Any:
        if not isinstance(record, dict):
            return record
        found.update(name for name in _WITHOUT_INFLUENCE if record.get(name) is not None)
        return {name: each for name, each in record.items() if name not in _WITHOUT_INFLUENCE}

    clean = {**cleaned(body), "stream_options": cleaned(body.get("stream_options"))}
    for name in ("messages", "input", "tools"):
        if isinstance(records := body.get(name), list):
            clean[name] = records = [cleaned(record) for record in records]
            for record in records:
                if isinstance(record, dict) and isinstance(parts := record.get("content"), list):
                    record["content"] = [cleaned(part) for part in parts]
    return clean, tuple(sorted(found))


def _require_fields(value: Mapping[str, Any], schema: Schema, path: str) -> None:
    properties = schema.get("properties", _ANY)
    others = schema.get("additionalProperties", _ANY)
    present = {name: content for name, content in value.items() if content is not None}
    if "type" in properties and "type" in present:  # the other fields depend on it
        require(present["type"], properties["type"], f"{path}.type".lstrip("."))
    for name in schema.get("required", ()):
        if name not in present:
            field = f"{path}.{name}".lstrip(".")
            raise Refused(f"{field} is missing", param=field)
    for name, content in present.items():
        field = f"{path}.{name}".lstrip(".")
        if name not in properties and others is False:
            raise Refused(f"unknown field {field}", code="unknown_parameter", param=field)
        require(content, properties.get(name, others), field)


def _matches(value: Any, schema: Schema) -> bool:
    """Return True if a value itself matches a schema.

    Its items and fields are not checked, except against the alternatives of `anyOf`.
    """
    if "anyOf" in schema:
        # The quick check first: it makes no error with a text.
        return any(
            _matches(value, each) and _matches_deeply(value, each) for each in schema["anyOf"]
        )
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
