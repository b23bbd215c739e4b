"""Test the virtual clock.

Timers fire in order and without waiting; equal ones always in the same order. Work in other threads
takes a fixed virtual time. A wait that cannot end is an error. Two runs are identical. A server of
the loop is reached in memory, and nothing else is.
"""

import asyncio
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from unstale.durability.virtual_clock import WORK_S, Stalled, run
from unstale.envs.guard import UnjoinedThreads

HOUR = 3600.0


def now() -> float:
    return asyncio.get_running_loop().time()


def naps(heard: list[tuple[str, float]]) -> None:
    """Start five sleepers, three of them equally long."""

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        heard.append((name, now()))

    async def main() -> None:
        naps = [
            ("late", 3 * HOUR),
            ("tie 1", HOUR),
            ("early", 0.001),
            ("tie 2", HOUR),
            ("tie 3", HOUR),
        ]
        async with asyncio.TaskGroup() as tasks:
            for name, seconds in naps:
                tasks.create_task(nap(name, seconds))

    run(main(), virtual=True)


def test_timers_jump_in_order_and_ties_are_settled_the_same_way_every_time() -> None:
    heard: list[tuple[str, float]] = []
    began = time.monotonic()
    for _ in range(3):
        naps(heard)
    assert time.monotonic() - began < HOUR / 60
    assert heard[:5] == heard[5:10] == heard[10:]
    assert [at for _, at in heard[:5]] == [0.001, HOUR, HOUR, HOUR, 3 * HOUR]
    assert {name for name, _ in heard[1:4]} == {"tie 1", "tie 2", "tie 3"}


def test_what_a_thread_does_takes_the_same_time_and_others_go_on_meanwhile() -> None:
    ticks: list[float] = []

    def work(seconds: float) -> int:
        time.sleep(seconds)
        return threading.get_ident()

    async def tick() -> None:
        while True:
            await asyncio.sleep(WORK_S / 4)
            ticks.append(now())

    async def main() -> tuple[list[int], float]:
        with ThreadPoolExecutor(1) as worker:
            loop, ticking = asyncio.get_running_loop(), asyncio.ensure_future(tick())
            idents = [await loop.run_in_executor(worker, work, seconds) for seconds in (0.02, 0.0)]
            idents.append(await asyncio.to_thread(work, 0.0))
            ticking.cancel()
            return idents, now()

    idents, ended = run(main(), virtual=True)
    assert ended == pytest.approx(3 * WORK_S) and len(ticks) in (11, 12)
    assert idents[0] == idents[1] and threading.get_ident() not in idents


def test_what_a_thread_raises_comes_through_where_it_is_waited_for() -> None:
    def broken() -> None:
        raise ZeroDivisionError("in the thread")

    async def main() -> None:
        with pytest.raises(ZeroDivisionError, match="in the thread"):
            await asyncio.to_thread(broken)
        forgotten = asyncio.get_running_loop().run_in_executor(None, broken)
        forgotten.cancel()  # nobody waits for it any more
        await asyncio.sleep(2 * WORK_S)

    run(main(), virtual=True)
    with pytest.raises(ZeroDivisionError):
        run(asyncio.to_thread(broken), virtual=True)


def test_a_time_out_comes_at_its_time() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HOUR):
                await asyncio.Event().wait()
        assert now() == HOUR
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(HOUR), 60)
        assert now() == HOUR + 60

    run(main(), virtual=True)


def test_a_wait_that_can_never_end_is_an_error_and_cleans_up() -> None:
    left: list[str] = []

    async def waits(event: asyncio.Event) -> None:
        try:
            await event.wait()
        finally:
            left.append("left")

    async def main() -> None:
        event = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(waits(event))

    with pytest.raises(Stalled, match="deadlock in a deterministic run"):
        run(main(), virtual=True)
    assert left == ["left"] * 3


def test_the_end_waits_for_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio ends the default executor in a thread, which is slow on a busy machine."""
    shutdown = ThreadPoolExecutor.shutdown

    def slowly(executor: ThreadPoolExecutor, *args: bool, **options: bool) -> None:
        time.sleep(0.05)
        shutdown(executor, *args, **options)

    async def main() -> int:
        return await asyncio.to_thread(lambda: 3)

    monkeypatch.setattr(UnjoinedThreads, "shutdown", slowly)
    assert run(main(), virtual=True) == 3


def test_two_runs_are_the_same_whatever_the_threads_did() -> None:
    def once() -> list[tuple[str, float]]:
        trace: list[tuple[str, float]] = []
        queue: asyncio.Queue[int] = asyncio.Queue(2)

        async def produce(name: int) -> None:
            rng = random.Random(name)
            for number in range(20):
                await asyncio.sleep(rng.random())
                await asyncio.to_thread(
                    time.sleep, random.random() / 2000
                )  # as long as it happens to take
                await queue.put(number)
                trace.append((f"{name} put {number}", now()))

        async def consume() -> None:
            for _ in range(80):
                trace.append((f"got {await queue.get()}", now()))

        async def main() -> None:
            async with asyncio.TaskGroup() as tasks:
                for name in range(4):
                    tasks.create_task(produce(name))
                tasks.create_task(consume())

        run(main(), virtual=True)
        return trace

    one = once()
    assert len(one) == 160 and once() == one


def test_on_the_clock_of_the_world_nothing_jumps() -> None:
    async def main() -> float:
        began = time.monotonic()
        await asyncio.sleep(0.02)
        return time.monotonic() - began

    assert run(main(), virtual=False) >= 0.019


def test_a_server_of_the_loop_is_reached_in_memory_and_nothing_else_is() -> None:
    """The two ends read and close as with sockets. Another thread cannot connect."""
    sent = bytes(range(256)) * 4096

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.read())[::-1])
        await asyncio.sleep(HOUR)
        writer.write(b"end")
        writer.close()

    async def main() -> tuple[bytes, float]:
        listening = socket.create_server(("127.0.0.1", 0))
        host, port = listening.getsockname()
        async with await asyncio.start_server(answer, sock=listening):
            with pytest.raises(ConnectionRefusedError, match="Connection refused"):
                await asyncio.to_thread(socket.create_connection, (host, port), 5)
            began = now()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(sent)
            writer.write_eof()
            received = await reader.read()
            waited = now() - began
            writer.close()
            await writer.wait_closed()
            with pytest.raises(ConnectionRefusedError, match="only call the endpoint of the run"):
                await asyncio.open_connection(host, port + 1)
        with pytest.raises(ConnectionRefusedError, match="only call the endpoint of the run"):
            await asyncio.open_connection(host, port)
        return received, waited

    assert run(main(), virtual=True) == (sent[::-1] + b"end", HOUR)
