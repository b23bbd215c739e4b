"""Test the diagnostics: their formulas by hand, and where they are called."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.groups import TASK, context, group, made, rewarded
from unstale.algorithms.advantages import grpo
from unstale.records import Failure, Group, Sampled
from unstale.research.techniques.balance import Balance, BalanceConfig, logit_changes, mass_balance
from unstale.research.techniques.rollout_figures import RolloutFigures, RolloutFiguresConfig
from unstale.techniques.hooks import CreditContext, Techniques


def test_the_change_of_the_right_mass_by_hand_and_by_a_finite_difference() -> None:
    p, c = (0.5, 0.3, 0.2), (1.0, 0.0, -1.0)
    assert logit_changes(p, c, rate=0.5) == pytest.approx([0.5, 0.0, -0.5])
    parts = mass_balance(p, c, right=(True, False, False), sampled=(True, False, True), rate=0.5)
    assert parts.total == parts.sampled == pytest.approx(0.175)
    right = (True, True, False)
    parts = mass_balance(p, (2.0, 0.0, -1.0), right=right, sampled=(True, False, True), rate=0.5)
    logits = torch.tensor(p, dtype=torch.float64).log()
    change = torch.tensor(logit_changes(p, (2.0, 0.0, -1.0), rate=0.5), dtype=torch.float64)
    before, after = ((logits + t * change).softmax(0)[:2] for t in (0.0, 1e-6))
    found = (after - before) / 1e-6
    assert [parts.sampled, parts.unsampled] == pytest.approx(found.tolist(), abs=1e-6)


def unsampled_part(count: int, draws: int = 60) -> Tensor:
    """Return the part of unsampled right arms for several draws of `count` samples.

    60 of 100 arms are right. Rewards are 1 and -1.
    """
    noise = torch.Generator().manual_seed(0)
    right = torch.arange(100) < 60
    parts = []
    for _ in range(draws):
        p = torch.randn(100, generator=noise).softmax(0)
        drawn = torch.multinomial(p, count, replacement=True, generator=noise)
        number = torch.bincount(drawn, minlength=100)
        balance = mass_balance(
            p.tolist(),
            torch.where(right, number, -number).tolist(),
            right=right.tolist(),
            sampled=(number > 0).tolist(),
            rate=1 / count,
        )
        parts.append(balance.unsampled)
    return torch.tensor(parts)


def test_unsampled_right_arms_lose_less_in_larger_groups() -> None:
    """Measured over 200 draws: -0.0030, -0.0004 and 0.0000 for 4, 64 and 256 samples."""
    small, middle, large = (unsampled_part(count).mean().item() for count in (4, 64, 256))
    assert small < -0.002 < middle < -1e-4 < large <= 0


def test_the_balance_of_a_group_of_first_replies() -> None:
    """Two episodes have the reply 2, one the reply 3. Each has the probability e^-0.5 or e^-1.5."""
    episodes = [
        made(1, turns=((1, 2), (1, 9)), episode=0),
        made(0, turns=((1, 2),), episode=1),
        made(0, turns=((1, 3),), episode=2),
    ]
    pieces = (episodes[2].pieces[0], Sampled((3,), (-1.5,), version=0))
    episodes[2] = replace(episodes[2], pieces=pieces)
    found = Balance(BalanceConfig()).measure([], [group(*episodes)], context())
    p, q = math.exp(-0.5), math.exp(-1.5)
    # Centred rewards 2/3, -1/3, -1/3 give c = 1/3 for the reply 2, and -1/3 for 3; 1/N is 1/3.
    drift = p * (1 / 9) + q * (-1 / 9)
    assert found == pytest.approx(
        {
            "balance/sampled_mass": p + q,
            "balance/sampled_change": p * (1 / 9 - drift),
            "balance/unsampled_loss_max": (1 - p - q) * drift,
        }
    )
    assert all(
        math.isnan(value) for value in Balance(BalanceConfig()).measure([], [], context()).values()
    )


def test_reliability_coverage_and_cost_of_a_batch() -> None:
    failure = Failure(TASK, "step 1", "broken", sampled_tokens=5)
    first = replace(rewarded(1, 0, 1), failures=(failure,), unused=(made(0, episode=7),))
    second = group(made(0), made(0, stop="max_turns"))
    found = RolloutFigures(RolloutFiguresConfig()).measure([first, second], [], context())
    assert found == pytest.approx(
        {
            "rollout_figures/reliability_share": 5 / 7,
            "rollout_figures/coverage_share": 1 / 2,
            "rollout_figures/tokens_per_success": (6 + 5) / 2,
        }
    )
    assert math.isnan(
        RolloutFigures(RolloutFiguresConfig()).measure([second], [], context())[
            "rollout_figures/tokens_per_success"
        ]
    )


def test_the_tokens_of_branches_are_part_of_the_cost() -> None:
    success = replace(made(1), branches=(made(1, turns=((1, 2), (1, 3))),))
    found = RolloutFigures(RolloutFiguresConfig()).measure([group(success, made(0))], [], context())
    assert found["rollout_figures/tokens_per_success"] == 1 + 2 + 1


class Drops:
    """A filter that leaves out every second episode."""

    def select(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        return [replace(each, trajectories=each.trajectories[::2]) for each in groups]


class Counts:
    """A diagnostic that counts the episodes."""

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> Mapping[str, float]:
        return {"counts/episodes": sum(len(each.trajectories) for each in groups)}


def test_a_diagnostic_sees_the_episodes_before_filters_and_changes_no_advantage() -> None:
    batch = [rewarded(1, 0, 0, 1)]

    def scored(*parts: object) -> tuple[list, Mapping[str, float]]:
        chosen = Techniques({str(number): part for number, part in enumerate(parts)})
        return chosen.credit(
            batch, progress=0.0, version=0, estimate=grpo, identify=lambda task: task.key
        )

    without, with_it = scored(Drops()), scored(Drops(), Counts())
    assert without[0] == with_it[0]
    assert with_it[1] == {**without[1], "counts/episodes": 4}
