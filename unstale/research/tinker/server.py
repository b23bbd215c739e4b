"""The HTTP server of the service. Every request must carry the token of a tenant."""

import asyncio
import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from unstale.cli.evaluate import run_until_complete
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.config import ConfigError, Dtype, EndpointConfig
from unstale.durability.console import Console
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.research.tinker.checkpoints import Checkpoints
from unstale.research.tinker.sampler import Sampler
from unstale.research.tinker.service import Service, Tenant
from unstale.research.tinker.trainer import Trainer
from unstale.research.tinker.wire import field, read_training
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.answers import json_response
from unstale.rollout.endpoint.connections import bearer, only_admitted, require_strong
from unstale.rollout.endpoint.off_loop import off_loop
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.server import REQUEST_TIMEOUT_S, RecordingEndpoint

MAX_BODY_BYTES = 32 << 20
PREFIX = "tml-"
"""Prefix of every tenant's token. Tinker's client refuses tokens without it."""
_ALPHA = 32.0
_MAX_RUNNING = 64


def new_token() -> str:
    return PREFIX + secrets.token_urlsafe(24)


class TinkerEndpoint(RecordingEndpoint):
    """An HTTP server for Tinker's client, with the same limits on connections as the agents'
    endpoint.
    """

    def __init__(
        self, service: Service, tokens: Sequence[str], config: EndpointConfig, *, port: int = 0
    ) -> None:
        """Create a server with a tenant for each of the `tokens`.

        Raises `ConfigError` for a token that is too easy to guess.
        """
        super().__init__(config, token=tokens[0], port=port)
        for token in tokens:
            if not token.startswith(PREFIX):
                raise ConfigError(f"a token must begin with {PREFIX}: Tinker's client demands it")
            if not config.is_local:
                require_strong(token.removeprefix(PREFIX))
        self._service = service
        self._tenants = [
            (bearer(token), Tenant(hashlib.sha256(token.encode()).hexdigest()[:16]))
            for token in tokens
        ]
        self._admits = lambda scope: any(admits(scope) for admits, _ in self._tenants)

    def _app(self) -> Any:
        service = self._service
        posts: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "client/config": _constant({"use_pyqwest_transport": False}),
            "client/dynamic_config": _constant({"sample_cancel_enabled": True}),
            "telemetry": _constant({"status": "accepted"}),
            "create_session": service.create_session,
            "session_heartbeat": service.heartbeat,
            "sessions/{session_id}/finish": service.finish_session,
            "create_model": service.create_model,
            "get_info": service.get_info,
            "unload_model": service.unload_model,
            "optim_step": service.optim_step,
            "save_weights": service.save_weights,
            "save_weights_for_sampler": service.save_weights_for_sampler,
            "load_weights": service.load_weights,
            "weights_info": service.weights_info,
            "create_sampling_session": service.create_sampling_session,
            "asample": service.sample,
            "cancel_future": service.cancel,
        }
        gets = {
            "healthz": _constant({"status": "ok"}),
            "get_server_capabilities": service.capabilities,
            "samplers/{sampler_id}": service.get_sampler,
        }
        routes = [_route(path, partial(self._post, act)) for path, act in posts.items()]
        routes += [_route(path, partial(self._get, act), "GET") for path, act in gets.items()]
        routes += [
            _route("forward_backward", self._train),
            _route("retrieve_future", self._retrieve),
        ]
        errors: Any = {Refused: _refused, HTTPException: _not_found}
        app = Starlette(routes=routes, exception_handlers=errors)
        return only_admitted(app, self._admits)

    def _tenant(self, request: Request) -> Tenant:
        return next(tenant for admits, tenant in self._tenants if admits(request.scope))

    async def _get(self, act: Callable[..., Awaitable[Any]], request: Request) -> Response:
        return json_response(await act(self._tenant(request), request.path_params))

    async def _post(self, act: Callable[..., Awaitable[Any]], request: Request) -> Response:
        body = await off_loop(wire.load, "the request", await _receive(request))
        return json_response(await act(self._tenant(request), {**body, **request.path_params}))

    async def _train(self, request: Request) -> Response:
        data = await _receive(request)
        training = await off_loop(read_training, "the request", data)
        return json_response(self._service.train(self._tenant(request), training, len(data)))

    async def _retrieve(self, request: Request) -> Response:
        request_id = field(wire.load(await _receive(request)), "request_id", str)
        result = await self._tenant(request).jobs.result(request_id)
        if isinstance(result, bytes):
            return Response(result, media_type="application/x-protobuf")
        if result is None:
            waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return json_response(waiting, 408)
        return json_response(result)


def _constant(answer: Mapping[str, Any]) -> Callable[..., Awaitable[Any]]:
    async def act(tenant: Tenant, body: Mapping[str, Any]) -> Any:
        return dict(answer)

    return act


def _route(
    path: str, handler: Callable[[Request], Awaitable[Response]], method: str = "POST"
) -> Route:
    return Route(f"/api/v1/{path}", handler, methods=[method])


async def _receive(request: Request) -> bytes:
    """Return the body of a request. Raises `Refused` if it is too large, too slow or compressed."""
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise Refused(f"Content-Encoding {encoding[:60]!r} is not supported", status=415)
    data = bytearray()
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise Refused(f"a body has at most {MAX_BODY_BYTES} bytes", status=413)
    except (TimeoutError, ClientDisconnect):
        raise Refused("the body did not arrive in time", status=408, code="timeout") from None
    return bytes(data)


async def _refused(request: Request, error: Refused) -> Response:
    return json_response(error.body(), error.status)


async def _not_found(request: Request, error: HTTPException) -> Response:
    refused = Refused(
        f"{request.method} {request.scope['path']} is not supported: {error.detail}",
        status=error.status_code,
        code="not_supported",
    )
    return json_response(refused.body(), error.status_code)


class TinkerServer:
    """A complete service: model, trainer, engine and HTTP server. It runs inside `async with`."""

    def __init__(  # noqa: PLR0913 - the options of the command
        self,
        model: Path,
        folder: Path,
        tokens: Sequence[str],
        *,
        name: str = "",
        max_rank: int = 32,
        max_context: int = 2048,
        dtype: Dtype = "float32",
        threads: int = 0,
        config: EndpointConfig | None = None,
        port: int = 0,
    ) -> None:
        """Load the model. Saved versions are stored in `folder`.

        `name` is the base model's name for clients, by default its path. `threads` is the number of
        CPU threads; 0 means all cores of the process. Raises `ConfigError` for a model that cannot
        have adapters, or whose context is shorter than `max_context`.
        """
        threads = threads or len(os.sched_getaffinity(0))
        self._thread = ThreadPoolExecutor(1, "trainer", partial(torch.set_num_threads, threads))
        self.policy = Policy.load(model, dtype=dtype, lora=Lora(max_rank, alpha=_ALPHA))
        trainer = Trainer(self.policy, max_context=max_context)
        options = EngineOptions(
            model,
            dtype=dtype,
            threads=threads,
            max_running=_MAX_RUNNING,
            max_context=max_context,
            merging=self.policy.merging,
            adapters="unmerged",
        )
        try:
            self.engine = EmbeddedEngine(options)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._sampler = Sampler(self.engine, self.policy, trainer.base, max_context=max_context)
        service = Service(
            trainer,
            self._sampler,
            Checkpoints(folder, base=self.policy.base),
            self._thread,
            facts={
                "model_name": name or str(model),
                "tokenizer_id": os.path.abspath(model),
                "max_context_length": max_context,
            },
        )
        self._endpoint = TinkerEndpoint(service, tokens, config or EndpointConfig(), port=port)

    @property
    def url(self) -> str:
        return self._endpoint.url

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            opened.callback(self._thread.shutdown, wait=False, cancel_futures=True)
            opened.push_async_callback(self._sampler.close)
            await self._sampler.start()
            await opened.enter_async_context(self._endpoint)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()


def serve(model: Path, folder: Path, tokens: Sequence[str], **options: Any) -> None:
    """Serve a model until Ctrl-C. Print the base URL and the tokens of the tenants."""
    limit_threads()
    console = Console(soft_wrap=True)
    server = TinkerServer(model, folder, tokens, **options)

    async def work() -> None:
        async with server:
            console.print(f"TINKER_BASE_URL={server.url}", highlight=False)
            for token in tokens:
                console.print(f"TINKER_API_KEY={token}", highlight=False)
            await asyncio.Event().wait()

    with rare_garbage_collection():
        run_until_complete(work())
