"""The components of a run that are on trainer ranks or engine hosts."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from unstale.cluster.engine_host import HostOptions
from unstale.cluster.engine_host_weights import WeightPosts
from unstale.cluster.gpus import host_gpus, run_gpus
from unstale.cluster.hosted_engine import RESOURCE, HostedEngine, place
from unstale.cluster.ranked_trainer import RankedAuditor, RankedOldLogps, RankedTrainer
from unstale.cluster.ranks import Notify, Ranks
from unstale.cluster.ranks_worker import MakeRank
from unstale.cluster.scoring_ranks import RankedOldLogitModel, RanksLink
from unstale.cluster.session import connect
from unstale.config import ClusterConfig, RunConfig
from unstale.engines import Engine
from unstale.engines.pool import EnginePool
from unstale.engines.registry import EngineOptions
from unstale.engines.routing import Phases
from unstale.model.policy import Policy


def connect_run(config: RunConfig) -> None:
    """Connect to Ray for the ranks and hosts of a run. Raises `ConfigError` if it cannot be used.

    A Ray that is started for this run gives the ranks only their GPUs.
    """
    cluster = config.cluster
    resources = {RESOURCE: cluster.engine_hosts} if cluster.engine_hosts else {}
    connect(cluster.address, resources=resources, gpus=run_gpus(config).trainers)


def make_host_pool(
    config: RunConfig,
    make: Callable[[EngineOptions], Engine],
    engines: Sequence[EngineOptions],
) -> EnginePool:
    """Connect to Ray and return a pool of engine hosts, which are not started yet.

    Each host makes `engines` by `make`. Raises `ConfigError` if Ray cannot be used.
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
        phases=Phases(config.engine.prefill_engines, config.engine.prefill_ratio),
        patience_s=config.cluster.patience_s,
    )


def build_ranked(
    config: RunConfig,
    policy: Policy,
    makes: tuple[MakeRank, MakeRank],
    ranks: Ranks | None = None,
    *,
    notify: Notify = lambda text: None,
) -> tuple[RankedOldLogps, RankedAuditor, RankedTrainer]:
    """Return the old-logit route, the audit and the trainer on ranks.

    `makes` make the components of one trainer rank, and those of one rank that only scores, if the
    route has such ranks. If `ranks` are given, they are used instead of new ones.
    `policy` is the driver's. `notify` is called with what new ranks wait for. Raises what
    `Ranks.make` raises; the ranks are then ended.
    """
    cluster = config.cluster
    connect_run(config)
    ranks = ranks or Ranks(
        cluster.trainers,
        address=cluster.address,
        patience_s=cluster.patience_s,
        scorers=config.old_logps.scoring_ranks,
    )
    with ExitStack() as on_error:
        on_error.callback(ranks.close)
        ranks.make(makes[0], notify)
        if ranks.scorers:
            ranks.scorers.make(makes[1], notify)
        on_error.pop_all()
    trainer = RankedTrainer(ranks, policy)
    return _ranked_route(config, trainer), RankedAuditor(trainer), trainer


def _ranked_route(config: RunConfig, trainer: RankedTrainer) -> RankedOldLogps:
    needs, scorers = config.old_logps.needs, trainer.ranks.scorers
    if scorers is None:
        return RankedOldLogps(trainer, needs)
    link = RanksLink(scorers, max_tokens=config.trainer.max_tokens_per_microbatch)
    return RankedOldLogitModel(trainer, needs, link, lockstep=config.deterministic)


def make_posts(
    cluster: ClusterConfig, read: Callable[[int], Mapping[str, Tensor]], dtype: torch.dtype
) -> WeightPosts | None:
    """Return the place where engine hosts fetch weights. None if the run has no engine hosts.

    `read` returns the full weights of a version on disk.
    """
    return WeightPosts(read, dtype=dtype) if cluster.engine_hosts else None


def report_events(engine: EnginePool, on_event: Callable[..., None]) -> None:
    """Call `on_event` with the events of engines on engine hosts."""
    for each in engine.engines:
        if isinstance(each, HostedEngine):
            each.on_event = on_event
