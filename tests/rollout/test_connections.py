"""Strangers cannot use up the file descriptors of a run.

A run with few descriptors serves its agents and trains while somebody without the token holds more
connections than it has descriptors.
"""

import asyncio
import json
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.rollout.test_endpoint import ASK, talker
from tests.rollout.test_external import World, whole
from tests.support.crowded import NUM_STRANGERS
from tests.support.forked import Forked
from tests.support.waits import LIMIT_S
from unstale.rollout.endpoint import connections


@pytest.mark.costly
def test_a_crowd_of_strangers_is_refused_and_the_run_never_notices(tmp_path: Path) -> None:
    """1,024 descriptors and 1,100 idle connections. New and old clients with the token are served.

    The connections that are still open are within the share of strangers.
    """
    program = f"from tests.support import crowded; crowded.main({str(tmp_path)!r})"
    with Forked(program, cwd=Path(__file__).parents[2]) as process:
        printed, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
    result = json.loads(printed)
    strangers = result["strangers"]
    assert sum(strangers.values()) == NUM_STRANGERS
    assert strangers.keys() <= {"503", "closed", "open"}
    assert strangers["503"] > 0 and strangers["open"] <= connections.MAX_STRANGERS
    assert len(result["statuses"]) >= 4 and set(result["statuses"]) == {200}
    assert (result["steps"][-1], result["failed"]) == (1, 0)
    assert not (tmp_path / "run" / "error.txt").exists()


def test_a_connection_without_the_token_is_closed_soon() -> None:
    """It may ask what needs no token; the time is that of the connection."""

    async def agent(base_url: str, task: str, seed: int, api_key: str) -> float:
        port = int(base_url.split(":")[2].split("/")[0])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connections, "HEAD_TIMEOUT_S", 1.0)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            async with asyncio.timeout(LIMIT_S):
                answer = await reader.read()  # until the endpoint closes the connection
        writer.close()
        await writer.wait_closed()
        key = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=key, timeout=LIMIT_S) as known:
            for _ in range(2):
                assert (await known.post(f"{base_url}/chat/completions", json=ASK)).is_success
                (connection,) = world.endpoint._server.server_state.connections
                assert connection._timer is None, "one with the token stays open"
        return float(b"alive" in answer and b" 408 " in answer)

    world = World(talker)
    assert whole(world.play(agent)).reward == 1
