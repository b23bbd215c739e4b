"""The endpoint's HTTP server (starlette on uvicorn), for clients that have the secret token.

`/e/<episode>/v1/` has `chat/completions`, `responses`, `messages`, `messages/count_tokens`,
`completions`, `models` and `record`. `record` returns all tokens so far with version,
log-probability and origin. `/e/<episode>/<role>/v1/` has the same paths for a role of the agent.
`/v1/` has them for the episode that the header X-Episode names. `/metrics` has the engines' metrics
if `unstale serve` serves. `/healthz` needs no token on loopback.
"""

import asyncio
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from unstale.config import ConfigError, EndpointConfig
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.answers import (
    AnswerFormat,
    AnswerResponse,
    ChatFormat,
    json_response,
)
from unstale.rollout.endpoint.connections import (
    BACKLOG,
    LimitedServer,
    bearer,
    only_admitted,
    require_strong,
)
from unstale.rollout.endpoint.messages import MessageFormat, error_body, read_messages
from unstale.rollout.endpoint.off_loop import off_loop
from unstale.rollout.endpoint.responses import ResponseFormat, read_response
from unstale.rollout.endpoint.schemas import CHAT, COMPLETION, MESSAGE, RESPONSE, Refused
from unstale.rollout.endpoint.session import AgentSession

MAX_BODY_BYTES = 2 << 20
MAX_PICTURES_BYTES = 32 << 20
"""Largest size in bytes of a request's body if the policy reads pictures. An agent sends all
pictures of its history with each call.
"""
REQUEST_TIMEOUT_S = 30.0
"""Seconds within which the body of a request must arrive."""
PATHS = {
    "/chat/completions": CHAT,
    "/responses": RESPONSE,
    "/messages": MESSAGE,
    "/messages/count_tokens": MESSAGE,
    "/completions": COMPLETION,
    "/models": None,
    "/record": None,
}
"""Path below an episode's URL -> schema of the body for a POST request, None for a GET request."""
MODEL = "policy"
"""Name of the model in answers to requests that name none."""

FindSession = Callable[[str], AgentSession]
"""A function that returns the session of the episode with this name, or raises `Refused`."""


class RecordingEndpoint:
    """A server that answers agents and records every token. It runs inside `async with`.

    `opened` adds the session of an episode. `find` is called with the name of an episode that was
    not added, and returns its session. `token` is the secret token of all clients (None: a random
    one), and `port` 0 chooses a free port. `metrics` is called for each request to `/metrics`,
    which does not exist without it.
    """

    def __init__(
        self,
        config: EndpointConfig | None = None,
        *,
        token: str | None = None,
        port: int = 0,
        find: FindSession | None = None,
        metrics: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        self.config = config or EndpointConfig()
        if self.config.lenient:
            import jsonschema  # noqa: F401 - checks replies; its absence is reported before the run
        self.token = token or secrets.token_urlsafe(24)
        if not self.config.is_local:
            require_strong(self.token)
        self._admits = bearer(self.token)
        self._context = _load_certificate(self.config)
        self._port = port
        self._find = find or refuse_unknown
        self._metrics = metrics
        self._sessions: dict[str, AgentSession] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError("the endpoint is not open: use it inside `async with endpoint:`")
        scheme = "https" if self._context else "http"
        host = self.config.public_host or self.config.host
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._port}"

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections) if self._server else 0

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    async def __aenter__(self) -> Self:
        """Start the server. Raises `ConfigError` if it cannot listen on the address and port."""
        host = self.config.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server(
                (self.config.host, self._port), family=family, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"the endpoint cannot listen on {host}, port {self._port}: {error}"
            ) from error
        # Connections inherit this option. Without it an answer may wait 40 ms.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = listening.getsockname()[1]
        app: Any = self._app()
        if not self.config.is_local:
            app = only_admitted(app, self._admits)
        self._server = _Server(app, self._admits, self._context, timeout_keep_alive=75)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None and self._serving is not None
        self._server.ended.set()
        await self._serving
        self._server = None

    @contextmanager
    def opened(self, session: AgentSession) -> Iterator[str]:
        """Serve an episode until the context ends. The context's value is the episode's base
        URL.
        """
        key = secrets.token_hex(8)
        self._sessions[key] = session
        try:
            yield f"{self.url}/e/{key}/v1"
        finally:
            del self._sessions[key]

    def _app(self) -> Starlette:
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/chat/completions": partial(self._answer, wire.read_chat, ChatFormat),
            "/responses": partial(self._answer, read_response, ResponseFormat),
            "/messages": partial(self._answer, read_messages, MessageFormat),
            "/messages/count_tokens": self._count_tokens,
            "/completions": partial(self._answer, wire.read_completion, AnswerFormat),
            "/models": self._models,
            "/record": self._record,
        }
        # Anthropic's clients add /v1 to their base URL. So an agent's base URL suits them, too.
        routes = [
            Route(f"{prefix}/v1/v1{path}", handler, methods=["POST"])
            for path, handler in handlers.items()
            for prefix in ("/e/{episode}", "/e/{episode}/{role}")
            if path.startswith("/messages")
        ]
        routes += [
            Route(f"{prefix}/v1{path}", handler, methods=["GET" if PATHS[path] is None else "POST"])
            for path, handler in handlers.items()
            for prefix in ("", "/e/{episode}", "/e/{episode}/{role}")
        ]
        routes += [Route("/healthz", _healthz)]
        if self._metrics is not None:
            routes += [Route("/metrics", self._read_metrics)]
        errors = {Refused: _refused, HTTPException: _http_error}
        app = Starlette(routes=routes, exception_handlers=errors)  # type: ignore[arg-type]
        app.router.redirect_slashes = False
        return app

    async def _models(self, request: Request) -> Response:
        self._require_token(request)
        return json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "unstale"}]}
        )

    async def _read_metrics(self, request: Request) -> Response:
        self._require_token(request)
        assert self._metrics is not None
        return json_response(self._metrics())

    async def _record(self, request: Request) -> Response:
        self._require_token(request)
        return json_response(
            {"branches": [wire.pieces(each.pieces) for each in self._session(request).transcripts]}
        )

    def _session(self, request: Request) -> AgentSession:
        key = request.path_params.get("episode") or request.headers.get("x-episode", "")
        return self._sessions.get(key) or self._find(key)

    async def _answer(
        self,
        read: Callable[..., wire.CompletionRequest],
        make_format: type[AnswerFormat],
        request: Request,
    ) -> Response:
        session, body, completion = await self._read(read, request)
        answer_format = make_format(str(body.get("model") or MODEL), session.chat)
        return AnswerResponse(session, completion, answer_format)

    async def _count_tokens(self, request: Request) -> Response:
        session, _, completion = await self._read(read_messages, request)
        return json_response({"input_tokens": await session.count_tokens(completion)})

    async def _read(
        self, read: Callable[..., wire.CompletionRequest], request: Request
    ) -> tuple[AgentSession, dict[str, Any], wire.CompletionRequest]:
        session, data = await self._receive(request)
        role = session.role(request.path_params.get("role", ""))

        def parse() -> tuple[dict[str, Any], wire.CompletionRequest]:
            body = wire.load(data)
            completion = read(body, temperature=session.temperature, config=self.config)
            return body, replace(completion, call=replace(completion.call, role=role))

        return session, *await off_loop(parse, "the request")

    def _require_token(self, request: Request) -> None:
        if not self._admits(request.scope):
            raise Refused(
                "the token is missing or wrong: send it as Authorization: Bearer, or as x-api-key",
                status=401,
                code="invalid_api_key",
            )

    async def _receive(self, request: Request) -> tuple[AgentSession, bytes]:
        self._require_token(request)
        session = self._session(request)
        if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            raise Refused(
                f"Content-Encoding {encoding!r} is not supported: send the body uncompressed",
                status=415,
                code="unsupported_encoding",
            )
        most = MAX_PICTURES_BYTES if session.chat.reads_pictures else MAX_BODY_BYTES
        data = bytearray()
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise Refused(
                            f"a body has at most {most} bytes",
                            status=413,
                            code="too_large",
                        )
        except (TimeoutError, ClientDisconnect):
            raise Refused("the body did not arrive in time", status=408, code="timeout") from None
        return session, bytes(data)


class _Server(LimitedServer):
    """A server that runs until the event `ended` is set, and leaves signals to the program."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.ended = asyncio.Event()

    async def main_loop(self) -> None:
        """Wait until the server ends.

        uvicorn's own method sets a timer again and again. A loop with a virtual clock would then
        never notice that all tasks wait for each other.
        """
        await self.ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def refuse_unknown(key: str) -> AgentSession:
    raise Refused(
        f"there is no episode {key!r}; use the base URL that the agent received",
        status=404,
        code="no_episode",
    )


def _load_certificate(config: EndpointConfig) -> ssl.SSLContext | None:
    """Return the TLS context for `endpoint.certificate`, or None without a certificate.

    Raises `ConfigError` if a file cannot be read, or the key is not that of the certificate.
    """
    if not config.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def ask_nobody() -> str:
        raise ConfigError("the private key of endpoint.certificate has a password: remove it")

    try:
        context.load_cert_chain(config.certificate, config.certificate_key or None, ask_nobody)
    except OSError as error:
        files = " and ".join(filter(None, (config.certificate, config.certificate_key)))
        raise ConfigError(
            f"endpoint.certificate: cannot load a certificate and its private key from {files}: "
            f"{error}"
        ) from error
    return context


async def _healthz(request: Request) -> Response:
    return json_response({"alive": True})


async def _refused(request: Request, error: Refused) -> Response:
    is_anthropic = request.scope["path"].endswith(("/messages", "/messages/count_tokens"))
    return json_response(error_body(error) if is_anthropic else error.body(), error.status)


async def _http_error(request: Request, error: HTTPException) -> Response:
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    refused = Refused(
        f"{request.method} {request.scope['path']}: {error.detail}",
        status=error.status_code,
        code=code,
    )
    answer = await _refused(request, refused)
    answer.headers.update(error.headers or {})
    return answer
