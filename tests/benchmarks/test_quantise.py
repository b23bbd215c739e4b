"""The figures of quantised rollouts are means over the steps of a run."""

import pytest

from benchmarks.quantise import discrepancy, sizes


def test_the_discrepancy_is_the_mean_over_steps() -> None:
    rows = [{}, {"correction/log_d_abs_mean": 0.001}, {"correction/log_d_abs_mean": 0.004}]
    assert discrepancy(rows) == pytest.approx(0.0025)


def test_a_whole_version_is_not_counted_among_the_differences() -> None:
    sent = [0, 2_000_000, 30_000, 50_000]  # the first step has published nothing yet
    assert sizes([{"publish/bytes": size} for size in sent]) == (2000, 40)
    assert sizes([{"publish/bytes": 2_000_000} for _ in range(3)]) == (2000, 2000)
