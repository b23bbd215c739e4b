"""The endpoint over HTTP: starlette on uvicorn, on loopback, for whoever has the token.

Routes: `/e/<episode>/v1/` with `chat/completions`, `completions`, `models`, and `record` for what was said so far, with
version, log-probability and provenance; `/v1/` with the same for the episode that the header X-Episode names;
`/openapi.json`, which describes them; `/healthz`, which needs no token.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Self

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from unstale.envs.chat import Chat
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.openapi import describe
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.endpoint.wire import Choice, Refused

HOST = "127.0.0.1"
MAX_BODY, BODY_S = 2 << 20, 30.0
"""Bytes of a request, and seconds in which it has to be there."""
PATHS = {
    "/chat/completions": wire.CHAT,
    "/completions": wire.COMPLETION,
    "/models": None,
    "/record": None,
}
"""Of an episode, with the schema of a body where one is sent."""
MODEL = "policy"
"""What the policy is called, where nobody calls it anything else."""

Find = Callable[[str], AgentSession]
"""The session of an episode; raises `Refused`."""


class RecordingEndpoint:
    """`async with` serves. An episode is known to it while it is `opened`.

    `find` looks for the sessions of episodes that are not.
    """

    def __init__(
        self, *, token: str | None = None, port: int = 0, find: Find | None = None
    ) -> None:
        self.token = token or secrets.token_urlsafe(24)
        self._port = port
        self._find = find or _unknown
        self._sessions: dict[str, AgentSession] = {}
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        if self._server is None:
            raise RuntimeError(
                "the endpoint is not open: use it as `async with endpoint:` around what it is for"
            )
        return f"http://{HOST}:{self._port}"

    @property
    def num_connections(self) -> int:
        return len(self._server.server_state.connections) if self._server else 0

    async def __aenter__(self) -> Self:
        """Raises OSError for a port that cannot be had."""
        listening = socket.create_server((HOST, self._port), backlog=512)
        listening.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
        )  # handed on; else an answer waits 40 ms
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._app(), lifespan="off", log_config=None, log_level=logging.ERROR, access_log=False,
            timeout_graceful_shutdown=1, ws="none", timeout_keep_alive=75, http=_Protocol,
        )  # fmt: skip
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None and self._serving is not None
        self._server.should_exit = True
        await self._serving
        self._server = None

    @contextmanager
    def opened(self, session: AgentSession) -> Iterator[str]:
        """The base URL of an episode, good until this is left."""
        key = secrets.token_hex(8)
        self._sessions[key] = session
        try:
            yield f"{self.url}/e/{key}/v1"
        finally:
            del self._sessions[key]

    def _app(self) -> Starlette:
        acts = {
            "/chat/completions": self._chat,
            "/completions": self._complete,
            "/models": self._models,
            "/record": self._record,
        }
        routes = [
            Route(f"{before}/v1{path}", act, methods=["GET" if PATHS[path] is None else "POST"])
            for path, act in acts.items()
            for before in ("", "/e/{episode}")
        ]
        routes += [Route("/openapi.json", self._describe), Route("/healthz", _alive)]
        handlers = {Refused: _refused, HTTPException: _not_found}
        app = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
        app.router.redirect_slashes = False
        return app

    async def _describe(self, request: Request) -> Response:
        self._admit(request)
        return _json(describe(PATHS))

    async def _models(self, request: Request) -> Response:
        self._admit(request)
        return _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "unstale"}]}
        )

    async def _record(self, request: Request) -> Response:
        """What was said so far, as it is recorded."""
        self._admit(request)
        return _json(
            {"branches": [wire.pieces(each.pieces) for each in self._session(request).transcripts]}
        )

    def _session(self, request: Request) -> AgentSession:
        key = request.path_params.get("episode") or request.headers.get("x-episode", "")
        return self._sessions.get(key) or self._find(key)

    async def _chat(self, request: Request) -> Response:
        session, body = await self._receive(request)
        asked = wire.read_chat(body, temperature=session.rollout.generator.config.temperature)
        return _Answering(session, asked, _ChatForm(str(body.get("model") or MODEL), session.chat))

    async def _complete(self, request: Request) -> Response:
        session, body = await self._receive(request)
        asked = wire.read_completion(body, temperature=session.rollout.generator.config.temperature)
        return _Answering(session, asked, _TextForm(str(body.get("model") or MODEL)))

    def _admit(self, request: Request) -> None:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not hmac.compare_digest(
            given.strip().encode(), self.token.encode()
        ):
            raise Refused(
                "a bearer token is needed, and this is not it", status=401, code="invalid_api_key"
            )

    async def _receive(self, request: Request) -> tuple[AgentSession, dict[str, Any]]:
        self._admit(request)
        session, data = self._session(request), bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > MAX_BODY:
                        raise Refused(
                            f"a body has at most {MAX_BODY} bytes", status=413, code="too_large"
                        )
        except (TimeoutError, ClientDisconnect):
            raise Refused("the body did not come", status=408, code="timeout") from None
        return session, wire.load(bytes(data))


def _json(
    record: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """In ASCII: what was sent may hold half a surrogate pair, and is told as it came."""
    return Response(json.dumps(record), status, headers, "application/json")


class _Protocol(H11Protocol):
    """HTTP that is none is refused in the words of all refusals, and so is who takes too long to ask."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def _watch(self) -> None:
        """Time runs while a request has begun and its head is not there."""
        waiting = self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        if waiting and self._late is None:
            self._late = self.loop.call_later(
                BODY_S, self._refuse, 408, "timeout", "the request did not come"
            )
        elif not waiting and self._late is not None:
            self._late.cancel()
            self._late = None

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", msg)

    def _refuse(self, status: int, code: str, words: str) -> None:
        told = json.dumps(Refused(words, status=status, code=code).body()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(told))),
            ("connection", "close"),
        ]
        with suppress(h11.LocalProtocolError):  # an answer has begun: it ends here
            for event in (
                h11.Response(status_code=status, headers=headers),
                h11.Data(data=told),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.close()


class _Server(uvicorn.Server):
    """Signals belong to whoever runs the program."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _unknown(key: str) -> AgentSession:
    raise Refused(
        f"there is no episode {key!r}; its base URL is the one that the agent was given",
        status=404,
        code="no_episode",
    )


async def _alive(request: Request) -> Response:
    return _json({"alive": True})


async def _refused(request: Request, error: Refused) -> Response:
    return _json(error.body(), error.status)


async def _not_found(request: Request, error: HTTPException) -> Response:
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    refused = Refused(
        f"{request.method} {request.scope['path']}: {error.detail}",
        status=error.status_code,
        code=code,
    )
    return _json(refused.body(), refused.status, error.headers)


class _Answering(Response):
    """Answers a call; whoever hangs up ends it."""

    def __init__(
        self, session: AgentSession, asked: wire.CompletionRequest, form: "_ChatForm | _TextForm"
    ) -> None:
        self._session, self._asked, self._form = session, asked, form
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        news: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        try:
            working = self._session.start(self._asked, lambda at, text: news.put_nowait((at, text)))
        except Refused as refused:
            return await _json(refused.body(), refused.status)(scope, receive, send)
        working.add_done_callback(lambda _: news.put_nowait(None))
        gone = asyncio.ensure_future(_gone(receive))
        gone.add_done_callback(lambda _: working.cancel())
        try:
            # What was refused before anything was said has a status of its own; a stream's is sent with its first text.
            first = await news.get()
            if self._asked.stream and not (first is None and isinstance(_result(working), Refused)):
                await self._stream(news, first, working, send)
            else:
                while first is not None:
                    first = await news.get()
                await self._whole(_result(working))(scope, receive, send)
        except OSError:
            pass  # nobody reads any more
        finally:
            gone.cancel()
            working.cancel()
            with suppress(asyncio.CancelledError):
                await gone

    def _whole(self, found: list[Choice] | Refused) -> Response:
        if isinstance(found, Refused):
            return _json(found.body(), found.status)
        choices = [
            self._form.choice(at, choice, self._asked.logprobs) for at, choice in enumerate(found)
        ]
        return _json({**self._form.head(False), "choices": choices, "usage": wire.usage(found)})

    async def _stream(
        self, news: "asyncio.Queue[tuple[int, str] | None]", first: tuple[int, str] | None,
        working: "asyncio.Task[list[Choice] | Refused]", send: Send,
    ) -> None:  # fmt: skip
        """Server-sent events: text as it is certain, and what is left at the end."""
        head, form = self._form.head(True), self._form
        sent: list[dict[str, str]] = [{} for _ in range(self._asked.choices)]
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def tell(record: Mapping[str, Any] | str) -> None:
            text = record if isinstance(record, str) else json.dumps(record)
            await send(
                {
                    "type": "http.response.body",
                    "body": f"data: {text}\n\n".encode(),
                    "more_body": True,
                }
            )

        for at in range(len(sent)):
            for delta in form.begin():
                await tell({**head, "choices": [form.delta(at, delta)]})
        item: tuple[int, str] | None = first
        while item is not None:
            at, text = item
            for name, known in form.certain(text, self._asked).items():
                told = len(sent[at].get(name, ""))
                if len(known) > told:
                    await tell({**head, "choices": [form.delta(at, {name: known[told:]})]})
                    sent[at][name] = known
            item = await news.get()
        found = _result(working)
        if isinstance(found, Refused):
            await tell(found.body())
        else:
            for at, choice in enumerate(found):
                for delta in form.rest(choice, sent[at]):
                    await tell({**head, "choices": [form.delta(at, delta)]})
                await tell({**head, "choices": [form.end(at, choice, self._asked.logprobs)]})
            if self._asked.usage:
                await tell({**head, "choices": [], "usage": wire.usage(found)})
        await tell("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _result(working: "asyncio.Task[list[Choice] | Refused]") -> list[Choice] | Refused:
    if working.cancelled() or working.exception():
        return Refused("this episode was ended meanwhile", status=503, code="episode_over")
    return working.result()


async def _gone(receive: Receive) -> None:
    """Until the client hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass


class _Form:
    """How answers of one kind are written."""

    kind = ""

    def __init__(self, model: str) -> None:
        self._id = f"{self.kind}-{secrets.token_hex(12)}"
        self._model, self._made = model, int(time.time())

    def call_id(self, choice: Choice, place: int) -> str:
        """The same when a resumed agent hears it again: some write it into what they say next."""
        return f"call_{choice.branch}_{choice.num_prompt_tokens}_{place}"


class _ChatForm(_Form):
    kind = "chatcmpl"

    def __init__(self, model: str, chat: Chat) -> None:
        super().__init__(model)
        self._chat = chat

    def head(self, streamed: bool) -> dict[str, Any]:
        kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._made, "model": self._model}

    def choice(self, at: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
        said = wire.message(choice.said, partial(self.call_id, choice))
        told = wire.logprobs(choice.tokens) if logprobs else None
        return {"index": at, "message": said, "finish_reason": choice.finish, "logprobs": told}

    def begin(self) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": ""}]

    def certain(self, text: str, asked: wire.CompletionRequest) -> dict[str, str]:
        """How what is answered begins, whatever comes."""
        thoughts, content = self._chat.parse_partial(_certain(text, asked), calls=asked.calls)
        return {"reasoning_content": thoughts, "content": content}

    def rest(self, choice: Choice, sent: Mapping[str, str]) -> list[dict[str, Any]]:
        said = wire.message(choice.said, partial(self.call_id, choice))
        calls = [{"index": place, **call} for place, call in enumerate(said.get("tool_calls", ()))]
        left = {
            name: (said.get(name) or "")[len(sent.get(name, "")) :]
            for name in ("reasoning_content", "content")
        }
        return [{name: value} for name, value in {**left, "tool_calls": calls}.items() if value]

    def delta(self, at: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": at, "delta": delta, "finish_reason": None}

    def end(self, at: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
        told = wire.logprobs(choice.tokens) if logprobs else None
        return {"index": at, "delta": {}, "finish_reason": choice.finish, "logprobs": told}


class _TextForm(_Form):
    kind = "cmpl"

    def head(self, streamed: bool) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._made,
            "model": self._model,
        }

    def choice(self, at: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
        return {**self.end(at, choice, logprobs), "text": choice.said.message.content}

    def begin(self) -> list[dict[str, Any]]:
        return []

    def certain(self, text: str, asked: wire.CompletionRequest) -> dict[str, str]:
        return {"text": _certain(text, asked)}

    def rest(self, choice: Choice, sent: Mapping[str, str]) -> list[dict[str, Any]]:
        left = choice.said.message.content[len(sent.get("text", "")) :]
        return [{"text": left}] if left else []

    def delta(self, at: int, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"index": at, "finish_reason": None, "logprobs": None, **delta}

    def end(self, at: int, choice: Choice, logprobs: bool) -> dict[str, Any]:
        told = wire.text_logprobs(choice.tokens) if logprobs else None
        return {"index": at, "text": "", "finish_reason": choice.finish, "logprobs": told}


def _certain(text: str, asked: wire.CompletionRequest) -> str:
    """Without an end that may be half a character, or belong to a text that ends the reply."""
    if any(stop in text for stop in asked.stops):
        return ""
    kept = text.rstrip("\ufffd")
    longest = max((len(stop) for stop in asked.stops), default=1) - 1
    return kept[: len(kept) - longest] if longest else kept
