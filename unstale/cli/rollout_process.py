"""The program of a rollout process, which runs a part of a run's episodes (`rollout.processes`)."""

import asyncio
import os
import socket
import sys
from dataclasses import replace
from functools import partial
from typing import Any, cast

from unstale.builders import build_chat
from unstale.cli.process import limit_threads, rare_garbage_collection
from unstale.cluster.engine_host import HostOptions
from unstale.cluster.hosted_engine import HostedEngine
from unstale.cluster.session import connect
from unstale.config import Dtype, RunConfig
from unstale.config.options import stored_config
from unstale.durability import virtual_clock
from unstale.engines.following import FollowedEngine, SharedServer
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions, ModelSizes, engine_spec
from unstale.engines.remote import RemoteEngine
from unstale.engines.routing import Phases
from unstale.envs import sandbox
from unstale.envs.registry import build_taskset
from unstale.isolation import IsolatedTasks, isolate
from unstale.isolation.worker import end_with
from unstale.model.loading import load_tokenizer
from unstale.rollout.generator import Generator
from unstale.rollout.processes.wire import (
    DECODE_COMMANDS,
    Command,
    Logged,
    Refused,
    Setup,
    encode,
    read_frame,
)
from unstale.rollout.processes.worker import Outbox, Shard, ShardServer

UNLIMITED = 1 << 60
"""Number of restarts of engines that a rollout process allows. The run's main process sets the
limit.
"""


def main(descriptor: str, parent: str) -> None:
    """Run episodes until the run's main process closes the socket, or ends. Never returns.

    `descriptor` is the file descriptor of the socket, and `parent` the id of the main process.
    """
    end_with(int(parent))
    limit_threads()
    on_stuck = partial(print, file=sys.stderr, flush=True)
    with rare_garbage_collection():
        virtual_clock.run(_serve(int(descriptor)), on_stuck=on_stuck)
    os._exit(0)


async def _serve(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    setup, *rest = DECODE_COMMANDS(await read_frame(reader))
    assert isinstance(setup, Setup), "the first message"
    early: list[list[Command]] = [rest]

    async def receive() -> list[Command]:
        return early.pop() if early else DECODE_COMMANDS(await read_frame(reader))

    try:
        server = _make_server(setup, Outbox(writer))
    except ValueError as error:  # ConfigError is one
        writer.write(encode([Refused(str(error))]))
        await writer.drain()
        await reader.read()
        return
    try:
        await server.serve(receive)
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)  # the run has ended


def _make_server(setup: Setup, outbox: Outbox) -> ShardServer:
    """Return the object that runs the episodes of this process.

    Raises ValueError if something that it needs is missing.
    """
    config = stored_config(setup.config)
    if config.allow_weak_sandbox:
        sandbox.allow_weak()
    if setup.ray:
        connect(setup.ray)
    taskset = isolate(build_taskset(config.task), config.task)
    if isinstance(taskset, IsolatedTasks):
        taskset.workers.on_event = lambda kind, **fields: outbox.send(Logged(kind, fields))
    make = partial(_make_engine, config, ModelSizes(setup.vocab_size, setup.routed))
    engines = [FollowedEngine(number, make, outbox.send) for number in range(setup.engines)]
    pool = EnginePool(
        engines,
        Recovery(lambda version: {}, UNLIMITED),
        max_running=setup.max_running,
        keep_cache=config.engine.keep_cache,
        load_tokens=config.engine.load_tokens,
        phases=replace(Phases.of(config.engine), scenarios="none"),
    )
    tokenizer = load_tokenizer(config.policy_folder, config.chat_template)
    chat = build_chat(config, tokenizer, setup.ends, taskset)
    make_rollout: Any = partial(
        Shard, Generator(pool, chat, config.engine), taskset, config.rollout
    )
    return ShardServer(setup, engines, make_rollout, outbox)


def _make_engine(config: RunConfig, sizes: ModelSizes, url: str) -> SharedServer:
    """Return an engine on the server or engine host at `url`, which the run's main process
    controls.
    """
    options = config.engine
    each = EngineOptions(
        config.policy_folder,
        url=url,
        dtype=cast(Dtype, options.dtype),
        quantise=options.quantise,
        max_context=options.max_context,
        keep_cache=options.keep_cache,
        record_experts=config.trainer.routing_replay,
        sizes=sizes,
    )
    make = engine_spec(options.backend).make
    if config.cluster.engine_hosts:
        return HostedEngine.at(url, HostOptions(make, (each,)))
    engine = make(each)
    assert isinstance(engine, RemoteEngine), "the run checked it"
    return engine
