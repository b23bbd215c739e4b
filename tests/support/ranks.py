"""Run a function on several ranks of a process group, each in a separate process."""

import datetime
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tests.support.forked import CONTEXT
from tests.support.waits import LIMIT_S
from unstale.model.peers import RankGroup

PATIENCE = datetime.timedelta(seconds=LIMIT_S)


def run_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the results of `function(peers, *arguments)` on `count` ranks, in order of rank.

    Raises AssertionError with the traceback of the first rank that fails.
    """
    work = pickle.dumps((function, arguments))  # not multiprocessing's pickle, which shares memory
    pipes: list[Connection] = []
    processes = []
    with TemporaryDirectory() as folder:
        try:
            for rank in range(count):
                ours, theirs = CONTEXT.Pipe(duplex=False)
                place = (f"file://{folder}/group", rank, count)
                process = CONTEXT.Process(target=_work, args=(theirs, place, work), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _results(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(pipes: list[Connection]) -> list[Any]:
    """Return the results of all ranks. Fail with the first error: the others wait for that rank."""
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        left = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(left, PATIENCE.total_seconds())
        assert ready, f"{len(left)} of {len(pipes)} ranks did not answer"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            error, value = pickle.loads(pipe.recv_bytes())
            assert error is None, error
            results[pipes.index(pipe)] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(pipe: Connection, place: tuple[str, int, int], work: bytes) -> None:
    torch.set_num_threads(1)
    address, rank, count = place
    answer: tuple[str | None, Any]
    try:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=count, timeout=PATIENCE
        )
        function, arguments = pickle.loads(work)
        answer = None, function(RankGroup.of_group(), *arguments)
    except BaseException:  # noqa: BLE001 - the test that waits for it reports it
        answer = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(answer))
