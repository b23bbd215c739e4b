"""Tasks whose environment kills its own process."""

import os
import signal
from pathlib import Path

from tests.support.tiny_runs import EvenEnv, EvenTasks
from unstale.envs import Message, Turn
from unstale.records import Task

FLAG = "UNSTALE_TEST_KILLED"
"""Environment variable: a file that is written before the first kill. Without it, no kill follows
if the file exists. If it is empty, every episode of the task kills its process.
"""
FATAL = 3
"""Index, modulo 100, of the task whose second reply kills the process."""


def kill() -> None:
    """Kill this process, unless the file is there already."""
    flag = os.environ[FLAG]
    if flag and Path(flag).exists():
        return
    if flag:
        Path(flag).touch()
    os.kill(os.getpid(), signal.SIGKILL)


class KillingEnv(EvenEnv):
    _num_steps = 0

    async def step(self, reply: Message) -> Turn:
        self._num_steps += 1
        if self.task.index % 100 == FATAL and self._num_steps == 2:
            kill()
        return await super().step(reply)


class KillingTasks(EvenTasks):
    def env(self, task: Task, seed: int) -> KillingEnv:
        return KillingEnv(task, self)
