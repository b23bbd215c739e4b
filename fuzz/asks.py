"""Requests to the endpoint, valid and invalid, drawn from the schemas that check them.

A JSON Schema validator decides independently which requests are valid.
"""

import asyncio
import json
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from http.client import HTTPException, HTTPResponse
from typing import Any, cast

from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from fuzz.draws import NESTED, Draws, as_json, require
from unstale.cli.serve import SessionPool
from unstale.config import SHIPPED_POLICY, EngineConfig, RolloutConfig
from unstale.engines.scripted import ScriptedEngine
from unstale.envs.calculator import TOOL
from unstale.envs.chat import Chat
from unstale.envs.external import ExternalAgent
from unstale.rollout.endpoint import connections, server
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.generator import Generator

HANG_S = 20.0
"""Seconds. An answer that takes longer is a finding."""
BODY_S, MAX_BODY = 0.2, 1 << 16
"""Limits of the endpoint: seconds and bytes of a body, small so that inputs often exceed them."""
CHAT_BODY: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "calculate", "arguments": '{"expression": "1"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "1"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "n": 2,
    "stop": ["x"],
    "max_tokens": 4,
    "temperature": 1.0,
    "stream": True,
    "logprobs": True,
    "stream_options": {"include_usage": True},
    "model": "policy",
}
"""A request with a message of each role and most fields."""
MESSAGES_BODY: dict[str, Any] = {
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "t"},
                {"type": "tool_use", "id": "1", "name": "calculate", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "1", "is_error": False},
                {"type": "text", "text": "u"},
            ],
        },
    ],
    "tools": [{"name": "calculate", "description": "d", "input_schema": {}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "adaptive"},
    "max_tokens": 4,
    "stop_sequences": ["x"],
}
"""A request to `/messages` with a block of each type and most fields."""
TEMPLATES: Sequence[tuple[str, Any]] = (
    ("/chat/completions", CHAT_BODY),
    (
        "/chat/completions",
        {"messages": [{"role": "user", "content": "one"}], "tools": [TOOL], "tool_choice": "none"},
    ),
    (
        "/completions",
        {"prompt": "one", "stop": "x", "logprobs": 0, "max_tokens": 3, "top_p": 1, "stream": False},
    ),
    ("/completions", {"prompt": [[5, 6]], "n": 3, "stream": True}),
    ("/responses", {"input": "one", "instructions": "two", "stream": True}),
    (
        "/responses",
        {
            "input": [
                {"role": "developer", "content": "s"},
                {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "calculate", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "1"},
            ],
            "tools": [{"type": "function", "name": "calculate", "parameters": {}}],
            "max_output_tokens": 4,
            "include": ["message.output_text.logprobs"],
        },
    ),
    ("/messages", {"messages": [{"role": "user", "content": "one"}], "stream": True}),
    ("/messages", MESSAGES_BODY),
    ("/messages/count_tokens", MESSAGES_BODY),
)
ONLY_IN_WORDS = (
    "at most one system message",
    "there is nothing to answer",
    "the chat template cannot write these messages",
    "that are not in the vocabulary",
    "is not a JSON object",
    "is not an item of type",
    "temperature must be the run's",
    "no reply fits",
    "is the result of a tool call, but no call",
    "has two calls with the same id",
    "call_id is",
    "tool_use_id is",
    "is a block of type",
    "has tool calls without a result",
    "half of a character",
)
"""Parts of refusals for reasons that a schema cannot express."""
KEYS = ("one", "two", "three", "a%20b", "%ff", "-unknown")
CHUNKED = b"Transfer-Encoding: chunked\r\n"
METHODS = (b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE", b"get", b"\xff", b"A" * 99)
PATHS = ("/", "//", "/v1", "/v1/../healthz", "*", "é", "http://[", "/e//v1/models")
TEXTS = ("one", "", "{}", '{"expression": "1"}', "\ud800", "漢字 🙂 <|im_end|>")
HEADERS = (
    "Content-Type: text/plain",
    "Content-Type: application/x-www-form-urlencoded",
    "Content-Type: \xff",
    "X-Episode: é",
    "Host: [",
    "Host: a:b:c",
    "X: a\r\nX-Episode: two",
    "X: a\nb",
    "X : y",
    ": y",
    "Transfer-Encoding: gzip",
    "Content-Length: -1",
    "Content-Length: 5, 6",
    "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade",
    "Cookie: " + "x" * 3000,
    "X: " + "y" * 70_000,
    "Authorization: Basic eA==",
    "Authorization: Bearer é",
    "X: \x00",
    "Connection: close",
    "Accept: nothing/at-all",
)


ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}
"""The schema of a refusal."""


def with_nulls(schema: Any) -> Any:
    """Return the schema with null allowed for optional fields, because the endpoint allows it."""
    if isinstance(schema, list):
        return [with_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    nullable = {
        name: value if name == "enum" else with_nulls(value) for name, value in schema.items()
    }
    for name, value in nullable.get("properties", {}).items():
        if value and name not in schema["required"]:
            nullable["properties"][name] = {"anyOf": [value, {"type": "null"}]}
    return nullable


class _World:
    """An endpoint in a thread of its own. It refuses names of episodes that begin with a dash."""

    def __init__(self) -> None:
        self.address, self.key, self.failed = ("", 0), "", ""
        self.schemas: dict[str, Draft202012Validator] = {}
        self.bodies: dict[str, Any] = {}
        self.paths: dict[str, bool] = {}
        """True for the paths of POST requests."""
        self._up = threading.Event()
        server.REQUEST_TIMEOUT_S, server.MAX_BODY_BYTES = BODY_S, MAX_BODY
        connections.HEAD_TIMEOUT_S = BODY_S
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        require(self._up.wait(60), f"the endpoint does not open: {self.failed}")
        for prefix in ("/e/{episode}/v1", "/v1"):
            for path, schema in server.PATHS.items():
                self.paths[prefix + path] = schema is not None
                if schema is not None:
                    self.bodies[prefix + path] = with_nulls(schema)
                    self.schemas[prefix + path] = Draft202012Validator(with_nulls(schema))
        self.refusal = Draft202012Validator(ERROR)

    @property
    def authorized(self) -> bytes:
        return f"Authorization: Bearer {self.key}\r\n".encode()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    def _run(self) -> None:
        with suppress(asyncio.CancelledError):
            asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._serving = (
            asyncio.get_running_loop(),
            cast("asyncio.Task[None]", asyncio.current_task()),
        )
        chat = Chat(AutoTokenizer.from_pretrained(SHIPPED_POLICY), ())
        engine = ScriptedEngine(_say(chat))
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        generator = Generator(engine, chat, EngineConfig(max_context=512, max_completion_tokens=24))
        try:
            async with asyncio.TaskGroup() as calls:

                def find(key: str) -> AgentSession:
                    return server.refuse_unknown(key) if key.startswith("-") else visitors.find(key)  # type: ignore

                async with RecordingEndpoint(find=find) as endpoint:
                    tasks = ExternalAgent(lambda *_: 0.0, ["x"])
                    rollout = AgentRollout(
                        generator, tasks, RolloutConfig(max_turns=1 << 30), endpoint=endpoint
                    )
                    visitors = SessionPool(rollout, calls, 0)
                    host, _, port = endpoint.url.removeprefix("http://").partition(":")
                    self.address, self.key = (host, int(port)), endpoint.token
                    self._up.set()
                    await asyncio.Event().wait()
        finally:
            self.failed = (
                "an answer failed with something else than a refusal, and took the episodes with it"
            )

    def send(
        self, method: bytes, path: str, head: bytes, parts: Sequence[bytes] = (b"",)
    ) -> tuple[int, bytes]:
        """Send a request, and return the status and body of the answer.

        The status is 0 if the connection was closed without an answer. Without `parts`, only the
        bytes of `head` are sent, and the request never ends.
        """
        begin = (
            method + b" " + path.encode("latin-1", "replace") + b" HTTP/1.1\r\nHost: x\r\n" + head
        )
        with socket.create_connection(self.address, timeout=HANG_S) as connection:
            try:
                for part in (begin + b"\r\n" + parts[0], *parts[1:]) if parts else (begin,):
                    connection.sendall(part)
            except OSError:
                pass  # it may answer before it has read everything
            answer = HTTPResponse(connection, method=method.decode("latin-1"))
            try:
                answer.begin()
                return answer.status, answer.read()
            except TimeoutError:
                raise AssertionError("no answer") from None
            except (HTTPException, ConnectionError):
                return 0, b""


def _say(chat: Chat) -> Any:
    """Return a policy whose reply depends only on the length of its context."""
    call = '<tool_call>\n{"name": "calculate", "arguments": {}}\n</tool_call>'
    words = ("one two three", call, "<tool_call>{", "é🙂")
    said = [chat._tokenizer.encode(text, add_special_tokens=False) for text in words]
    return lambda tokens, params: [*said[len(tokens) % len(said)], chat.stop_tokens[0]]


@cache
def world() -> _World:
    return _World()


def drawn(schema: Any, draws: Draws) -> Any:
    """Return a value that a schema allows."""
    for several in ("anyOf", "oneOf", "enum"):
        if several in schema:
            chosen = draws.choice(schema[several])
            return chosen if several == "enum" else drawn(chosen, draws)
    match schema.get("type"):
        case "object":
            wanted = [
                name
                for name in schema["properties"]
                if name in schema["required"] or not draws.number(7)
            ]
            return {name: drawn(schema["properties"][name], draws) for name in wanted}
        case "array":
            least = schema.get("minItems", 0)
            many = least + draws.number(1 + min(3, schema.get("maxItems", 9) - least))
            return [drawn(schema["items"], draws) for _ in range(many)]
        case "string":
            return draws.choice((*TEXTS, draws.text())) or "x" * schema.get("minLength", 0)
        case "integer":
            low, high = schema.get("minimum", -9), schema.get("maximum", 9)
            return draws.choice(
                (low, low + draws.number(4) if low + 4 <= high else low, min(high, 64), float(low))
            )
        case "number":
            return draws.choice((1, 1.0))
        case "boolean":
            return bool(draws.number(2))
        case "null":
            return None
    return draws.json()


def endpoint(data: bytes) -> None:
    draws, at = Draws(data), world()
    path = draws.choice(sorted(at.paths))
    body = drawn(at.bodies[path], draws) if at.paths[path] else None
    if draws.number(2):
        suffix, body = draws.choice(TEMPLATES)
        path = draws.choice([path for path in sorted(at.schemas) if path.endswith(f"v1{suffix}")])
    for _ in range(draws.choice((0, 1, 1, 2))):
        body = draws.changed(body)
    text = as_json(body).encode() if body is not None else b""
    method, key = (b"POST" if at.paths[path] else b"GET"), draws.choice(KEYS)
    sound, valid = (
        True,
        path in at.schemas and "NaN" not in text.decode() and "Infinity" not in text.decode(),
    )
    fault = draws.number(24)
    match fault:
        case 1:
            text, sound = draws.damaged(text), False
        case 2:
            text, sound = (
                draws.choice(
                    (*[each.encode() for each in NESTED], b"\xff\xfe", b"", b"[]", b" " * 9)
                ),
                False,
            )
        case 3:
            body = {"user": 0} | body if isinstance(body, dict) else body
            text = (
                as_json(body)
                .encode()
                .replace(b'"user": 0', b'"user": ' + draws.choice(NESTED).encode())
            )
            sound = False
        case 4:
            method, sound = draws.choice(METHODS), False
        case 5:
            path, sound = draws.choice((*PATHS, f"{path}/", f"/{draws.text()}")), False
    head = at.authorized
    match fault:
        case 6:
            head, sound = (
                draws.choice((b"", b"Authorization: Bearer no\r\n", at.authorized[:-5] + b"\r\n")),
                False,
            )
        case 7 | 8:
            head, sound = head + draws.choice(HEADERS).encode("latin-1") + b"\r\n", False
    parts, head, whole = _framed(draws, text, head)
    where = path
    if "{episode}" in path:
        path = path.replace("{episode}", key)
    elif draws.number(2):
        head += b"X-Episode: " + key.encode() + b"\r\n"
    else:
        key = ""
    status, answer = at.send(method, path, head, parts)
    require(not at.failed, at.failed)
    _check(status, answer, silent=method == b"HEAD" or not whole)
    if sound and whole and key != "-unknown" and where in at.schemas:
        _check_sound(at, where, body, (status, answer, valid))


def _framed(draws: Draws, text: bytes, head: bytes) -> tuple[Sequence[bytes], bytes, bool]:
    """Return the parts in which a body is sent, the request's head, and True if it arrives whole.

    Some bodies are cut, too long, or have a wrong length.
    """
    size = b"Content-Length: %d\r\n"
    match draws.number(60):
        case 1:
            return (text, b""), head + size % (len(text) + 9), False  # the body never ends
        case 2:
            return (text,), head + size % (len(text) // 2), False
        case 3:
            return (text + b" " * (MAX_BODY + 1),), head + size % (len(text) + MAX_BODY + 1), False
        case 4:
            return (text,), head, False
        case 5:
            return (b"%x\r\n" % (len(text) + 3) + text + b"\r\n0\r\n\r\n",), head + CHUNKED, False
        case 6:
            return (), head[: draws.number(len(head) + 1)], False  # the head never ends
        case 7 | 8:
            cut = len(text) // 2
            chunks = [
                b"%x\r\n" % len(part) + part + b"\r\n" for part in (text[:cut], text[cut:]) if part
            ]
            return (*chunks, b"0\r\n\r\n"), head + CHUNKED, True
        case 9 | 10:
            return (text[:5], text[5:]), head + size % len(text), True
    return (text,), head + size % len(text), True


def _check(status: int, answer: bytes, *, silent: bool) -> None:
    """Check what holds for every answer. With `silent` there may be none."""
    if silent and (status in (0, 200) or not answer):
        return
    require(status == 200 or 400 <= status < 500, f"status {status}: {answer[:300]!r}")
    if status != 200:
        refused = json.loads(answer)
        require(
            world().refusal.is_valid(refused) and refused["error"]["message"],
            f"no words: {answer[:300]!r}",
        )


def _check_sound(at: _World, path: str, body: Any, result: tuple[int, bytes, bool]) -> None:
    """Check that the endpoint answers exactly the requests that its description allows."""
    status, answer, valid = result
    if not valid or not at.schemas[path].is_valid(body):
        require(
            400 <= status < 500,
            f"{path} answers what its description forbids: {as_json(body)[:600]}",
        )
    elif status != 200:
        words = json.loads(answer)["error"]["message"]
        allowed = any(known in words for known in ONLY_IN_WORDS)
        require(
            allowed, f"{path} refuses what its description allows: {words}: {as_json(body)[:600]}"
        )
    elif path.endswith("/count_tokens"):
        require(json.loads(answer)["input_tokens"] > 0, f"no tokens: {answer[:300]!r}")
    elif body.get("stream"):
        last = answer.rpartition(b"event: ")[2]
        whole = answer.endswith(b"data: [DONE]\n\n") and b'data: {"error"' not in answer
        if path.endswith("/responses"):
            whole = last.startswith((b"response.completed", b"response.incomplete"))
        elif path.endswith("/messages"):
            whole = last.startswith(b"message_stop")
        require(whole, f"a stream that broke: {answer!r}")
    elif path.endswith(("/responses", "/messages")):
        found = json.loads(answer)
        parts = found["output"] if path.endswith("/responses") else found["content"]
        require(len(parts) > 0, f"no output: {answer[:300]!r}")
    else:
        require(
            len(json.loads(answer)["choices"]) == int(body.get("n") or 1),
            f"other choices: {answer[:300]!r}",
        )
