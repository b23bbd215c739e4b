"""Create the components of a run whose trainer is divided among ranks."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from unstale.builders.components import Components
from unstale.builders.local import build_scorer, build_trainer
from unstale.builders.policy import keep_versions, load_policy, warn_of_float32
from unstale.cluster.components import connect_run
from unstale.cluster.engine_host_weights import WeightPosts
from unstale.cluster.ranked_trainer import (
    RankedAuditor,
    RankedCheckpoints,
    RankedOldLogps,
    RankedTrainer,
)
from unstale.cluster.ranks import Notify, Ranks
from unstale.cluster.ranks_publish import RankedPublisher
from unstale.cluster.ranks_worker import Rank
from unstale.cluster.scoring_ranks import RankedOldLogitModel, RanksLink, ScoringRank
from unstale.config import (
    RunConfig,
)
from unstale.durability.checkpoint import Checkpoints
from unstale.engines.pool import EnginePool
from unstale.envs import (
    Taskset,
)
from unstale.model.pass_size import MOST
from unstale.model.peers import RankGroup
from unstale.model.policy import Policy
from unstale.old_logps.scoring.local_scorer import delta_store
from unstale.rollout.generator import Generator
from unstale.techniques.hooks import Techniques
from unstale.trainer.threads import trainer_threads
from unstale.weights.publish import Publisher


def build_rank(config: RunConfig, peers: RankGroup) -> Rank:
    """Return the components of a run on one trainer rank. All ranks must call this function."""
    torch.set_num_threads(trainer_threads(config))
    cluster = config.cluster
    peers = peers.in_context_groups(cluster.context).in_replicas(cluster.replicas)
    peers = replace(peers, divides_experts=cluster.expert_parallel)
    policy = load_policy(config, peers)
    scorer = build_scorer(config, policy)
    trainer, auditor = build_trainer(config, policy, scorer, on_rank=True)
    store = delta_store(scorer) if config.old_logps.shares_deltas else None
    return Rank(policy, trainer, auditor, store)


def build_scoring_rank(config: RunConfig, peers: RankGroup) -> ScoringRank:
    """Return the components of one of the ranks that only score. All these ranks must call this
    function.
    """
    torch.set_num_threads(1)
    policy = load_policy(config, peers, trained=False)
    return ScoringRank(policy, build_scorer(config, policy))


@dataclass(frozen=True, slots=True)
class RankedComponents(Components):
    """The components of a run whose trainer is divided among ranks.

    `policy` is a whole copy in the run's own process.
    """

    policy: Policy
    taskset: Taskset
    generator: Generator
    old: RankedOldLogps
    auditor: RankedAuditor
    trainer: RankedTrainer
    techniques: Techniques

    @property
    def ranks(self) -> Ranks:  # type: ignore[override]
        return self.trainer.ranks

    def posted_dtype(self, config: RunConfig) -> torch.dtype:
        return self.policy.dtype

    def save_policy(self, folder: Path) -> None:
        self.trainer.update_policy()
        self.policy.save(folder)

    def save_failed_batch(self, folder: Path) -> str:
        return self.trainer.save_failed_batch(folder)

    def record(self, folder: Path) -> None:
        self.auditor.record(folder)

    def checkpoints(self, config: RunConfig, run: Path) -> Checkpoints:
        return RankedCheckpoints(self.trainer, run, keep=config.checkpoint.keep)

    def publisher(
        self,
        config: RunConfig,
        engine: EnginePool,
        checkpoints: Checkpoints,
        posts: WeightPosts | None,
    ) -> Publisher:
        return RankedPublisher(
            engine,
            self.trainer,
            dtype=self.travel_dtype(config),
            posts=posts,
            keep_versions=keep_versions(config, engine),
        )


def build_ranked(
    config: RunConfig,
    sampler: tuple[Policy, Taskset, Generator],
    *,
    ranks: Ranks | None,
    notify: Notify,
) -> RankedComponents:
    """Return the components of a run that trains on ranks.

    `sampler` is the result of `build_sampler`. If `ranks` is given, these ranks are used and no new
    ones started. `notify` is called with a text on what the start of ranks waits for. If the start
    fails, the ranks are closed before the error is raised.
    """
    policy, taskset, generator = sampler
    policy.check_length(config.engine.max_context)  # before ranks are waited for
    techniques = Techniques.of(config)  # raises ConfigError for those that ranks do not have
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
        ranks.make(partial(build_rank, config), notify)
        if ranks.scorers:
            ranks.scorers.make(partial(build_scoring_rank, config), notify)
        on_error.pop_all()
    warn_of_float32(config, on_gpu=ranks.on_gpus)
    trainer = RankedTrainer(ranks, policy)
    own = (_route(config, trainer), RankedAuditor(trainer), trainer)
    return RankedComponents(policy, taskset, generator, *own, techniques=techniques)


def _route(config: RunConfig, trainer: RankedTrainer) -> RankedOldLogps:
    needs, scorers = config.old_logps.needs, trainer.ranks.scorers
    if scorers is None:
        return RankedOldLogps(trainer, needs)
    scoring = config.trainer.scoring_tokens(on_gpu=scorers.on_gpus)
    link = RanksLink(scorers, max_tokens=scoring or MOST["cpu"])
    return RankedOldLogitModel(trainer, needs, link, lockstep=config.deterministic)
