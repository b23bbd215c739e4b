"""The program of a process that computes a reward function, which `reward_processes` starts.

    python -c PROGRAM MODULE:FUNCTION

It prints a line of JSON when the function is imported. Each line of its input is a list of pairs of
a reply and a row. It prints a list with rewards by name, or an error text, for each of them.
"""

import asyncio
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from unstale.config import ConfigError
from unstale.envs import EnvError, read_rewards
from unstale.envs.dataset import load_reward
from unstale.envs.guard import describe
from unstale.frames import one_line


def main(name: str) -> None:
    """Answer each line of standard input until it ends. `name` is that of the reward function.

    The function runs in the main thread, so it may use signals.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the function prints
    try:
        reward = load_reward(name)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    print(json.dumps({}), file=answers, flush=True)
    while True:
        found = [_answer(reward, *pair) for pair in json.loads(lines.get())]
        print(json.dumps(found), file=answers, flush=True)


def _read(lines: "SimpleQueue[str]") -> None:
    """Put each line of input into the queue. End the process with the input, also while the
    function runs.
    """
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _answer(
    reward: Callable[..., Any], reply: str, row: Mapping[str, Any]
) -> dict[str, float] | str:
    try:
        value = reward(reply, row)
        return read_rewards(asyncio.run(value) if inspect.iscoroutine(value) else value, "")
    except EnvError as error:
        return one_line(str(error))
    except Exception as error:  # noqa: BLE001 - it becomes an error of the episode
        return describe(error)
