"""Metrics of the groups that one batch trains on."""

from collections.abc import Iterable, Sequence

from unstale.records import Group


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Return the metrics of a batch's groups. Failed episodes are counted apart."""
    finished = [trajectory for group in groups for trajectory in group.trajectories]
    failures = sum(len(group.failures) for group in groups)
    facts = {name for trajectory in finished for name in trajectory.facts}

    def mean(values: Iterable[float]) -> float:
        return sum(values) / max(len(finished), 1)

    return {
        "rollout/episodes": len(finished),
        "rollout/failed_episodes": failures,
        "rollout/success_rate": mean(trajectory.success for trajectory in finished),
        "reward/mean": mean(trajectory.reward for trajectory in finished),
        "rollout/turns_mean": mean(trajectory.num_turns for trajectory in finished),
        "rollout/total_tokens_mean": mean(len(trajectory) for trajectory in finished),
        "completion/truncated_share": mean(trajectory.stop != "done" for trajectory in finished),
        "reward/zero_std_group_share": sum(
            len({t.reward for t in group.trajectories}) <= 1 for group in groups
        )
        / max(len(groups), 1),
        **{
            f"{name if name.startswith('reward/') else f'env/{name}'}_mean": mean(
                t.facts.get(name, 0.0) for t in finished
            )
            for name in sorted(facts - {"success"})
        },
    }
