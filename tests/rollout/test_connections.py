"""Strangers cannot use up the file descriptors of a run.

A process with few descriptors serves its agents and opens files while somebody without the token
holds more connections than it has descriptors.
"""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2 as httpx
import pytest

from tests.rollout.test_endpoint import ASK, talker
from tests.rollout.test_external import World, whole
from unstale.rollout.endpoint import connections

LIMIT = 256
CROWD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
for _ in range(int(sys.argv[2])):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
print("connected", flush=True)
sys.stdin.read()
answers = {}
for each in held:
    each.settimeout(0.5)
    try:
        status = each.recv(100).split(b" ")[1:2]
    except OSError:
        status = []
    answers[str(status)] = answers.get(str(status), 0) + 1
print(answers.get("[b'503']", 0), flush=True)
"""


@contextmanager
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_crowd_of_strangers_is_refused_and_the_run_never_notices() -> None:
    refused = []

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        port = base_url.split(":")[2].split("/")[0]
        crowd = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CROWD, port, str(2 * LIMIT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert crowd.stdin and crowd.stdout
        key = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=key, timeout=20) as known:
            body = {**ASK, "n": 1}
            answers = [await known.post(f"{base_url}/chat/completions", json=body)]
            assert await crowd.stdout.readline() == b"connected\n"
            answers.append(await known.post(f"{base_url}/chat/completions", json=body))
            async with httpx.AsyncClient(headers=key, timeout=20) as late:
                answers.append(await late.post(f"{base_url}/chat/completions", json=body))
        assert [answer.status_code for answer in answers] == [200] * 3
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]  # as a journal would
        for each in held:
            os.close(each)
        crowd.stdin.close()
        refused.append(int(await crowd.stdout.readline()))
        await crowd.wait()
        return 1.0

    with few_descriptors():
        trajectory = whole(World(talker, timeout_s=60.0).play(agent))
    assert trajectory.reward == 1
    assert refused[0] >= 2 * LIMIT - LIMIT // 4, "all but the last few got an answer"


def test_a_connection_without_the_token_is_closed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may ask what needs no token; the time is that of the connection."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.3)

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        port = int(base_url.split(":")[2].split("/")[0])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(10):
            answer = await reader.read()  # until the endpoint closes the connection
        writer.close()
        await writer.wait_closed()
        key = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=key, timeout=20) as known:
            for _ in range(2):
                assert (await known.post(f"{base_url}/chat/completions", json=ASK)).is_success
                await asyncio.sleep(0.4)
            assert world.endpoint.num_connections == 1, "one with the token stays open"
        return float(b"alive" in answer and b" 408 " in answer)

    world = World(talker)
    assert whole(world.play(agent)).reward == 1
