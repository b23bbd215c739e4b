"""What the loop touches, each part typed by its Protocol."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

from afterimage.auditor import Auditor
from afterimage.checkpoint import Checkpoints, Stand
from afterimage.config import RunConfig
from afterimage.engines import Engine
from afterimage.journal import Journal
from afterimage.observe.recorder import Recorder
from afterimage.old_logps import OldLogps
from afterimage.policy import Policy
from afterimage.publish import Publisher
from afterimage.rollout import Rollout
from afterimage.schedule import Ledger, Line
from afterimage.trainer import Trainer
from afterimage.trajectory import Credited, Group, Handout, Task


@dataclass(frozen=True, slots=True)
class Parts:
    """Made by `build.py`; it never leaves the loop, which gives each room what that needs."""

    config: RunConfig
    stand: Stand
    begun: Sequence[Handout]
    """What an earlier life of the run has handed out and not consumed, in order."""
    handouts: Iterator[Handout]
    held_out: Sequence[Task]
    engine: Engine
    rollout: Rollout
    examination: Rollout
    line: Line
    ledger: Ledger
    credit: Callable[[Sequence[Group]], list[Credited]]
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
        return await asyncio.get_running_loop().run_in_executor(self.worker, partial(function, *arguments))

    async def aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run what waits for the disk in its own thread."""
        return await asyncio.get_running_loop().run_in_executor(self.disk, partial(function, *arguments))
