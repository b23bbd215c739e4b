"""Test the service with Tinker's own client, where an environment has it.

Run on demand: `pytest -m slow tests/research/test_tinker_client.py`, with the variable
TINKER_PYTHON set to the interpreter of an environment in which `tinker` and `h2` are installed.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from unstale.config import SHIPPED_POLICY
from unstale.research.tinker.server import TinkerServer, new_token

PYTHON = os.environ.get("TINKER_PYTHON", "")
SCRIPT = Path(__file__).parents[1] / "support" / "tinker_client.py"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="TINKER_PYTHON names no interpreter")
def test_the_real_client_trains_samples_and_resumes(tmp_path: Path) -> None:
    token = new_token()
    server = TinkerServer(SHIPPED_POLICY, tmp_path, [token], name="base", max_context=256)

    async def play() -> bytes:
        async with server:
            variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": token}
            process = await asyncio.create_subprocess_exec(
                PYTHON,
                "-W",
                "ignore",
                str(SCRIPT),
                "base",
                env={"PATH": os.environ["PATH"], "TINKER_TELEMETRY": "0", **variables},
                stdout=asyncio.subprocess.PIPE,
                stderr=sys.stderr,
            )
            return (await process.communicate())[0]

    found = json.loads(asyncio.run(play()))
    print(found)  # noqa: T201 - the figures of the run
    assert found["losses"][-1] < found["losses"][0] / 2
    assert sum(found["rewards"][-3:]) > 2 * sum(found["rewards"][:3])
    assert found["error"] < 1e-4 and found["is_unchanged"] and found["rank"] == 8
