"""The advantage estimator `reward_alone`: the reward without a baseline."""

from collections.abc import Sequence

from unstale.records import Group, ScoredTrajectory


def reward_alone(groups: Sequence[Group]) -> list[ScoredTrajectory]:
    return [
        ScoredTrajectory(item, (item.reward,)) for group in groups for item in group.trajectories
    ]
