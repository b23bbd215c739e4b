"""Test the service with Tinker's own client and a recipe of its cookbook (`make test-tinker`)."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import cookbook
from unstale.config import SHIPPED_POLICY
from unstale.research.tinker.server import TinkerServer, new_token

pytest.importorskip("tinker_cookbook", reason="needs tinker-cookbook: make test-tinker")
SCRIPT = Path(__file__).parents[1] / "support" / "tinker_client.py"


def test_the_real_client_trains_samples_and_resumes(tmp_path: Path) -> None:
    token = new_token()
    server = TinkerServer(SHIPPED_POLICY, tmp_path, [token], name="base", max_context=256)

    async def play() -> bytes:
        async with server:
            variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": token}
            process = await asyncio.create_subprocess_exec(
                sys.executable,
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
    assert found["losses"][-1] < found["losses"][0] / 2
    assert sum(found["rewards"][-3:]) > 2 * sum(found["rewards"][:3])
    assert found["error"] < 1e-4 and found["is_unchanged"] and found["rank"] == 8


def test_two_recipes_at_once_end_well_and_keep_their_versions(tmp_path: Path) -> None:
    model, steps = "base", 2
    recipes = [cookbook.ROUNDS[1][0], "sl_loop train_mean_nll batch_size=8"]
    prompt = cookbook.prepare(tmp_path, model)
    with cookbook.service(model, tmp_path) as (url, tokens):
        found = cookbook.play(recipes, tmp_path, url, tokens, steps)
        assert [each.status for each in found] == [0, 0]
        assert [len(each.values) for each in found] == [steps, steps]
        (_, _, first), (_, _, second) = found
        assert cookbook.largest_difference(url, tokens[0], first, prompt) < 1e-4
        assert "there are no weights" in cookbook.refusal(url, tokens[0], second)
        assert "there are no weights" in cookbook.refusal(url, tokens[1], first)
        assert cookbook.refusal(url, tokens[1], second) == ""
