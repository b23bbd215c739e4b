"""A server backend is one file, which an entry point names. This test adds one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributions import add_distribution
from unstale.config import ConfigError, EngineConfig
from unstale.config.sampling import backends
from unstale.engines.registry import EngineSpec, engine_spec

REPOSITORY = Path(__file__).parents[2]

BACKEND = """
from unstale.engines.registry import EngineSpec
from unstale.engines.remote import RemoteEngine, ServerReply


class TinyEngine(RemoteEngine):
    NAME = "tiny"
    HEALTH_PATH = "/health"
    GENERATE_PATH = "/generate"
    MIN_TEMPERATURE = 0.01

    async def _handshake(self):
        return (await self._http.call("GET", "/health"))["max_context"]

    async def _pause(self, *, keep_cache):
        await self._post("/abort")

    async def _abort(self, request_ids):
        await self._post("/abort")

    async def _load_weights(self, folder, version):
        await self._post("/load", {"folder": str(folder), "version": version})

    async def _loaded_version(self):
        return (await self._http.call("GET", "/health"))["version"]

    async def _unpause(self):
        pass

    def _request_body(self, request_id, tokens, params):
        size = self._max_tokens(tokens, params)
        return {"tokens": list(tokens), "size": size, "temperature": params.temperature}

    def _parse_reply(self, body):
        tokens = tuple(body["tokens"])
        versions = ((body["version"], len(tokens)),)
        return ServerReply(tokens, tuple(body["logps"]), tokens, versions, "length", 0)


SPEC = EngineSpec(TinyEngine, needs_urls=True)
"""

SERVER = """
import asyncio, sys
from pathlib import Path

from unstale.config import EngineConfig, RunConfig
config = EngineConfig(backend="tiny", urls="http://127.0.0.1:1")
assert not {"torch", "transformers"} & set(sys.modules), "the names need no torch"

import torch
from safetensors.torch import load_file
from tests.support.fake_server import FakeServer, Speech, gumbel
from unstale.builders import build_engine
from unstale.engines import SamplingParams
from unstale.testing import tiny_policy


class TinyServer(FakeServer):
    version = "none"

    async def listen(self, connected):
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def answer(self, method, target, body):
        match target:
            case "/health":
                return 200, {"max_context": 512, "version": self.version}
            case "/load":
                self.load(load_file(Path(body["folder"]) / "model.safetensors"))
                self.version = str(body["version"])
            case "/generate":
                noise = torch.Generator().manual_seed(0)
                speech = Speech(body["tokens"], body["temperature"], lambda _, n: gumbel(noise, n))
                rows = [speech.next(self.policy, self.head) for _ in range(body["size"])]
                tokens, logps, _ = zip(*rows)
                return 200, {"tokens": tokens, "logps": logps, "version": self.version}
        return 200, None


async def sample(engine):
    await engine.start()
    for version in (0, 1):
        await engine.interrupt()
        await engine.load(tiny_policy(seed=version).weights(), version)
        await engine.resume()
    reply = await engine.sample([1, 2, 3], SamplingParams(5, ()))
    await engine.close()
    return reply


folder = Path(sys.argv[1])
tiny_policy().save(folder)
with TinyServer(tiny_policy()) as server:
    options = EngineConfig(backend="tiny", urls=server.url, dtype="float32", max_context=512)
    run = RunConfig(recipe="x", model=str(folder), engine=options)
    reply = asyncio.run(sample(build_engine(run, None)))
print(reply.piece.version, len(reply.piece.tokens))
"""


@pytest.mark.costly
def test_one_file_adds_a_backend(tmp_path: Path) -> None:
    (tmp_path / "tiny_backend.py").write_text(BACKEND)
    add_distribution(tmp_path, "tiny", {"unstale.engines": {"tiny": "tiny_backend:SPEC"}})
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-c", SERVER, str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1 5\n", done.stderr


@pytest.mark.parametrize("backend", backends())
def test_every_backend_has_a_spec(backend: str) -> None:
    assert isinstance(engine_spec(backend), EngineSpec)


def test_an_unknown_backend_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="embedded, sglang, vllm"):
        EngineConfig(backend="nothing_like_it")
