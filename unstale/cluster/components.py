"""Functions that make the components of a run with trainer ranks or engine hosts.

Trainer ranks are processes that share the trainer's work. Engine hosts are machines with engines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unstale.cluster.engine_host import HostOptions
from unstale.cluster.engine_host_weights import WeightPosts
from unstale.cluster.gpus import host_gpus, run_gpus
from unstale.cluster.hosted_engine import RESOURCE, HostedEngine, place
from unstale.cluster.session import connect, import_ray
from unstale.config import ClusterConfig, RunConfig
from unstale.engines import Engine
from unstale.engines.pool import EnginePool
from unstale.engines.registry import EngineOptions
from unstale.engines.routing import Phases


def connect_run(config: RunConfig) -> None:
    """Connect to Ray for a run's trainer ranks and engine hosts.

    If this starts Ray, the ranks see only the GPUs that are meant for them. Raises `ConfigError` if
    Ray cannot be used.
    """
    cluster = config.cluster
    resources = {RESOURCE: cluster.engine_hosts} if cluster.engine_hosts else {}
    connect(cluster.address, resources=resources, gpus=run_gpus(config).trainers)


def make_host_pool(
    config: RunConfig,
    make: Callable[[EngineOptions], Engine],
    engines: Sequence[EngineOptions],
) -> EnginePool:
    """Connect to Ray and return a pool of engine hosts (machines with engines), which are not
    started yet.

    Each host calls `make` for each of `engines`. Raises `ConfigError` if Ray cannot be used.
    """
    connect_run(config)
    hosts = []
    for number in range(config.cluster.engine_hosts):
        own = [replace(each, gpus=host_gpus(config, number)) for each in engines]
        options = HostOptions(make, tuple(own), config.engine.restarts)
        hosts.append(HostedEngine(number, options, partial(place, options)))
    return EnginePool(
        hosts,
        max_running=engines[0].max_running * len(engines),
        keep_cache=engines[0].keep_cache,
        load_tokens=engines[0].load_tokens,
        phases=Phases.of(config.engine),
        patience_s=config.cluster.patience_s,
    )


def ray_address() -> str:
    """Return the address of the Ray cluster to which this process is connected."""
    return str(import_ray().get_runtime_context().gcs_address)


def make_posts(
    cluster: ClusterConfig, read: Callable[[int], Mapping[str, Tensor]], dtype: torch.dtype
) -> WeightPosts | None:
    """Return the store from which engine hosts fetch weights, or None if the run has no engine
    hosts.

    `read` returns the full weights of a version on disk. `dtype` is the precision in the store.
    """
    return WeightPosts(read, dtype=dtype) if cluster.engine_hosts else None


def report_events(engine: Engine, on_event: Callable[..., None]) -> None:
    """Make the engine hosts (machines with engines) in the pool `engine` report to `on_event`.

    It is called with each event of their engines. Other engines are not changed.
    """
    for each in engine.engines if isinstance(engine, EnginePool) else ():
        if isinstance(each, HostedEngine):
            each.on_event = on_event
