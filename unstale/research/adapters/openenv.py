"""Environments of a running OpenEnv server: `--task.env openenv:http://127.0.0.1:8000`.

Each reply becomes an action by the server's schema of actions. If the schema has a single text
field, the whole reply is its value. Otherwise the reply must call a tool, whose arguments are the
fields of the action. The tools of an environment with the MCP protocol are used unchanged.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from unstale.config import ConfigError, install
from unstale.envs import EnvError, Message, NumberedTasks, ToolCall, Turn
from unstale.envs.strict_json import loads
from unstale.records import Task

ACT = "act"
"""Name of the tool by whose call the policy gives an action with several fields."""

_WAIT_S = 10.0
_REFUSED = "(code: VALIDATION_ERROR)"
_HIDDEN = frozenset({"done", "metadata", "reward"})


class OpenEnvTasks(NumberedTasks):
    """Tasks on one OpenEnv server. Each episode opens its own session on the server.

    The server must allow one session for each concurrent episode (`max_concurrent_envs`). Each
    `reset` receives `options` and the task's seed. Training and held-out tasks have different
    seeds. An answer of the server may take at most `timeout_s` seconds.
    """

    def __init__(
        self, url: str, *, instructions: str = "", timeout_s: float = 60.0, **options: Any
    ) -> None:
        self.name = f"openenv:{url}"
        self.url = url
        self.options = options
        self.instructions = instructions
        self.timeout_s = timeout_s
        try:
            self.session = connection_class()
        except ModuleNotFoundError as error:
            raise ConfigError(f"{self.name} needs {error.name}: {install('openenv')}") from error
        try:
            schema = self._ask("/schema")["action"]
            listed = self._ask(
                "/mcp", {"jsonrpc": "2.0", "method": "tools/list", "params": {}, "id": 1}
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"no OpenEnv server answers at {url!r}: {error}") from error
        self.mcp = (listed.get("result") or {}).get("tools") or []
        self.field = "" if self.mcp else only_text(schema)
        self.tools: tuple[Mapping[str, Any], ...] = ()
        if not self.field:
            act = {
                "name": ACT,
                "description": schema.get("description", ""),
                "inputSchema": plain(schema),
            }
            self.tools = tuple(as_tool(tool) for tool in self.mcp or [act])

    def _ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        with build_opener(ProxyHandler({})).open(request, timeout=_WAIT_S) as answer:
            return loads(answer.read())

    def env(self, task: Task, seed: int) -> "OpenEnv":
        """Return the environment of a task.

        `seed` is not used, because the task's number is the seed.
        """
        return OpenEnv(self, self.seed_of(task))


def plain(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an action without the fields that the server sets itself."""
    fields = schema.get("properties", {})
    visible = {name: field for name, field in fields.items() if name not in _HIDDEN}
    return {**schema, "properties": visible}


def only_text(schema: Mapping[str, Any]) -> str:
    """Return the name of an action's only field if that field is free text, otherwise "".

    >>> only_text({"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}})
    'message'
    >>> only_text({"properties": {"move": {"type": "string", "enum": ["up", "down"]}}})
    ''
    """
    fields = plain(schema)["properties"]
    if len(fields) != 1:
        return ""
    ((name, field),) = fields.items()
    is_limited = not {"enum", "const", "pattern", "format"}.isdisjoint(field)
    return name if field.get("type") == "string" and not is_limited else ""


def as_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a tool description of MCP or OpenEnv to the format that chat templates expect."""
    schema = tool.get("inputSchema") or tool.get("input_schema")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": schema or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def seen(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only text field, or JSON without empty fields.

    >>> seen({"echoed": "hello", "metadata": {}})
    'hello'
    >>> seen({"board": [0, 1], "note": None, "metadata": {}})
    '{"board": [0, 1]}'
    """
    if "tool_name" in observation and "result" in observation:
        if error := observation.get("error"):
            return f"Error: {error.get('message', error)}"
        result = observation["result"]
        data = result.get("data", result) if isinstance(result, dict) else result
        return data if isinstance(data, str) else json.dumps(data)
    fields = {
        name: value
        for name, value in observation.items()
        if name not in _HIDDEN and value not in (None, "", [], {})
    }
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields)


class OpenEnv:
    """An episode on an OpenEnv server. Its reward is the sum of the rewards of its steps."""

    def __init__(self, tasks: OpenEnvTasks, seed: int) -> None:
        self._tasks = tasks
        self._seed = seed
        self._total = 0.0
        self._done = False
        self._session = tasks.session(
            tasks.url, connect_timeout_s=_WAIT_S, message_timeout_s=tasks.timeout_s
        )

    async def begin(self) -> Turn:
        with self._env_errors():
            result = await self._session.reset(seed=self._seed, **self._tasks.options)
        if result.done:
            raise EnvError(f"{self._tasks.url} ends the episode at reset(seed={self._seed})")
        opening = [Message("user", seen(result.observation))]
        if self._tasks.instructions:
            opening.insert(0, Message("system", self._tasks.instructions))
        return Turn(tuple(opening))

    async def step(self, reply: Message) -> Turn:
        if self._tasks.field:
            text = reply.content.rpartition("</think>")[2].strip()
            answers = [Message("user", await self._act({self._tasks.field: text}))]
        elif reply.tool_calls:
            answers = [
                Message("tool", await self._call(call))
                for call in reply.tool_calls
                if not self._done
            ]
        else:
            answers = [Message("user", "Act with a tool call.")]
        messages = () if self._done else tuple(answers)
        return Turn(messages, self._done, {"return": self._total})

    async def _call(self, call: ToolCall) -> str:
        names = [tool["function"]["name"] for tool in self._tasks.tools]
        if call.error:
            return f"Error: {call.error}"
        if call.name not in names:
            return f"Error: there is no tool {call.name}, only {', '.join(names)}"
        arguments = dict(call.arguments)
        if self._tasks.mcp:
            arguments = {"type": "call_tool", "tool_name": call.name, "arguments": arguments}
        return await self._act(arguments)

    async def _act(self, action: Mapping[str, Any]) -> str:
        """Send an action. Return the new observation as text, or an error message for an invalid
        action.
        """
        try:
            with self._env_errors():
                result = await self._session.step(dict(action))
        except EnvError as error:
            if _REFUSED in str(error):
                return f"Error: {error.__cause__}"
            raise
        self._done = bool(result.done)
        self._total += float(result.reward or 0.0)
        if not math.isfinite(self._total):
            raise EnvError(f"{self._tasks.url} gave {result.reward} as a reward")
        return seen(result.observation)

    @contextmanager
    def _env_errors(self) -> Iterator[None]:
        """Return a context that raises `EnvError` for errors of the server or the connection."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            raise EnvError(f"{self._tasks.url}: {str(error) or type(error).__name__}") from error

    async def close(self) -> None:
        """End the session on the server, so that another session can start."""
        with suppress(EnvError), self._env_errors():
            await self._session.close()


@cache
def connection_class() -> Any:
    """Return a client class for OpenEnv. OpenEnv is imported here, because it is optional."""
    from openenv.core import GenericEnvClient
    from websockets.exceptions import WebSocketException

    class Connection(GenericEnvClient):
        """A client connection that raises `ConnectionError` when it is lost, instead of
        reconnecting.

        The server drops the environment of a lost connection.
        """

        _begun = False

        async def _connect_async(self) -> Any:
            before = self._ws
            await super()._connect_async()
            if self._begun and self._ws is not before:
                raise ConnectionError("the connection was lost, and the session with it")
            self._begun = True
            return self

        async def _send_and_receive(self, message: Any) -> Any:
            try:
                return await super()._send_and_receive(message)
            except WebSocketException as error:
                raise ConnectionError(str(error)) from error

    return Connection


TASKSET = OpenEnvTasks
