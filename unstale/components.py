"""What the loop touches, each part typed by its Protocol."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from unstale.config import RunConfig
from unstale.durability.checkpoint import Checkpoints, Progress
from unstale.durability.journal import Journal
from unstale.engines import Engine
from unstale.model.policy import Policy
from unstale.observe.recorder import Recorder
from unstale.old_logps import OldLogps
from unstale.records import Group, GroupRequest, ScoredTrajectory, Task
from unstale.rollout.episode import Rollout
from unstale.rollout.staleness_queue import PendingPieces, StalenessQueue
from unstale.trainer.auditor import Auditor
from unstale.trainer.local import Trainer
from unstale.weights.publish import Publisher


@dataclass(frozen=True, slots=True)
class RunComponents:
    """Made by `build.py`; it never leaves the loop, which gives each room what that needs."""

    config: RunConfig
    stand: Progress
    begun: Sequence[GroupRequest]
    """What an earlier life of the run has handed out and not consumed, in order."""
    handouts: Iterator[GroupRequest]
    held_out: Sequence[Task]
    engine: Engine
    rollout: Rollout
    examination: Rollout
    line: StalenessQueue
    ledger: PendingPieces
    advantage: Callable[[Sequence[Group]], list[ScoredTrajectory]]
    policy: Policy
    old: OldLogps
    auditor: Auditor
    trainer: Trainer
    publisher: Publisher
    journal: Journal
    checkpoints: Checkpoints
    log: Recorder
    worker: Executor
    """The trainer's thread."""
    disk: Executor
    """The thread that writes checkpoints: environments may keep every other one busy."""

    def close(self) -> None:
        """End the threads, when what they are at is done."""
        self.worker.shutdown()
        self.disk.shutdown()

    async def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run trainer code in its own thread, so that episodes go on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(
            self.worker, partial(function, *arguments)
        )

    async def aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what waits for the disk in its own thread."""
        return await asyncio.get_running_loop().run_in_executor(
            self.disk, partial(function, *arguments)
        )
