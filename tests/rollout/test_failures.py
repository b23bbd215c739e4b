"""Test the limit on failed episodes: one broken task, or fast failures, must not end a run."""

import heapq
from collections.abc import Callable
from random import Random

import pytest

from unstale.records import ContextPiece, Failure, Task, Trajectory
from unstale.rollout.failures import FailureLimit, TooManyFailures

TASK = Task("toy", "train", 7)
BROKEN = Failure(TASK, "begin", "EnvError: gone")
DONE = Trajectory((ContextPiece((1,)),), {"r": 1.0}, "done", TASK, 0)
LIMIT = 0.2
WHOLE_RUN = 5000


def ended_by(
    concurrent: int,
    is_broken: Callable[[int], bool],
    *,
    fails_after: float,
    in_waves: bool = False,
    size: int = 4,
) -> int:
    """Return how many groups ended before the limit ended the run, or `WHOLE_RUN`.

    Successes take 0.5 to 1.5, failures `fails_after`. Each group that ends is replaced at once, or
    in waves: when all of them have ended.
    """
    limit, random = FailureLimit(LIMIT), Random(0)
    running: list[tuple[float, int, bool]] = []
    now, num_ended = 0.0, 0

    def begin() -> None:
        number = limit.begin()
        broken = is_broken(number)
        seconds = fails_after if broken else random.uniform(0.5, 1.5)
        heapq.heappush(running, (now + seconds, number, broken))

    for _ in range(concurrent):
        begin()
    while num_ended < WHOLE_RUN:
        now, number, broken = heapq.heappop(running)
        num_ended += 1
        try:
            limit.count(number, [BROKEN if broken else DONE] * size)
        except TooManyFailures:
            return num_ended
        if not in_waves:
            begin()
        elif not running:
            for _ in range(concurrent):
                begin()
    return WHOLE_RUN


@pytest.mark.parametrize("fails_after", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("in_waves", [False, True])
@pytest.mark.parametrize("concurrent", [16, 128, 512, 2000])
def test_few_broken_tasks_end_no_run(concurrent: int, in_waves: bool, fails_after: float) -> None:
    """They fail at once, as soon as successes end, or later than these, by a time limit."""
    found = ended_by(
        concurrent, lambda number: number % 10 == 3, fails_after=fails_after, in_waves=in_waves
    )
    assert found == WHOLE_RUN


@pytest.mark.parametrize("fails_after", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("in_waves", [False, True])
@pytest.mark.parametrize("concurrent", [1, 16, 128, 512, 2000])
def test_many_broken_tasks_end_it(concurrent: int, in_waves: bool, fails_after: float) -> None:
    found = ended_by(
        concurrent, lambda number: number % 5 in (1, 3), fails_after=fails_after, in_waves=in_waves
    )
    assert found <= 5 * concurrent + 100


@pytest.mark.parametrize("concurrent", [1, 16, 128, 512, 2000])
def test_if_all_fail_the_run_ends_at_the_20th_group(concurrent: int) -> None:
    assert ended_by(concurrent, lambda number: True, fails_after=1.0) == 20


def test_a_broken_task_counts_once_however_large_its_group() -> None:
    found = ended_by(1, lambda number: number % 10 == 0, fails_after=1.0, size=256)
    assert found == WHOLE_RUN


def test_each_group_counts_by_the_share_of_its_failed_episodes() -> None:
    limit = FailureLimit(LIMIT)
    for _ in range(1000):
        limit.count(limit.begin(), [BROKEN, DONE, DONE, DONE, DONE])
    message = (
        r"20.3% of the episodes of 100 groups failed, more than rollout.max_failed_share = 0.2 "
        r"allows; the last one in begin of toy/train/7: EnvError: gone"
    )
    with pytest.raises(TooManyFailures, match=message):
        limit.count(limit.begin(), [BROKEN, DONE])


def test_fewer_than_20_groups_are_not_judged() -> None:
    limit = FailureLimit(LIMIT)
    for _ in range(19):
        limit.count(limit.begin(), [BROKEN])
    with pytest.raises(TooManyFailures):
        limit.count(limit.begin(), [BROKEN])


def test_a_cancelled_group_counts_as_one_without_failures() -> None:
    limit = FailureLimit(LIMIT)
    for _ in range(80):
        limit.end(limit.begin())
    for _ in range(20):
        limit.count(limit.begin(), [BROKEN])
    with pytest.raises(TooManyFailures, match=r"21\.0% of the episodes of 100 groups"):
        limit.count(limit.begin(), [BROKEN])


def test_a_resumed_run_counts_the_groups_before_the_resume() -> None:
    limit = FailureLimit(LIMIT)
    limit.restore([0.0] * 15 + [1.0] * 4)
    with pytest.raises(TooManyFailures, match=r"25.0% of the episodes of 20 groups"):
        limit.count(limit.begin(), [BROKEN] * 4)
