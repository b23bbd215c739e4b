"""Try an advantage estimator on invented episodes, for rules of the linter.

An estimator of the user may raise an error for these episodes, whose only reward is named `reward`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unstale.config import RunConfig

if TYPE_CHECKING:  # the linter runs before torch is imported
    from unstale.records import Group, ScoredTrajectory


def compares(config: RunConfig) -> bool | None:
    """Return True if the run's estimator gives an advantage other than 0 in groups of one episode.

    It is tried on a batch of two such groups, or of one if the run's batches have one. None if it
    raises an error.
    """
    numbers = range(min(config.schedule.groups_per_step, 2))
    scored = _try(config, [_group(number, [number + 1.0]) for number in numbers])
    return None if scored is None else any(any(each.advantage) for each in scored)


def is_by_group(config: RunConfig) -> bool | None:
    """Return True if the run's estimator uses no other groups of the batch for a group's
    advantages.

    None if it raises an error.
    """
    rewards = ([0.0, 1.0, 1.0], [2.0, 0.0, 5.0], [3.0, 3.0, 4.0])
    groups = [_group(number, each) for number, each in enumerate(rewards)]
    together = _try(config, groups)
    alone = [_try(config, [group]) for group in groups]
    if together is None or None in alone:
        return None
    separate = [each for scored in alone for each in scored or ()]
    return len(together) == len(separate) and all(
        abs(x - y) < 1e-9
        for one, other in zip(together, separate, strict=True)
        for x, y in zip(one.advantage, other.advantage, strict=True)
    )


def _try(config: RunConfig, groups: Sequence["Group"]) -> "Sequence[ScoredTrajectory] | None":
    """Return the episodes with the advantages of the estimator, or None if it raises an error."""
    from unstale.algorithms.advantages import find_estimator

    estimate = find_estimator(config.advantage.estimator)
    try:
        return list(estimate(groups, **config.advantage.selected_options()))
    except Exception:  # noqa: BLE001 - an estimator of the user may need what these episodes lack
        return None


def _group(number: int, rewards: Sequence[float]) -> "Group":
    """Return a group of episodes with these rewards. Each has one turn, and all have different
    lengths.
    """
    from unstale.records import ContextPiece, Group, Sampled, Task, Trajectory

    task = Task("probe", "train", number)
    trajectories = []
    for sibling, reward in enumerate(rewards):
        tokens = (0,) * (1 + sibling + 2 * number)
        pieces = (ContextPiece((0,)), Sampled(tokens, (0.0,) * len(tokens), version=0))
        episode = len(rewards) * number + sibling
        trajectories.append(
            Trajectory(pieces, {"reward": reward}, "done", task, seed=0, episode=episode)
        )
    return Group(task, tuple(trajectories), number=number)
