"""Test an endpoint that listens on more than loopback.

It needs TLS and a strong token. A stranger gets status 401 on every path. Floods of connections,
handshakes and requests end no call of an agent.
"""

import asyncio
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.rollout.test_endpoint import ASK, talker
from tests.rollout.test_external import World, whole
from tests.support.certificates import make_certificate, trusting
from tests.support.waits import LIMIT_S
from unstale.config import ConfigError, EndpointConfig
from unstale.rollout.endpoint import connections
from unstale.rollout.endpoint.server import RecordingEndpoint

OUTSIDE = {"host": "0.0.0.0", "public_host": "127.0.0.1"}
MESSAGE = {**ASK, "max_tokens": 16}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1", "10.231.77.1")


def bound(files: tuple[str, str], **options: Any) -> World:
    """Return a world whose endpoint listens on all addresses, with TLS."""
    certificate, key = files
    world = World(talker, max_turns=999)
    config = {**OUTSIDE, "certificate": certificate, "certificate_key": key, **options}
    world.endpoint = RecordingEndpoint(EndpointConfig(**config))
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
@pytest.mark.costly
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


ASKED = [{"role": "user", "content": "one"}]
AGENTS = {
    "urllib": f"""
import json, os, ssl, urllib.error, urllib.request
body = json.dumps({{"max_tokens": 64, "messages": {ASKED}}}).encode()
context = ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"])
for key in ("no", api_key):
    request = urllib.request.Request(f"{{base_url}}/messages", body, {{"x-api-key": key}})
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as answer:
            print(json.load(answer)["content"][0]["text"])
    except urllib.error.HTTPError as error:
        assert error.code == 401
""",
    "openai": f"""
import openai
client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
answer = client.chat.completions.create(model="policy", messages={ASKED})
print(answer.choices[0].message.content)
""",
    "anthropic": f"""
import anthropic
client = anthropic.Anthropic(base_url=base_url, api_key=api_key, max_retries=0)
with client.messages.stream(model="policy", max_tokens=64, messages={ASKED}) as stream:
    print(stream.get_final_message().content[0].text)
""",
    "litellm": f"""
import litellm
answer = litellm.completion(
    "anthropic/policy", api_base=base_url, api_key=api_key, messages={ASKED}, max_tokens=64
)
print(answer.choices[0].message.content)
""",
}
"""Programs that ask the policy one question and print its answer, by the library that they use."""
NETWORK = """
ip netns add {name}
ip link add {name}0 type veth peer name {name}1
ip link set {name}1 netns {name}
ip addr add 10.231.77.1/30 dev {name}0
ip link set {name}0 up
ip netns exec {name} ip addr add 10.231.77.2/30 dev {name}1
ip netns exec {name} ip link set {name}1 up
"""


@pytest.mark.slow
@pytest.mark.parametrize("library", AGENTS)
def test_an_agent_in_another_network_namespace_is_recorded(
    files: tuple[str, str], library: str
) -> None:
    """It needs root and the program ip."""
    if find_spec(library) is None:
        pytest.skip(f"needs {library}")
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and the program ip")
    name = f"u{os.getpid()}"
    world = bound(files, host="10.231.77.1", public_host="")

    def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        program = f"import sys; base_url, api_key = sys.argv[1:]\n{AGENTS[library]}"
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-c", program, base_url, api_key],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "SSL_CERT_FILE": files[0], "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )
        printed = done.stdout.splitlines()[-1:]  # litellm prints advice before
        assert printed == ["one two. three four, five six"], done.stderr[-2000:]
        return 1.0

    try:
        for line in NETWORK.format(name=name).strip().splitlines():
            done = subprocess.run(line.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"this machine has no network namespaces: {line}: {done.stderr}")
        trajectory = whole(world.play(agent))
    finally:
        for line in (f"ip link del {name}0", f"ip netns del {name}"):
            subprocess.run(line.split(), capture_output=True, check=False)
    assert (trajectory.reward, trajectory.num_turns) == (1, 1)
    with socket.socket() as closed:
        assert closed.connect_ex(("127.0.0.1", int(world.endpoint._port))) != 0
