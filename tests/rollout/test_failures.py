"""Test the limit on failed episodes: one broken task, or fast failures, must not end a run."""

from collections.abc import Sequence

import pytest

from unstale.records import ContextPiece, Failure, Task, Trajectory
from unstale.rollout.failures import FailureLimit, TooManyFailures

TASK = Task("toy", "train", 7)
BROKEN = Failure(TASK, "begin", "EnvError: gone")
DONE = Trajectory((ContextPiece((1,)),), {"r": 1.0}, "done", TASK, 0)
LIMIT = 0.2


def run_groups(limit: FailureLimit, outcomes: Sequence[Sequence[Failure | Trajectory]]) -> int:
    """End groups while others begin. Return the number that ended before the limit was reached."""
    for number, each in enumerate(outcomes):
        try:
            limit.count(each)
        except TooManyFailures:
            return number
        limit.end()
        limit.begin()
    return len(outcomes)


def started(groups: int) -> FailureLimit:
    limit = FailureLimit(LIMIT)
    for _ in range(groups):
        limit.begin()
    return limit


def test_a_broken_task_counts_once_however_large_its_group() -> None:
    done = [[DONE] * 256] * 19
    assert run_groups(started(1), [*done, [BROKEN] * 256]) == 20


@pytest.mark.parametrize("groups", [48, 512, 3000])
def test_broken_tasks_that_fail_at_once_do_not_end_a_run(groups: int) -> None:
    """Of the groups that begin, 5% fail before any other ends."""
    broken = groups // 20
    assert run_groups(started(groups), [[BROKEN] * 8] * broken) == broken


@pytest.mark.parametrize("groups", [1, 48, 512, 3000])
def test_a_share_above_the_limit_ends_a_run_soon_after_all_first_groups(groups: int) -> None:
    """Of each three groups one is broken."""
    outcomes = [[[BROKEN] * 2, [DONE] * 2, [DONE] * 2][number % 3] for number in range(9000)]
    ended = run_groups(started(groups), outcomes)
    assert groups / 2 <= ended <= groups + 20


@pytest.mark.parametrize("groups", [1, 512])
def test_a_share_at_the_limit_ends_no_run(groups: int) -> None:
    outcomes = [[BROKEN, DONE, DONE, DONE, DONE]] * 5000
    assert run_groups(started(groups), outcomes) == 5000


def test_the_message_has_the_share_the_limit_and_the_last_error() -> None:
    limit = started(1)
    message = (
        r"50.0% of the episodes of the last 20 groups failed, more than rollout.max_failed_share "
        r"= 0.2 allows; the last one in begin of toy/train/7: EnvError: gone"
    )
    with pytest.raises(TooManyFailures, match=message):
        for _ in range(20):
            limit.count([BROKEN, DONE])
            limit.end()
            limit.begin()


def test_fewer_than_20_groups_are_not_judged() -> None:
    limit = started(19)
    for _ in range(19):
        limit.count([BROKEN])
        limit.end()


def test_a_resumed_run_counts_the_groups_before_the_resume() -> None:
    limit = FailureLimit(LIMIT)
    limit.restore([0.0] * 15 + [1.0] * 4)
    limit.begin()
    with pytest.raises(TooManyFailures, match=r"25.0% of the episodes of the last 20 groups"):
        limit.count([BROKEN] * 4)
