"""The components of a run that sample and train, as one object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unstale.config import RunConfig
from unstale.model.loading import DTYPES
from unstale.old_logps import OldLogps
from unstale.rollout.generator import Generator
from unstale.techniques.hooks import HiddenStates, StatesQuery, Techniques

if TYPE_CHECKING:
    from unstale.cluster.engine_host_weights import WeightPosts
    from unstale.cluster.ranked_trainer import RankedAuditor, RankedTrainer
    from unstale.cluster.ranks import Ranks
    from unstale.durability.checkpoint import Checkpoints
    from unstale.engines.pool import EnginePool
    from unstale.envs import Taskset
    from unstale.model.policy import Policy
    from unstale.records import Batch
    from unstale.trainer.auditor import Auditor
    from unstale.trainer.local import LocalTrainer
    from unstale.weights.publish import Publisher


class Components(ABC):
    """The components of a run that sample and train. None of them needs a run folder.

    `LocalComponents` train in this process, and `RankedComponents` on trainer ranks.
    """

    policy: Policy
    taskset: Taskset
    generator: Generator
    old: OldLogps
    auditor: Auditor | RankedAuditor
    trainer: LocalTrainer | RankedTrainer
    techniques: Techniques

    ranks: Ranks | None = None
    """The trainer ranks. None if the trainer is in this process."""

    @property
    def hidden_states(self) -> Callable[[Batch, StatesQuery], HiddenStates] | None:
        """The function that computes hidden states of the policy. None if it is trained on
        ranks.
        """
        return None

    def travel_dtype(self, config: RunConfig) -> torch.dtype:
        """Return the precision in which weights are sent to the engines."""
        return self.policy.travel_dtype(DTYPES[config.engine.dtype])

    def posted_dtype(self, config: RunConfig) -> torch.dtype:
        """Return the precision of the weights that engine hosts fetch."""
        return self.travel_dtype(config)

    @abstractmethod
    def save_policy(self, folder: Path) -> None:
        """Save the trained policy to `folder`, as a Hugging Face model."""

    @abstractmethod
    def save_failed_batch(self, folder: Path) -> str:
        """Save the batch at which the trainer failed to `folder`. Return a message for the
        terminal.
        """

    @abstractmethod
    def record(self, folder: Path) -> None:
        """Make the auditor record all batches and weights in `folder`, for `unstale audit`."""

    @abstractmethod
    def checkpoints(self, config: RunConfig, run: Path) -> Checkpoints:
        """Return the object that writes checkpoints to the run folder `run`.

        They have the states of trainer, auditor and `old`, which computes old log-probabilities.
        """

    @abstractmethod
    def publisher(
        self,
        config: RunConfig,
        engine: EnginePool,
        checkpoints: Checkpoints,
        posts: WeightPosts | None,
    ) -> Publisher:
        """Return the object that sends each version of the weights to the engines.

        `posts` is the store from which engine hosts fetch weights. It is None without engine hosts.
        """
