"""A reward function of the user, computed in a pool of processes (`task.reward_processes`)."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from typing import Any

from unstale.config import ConfigError
from unstale.envs.elastic import ElasticPool, LineProcess
from unstale.envs.guard import DescribedError, is_coroutine

_PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from unstale.envs.reward_worker import main
main(sys.argv[1])
"""


class RewardProcesses:
    """A reward function whose calls run in other processes, one call at a time in each.

    A process that ends during a call is replaced, and the call is repeated once. A process whose
    call is cancelled is ended, because the function may never return.
    """

    def __init__(
        self, name: str, reward: Callable[..., Any], *, processes: int, min_processes: int
    ) -> None:
        """Check the function `reward`, which `name`, as `module:function`, names.

        At most `processes` run, and `min_processes` remain when idle. Raises `ConfigError` if
        another process cannot import the function, or if it waits without one.
        """
        given = f"task.reward_processes = {processes} cannot be used with task.reward = {name}"
        if name.startswith("__main__:"):
            raise ConfigError(
                f"{given}: other processes cannot import __main__. Move the function to a module"
            )
        if is_coroutine(reward):
            raise ConfigError(
                f"{given}: it is a coroutine function, which waits in the run's process. Make it "
                "a plain function, or for a RewardModel give `processes` to its constructor"
            )
        update_wrapper(self, reward)
        self.pool = ElasticPool(
            self._start,
            name="",
            ended=DescribedError,
            failed=DescribedError,
            fewest=min_processes,
            most=processes,
            ends_abandoned=True,
        )
        self._name = name

    async def __call__(self, reply: str, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the rewards by name. Raises `DescribedError` if the function raises an error."""
        try:
            item = json.loads(json.dumps([reply, row]))
        except (TypeError, ValueError) as error:
            raise DescribedError(
                f"task.reward_processes sends rows as JSON, and this row cannot be sent: {error}"
            ) from None
        return dict(await self.pool.ask(item))

    def _start(self, number: int) -> LineProcess:
        path = json.dumps([each or os.getcwd() for each in sys.path])
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # unless the user sets others
        return LineProcess(["-c", _PROGRAM, self._name, path], {**threads, **os.environ})
