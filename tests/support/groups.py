"""Groups of hand-made episodes for tests of techniques."""

from collections.abc import Mapping, Sequence
from typing import Any

from unstale.records import ContextPiece, Group, Piece, Sampled, Task, Trajectory
from unstale.techniques.hooks import CreditContext

TASK = Task("toy", "train", 0)


def made(
    reward: float | Mapping[str, float] = 0.0,
    *,
    turns: Sequence[tuple[int, int]] = ((1, 2),),
    reply: int = 1,
    episode: int = 0,
    **fields: Any,
) -> Trajectory:
    """Return an episode. `turns` are pairs of an observation and an action, one token each.

    Each action is repeated `reply` times.
    """
    pieces: list[Piece] = []
    for observation, action in turns:
        sampled = Sampled((action,) * reply, (-0.5,) * reply, version=0)
        pieces += [ContextPiece((observation,)), sampled]
    rewards = reward if isinstance(reward, Mapping) else {"reward": float(reward)}
    values: dict[str, Any] = {"stop": "done", "task": TASK, "seed": 0, **fields}
    return Trajectory(tuple(pieces), rewards=rewards, episode=episode, **values)


def group(*episodes: Trajectory, number: int = 0) -> Group:
    return Group(TASK, episodes, number=number)


def rewarded(*rewards: float) -> Group:
    """Return a group of episodes of one turn, numbered from 0."""
    return group(*(made(reward, episode=number) for number, reward in enumerate(rewards)))


def context(progress: float = 0.0) -> CreditContext:
    return CreditContext(progress, version=0, identify=lambda task: task.key)
