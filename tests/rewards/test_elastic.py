"""Test the pool of reward processes.

The number of processes over time is fixed by arrivals and service times, on a simulated clock. No
value depends on which process computed it, or on their number. A process that ends is replaced, and
its request is repeated once.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.rewards.test_reward_model import save
from tests.support.waits import LIMIT_S, until, wait_until
from unstale.analysis.planner.clock import SimulatedClock
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.rewards import SimulatedRewards
from unstale.analysis.planner.simulate import Constant, Fleet, Workload, simulate
from unstale.config import ConfigError, ScheduleConfig, make_task
from unstale.durability import virtual_clock
from unstale.envs import EnvError, Message
from unstale.envs.elastic import ElasticPool, LineProcess, PoolSize, read_pools
from unstale.envs.registry import build_taskset
from unstale.envs.reward_processes import RewardProcesses
from unstale.rewards.reward_model import RewardModel

FUNCTIONS = """
import asyncio, os, time

def length(reply, row):
    if reply == "die" or (reply == "die once" and not os.path.exists(row["flag"])):
        open(row["flag"], "w").close()
        os._exit(3)
    if reply == "bad":
        raise ValueError("not good")
    if reply == "hang":
        open(row["flag"], "w").close()
        time.sleep(1000)
    if reply == "children":  # they have the pipes of this process
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(3)
    if reply == "wait":
        while not os.path.exists(row["flag"]):
            time.sleep(0.01)
    print("noise")
    return {"length": len(reply), "process": os.getpid()}

async def waits(reply, row):
    return 1.0
"""


def sizes(
    size: PoolSize, arrivals: Sequence[tuple[float, float]], last: float
) -> tuple[list[tuple[float, int]], list[float]]:
    """Return (time, number of processes) at each change, and when each reward is known.

    `arrivals` has the time of each request and the seconds that it takes. A start takes 2 s.
    """

    async def simulate() -> tuple[list[tuple[float, int]], list[float]]:
        clock, ends = SimulatedClock(), []
        pool = SimulatedRewards(clock, size, start_s=2.0)
        for at, seconds in arrivals:
            clock.at(at, lambda s=seconds: pool.compute(s, lambda: ends.append(clock.now)))
        await clock.sleep(last)
        return pool.sizes, ends

    return virtual_clock.run(simulate(), virtual=True)


BURST = [(0.0, 0.7)] * 12


def test_the_pool_grows_while_requests_wait_and_ends_what_is_idle() -> None:
    """The first process is ready at 2. While requests wait, others start at 4 and 6, and are ready
    at 6 and 8. From 7.6 on nothing waits. The idle ones end after ten starts, 20 s.
    """
    changes, ends = sizes(PoolSize(1, 4), BURST, last=100)
    assert [number for _, number in changes] == [1, 2, 3, 2, 1]
    assert [at for at, _ in changes] == pytest.approx([2, 6, 8, 28, 28.1])
    wanted = [2.7, 3.4, 4.1, 4.8, 5.5, 6.2, 6.7, 6.9, 7.4, 7.6, 8.1, 8.3]
    assert ends == pytest.approx(wanted)


def test_a_pool_of_one_does_not_change() -> None:
    changes, ends = sizes(PoolSize(1, 1), BURST, last=1000)
    assert changes == [(2, 1)] and ends == pytest.approx([2.7 + 0.7 * i for i in range(12)])


def test_no_process_remains_of_a_pool_with_a_minimum_of_none() -> None:
    changes, _ = sizes(PoolSize(0, 4), [(0.0, 1.0), (50.0, 1.0)], last=200)
    assert changes == [(2, 1), (23, 0), (52, 1), (73, 0)]


def test_waits_of_several_bursts_add_up() -> None:
    """A request waits 1.2 s in each burst of two. So the second start is in the second burst, after
    0.8 s.
    """
    bursts = [(10.0 * i, 1.2) for i in range(1, 6) for _ in range(2)]
    changes, _ = sizes(PoolSize(1, 4), bursts, last=60)
    assert [number for _, number in changes] == [1, 2]
    assert [at for at, _ in changes] == pytest.approx([12, 22.8])


def test_a_simulated_step_waits_for_the_rewards() -> None:
    """A step has 8 rewards of 1 s and 0.1 s of training. Its replies take no time."""

    def step_s(**processes: int) -> float:
        result = simulate(
            Workload(prompt_tokens=Constant(8), reply_tokens=Constant(8), reward_s=Constant(1)),
            Fleet(reward_start_s=0.5, **processes),
            ScheduleConfig(max_staleness=0, groups_per_step=2, group_size=4),
            LinearCosts(train=0.1),
            steps=5,
        )
        return result.mean_step_s

    assert step_s() == pytest.approx(8.1)
    assert step_s(reward_processes=4, min_reward_processes=4) == pytest.approx(2.1)
    with pytest.raises(ConfigError, match=r"fleet.min_reward_processes must be at most 1"):
        Fleet(min_reward_processes=2)


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"functions_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def length(functions: str) -> Iterator[RewardProcesses]:
    module = __import__(functions)
    name = f"{functions}:length"
    made = RewardProcesses(name, module.length, processes=2, min_processes=0)
    yield made
    made.pool.close()


def test_a_function_runs_in_processes_that_are_replaced(
    length: RewardProcesses, tmp_path: Path
) -> None:
    flag = {"flag": str(tmp_path / "died")}

    async def compute() -> None:
        async with asyncio.timeout(LIMIT_S):
            first = await length("once", {})
            assert first["length"] == 4.0 and first["process"] != os.getpid()
            again = await length("die once", flag)
            assert again["length"] == 8.0 and again["process"] != first["process"]
            with pytest.raises(EnvError, match=r"^its process has ended with exit code 3"):
                await length("die", flag)
            with pytest.raises(EnvError, match=r"^ValueError: not good .*line 9, in length"):
                await length("bad", flag)
            assert (await length("after", flag))["length"] == 5.0
        read = read_pools()
        assert read["reward_pool/starts"] == 4 and read["reward_pool/ends"] == 3
        assert read_pools()["reward_pool/starts"] == 0

    asyncio.run(compute())


def test_a_call_that_is_cancelled_ends_its_process(length: RewardProcesses, tmp_path: Path) -> None:
    started = tmp_path / "started"

    async def compute() -> None:
        hung = asyncio.create_task(length("hang", {"flag": str(started)}))
        async with asyncio.timeout(LIMIT_S):
            await until(started.exists, "a call that hangs")
            before = length.pool.pids
            hung.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hung
            found = await length("other", {})
            assert found["length"] == 5.0 and found["process"] not in before

    asyncio.run(compute())


def test_a_cancelled_call_is_not_repeated(length: RewardProcesses, tmp_path: Path) -> None:
    """Its process was killed, and it waits for the next one."""
    started = tmp_path / "started"
    length.pool.size.most = 1

    async def compute() -> None:
        async with asyncio.timeout(LIMIT_S):
            hung = asyncio.create_task(length("hang", {"flag": str(started)}))
            await until(started.exists, "a call that hangs")
            os.kill(length.pool.pids[0], signal.SIGKILL)
            await until(lambda: not length.pool.pids, "the end of its process")
            hung.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hung
            started.unlink()
            assert (await length("other", {}))["length"] == 5.0
        assert not started.exists()

    asyncio.run(compute())


def test_the_children_of_a_process_end_with_it(length: RewardProcesses) -> None:
    """The output of a process does not end before that of its children."""

    async def compute() -> None:
        async with asyncio.timeout(LIMIT_S):
            length.pool.size.most = 1
            await length("first", {})
            left = asyncio.create_task(length("children", {}))
            (pid,) = length.pool.pids
            await until(lambda: has_ended(pid), "the end of the process")
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            assert (await length("after", {}))["length"] == 5.0

    asyncio.run(compute())


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, also before its parent has asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_much_output_is_not_in_a_later_error() -> None:
    program = (
        "import os; print('{}', flush=True); input(); os.write(2, b'x' * (2 << 20));"
        "print('[1]', flush=True); input(); os.write(2, b'last words')"
    )
    process = LineProcess(["-c", program], os.environ)
    assert process.first_line() == {}
    assert process.ask(["{}"]) == [1] and process.ask(["{}"]) == []
    assert process.end() == "its process has ended with exit code 0: last words"
    process.close()


def test_another_process_starts_when_a_request_waits(
    length: RewardProcesses, tmp_path: Path
) -> None:
    """The first call holds its process until the second was answered by another one."""
    flag = tmp_path / "second"

    async def compute() -> None:
        async with asyncio.timeout(LIMIT_S):
            held = asyncio.create_task(length("wait", {"flag": str(flag)}))
            await asyncio.sleep(0)  # it is the first
            second = await length("second", {})
            flag.touch()
            first = await held
        assert (first["length"], second["length"]) == (4.0, 6.0)
        assert first["process"] != second["process"]

    asyncio.run(compute())


def test_a_task_set_uses_the_option(functions: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    env = f"dataset:{tmp_path / 'rows.jsonl'}"
    options = {"reward_processes": 2, "held_out_share": 0}
    task = make_task(env, reward=f"{functions}:length", **options)

    async def play() -> float:
        tasks = build_taskset(task)
        env = tasks.env(next(iter(tasks.train(0))), 0)
        await env.begin()
        rewards = (await env.step(Message("assistant", "four"))).rewards
        assert rewards["process"] != os.getpid()
        with pytest.raises(EnvError, match=r"^the reward function length: ValueError: not good"):
            await env.step(Message("assistant", "bad"))
        return rewards["length"]

    assert asyncio.run(play()) == virtual_clock.run(play(), virtual=True) == 4.0
    with pytest.raises(ConfigError, match="it is a coroutine function"):
        build_taskset(make_task(env, reward=f"{functions}:waits", **options))
    with pytest.raises(ConfigError, match=r"computes rewards in its task.workers: set one"):
        make_task(env, reward=f"{functions}:length", isolate="process", **options)
    with pytest.raises(ConfigError, match=r"min_reward_processes must be at most 2 .*got 3"):
        make_task(env, reward=f"{functions}:length", min_reward_processes=3, **options)


@pytest.mark.costly
def test_scores_do_not_depend_on_the_processes(tmp_path: Path) -> None:
    """Bit for bit, if each conversation has its own forward pass. First one process computes all
    scores, then another one, which also repeats what the first had when it was killed.
    """
    model = RewardModel(save(tmp_path / "liking"), largest_batch=1, processes=2)
    texts = [f"w{3 + i % 60} w{7 + i % 50}" for i in range(24)]

    async def score() -> list[dict[str, float]]:
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(model.reward(text, {"prompt": "w30"}) for text in texts))

    try:
        wanted = asyncio.run(score())
        version = model.version
        model.pool.size.fewest = 2
        assert asyncio.run(score()) == wanted
        wait_until(lambda: len(model.pool.pids) == 2, "the second process")
        os.kill(model.pool.pids[0], signal.SIGKILL)
        assert asyncio.run(score()) == wanted
        assert all(list(each) == [f"liking@{version}"] for each in wanted)
    finally:
        model.close()


def answering(first_lines: Sequence[str]) -> ElasticPool:
    """Return a pool whose n-th process prints the n-th line, and ends at its first request."""
    lines = iter(first_lines)

    def start(number: int) -> LineProcess:
        return LineProcess(["-c", f"print({next(lines)!r}, flush=True); input()"], os.environ)

    return ElasticPool(start, name="model M", ended=EnvError, fewest=0, most=2)


def test_a_model_whose_files_change_is_refused() -> None:
    pool = answering(['{"version": "1a"}', '{"version": "2b"}'])
    for _ in range(2):  # the cause remains
        with pytest.raises(EnvError, match=r"^model M: its files have changed from .* 1a to 2b"):
            pool.submit("item").result(LIMIT_S)
    assert pool.versions == {"1a"} and pool.starts == 2
    pool.close()


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("print('hello'); print('{}', flush=True); input(); print('[0.', end='', flush=True)", ""),
        ("print('{', end='', flush=True)", ""),
        ("raise SystemExit('no such disk')", ": no such disk"),
    ],
)
def test_a_process_that_ends_within_a_line_fails_its_request(program: str, problem: str) -> None:
    def start(number: int) -> LineProcess:
        return LineProcess(["-c", f"{program}; import os; os._exit(3)"], os.environ)

    pool = ElasticPool(start, name="", ended=EnvError, fewest=0, most=1)
    with pytest.raises(EnvError, match=f"^its process has ended with exit code [13]{problem}$"):
        pool.submit("item").result(LIMIT_S)
    pool.close()


def test_what_cannot_be_sent_is_an_error_of_the_request() -> None:
    pool = answering(["{}"])
    with pytest.raises(EnvError, match=r"^model M: requests are sent as JSON, .* set is not JSON"):
        pool.submit({1})
    pool.close()


def test_closing_fails_what_waits() -> None:
    pool = answering(["{}"])
    found = pool.submit("item")
    pool.close()
    with pytest.raises(EnvError, match=r"^model M: it was closed$"):
        found.result(LIMIT_S)


@pytest.mark.costly
def test_errors_of_processes_and_devices(tmp_path: Path) -> None:
    folder = save(tmp_path / "liking")
    with pytest.raises(ConfigError, match=r"min_processes from 0 to processes, got 1 and 2"):
        RewardModel(folder, processes=1, min_processes=2)
    with pytest.raises(ConfigError, match=r"largest_batch must be at least 1, got 0"):
        RewardModel(folder, largest_batch=0)
    with pytest.raises(ConfigError, match=r"devices must be a list .* got 'cpu'"):
        RewardModel(folder, devices="cpu")
    away = RewardModel(folder, devices=("77",))
    with pytest.raises(EnvError, match=r"there is no GPU 77: name other `devices`"):
        asyncio.run(away.reward("w5", {"prompt": "w3"}))
    away.close()
