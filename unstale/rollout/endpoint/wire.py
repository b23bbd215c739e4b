"""Requests and answers of the OpenAI API."""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

from unstale.config import EndpointConfig
from unstale.config.files import MAX_DEPTH, is_too_deep
from unstale.envs import Image, Message, ToolCall
from unstale.envs.strict_json import loads
from unstale.envs.tokens import text_offsets
from unstale.pictures import read_data_url
from unstale.records import ContextPiece, Piece, Placed, Sampled
from unstale.rewards import workers
from unstale.rewards.schemas import satisfies
from unstale.rollout.endpoint.conversation import Call, HistoryMessage
from unstale.rollout.endpoint.schemas import (
    CHAT,
    COMPLETION,
    JSON_FORMATS,
    LENIENT,
    MESSAGES,
    Refused,
    Schema,
    is_json_format,
    mismatched,
    require,
    without_influence,
)

LOGP_FLOOR = -9999.0
"""Log-probability that replaces -infinity, which JSON cannot express. OpenAI uses the same value.
"""


STRICT = EndpointConfig()


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """A JSON Schema that a reply must satisfy. Otherwise the reply is sampled again.

    Replies with tool calls are not checked.
    """

    schema: Mapping[str, Any]
    retries: int
    """Largest number of times that a reply is sampled again."""

    def accepts(self, message: Message) -> bool:
        """Return True if a message satisfies the schema or has tool calls.

        Blocks during the check. A check that takes too long counts as not satisfied.
        """
        return bool(message.tool_calls) or bool(satisfies(message.content, self.schema))

    def require_usable(self) -> None:
        """Raise `Refused` if the schema is invalid or takes too long to check."""
        try:
            is_quick = satisfies("null", self.schema) is not None
        except ValueError as error:
            raise Refused(f"response_format: {error}", param="response_format") from None
        if not is_quick:
            raise Refused(
                f"response_format: a check takes over {workers.CPU_S:g} s: simplify the schema",
                param="response_format",
            )

    def instruct(self, history: Sequence[HistoryMessage]) -> tuple[HistoryMessage, ...]:
        """Return the history with a system message that describes the schema."""
        schema = json.dumps(self.schema)
        text = f"Write the final reply as JSON only. It must satisfy this JSON Schema:\n{schema}"
        if not history or history[0].message.role != "system":
            return (HistoryMessage(Message("system", text)), *history)
        system = history[0].message
        system = replace(system, content=f"{system.content}\n\n{text}".lstrip())
        return (replace(history[0], message=system), *history[1:])


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for answers, with its options, whatever API it came from."""

    call: Call
    choices: int
    stops: tuple[str, ...]
    max_tokens: int | None
    logprobs: bool
    stream: bool
    usage: bool
    """True if the last event of a stream must have the numbers of tokens."""
    calls: bool
    """True if a tool call in the reply's text is returned as a tool call, not as text."""
    format: ReplyFormat | None = None
    overridden: tuple[str, ...] = ()
    """Names of the request's options that are ignored because of `endpoint.lenient`."""
    field: str = "messages"
    """Name of the request's field that has the prompt, for error texts."""


class AnswerToken(NamedTuple):
    """A token of an answer: its UTF-8 bytes, which may be part of a character, and log-probability.

    `data` is empty unless the request asked for log-probabilities.
    """

    data: bytes
    logp: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the `n` answers to a request.

    `finish` is OpenAI's `finish_reason`: "stop", "length" or "tool_calls".
    """

    message: HistoryMessage
    finish: str
    tokens: tuple[AnswerToken, ...]
    num_prompt_tokens: int
    stop_text: str = ""
    """The stop text that ended the answer. Empty if none did."""


class SentMessage(NamedTuple):
    """A message of a request, and its path there. For a result, also the id of the tool call."""

    message: HistoryMessage
    path: str
    call_id: str | None = None


class ResultTerms(NamedTuple):
    """Words with which errors describe the results of tool calls, in the terms of one API."""

    id_field: str
    """Name of the field with the id of the tool call."""
    place: str
    """A sentence that says where in a request the results of tool calls must be."""


CHAT_TERMS = ResultTerms(
    "tool_call_id",
    "A message of role tool with the tool_call_id of each must come directly after it",
)


def load(data: bytes) -> dict[str, Any]:
    """Return the body of a request, parsed as JSON.

    Raises `Refused` if it is no JSON object, or is nested more than `MAX_DEPTH` times.
    """
    try:
        body = loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise Refused("the body is not a JSON object", code="invalid_json")
    if is_too_deep(body):
        raise Refused(f"the body is nested more than {MAX_DEPTH} times", code="invalid_json")
    return body


def read_chat(
    body: Mapping[str, Any], *, temperature: float, config: EndpointConfig = STRICT
) -> CompletionRequest:
    """Check and read a chat request.

    `temperature` is the run's. Raises `Refused` if the request is invalid or, without
    `endpoint.lenient`, if its sampling options differ from the run's.
    """
    body, overridden = without_overridden(body, CHAT, temperature, config)
    reply_format = None
    if config.lenient and is_json_format(body.get("response_format")):
        reply_format = read_format(body["response_format"], config)
        body = {name: value for name, value in body.items() if name != "response_format"}
    require(body, CHAT, "")
    sent = [
        _read_message(record, f"messages[{index}]") for index, record in enumerate(body["messages"])
    ]
    history, moved = in_order(sent, CHAT_TERMS, config)
    if reply_format:
        history = reply_format.instruct(history)
    tools = tuple(map(dict, body.get("tools") or ()))
    call = Call(history, tools, body.get("chat_template_kwargs") or {})
    calls = bool(call.tools) and body.get("tool_choice") != "none"
    logprobs = bool(body.get("logprobs"))
    request = completion_request(body, call, temperature, logprobs=logprobs, calls=calls)
    return replace(request, format=reply_format, overridden=(*overridden, *moved))


def read_completion(
    body: Mapping[str, Any], *, temperature: float, config: EndpointConfig = STRICT
) -> CompletionRequest:
    """Check and read a request to continue a text or a list of tokens.

    Arguments and errors are those of `read_chat`.
    """
    body, overridden = without_overridden(body, COMPLETION, temperature, config)
    require(body, COMPLETION, "")
    prompt = body["prompt"]
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    call = Call(prompt if isinstance(prompt, str) else tuple(map(int, prompt)))
    logprobs = body.get("logprobs") is not None
    request = completion_request(body, call, temperature, logprobs=logprobs, calls=False)
    return replace(request, overridden=overridden, field="prompt")


def _as_user(each: HistoryMessage) -> HistoryMessage:
    """Return a system message as a user message: most templates allow a system message only
    first.
    """
    if each.message.role != "system":
        return each
    return replace(each, message=replace(each.message, role="user"))


def read_format(requested: Mapping[str, Any], config: EndpointConfig) -> ReplyFormat:
    kind = requested["type"]
    require(requested, JSON_FORMATS[kind], "response_format")
    schema = requested["json_schema"]["schema"] if kind == "json_schema" else {"type": "object"}
    reply_format = ReplyFormat(schema, config.format_retries)
    reply_format.require_usable()
    return reply_format


def without_overridden(
    body: Mapping[str, Any], schema: Schema, temperature: float, config: EndpointConfig
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a request without what `endpoint.lenient` ignores, and the names of the ignored
    options.

    `schema` is that of the request. Without `endpoint.lenient`, nothing is ignored.
    """
    if not config.lenient:
        return body, ()
    body, names = without_influence(body)
    requested = body.get("temperature")
    is_other = isinstance(requested, int | float) and requested != temperature
    options = (*mismatched(body, schema), *["temperature"] * is_other)
    rest = {name: value for name, value in body.items() if name not in options}
    return rest, (*options, *names)


def completion_request(
    body: Mapping[str, Any], call: Call, temperature: float, *, logprobs: bool, calls: bool
) -> CompletionRequest:
    requested = body.get("temperature")
    if requested is not None and requested != temperature:
        raise Refused(
            f"temperature must be the run's, {temperature:g} (--engine.temperature), got "
            f"{reprlib.repr(requested)}: it is part of the policy that is trained. Leave it out, "
            f"or start the endpoint with {LENIENT}",
            param="temperature",
        )
    stop = body.get("stop") or ()
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return CompletionRequest(
        call=call,
        choices=int(body.get("n") or 1),
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens=min((int(limit) for limit in limits if limit is not None), default=None),
        logprobs=logprobs,
        stream=bool(body.get("stream")),
        usage=bool((body.get("stream_options") or {}).get("include_usage")),
        calls=calls,
    )


def _read_message(record: Any, path: str) -> SentMessage:
    if not isinstance(record, dict):
        raise Refused(f"{path} is not an object", param=path)
    role = record.get("role")
    if not isinstance(role, str) or role not in MESSAGES:
        raise Refused(f"{path}.role cannot be {reprlib.repr(role)}", param=f"{path}.role")
    require(record, MESSAGES[role], path)
    content = record.get("content") or ""
    text, images = read_parts(content, f"{path}.content")
    calls = tuple(
        _read_call(call, f"{path}.tool_calls[{index}]")
        for index, call in enumerate(record.get("tool_calls") or ())
    )
    thoughts = record.get("reasoning_content")
    if thoughts is None:
        thoughts = record.get("reasoning")
    role_in_template: Any = "system" if role == "developer" else role
    message = HistoryMessage(Message(role_in_template, text, calls, images=images), thoughts)
    return SentMessage(message, path, record.get("tool_call_id"))


def read_parts(
    content: str | Sequence[Mapping[str, Any]], path: str
) -> tuple[str, tuple[Image, ...]]:
    """Return the text of a message's content, and its pictures.

    Raises `Refused` if a part lacks its text or picture, or if a picture is not in the request
    itself.
    """
    if isinstance(content, str):
        return content, ()
    text, images = "", []
    for index, part in enumerate(content):
        kind = part["type"]
        if (field := part.get(kind)) is None:
            place = f"{path}[{index}].{kind}"
            raise Refused(f"{place} is missing", param=place)
        if kind == "text":
            text += field
        else:
            data = _data_of(field["url"], f"{path}[{index}].image_url.url")
            images.append(Image(data, len(text)))
    return text, tuple(images)


def _data_of(url: str, path: str) -> bytes:
    """Return the file in a data URL. Raises `Refused` for another URL."""
    if (data := read_data_url(url)) is not None:
        return data
    raise Refused(
        f"{path} must be a data URL with base64 (data:image/png;base64,...), got "
        f"{reprlib.repr(url)}: the endpoint fetches no pictures",
        param=path,
    )


def in_order(
    sent: Sequence[SentMessage], terms: ResultTerms, config: EndpointConfig
) -> tuple[tuple[HistoryMessage, ...], tuple[str, ...]]:
    """Return the messages, with the results after each reply in the order of its tool calls.

    Most chat templates write no ids, so the policy identifies a result by its order. Raises
    `Refused` unless each tool call has one result. For agents that parse calls from text, a reply
    without tool calls may have results without ids.

    A later system message is refused. With `endpoint.lenient` it becomes a user message, and the
    second returned value is `("system_message",)` instead of ().
    """
    begins = [at for at, each in enumerate(sent) if each.message.message.role != "tool"]
    if begins[:1] != [0]:
        path = sent[0].path
        raise Refused(
            f"{path} is the result of a tool call, but no call comes before it", param=path
        )
    ordered: list[SentMessage] = []
    for begin, end in pairwise((*begins, len(sent))):
        is_last = begin + 1 == len(sent)  # refused later: there is nothing to answer
        results = [] if is_last else _in_order_of_calls(sent[begin], sent[begin + 1 : end], terms)
        ordered += [sent[begin], *results]
    late = [each.path for each in ordered[1:] if each.message.message.role == "system"]
    if late and not config.lenient:
        raise Refused(
            f"there is at most one system message, and it comes first; with {LENIENT}, "
            "others are the user's",
            param=late[0],
        )
    history = [each.message for each in ordered]
    if late:
        history = [history[0], *map(_as_user, history[1:])]
    return tuple(history), ("system_message",) * bool(late)


def _in_order_of_calls(
    reply: SentMessage, results: Sequence[SentMessage], terms: ResultTerms
) -> Sequence[SentMessage]:
    """Return the results after a reply, in the order of its tool calls.

    Raises `Refused` if the ids of calls and results do not match.
    """
    ids = [call.id for call in reply.message.message.tool_calls]
    if not ids and not any(each.call_id for each in results):
        return results
    if len(set(ids)) < len(ids):
        raise Refused(
            f"{reply.path} has two calls with the same id: {', '.join(ids)}", param=reply.path
        )
    result_of: dict[str, SentMessage] = {}
    for result in results:
        param = f"{result.path}.{terms.id_field}"
        if result.call_id is None:
            raise Refused(f"{param} is missing: it must be {' or '.join(ids)}", param=param)
        if result.call_id not in ids:
            known = f"they have {', '.join(ids)}" if ids else "it has no calls"
            no_call = f"no tool call of {reply.path} has this id: {known}"
            raise Refused(f"{param} is {result.call_id!r}, but {no_call}", param=param)
        if other := result_of.get(result.call_id):
            same = f"{param} is {result.call_id!r}, but {other.path} has the same id"
            raise Refused(f"{same}: each tool call has one result", param=param)
        result_of[result.call_id] = result
    if missing := [each for each in ids if each not in result_of]:
        raise Refused(
            f"{reply.path} has tool calls without a result: {', '.join(missing)}. {terms.place}",
            param=reply.path,
        )
    return [result_of[each] for each in ids]


def _read_call(call: Any, path: str) -> ToolCall:
    function = call["function"]
    try:
        arguments = loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise Refused(f"{path}.function.arguments is not a JSON object", param=path)
    if is_too_deep(arguments):
        raise Refused(
            f"{path}.function.arguments is nested more than {MAX_DEPTH} times", param=path
        )
    return ToolCall(function["name"], arguments, id=call["id"])


def message(answer: HistoryMessage) -> dict[str, Any]:
    """Return a reply as the JSON object of an OpenAI chat message."""
    content = answer.message.content
    calls = answer.message.tool_calls
    record: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if answer.thoughts is not None:
        record["reasoning_content"] = answer.thoughts
    if calls:
        record["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in calls
        ]
    return record


_KINDS = {ContextPiece: "context", Sampled: "sampled", Placed: "placed"}


def pieces(recorded: Sequence[Piece]) -> list[dict[str, Any]]:
    """Return pieces (runs of tokens) as JSON objects, with versions and log-probabilities."""
    return [
        {
            "kind": _KINDS[type(piece)],
            **asdict(piece),
            "provenance": piece.provenance.name,
        }
        for piece in recorded
    ]


def chat_logprobs(tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Return the field `logprobs` of an OpenAI chat answer."""
    return {
        "content": [
            {
                "token": token.data.decode(errors="replace"),
                "logprob": _finite(token.logp),
                "bytes": list(token.data),
                "top_logprobs": [],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def text_logprobs(tokens: Sequence[AnswerToken]) -> dict[str, Any]:
    """Return the field `logprobs` of an answer to `/completions`."""
    return {
        "tokens": [token.data.decode(errors="replace") for token in tokens],
        "token_logprobs": [_finite(token.logp) for token in tokens],
        "top_logprobs": None,
        "text_offset": list(text_offsets([token.data for token in tokens])),
    }


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the field `usage` of an answer: the numbers of its prompt and answer tokens."""
    prompt = choices[0].num_prompt_tokens
    completion = sum(len(choice.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _finite(logp: float) -> float:
    return logp if math.isfinite(logp) else LOGP_FLOOR
