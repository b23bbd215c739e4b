"""Test the limit on failed episodes: one broken task, or fast failures, must not end a run."""

from typing import Any

import pytest

from unstale.records import Failure, Task
from unstale.rollout.failures import FailureLimit, TooManyFailures


def broken(group: int) -> Failure:
    return Failure(Task("toy", "train", group), "begin", "EnvError: gone")


def limit_with(*groups: int, size: int) -> FailureLimit:
    limit = FailureLimit(0.2)
    for group in groups:
        limit.begin(group, size)
    return limit


def test_a_broken_task_counts_once_however_large_its_group() -> None:
    limit = limit_with(0, size=256)
    for _ in range(256):
        limit.failed(0, broken(0))


def test_groups_that_run_count_as_without_failures() -> None:
    """Of 48 groups that begin, 3 fail at once, and no other episode has ended yet."""
    limit = limit_with(*range(48), size=8)
    for group in range(3):
        for _ in range(8):
            limit.failed(group, broken(group))


def test_too_many_broken_tasks_end_the_run_with_the_last_error() -> None:
    limit = limit_with(*range(48), size=2)
    message = (
        r"20.8% of the episodes of the 48 groups failed, more than rollout.max_failed_share = 0.2 "
        r"allows; the last one in begin of toy/train/9: EnvError: gone"
    )
    with pytest.raises(TooManyFailures, match=message):
        for group in range(10):
            for _ in range(2):
                limit.failed(group, broken(group))
    assert group == 9  # 19 of 96 episodes are allowed, and the 20th is of this group


def one_in(share: int, limit: FailureLimit, groups: range) -> None:
    for group in groups:
        limit.begin(group, 4)
        for sibling in range(4):
            if sibling % share:
                limit.succeeded(group)
            else:
                limit.failed(group, broken(group))
        limit.end(group)


def test_the_share_is_that_of_episodes_and_of_the_latest_groups() -> None:
    limit = FailureLimit(0.3)
    one_in(4, limit, range(1000))  # a quarter of each group
    with pytest.raises(TooManyFailures, match=r"30\.[1-5]% of the episodes of the last 100 groups"):
        one_in(2, limit, range(1000, 2000))  # half of each
    assert limit_size(limit) <= 101


def limit_size(limit: Any) -> int:
    return max(len(limit._sizes), len(limit._shares), len(limit._silent))


def test_a_resumed_run_counts_the_groups_before_the_resume() -> None:
    limit = FailureLimit(0.2)
    limit.restore([0.0] * 15 + [1.0] * 4)
    limit.begin(19, 4)
    with pytest.raises(TooManyFailures, match=r"2[01].\d% of the episodes"):
        for _ in range(2):
            limit.failed(19, broken(19))
