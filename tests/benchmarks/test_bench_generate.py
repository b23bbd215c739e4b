"""Test the workload and the figures of the generation benchmark."""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.generate import (
    GOALS,
    LABELS,
    Player,
    _line,
    _must_play,
    make_model,
    own_growth,
    workload,
)
from benchmarks.generate_peers import GenerateDivided
from tests.support.waits import wait_until


def test_everyone_plays_the_same_and_groups_share_their_opening() -> None:
    episodes = workload(16, 50, seed=3)
    assert episodes == workload(16, 50, seed=3) != workload(16, 50, seed=4)
    assert len(episodes) == 20
    openings = [opening for opening, _ in episodes]
    assert openings[0] == openings[7] != openings[8] == openings[15]
    longest = max(
        len(opening) + sum(length + len(tool) for length, tool in turns)
        for opening, turns in episodes
    )
    assert 300 < longest < 700


def test_a_line_has_the_ratio_the_goal_or_why_there_is_none() -> None:
    found = {"ours 64": [200.0, 300.0], "vllm 64": [100.0, 100.0]}
    what = ("1M", "float32", 64)
    assert "2.50 (2.00 to 3.00) | met: 2.50 of 2.5, in 2 rounds" in _line(
        what, "vllm", found, "", 1e-6
    )
    assert "not run: no .venv-peers" in _line(what, "generate", found, "no .venv-peers", None)
    assert {"ours", "ours-threads", *GOALS} == set(LABELS)


def test_growth_is_taken_round_by_round() -> None:
    lines = own_growth({"1M": {"ours 64": [10.0, 20.0, 5.0], "ours 256": [20.0, 20.0, 7.5]}})
    assert lines[-1] == "| 1M | 1.50 (1.00 to 2.00) | missed: 1.50 of 1.6, in 3 rounds |"
    assert own_growth({"1M": {"ours 64": [10.0]}}) == []


@pytest.mark.costly
def test_a_peer_in_several_processes_plays_all_of_it(tmp_path: Path) -> None:
    make_model("tiny", tmp_path)
    episodes = [
        (opening[:8], [(3, result[:2]) for _, result in turns])
        for opening, turns in workload(16, 128, seed=0)
    ]
    divided = GenerateDivided(tmp_path, "float32", 2)
    try:
        sampled, (context, tokens, logp) = divided.play(episodes, 4)
    finally:
        divided.close()
    assert sampled == sum(3 * len(turns) for _, turns in episodes)
    assert context[:8] == episodes[0][0] and len(tokens) == len(logp) == 3


@pytest.fixture
def players_of(tmp_path: Path) -> Iterator[Callable[..., Player]]:
    make_model("tiny", tmp_path)
    started = []

    def start(kind: str, *, limit: float = 60, threads: int = 1) -> Player:
        asked = argparse.Namespace(limit=limit, threads=threads, cpu_time=False)
        started.append(Player(kind, tmp_path, arguments=asked, dtype="float32"))
        return started[-1]

    yield start
    for player in started:
        player.close()


@pytest.mark.costly
def test_our_engines_stop_and_end_with_their_contestant(players_of: Callable[..., Player]) -> None:
    player = players_of("ours", threads=2)
    each = list(player._groups)
    assert len(each) == 3
    wait_until(lambda: all(_state(pid) == "T" for pid in each), "the stop")
    answer = player.play(workload(2, 128, seed=0), 2, warm=True)
    assert answer is not None, player.error
    assert answer[0] > 0
    player.close()
    wait_until(lambda: all(_state(pid) in "ZX" for pid in each), "the end")


def test_one_that_does_not_answer_is_left_out(players_of: Callable[..., Player]) -> None:
    player = players_of("ours", limit=0.01)
    assert player.error == "no answer within 0.01 s"
    assert player.play(workload(2, 128, seed=0), 2) is None
    with pytest.raises(SystemExit, match="ours: no answer"):
        _must_play("ours", player)


def _state(pid: int) -> str:
    path = Path(f"/proc/{pid}/stat")
    return path.read_text().split()[2] if path.exists() else "X"
