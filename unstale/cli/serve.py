"""The command `serve`: serve a policy over HTTP, to agents that the user starts."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from unstale.builders import build_server
from unstale.cli.evaluate import run_until_complete, running_generator
from unstale.cli.failures import literal
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.cli.trained import policy_folder
from unstale.cli.turn_limits import learned_limit
from unstale.config import RunConfig
from unstale.durability.console import Console
from unstale.engines import Engine, rates
from unstale.rollout.endpoint.agents import AgentRollout
from unstale.rollout.endpoint.server import RecordingEndpoint
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.seeds import derive_seed
from unstale.rollout.transcript import Transcript

MAX_SESSIONS = 1000
"""Number of named episodes that are kept in memory. The least recently used one is dropped for a
new one.
"""
METRICS_S = 10.0
"""Shortest time in seconds over which metrics are measured. Clients that read them more often get
the same ones again.
"""


class ServedMetrics:
    """The metrics of a server's engines, for several clients that read them at any time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._began = time.monotonic()
        self._last: Mapping[str, float] = {}

    def read(self) -> Mapping[str, float]:
        """Return the metrics of `docs/metrics.md` since the read before, at least `METRICS_S` ago.

        `seconds` is the time over which they were measured.
        """
        seconds = time.monotonic() - self._began
        if not self._last or seconds >= METRICS_S:
            self._began += seconds
            self._last = {"seconds": seconds, **rates(self._engine.metrics())}
        return self._last


class SessionPool:
    """The episodes of a server, by the name that a client puts into the URL.

    The first call with a name begins an episode. Every call without a name is an episode of its
    own.
    """

    def __init__(self, rollout: AgentRollout, calls: asyncio.TaskGroup, seed: int) -> None:
        self._rollout = rollout
        self._calls = calls
        self._seed = seed
        self._sessions: OrderedDict[str, AgentSession] = OrderedDict()

    def find(self, key: str) -> AgentSession:
        session = self._sessions.get(key) or self._begin()
        if key:
            self._sessions[key] = session
            self._sessions.move_to_end(key)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def _begin(self) -> AgentSession:
        episode = self._rollout.next_episode()
        seed = derive_seed(self._seed, "visit", episode)
        return AgentSession(self._rollout, Transcript(episode, seed), self._calls)


def serve(  # noqa: PLR0913 - options of a command
    trained: Path,
    config: RunConfig,
    *,
    token: str | None = None,
    port: int = 0,
    limit_turns: bool = False,
    console: Console | None = None,
) -> None:
    """Serve the policy of a run or model folder until Ctrl-C. Print the base URL and the API key.

    `token` is the key; None makes a random one. With `limit_turns`, a named episode has at most as
    many replies as `learned_limit` says. Raises `ConfigError` for wrong settings, and `RunFailed`
    if the engine fails.
    """
    limit = learned_limit(trained, config) if limit_turns else None
    folder = policy_folder(trained)
    config = config.with_policy(folder)
    config = replace(config, rollout=replace(config.rollout, max_turns=1 << 30))
    limit_threads()
    policy, taskset, generator = build_server(config)
    console = console or Console(soft_wrap=True)

    def on_engine_event(kind: str, *, cause: str = "", **_: Any) -> None:
        if kind == "engine_restarted":
            console.print(f"restarting the engine: {literal(cause)}", highlight=False)

    async def work() -> None:
        async with (
            running_generator(config, policy, generator, on_event=on_engine_event) as running,
            asyncio.TaskGroup() as calls,
        ):
            endpoint = RecordingEndpoint(
                config.endpoint,
                token=token,
                port=port,
                find=lambda key: sessions.find(key),
                metrics=ServedMetrics(running.engine).read,
            )
            rollout = AgentRollout(running, taskset, config.rollout, endpoint=endpoint)
            rollout.turn_limit = limit
            sessions = SessionPool(rollout, calls, config.seed)
            async with endpoint:
                console.print(
                    f"base URL  {endpoint.url}/v1\nAPI key   {endpoint.token}", highlight=False
                )
                console.print(
                    f"a named episode: {endpoint.url}/e/<any name>/v1; metrics of the engines: "
                    f"{endpoint.url}/metrics; Ctrl-C stops the server",
                    style="dim",
                )
                await asyncio.Event().wait()

    with rare_garbage_collection():
        run_until_complete(work())
