"""Question 1's workload and what is made of its figures."""

from benchmarks.generate import GOALS, _line, own_growth, workload


def test_everyone_plays_the_same_and_groups_share_their_opening() -> None:
    episodes = workload(16, 50, seed=3)
    assert episodes == workload(16, 50, seed=3) != workload(16, 50, seed=4)
    openings = [opening for opening, _ in episodes]
    assert openings[0] == openings[7] != openings[8] == openings[15]
    longest = max(len(opening) + sum(length + len(tool) for length, tool in turns) for opening, turns in episodes)
    assert 400 < longest < 1024


def test_a_line_has_the_ratio_the_goal_or_why_there_is_none() -> None:
    found = {"ours": [200.0, 300.0], "vllm": [100.0, 100.0]}
    what = ("1M", "float32", 64)
    assert "2.50 (2.00 to 3.00) | met: 2.50 of 1.5" in _line(what, "vllm", found, "", 1e-6)
    assert "not run: no .venv-peers" in _line(what, "generate", found, "no .venv-peers", None)
    assert set(GOALS) == {"generate", "vllm", "continuous"}


def test_growth_is_taken_round_by_round() -> None:
    lines = own_growth({"1M": {64: {"ours": [10.0, 20.0, 5.0]}, 256: {"ours": [20.0, 20.0]}}})
    assert lines[-1] == "| 1M | 1.50 (1.00 to 2.00) | met: 1.50 of 1.5 |"
    assert own_growth({"1M": {64: {"ours": [10.0]}}}) == []
