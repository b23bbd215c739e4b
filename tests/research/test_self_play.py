"""Games for two players in which one policy plays both seats, each a role with its own credit."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.test_external import CHAT, SUMS, TASK, World, halves, says, whole
from unstale.algorithms import advantages
from unstale.config import ConfigError, make_task
from unstale.engines import SamplingParams
from unstale.envs.external import ExternalAgent
from unstale.envs.registry import build_taskset
from unstale.records import ContextPiece, Group, GroupRequest, Sampled, Trajectory

textarena = pytest.importorskip("textarena", reason="the extra textarena is not installed")
pytestmark = pytest.mark.usefixtures("forked_children")

ROOM = 8192


def selfplay(game: str = "Nim-v0") -> Any:
    return build_taskset(make_task(f"textarena:{game}"))


def mover(tokens: Sequence[int], params: SamplingParams) -> list[int]:
    """A policy that plays tic-tac-toe: the first free cell of an order that its seed decides."""
    board = CHAT.text(tokens, whole=True).rpartition("Available Moves:")[2]
    free = [cell for cell in range(9) if f"[{cell}]" in board]
    return says(f"[{sorted(free, key=lambda cell: (cell * 7 + params.seed) % 9)[0]}]")


def test_both_seats_are_roles_with_their_own_reward() -> None:
    tasks = selfplay("TicTacToe-v0")
    world = World(mover, max_context=ROOM)
    found = whole(world.play(tasks.play, [1], roles=tasks.roles))
    first, second = found.conversations
    assert (first.role, second.role) == ("first", "second")
    assert first.num_turns - second.num_turns in (0, 1) and first.num_turns >= 3
    assert first.role_reward == -second.role_reward
    assert {*found.rewards} == {"first/game", "second/game"}
    texts = [CHAT.text(each.tokens, whole=True) for each in (first, second)]
    assert "As Player 0" in texts[0] and "As Player 1" not in texts[0]
    assert "As Player 1" in texts[1] and "As Player 0" not in texts[1]


def test_credit_of_a_zero_sum_game_is_enumerated() -> None:
    """All groups of two games of matching pennies, against the derivatives of each seat's value.

    The first seat wins if both choose alike. Its logit is for 1, and so is the second one's.
    """
    shares = (0.7, 0.4)
    choices = list(product((0, 1), repeat=2))

    def chance(seat: int, choice: int) -> float:
        return shares[seat] if choice else 1 - shares[seat]

    def game(one: int, two: int) -> Trajectory:
        won = 1.0 if one == two else -1.0
        rewards = {"first/game": won, "second/game": -won}
        main, branch = (
            Trajectory(
                (ContextPiece((1,)), Sampled((choice,), (-1.0,), 0)),
                rewards,
                "done",
                TASK,
                0,
                role=role,
            )
            for role, choice in (("first", one), ("second", two))
        )
        return Trajectory(main.pieces, rewards, "done", TASK, 0, role="first", branches=(branch,))

    found: dict[str, float] = defaultdict(float)
    for one, other in product(choices, repeat=2):
        likely = chance(0, one[0]) * chance(1, one[1]) * chance(0, other[0]) * chance(1, other[1])
        for item, (place, seat) in zip(
            advantages.rloo([Group(TASK, (game(*one), game(*other)))]),
            product((one, other), (0, 1)),
            strict=True,
        ):
            assert item.trajectory.role == ("first", "second")[seat]
            slope = place[seat] - chance(seat, 1)
            found[item.trajectory.role] += likely / 2 * slope * item.advantage[0]

    # the value of the first seat is (2p - 1)(2q - 1), and d p / d logit is p (1 - p)
    p, q = shares
    assert found["first"] == pytest.approx(2 * (2 * q - 1) * p * (1 - p), abs=1e-12)
    assert found["second"] == pytest.approx(-2 * (2 * p - 1) * q * (1 - q), abs=1e-12)


@pytest.mark.parametrize("after", [1, 4])
def test_resumed_games_are_equal(tmp_path: Path, after: int) -> None:
    tasks = selfplay("TicTacToe-v0")

    async def play(base_url: str, task: str, seed: int, api_key: str) -> dict[str, float]:
        return await tasks.play(base_url, 1, seed, api_key)

    group, _, _ = halves(tmp_path, play, after=after, reply=mover, room=ROOM, roles=tasks.roles)
    again = World(mover, max_context=ROOM)

    async def undisturbed() -> Group:
        async with again.open():
            played = ExternalAgent(play, SUMS, name="sums", roles=tasks.roles)
            return await again.rollout(played).group(GroupRequest(0, TASK, 0, 0), size=2)

    other = asyncio.run(undisturbed())
    assert content(group) == content(other)


def content(group: Group) -> Any:
    return [
        sorted((one.role, one.tokens, one.role_reward) for one in each.conversations)
        for each in group.trajectories
    ]


def test_seeds_of_held_out_games_are_no_training_seeds() -> None:
    tasks = selfplay()
    assert not {*tasks.data["train"]} & {*tasks.data["held_out"]}
    with pytest.raises(ConfigError, match="textarena has no 'Nim'"):
        selfplay("Nim")
