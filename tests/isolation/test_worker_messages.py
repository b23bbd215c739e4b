"""Messages between the run and a worker process, whose other end is this test.

An answer that arrives as its call is cancelled ends no worker. A worker that reads a long message
slowly is not ended.
"""

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waits import LIMIT_S
from unstale.isolation import process
from unstale.isolation.process import ConcurrentWorker, LockstepWorker
from unstale.isolation.wire import Row
from unstale.records import Task
from unstale.weights.child_process import Frames, frame

TASK = Task("toy", "train", 0)
SLOW_S = 0.2
"""Seconds after which the other end reads, 20 times `process.TICK_S` of this test."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Return the other ends of workers. Their processes do nothing."""
    found: list[socket.socket] = []

    def begin(command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> Any:
        found.append(socket.socket(fileno=os.dup(pass_fds[0])))
        return subprocess.Popen(["sleep", "600"], start_new_session=True)

    fake = SimpleNamespace(
        Popen=begin, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(process, "subprocess", fake)
    yield found
    for each in found:
        each.close()


def send(end: socket.socket, *rows: Row) -> None:
    for row in rows:
        end.sendall(b"".join(frame(row)))


def test_an_answer_to_a_call_that_was_just_cancelled_ends_no_worker(
    ends: list[socket.socket],
) -> None:
    async def main() -> None:
        worker = ConcurrentWorker({}, 1.0, lambda worker: None)
        try:
            send(ends[0], {"op": "ready"})
            await worker.ready()
            cancelled, other = (asyncio.create_task(worker.call(0, "step", TASK)) for _ in range(2))
            await asyncio.sleep(0)
            send(ends[0], *({"op": "answer", "call": number} for number in range(2)))
            await asyncio.sleep(0)  # the event loop reads the answer after this task's next part
            cancelled.cancel()
            assert await other == {"op": "answer", "call": 1}
            assert cancelled.cancelled() and not worker.ended
        finally:
            worker.end("the test has ended")

    asyncio.run(main())


def test_a_worker_in_lockstep_that_reads_a_long_message_slowly_is_not_ended(
    ends: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TICK_S", SLOW_S / 20)
    reply = "x" * (1 << 23)
    received: list[Row] = []

    def answer() -> None:
        send(ends[0], {"op": "ready"})
        threading.Event().wait(SLOW_S)
        frames = Frames()
        while not received and (data := ends[0].recv(1 << 20)):
            received.extend(row for row, _ in frames.feed(data))
        if received:
            send(ends[0], {"op": "answer", "call": 0}, {"op": "idle", "timers": []})

    async def main() -> None:
        worker = LockstepWorker({}, 1.0, lambda worker: None)
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            await worker.ready()
            found = await worker.call(0, "step", TASK, reply=reply)
            assert found == {"op": "answer", "call": 0}
        finally:
            worker.end("the test has ended")
            ends[0].shutdown(socket.SHUT_RDWR)
            thread.join(LIMIT_S)

    asyncio.run(main())
    assert received[0]["reply"] == reply
