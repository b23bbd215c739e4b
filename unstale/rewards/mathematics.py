"""A reward for mathematical answers, which the library math-verify compares.

The library limits its own time by signals, which work only in a main thread, but reward functions
run in other threads. So it runs in worker processes without its own limits. The kernel ends a
worker that takes too much CPU time, and refuses it memory above a limit.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from unstale.config import install
from unstale.envs.numbers import with_plain_numbers
from unstale.rewards.workers import WorkerPool

if find_spec("math_verify") is None:
    raise ImportError(f"it needs math-verify: {install('math')}")

_POOL = WorkerPool("math_worker.py")


def math_answer(reply: str, row: Mapping[str, Any]) -> float:
    r"""Return 1 if the reply's answer equals the `answer` of the task's row as mathematics, else 0.

    This is a reward function for the environment `dataset`. It needs the extra `math`. The answer
    is the last `\boxed{}` of the reply. If there is none, it is what follows "answer is", the last
    formula or the last number. `answer` is a number or LaTeX, with or without `$`; a text with
    `####`, as in GSM8K; or a solution with `\boxed{}`. Numbers are compared exactly if both are
    whole, otherwise to 6 decimals. A reply that takes more than 3 s of CPU time gets 0. Raises
    ValueError if `answer` cannot be read.

    >>> math_answer(r"So it is \boxed{\frac{2}{4}}.", {"answer": "0.5"})
    1.0
    """
    expected = with_plain_numbers(str(row["answer"]))
    with _POOL.worker() as worker:
        worker.send([expected, with_plain_numbers(reply)])
        if worker.line() != b"read":
            raise ValueError(f"the answer cannot be read as mathematics: {expected[:200]!r}")
        return float(worker.line() == b"1")
