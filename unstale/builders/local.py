"""Create the objects that score and train the policy of a run in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from unstale.algorithms.advantages import find_estimator
from unstale.builders.components import Components
from unstale.builders.policy import (
    keep_versions,
    loads_in_place,
    reads_old_versions,
    shares_deltas,
)
from unstale.cluster.engine_host_weights import WeightPosts
from unstale.config import (
    AdvantageConfig,
    OldLogpsConfig,
    RunConfig,
)
from unstale.durability.checkpoint import Checkpoints, Stateful
from unstale.engines.pool import EnginePool
from unstale.engines.registry import packs_weights
from unstale.envs import (
    Taskset,
)
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.local_scorer import LocalScorer, delta_store
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, Group, ScoredTrajectory
from unstale.rollout.generator import Generator
from unstale.techniques.hooks import NO_TECHNIQUES, HiddenStates, StatesQuery, Techniques
from unstale.trainer.auditor import Auditor
from unstale.trainer.failed_batch import save_failed_batch
from unstale.trainer.local import LocalTrainer
from unstale.trainer.passes import pass_tokens
from unstale.trainer.rules import LossSpec
from unstale.weights.publish import DirectPublisher, Publisher
from unstale.weights.recording import Recording


def build_scorer(config: RunConfig, policy: Policy) -> Scorer:
    """Return a scorer, which computes log-probabilities under the current or past weights.

    A scorer keeps past weights for one user. So the route (the way to get `old_logp`) and the audit
    each need one. Raises `ConfigError` if log-probabilities of sequences of `engine.max_context`
    tokens would be wrong.
    """
    policy.check_length(config.engine.max_context)
    max_tokens = pass_tokens(policy, config, trains=False)
    return LocalScorer(policy, config.engine.temperature, max_tokens)


def build_trainer(
    config: RunConfig, policy: Policy, scorer: Scorer, *, on_rank: bool = False
) -> tuple[LocalTrainer, Auditor]:
    """Return the trainer, and the auditor that measures the errors of its old log-probabilities.

    The trainer's `old` computes these. The caller must close it, because it may have a process.
    With `on_rank`, `old` is the part of it that runs on a trainer rank.
    """
    make = config.old_logps.make_on_rank if on_rank else config.old_logps.make
    old: OldLogps = make(scorer, lockstep=config.deterministic)
    techniques = Techniques.of(config)
    rules = LossSpec(config.correction, config.objective, techniques)
    auditor = Auditor(
        build_scorer(config, policy),
        old,
        rules,
        share=config.audit.share,
        is_bitwise=config.engine.bitwise,
    )
    return LocalTrainer(policy, config, old, auditor.look, techniques=techniques), auditor


def build_advantage(config: AdvantageConfig) -> Callable[[Sequence[Group]], list[ScoredTrajectory]]:
    """Return the configured advantage estimator.

    An estimator is a function from the groups of a batch to their trajectories, with advantages.
    """
    return partial(find_estimator(config.estimator), **config.selected_options())


def build_old_logps(config: OldLogpsConfig, scorer: Scorer, *, lockstep: bool = False) -> OldLogps:
    """Return the configured route, the object that computes old log-probabilities.

    With `lockstep` the trainer waits for the route's child process, if it has one. Results then do
    not depend on the speed of that process.
    """
    route: OldLogps = config.make(scorer, lockstep=lockstep)
    return route


@dataclass(frozen=True, slots=True)
class LocalComponents(Components):
    """The components of a run that trains in this process."""

    policy: Policy
    taskset: Taskset
    generator: Generator
    scorer: Scorer
    """Computes log-probabilities for `old`. The auditor has another scorer."""
    old: OldLogps
    auditor: Auditor
    trainer: LocalTrainer
    techniques: Techniques = NO_TECHNIQUES

    @property
    def hidden_states(self) -> Callable[[Batch, StatesQuery], HiddenStates]:
        return self.trainer.hidden_states

    def save_policy(self, folder: Path) -> None:
        self.policy.save(folder)

    def save_failed_batch(self, folder: Path) -> str:
        return save_failed_batch(self.trainer, folder)

    def record(self, folder: Path) -> None:
        self.auditor.recording = Recording(folder, base=self.policy.base)

    def checkpoints(self, config: RunConfig, run: Path) -> Checkpoints:
        parts: dict[str, Stateful] = {
            "trainer": self.trainer,
            "old": self.old,
            "auditor": self.auditor,
            **self.techniques.stateful,
        }
        # A route may change the trained weights while a checkpoint is written.
        copies = config.old_logps.needs.trained_weights
        keep = config.checkpoint.keep
        if config.schedule.pin_versions:
            # An engine that starts again needs the version of the oldest running episode, which is
            # rebuilt from the checkpoint before it. Checkpoints are at least one version apart.
            keep = max(keep, config.schedule.staleness_bound + 2)
        every = reads_old_versions(config)
        return Checkpoints(run, parts, keep=keep, copies=copies, every_version=every)

    def publisher(
        self,
        config: RunConfig,
        engine: EnginePool,
        checkpoints: Checkpoints,
        posts: WeightPosts | None,
    ) -> Publisher:
        return DirectPublisher(
            engine,
            dtype=self.travel_dtype(config),
            store=delta_store(self.scorer) if shares_deltas(config) else None,
            put=checkpoints.write_version,
            post=posts.post if posts else None,
            in_place=loads_in_place(config),
            packed=config.engine.quantise if packs_weights(config) else "none",
            keep_versions=keep_versions(config, engine),
        )


def build_local(
    config: RunConfig, policy: Policy, taskset: Taskset, generator: Generator
) -> LocalComponents:
    """Return the components of a run that trains in this process."""
    scorer = build_scorer(config, policy)
    trainer, auditor = build_trainer(config, policy, scorer)
    own = (scorer, trainer.old, auditor, trainer, trainer.techniques)
    return LocalComponents(policy, taskset, generator, *own)
