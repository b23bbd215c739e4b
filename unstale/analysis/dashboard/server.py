"""The dashboard's web server (starlette on uvicorn), for the one user who has its address.

It listens on loopback. The address has a random token, which the browser keeps as a cookie. A
request with neither the token nor the cookie is refused. Every request is a GET and changes
nothing. docs/dashboard.md has the paths and their answers.
"""

import asyncio
import hmac
import json
import logging
import re
import secrets
import socket
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import orjson
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from unstale.analysis.dashboard import (
    audits,
    axes,
    details,
    limits,
    pairs,
    parameters,
    summary,
    table,
    timeline,
    tokens,
)
from unstale.analysis.dashboard.factors import TokenCache, answer
from unstale.analysis.dashboard.folders import RunFolders, UnknownRun
from unstale.analysis.dashboard.index import RunIndex
from unstale.analysis.dashboard.indexer import POLL_S, Indexer
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.dashboard.tokens import NotYet, UnknownEpisode
from unstale.config import ConfigError
from unstale.durability.journal import JournalError
from unstale.durability.run_folder import dumps
from unstale.rollout.endpoint.connections import BACKLOG, LimitedServer

HOST = "127.0.0.1"
KEEP_ALIVE_S = 15.0
"""Seconds after which a stream of events without news sends a comment, so that a lost client is
detected.
"""

_ESCAPED = re.compile(rb"\x7f|\xc2[\x80-\x9f]|\xe2\x80[\xaa-\xae]|\xe2\x81[\xa6-\xa9]")
"""Pattern of the characters, as UTF-8, that `dumps` escapes in JSON and orjson does not."""

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""The content security policy: pages run only the package's own scripts and styles, and scripts
cannot turn text into HTML.
"""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
"""Content types of the files in `static`, by ending. Files with other endings are not served."""


class Gate:
    """ASGI middleware that admits requests with the user's token, and adds security headers to
    answers.

    The first request has the token in its query. The answer sets a cookie and redirects to the path
    without the token, so that the token is in no history and no link.
    """

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"unstale_{port}"
        self._hosts = {f"{name}:{port}" for name in (HOST, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in extra if name not in names),
                ]
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, send_protected)

    def _refusal(self, request: Request) -> ASGIApp | None:
        """Return the answer to a request that is not passed on to the app: an error, or the
        redirect that sets the cookie. None if it is passed on.
        """
        if request.headers.get("host", "") not in self._hosts:
            return _error(421, f"this server is {' or '.join(sorted(self._hosts))}")
        if request.method not in ("GET", "HEAD"):
            return _error(405, "only GET is allowed: the dashboard changes nothing")
        if self._has_token(request):
            return self._welcome(request.url.path)
        if self._has_cookie(request):
            return None
        return _error(
            401, "the token is missing or wrong: open the address that `unstale dashboard` printed"
        )

    def admits(self, scope: Mapping[str, Any]) -> bool:
        """Return True for a request with the cookie or the token."""
        request = Request(scope)  # type: ignore[arg-type]
        return self._has_cookie(request) or self._has_token(request)

    def _has_cookie(self, request: Request) -> bool:
        return _equal(request.cookies.get(self._cookie, ""), self._token)

    def _has_token(self, request: Request) -> bool:
        return _equal(parse_qs(request.url.query).get("token", [""])[0], self._token)

    def _welcome(self, path: str) -> Response:
        own = path if path.startswith("/") and not path.startswith(("//", "/\\")) else "/"
        response = RedirectResponse(own, status_code=303)
        response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
        response.headers["cache-control"] = "no-store"
        return response


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _error(status: int, text: str) -> Response:
    return _json({"error": text}, status)


def _json(value: Any, status: int = 200) -> Response:
    """Return a JSON response.

    orjson takes a tenth of the time of `dumps`. `dumps` is used if orjson cannot write the value,
    or if the text has characters that a terminal must not get unescaped.
    """
    try:
        body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # such as numbers above 64 bits and halves of surrogate pairs
        body = b"\x7f"
    if _ESCAPED.search(body):
        body = dumps(value).encode(errors="replace")
    headers = {"cache-control": "no-store"}
    return Response(body, status, headers, media_type="application/json")


def make_app(indexer: Indexer, *, token: str, port: int) -> Gate:
    """Return the dashboard as an ASGI application. `indexer` must have been entered as a
    context.
    """
    api = _Api(indexer)
    questions: dict[str, Callable[[Request], Any]] = {
        "runs": api.runs,
        "run": api.run,
        "series": api.series,
        "lags": api.lags,
        "spans": api.spans,
        "log": api.log,
        "details": api.details,
        "audit": api.audit,
        "pairs": api.pairs,
        "episodes": api.episodes,
        "episode": api.episode,
        "group": api.group,
        "factors": api.factors,
    }
    routes = [
        *(Route(f"/api/{name}", _answering(answer)) for name, answer in questions.items()),
        Route("/api/stream", api.stream),
        Route("/{name:path}", _page(_read_pages())),
    ]
    app = Starlette(
        routes=routes, exception_handlers={HTTPException: _http_error, Exception: _failed}
    )
    app.router.redirect_slashes = False
    return Gate(app, token, port)


def _answering(answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """Return an endpoint that calls `answer` in a thread. Errors become responses with a status and
    a text.
    """

    def compute(request: Request) -> Response:
        try:
            found = answer(request)
            return found if isinstance(found, Response) else _json(found)
        except BadQuestion as error:
            return _error(400, str(error))
        except (UnknownRun, UnknownEpisode) as error:
            return _error(404, str(error))
        except NotYet as error:
            return _error(503, str(error))
        except (JournalError, OSError, ConfigError) as error:
            return _error(409, str(error))
        except sqlite3.Error as error:
            return _error(409, f"the index of the run cannot be read: {error}; was it removed?")

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(compute, request)

    return endpoint


class _Api:
    """The requests of the pages, one method each. Each method returns a value to send as JSON, or a
    response.
    """

    def __init__(self, indexer: Indexer) -> None:
        self._indexer = indexer
        self._cache = TokenCache()
        self._reading_tokens = threading.Lock()
        """A lock held while trained tokens are read and counted, so that only one request uses the
        memory for it.
        """

    def runs(self, request: Request) -> Any:
        return {
            "folder": str(self._indexer.folders.root),
            "runs": summary.list_runs(self._indexer.known().items()),
            "problem": self._indexer.problem,
        }

    def run(self, request: Request) -> Any:
        name = parameters.text(request, "run")
        index = self._shown(name)
        with index.database.read():
            return summary.overview(name, index) | {"columns": table.columns()}

    def series(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"), journal=False)
        names = [name for name in request.query_params.getlist("name") if name]
        axis, points = (
            parameters.text(request, "x", "step"),
            parameters.whole(request, "points", 500),
        )
        steps = parameters.ints(request, "at")
        window = parameters.whole(request, "window", 1)
        with index.database.read():
            return {
                "series": summary.series(index.database, names, points, axis=axis, window=window),
                "at": axes.positions(index.database, axis, steps),
            }

    def lags(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"), journal=False)
        return summary.lags(index.database)

    def spans(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"), journal=False)
        start, end = (
            parameters.number(request, "start", 0.0),
            parameters.number(request, "end", 1e18),
        )
        with index.database.read():
            return timeline.spans(
                index.database, start, end, parameters.whole(request, "limit", 3000)
            )

    def log(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"), journal=False)
        return {"events": summary.log(index.database, parameters.whole(request, "after", 0))}

    def details(self, request: Request) -> Any:
        database = self._indexer.get(parameters.text(request, "run")).database
        with database.read():
            return details.details(database)

    def audit(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"), journal=False)
        return audits.audit(index)

    def pairs(self, request: Request) -> Any:
        a, b = (self._indexer.get(parameters.text(request, name)).database for name in ("a", "b"))
        return pairs.pairs(a, b)

    def episodes(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"))
        question = table.Question(
            filter=parameters.text(request, "filter", ""),
            search=parameters.text(request, "search", ""),
            sort=parameters.text(request, "sort", "-episode"),
            page=parameters.whole(request, "page", 0),
            size=parameters.whole(request, "size", 50),
        )
        if question.search:
            if index.search_problem:
                raise BadQuestion(index.search_problem)
            self._indexer.want_words(index)
        with index.database.read():
            return table.page(index.database, question) | {
                "figure_names": table.figure_names(index.database),
                "index": summary.progress(index),
            }

    def episode(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"))
        start, limit = (
            parameters.whole(request, "start", 0),
            parameters.whole(request, "limit", tokens.MAX_TOKENS),
        )
        step = parameters.whole(request, "step") if "step" in request.query_params else None
        return tokens.episode(index, parameters.whole(request, "episode"), start, limit, step)

    def group(self, request: Request) -> Any:
        index = self._indexer.get(parameters.text(request, "run"))
        return tokens.group(index, parameters.whole(request, "group"))

    def factors(self, request: Request) -> Any:
        folder = self._indexer.get(parameters.text(request, "run"), journal=False).folder
        choice, brush = parameters.token_choice(request), parameters.brush(request)
        with self._reading_tokens:
            found = self._cache.read(folder, choice)
            return answer(
                found, brush, limits.of_run(folder), parameters.whole(request, "points", 0)
            )

    async def stream(self, request: Request) -> Response:
        """Send an event whenever the run in the parameter `run` changes. Without it, any run
        counts.
        """
        name = request.query_params.get("run")
        with_episodes = request.query_params.get("episodes") == "1"
        try:
            if name is not None:
                await run_in_threadpool(self._indexer.get, name, journal=with_episodes)
        except UnknownRun as error:
            return _error(404, str(error))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        news = self._news(name, with_episodes=with_episodes)
        return StreamingResponse(news, media_type="text/event-stream", headers=headers)

    def _shown(self, name: str) -> RunIndex:
        """Return the index of a run whose page is requested.

        If the run has ended, its journal is then read. Episodes of a live run are only counted
        until a page shows them, because reading them slows the training.
        """
        index = self._indexer.get(name, journal=False, count=True)
        if summary.state_of(index)["state"] != "live":
            self._indexer.get(name)
        return index

    async def _news(self, name: str | None, *, with_episodes: bool) -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        sent = ""
        quiet_s = 0.0
        while True:
            news = self._progress(name, with_episodes=with_episodes)
            if news != sent:
                sent, quiet_s = news, 0.0
                yield f"event: progress\ndata: {news}\n\n"
            elif quiet_s >= KEEP_ALIVE_S:
                quiet_s = 0.0
                yield ": still here\n\n"
            await asyncio.sleep(POLL_S)
            quiet_s += POLL_S

    def _progress(self, name: str | None, *, with_episodes: bool) -> str:
        """Return the progress of the run `name` as one line of JSON. None stands for all runs."""
        known = self._indexer.known()
        if name is None:
            return json.dumps(
                {"runs": len(known), "changes": sum(each.changes for each in known.values())}
            )
        try:
            index = self._indexer.get(name) if with_episodes else self._shown(name)
        except UnknownRun as error:
            return json.dumps({"error": str(error)})
        return json.dumps({"state": summary.state_of(index)["state"], **summary.progress(index)})


def _read_pages() -> Mapping[str, tuple[bytes, str]]:
    found: dict[str, tuple[bytes, str]] = {}
    static = files("unstale.analysis.dashboard").joinpath("static")
    for prefix, folder in (("", static), ("vendor/", static.joinpath("vendor"))):
        for file in folder.iterdir():
            kind = KINDS.get(Path(file.name).suffix)
            if file.is_file() and kind:
                found[prefix + file.name] = file.read_bytes(), kind
    found[""] = found["index.html"]
    return found


def _page(pages: Mapping[str, tuple[bytes, str]]) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in pages:
            return _error(404, "there is no such page")
        content, kind = pages[name]
        return Response(content, headers={"content-type": kind, "cache-control": "no-cache"})

    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _failed(request: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {error}")


class Dashboard:
    """The web server of the dashboard. `serve` runs it until Ctrl-C or a call of `stop`."""

    def __init__(self, root: Path, *, port: int = 0, token: str | None = None) -> None:
        """Open a port on loopback for the runs below `root`. Port 0 takes a free port. Without a
        `token`, a random one is made.

        Raises `ConfigError` if `root` is not a folder, and OSError if the port is in use.
        """
        self.folders = RunFolders(root)
        self.token = token or secrets.token_urlsafe(24)
        self._socket = socket.create_server((HOST, port), backlog=BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._server: LimitedServer | None = None

    @property
    def url(self) -> str:
        """The address of the dashboard, including the token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        with self._socket, Indexer(self.folders) as indexer:
            app = make_app(indexer, token=self.token, port=self.port)
            self._server = LimitedServer(
                app, app.admits, log_level=logging.CRITICAL, timeout_keep_alive=5
            )
            self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `serve` return. It is called from another thread than `serve`."""
        if self._server is not None:
            self._server.should_exit = True
