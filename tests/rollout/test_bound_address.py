"""Test an endpoint that listens on more than loopback.

It needs TLS and a strong token. A stranger gets status 401 on every path. Floods of connections,
handshakes and requests end no call of an agent.
"""

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.rollout.test_endpoint import ASK, BEGIN, rest_of, talker
from tests.rollout.test_external import CALL, CHAT, World, own_logp, whole
from tests.support.certificates import make_certificate, trusting
from tests.support.networks import Network, another_network
from tests.support.scripted_agents import with_anthropic, with_litellm, with_sdk
from tests.support.waits import LIMIT_S
from unstale.config import ConfigError, EndpointConfig
from unstale.engines import SamplingParams
from unstale.rollout.endpoint import connections
from unstale.rollout.endpoint.server import RecordingEndpoint

OUTSIDE = {"host": "0.0.0.0", "public_host": "127.0.0.1"}
MESSAGE = {**ASK, "max_tokens": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")


def bound_endpoint(files: tuple[str, str], **options: Any) -> RecordingEndpoint:
    certificate, key = files
    config = {**OUTSIDE, "certificate": certificate, "certificate_key": key, **options}
    return RecordingEndpoint(EndpointConfig(**config))


def bound(files: tuple[str, str], **options: Any) -> World:
    """Return a world whose endpoint listens on all addresses, with TLS."""
    world = World(talker, max_turns=999)
    world.endpoint = bound_endpoint(files, **options)
    return world


def play(world: World, act: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    """Run an agent whose client trusts the endpoint's certificate."""

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        async with known(base_url, {"x-api-key": api_key}, world) as client:
            await act(client)
            assert (await client.post("messages", json=MESSAGE)).status_code == 200
        return 1.0

    assert whole(world.play(agent)).reward == 1


def known(base_url: Any, headers: Any, world: World) -> httpx.AsyncClient:
    """Return a client that trusts the endpoint's certificate, at another address than strangers."""
    verify = trusting(world.endpoint.config.certificate)
    transport = httpx.AsyncHTTPTransport(verify=verify, local_address="127.0.0.2")
    return httpx.AsyncClient(
        base_url=base_url, headers=headers, transport=transport, timeout=LIMIT_S
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": "0.0.0.0"}, "set endpoint.public_host"),
        ({"host": "::", "allow_plaintext": True}, "set endpoint.public_host"),
        (OUTSIDE, "can be reached from outside: set endpoint.certificate"),
        ({"host": "10.0.0.5"}, "set endpoint.certificate for TLS, or endpoint.allow_plaintext"),
        ({"host": "myhost"}, "must be an IP address of this machine"),
        ({"certificate_key": "key.pem"}, "endpoint.certificate"),
    ],
)
def test_an_endpoint_is_never_open_by_accident(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EndpointConfig(**options)
    assert EndpointConfig().is_local and EndpointConfig(host="::1").is_local


def test_files_that_are_no_certificate_are_refused(files: tuple[str, str], tmp_path: Path) -> None:
    certificate, _ = files
    _, other_key = make_certificate(tmp_path, "127.0.0.1")
    for change in ({"certificate": "no-such-file"}, {"certificate": certificate}):
        for key in ("", other_key, __file__):
            config = EndpointConfig(**{**OUTSIDE, **change, "certificate_key": key})
            with pytest.raises(ConfigError, match="cannot load a certificate and its private key"):
                RecordingEndpoint(config)
    together = tmp_path / "both.pem"
    together.write_text("".join(Path(each).read_text() for each in files))
    RecordingEndpoint(EndpointConfig(**OUTSIDE, certificate=str(together)))


def test_a_weak_token_is_refused_where_strangers_can_try() -> None:
    config = EndpointConfig(**OUTSIDE, allow_plaintext=True)
    for weak in ("secret", "a" * 99, "0123456789abcdef" * 2 + "x", "0123456789abcdef" * 2):
        if weak.startswith("0"):
            RecordingEndpoint(config, token=weak)  # 128 bits, if it is random
            weak = weak[:31]
        with pytest.raises(ConfigError, match="at least 128 bits"):
            RecordingEndpoint(config, token=weak)
        RecordingEndpoint(EndpointConfig(), token=weak)
    tokens = {RecordingEndpoint(config).token for _ in range(9)}
    assert len(tokens) == 9, "each run has its own"


@pytest.mark.parametrize("with_tls", [True, False])
def test_a_stranger_gets_401_and_nothing_else(files: tuple[str, str], with_tls: bool) -> None:
    options = (
        {} if with_tls else {"certificate": "", "certificate_key": "", "allow_plaintext": True}
    )
    world = bound(files, **options)

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        assert base_url.startswith("https://127.0.0.1:" if with_tls else "http://127.0.0.1:")
        verify = trusting(files[0])
        paths = ("/healthz", "/", "/v1/models", "/docs", "/v1/chat/completions", "/v1/messages")
        wrong = ({}, {"x-api-key": api_key[:-1]}, {"Authorization": f"Basic {api_key}"})
        answers = set()
        async with httpx.AsyncClient(verify=verify, timeout=LIMIT_S) as stranger:
            for path in (*paths, base_url[base_url.index("/e/") :] + "/record"):
                for headers in wrong:
                    for method in ("GET", "POST", "DELETE"):
                        url = world.endpoint.url + path
                        got = await stranger.request(
                            method, url, headers=headers, content=b"x" * 100_000
                        )
                        answers.add((got.status_code, got.text, got.headers["connection"]))
        ((status, text, connection),) = answers
        assert (status, connection) == (401, "close")
        assert json.loads(text)["error"]["message"] == "the token is missing or wrong"
        async with openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key,
            max_retries=0,
            http_client=httpx.AsyncClient(verify=verify),
        ) as client:
            await client.chat.completions.create(model="policy", **ASK)
        return 1.0

    assert whole(world.play(agent)).num_turns == 1


@asynccontextmanager
async def crowd(
    address: tuple[str, int], number: int, work: Callable[..., Coroutine[Any, Any, str]]
) -> AsyncIterator[Counter[str]]:
    """Run clients without the token, each of which begins again and again. Count what they get."""
    results: Counter[str] = Counter()

    async def again() -> None:
        while True:
            try:
                results[await work(*address)] += 1
            except (OSError, asyncio.IncompleteReadError):
                results["closed"] += 1
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(again()) for _ in range(number)]
    try:
        yield results
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def untrusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def with_wrong_key(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port, ssl=untrusting())
    try:
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nx-api-key: no\r\n\r\n")
        return (await reader.readuntil(b"\r\n")).split()[1].decode()
    finally:
        writer.transport.abort()


async def without_handshake(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        return str(await reader.read(1))
    finally:
        writer.transport.abort()


async def with_broken_handshake(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return "alert" if await reader.read() else "closed"
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("attack", [with_wrong_key, without_handshake, with_broken_handshake])
@pytest.mark.costly(cases=0)
def test_a_flood_ends_no_call(
    files: tuple[str, str], attack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients with the token, from another address, are served meanwhile, also new ones."""
    monkeypatch.setattr(connections, "MAX_STRANGERS", 8)
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", LIMIT_S)
    world = bound(files)

    async def act(client: httpx.AsyncClient) -> None:
        address = ("127.0.0.1", client.base_url.port)
        assert (await client.post("messages", json=MESSAGE)).status_code == 200
        async with crowd(address, 24, attack) as results:
            while sum(results.values()) < 100:
                async with known(client.base_url, client.headers, world) as new:
                    for one in (client, new):
                        assert (await one.post("messages", json=MESSAGE)).status_code == 200
        assert results.keys() <= {"401", "503", "closed", "alert", "b''"}

    play(world, act)


def test_a_client_that_never_ends_its_handshake_is_closed(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)

    async def act(client: httpx.AsyncClient) -> None:
        for sent in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(sent)
            async with asyncio.timeout(LIMIT_S):
                assert await reader.read() == b""
            writer.transport.abort()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", client.base_url.port, ssl=untrusting()
        )
        writer.write(b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1000)
        async with asyncio.timeout(LIMIT_S):
            assert b" 408 " in await reader.read()
        writer.transport.abort()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", client.base_url.port, ssl=untrusting()
        )
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000)
        async with asyncio.timeout(LIMIT_S):
            with suppress(ConnectionError):
                assert b" 400 " in await reader.read()
        writer.transport.abort()

    play(bound(files), act)


class Strangers:
    """Clients without the token that flood an endpoint while an agent works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(connections, "MAX_STRANGERS", 4)
        self._got: list[Counter[str]] = []

    @asynccontextmanager
    async def attack(self, host: str, port: int) -> AsyncIterator[None]:
        async with AsyncExitStack() as crowds:
            for each in (with_wrong_key, without_handshake, with_broken_handshake):
                self._got.append(await crowds.enter_async_context(crowd((host, port), 3, each)))
            yield
        assert {*chain(*self._got)} <= {"401", "503", "closed", "alert", "b''"}

    async def before_reply(self, tokens: Sequence[int], params: SamplingParams) -> None:
        """Let 30 of them get something before each reply begins."""
        if list(tokens[-len(BEGIN) :]) == BEGIN:
            enough = self._total() + 30
            while self._total() < enough:  # noqa: ASYNC110 - there is no event for all of them
                await asyncio.sleep(0.001)

    def _total(self) -> int:
        return sum(each.total() for each in self._got)

    def beside(self, network: Network, work: Callable[..., float]) -> Callable[..., Any]:
        """Return an agent that calls `work` in a thread, during an attack."""

        async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
            async with self.attack(network.address, int(httpx.URL(base_url).port or 0)):
                return await asyncio.to_thread(work, base_url, task, seed, api_key)

        return agent


STEPS = [CALL, CALL.replace("20", "21"), CALL.replace("20", "22"), "It is 30."]


def solver_in_steps(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """Call the tool three times, then answer. The conversation so far tells which one is next."""
    number = CHAT.text(tokens, whole=True).count("<|im_start|>assistant\n") - 1
    return rest_of(STEPS[number], tokens)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("library", "client"),
    [
        ("openai", with_sdk),
        ("anthropic", with_anthropic),
        pytest.param("litellm", with_litellm, marks=pytest.mark.slow),
    ],
)
@pytest.mark.costly(cases=1)
def test_a_client_in_another_network_namespace_is_recorded_exactly_during_a_flood(
    library: str, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a program of its own. Its tokens are those of an agent at loopback without strangers.

    Before its conversation, it is a stranger itself: it has wrong keys.
    """
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    alone = whole(World(solver_in_steps, max_turns=9).play(with_sdk))
    strangers = Strangers(monkeypatch)
    with another_network() as network:
        files = make_certificate(tmp_path, network.address)

        def work(base_url: str, task: str, seed: int, api_key: str) -> float:
            with socket.socket() as loopback:  # it listens at the given address only
                assert loopback.connect_ex(("127.0.0.1", int(httpx.URL(base_url).port or 0)))
            words = ("-m", "tests.support.scripted_agents", client.__name__)
            done = subprocess.run(
                [*network.enter, sys.executable, *words, base_url, task, api_key],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                cwd=Path(__file__).parents[2],
                env={
                    **os.environ,
                    "SSL_CERT_FILE": files[0],
                    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                },
            )
            return float(done.stdout.splitlines()[-1])

        world = World(solver_in_steps, strangers.before_reply, logp=own_logp, max_turns=9)
        world.endpoint = bound_endpoint(files, host=network.address, public_host="")
        trajectory = whole(world.play(strangers.beside(network, work)))
    assert (trajectory.reward, trajectory.num_turns) == (1, 4)
    world.check_exact(trajectory)
    assert trajectory.tokens == alone.tokens
