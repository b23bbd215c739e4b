"""Test `episode_filter`: each rule, and its effect on the gradient and on tool errors.

One toy is a batch of softmax bandits, whose exact gradient is known. In the other, a policy learns
with or without a tool error that does not change its success.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import combinations
from statistics import pvariance

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, one_hot

from tests.support.bandit import Learner
from tests.support.groups import context, group, made, rewarded
from unstale.algorithms.advantages import grpo
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.config.techniques import techniques
from unstale.lint import check
from unstale.records import Group, ScoredTrajectory
from unstale.research.techniques.episode_filter import (
    EpisodeFilter,
    EpisodeFilterConfig,
    balanced,
    contrast,
    largest_variance,
    split,
)
from unstale.techniques.hooks import Techniques

RUN = RunConfig(recipe="mine", techniques="episode_filter")


def picked(*groups: Group, progress: float = 0.0, **options: object) -> list[Group]:
    choice = EpisodeFilter(EpisodeFilterConfig(**options))  # type: ignore[arg-type]
    return list(choice.select(groups, context(progress)))


def episodes(result: Group) -> list[int]:
    return [item.episode for item in result.trajectories]


def test_the_largest_variance_is_that_of_all_subsets() -> None:
    values = [-2.0, -1.0, 0.0, 1.0, 3.0]
    for scale, shift in ((1e-6, 0), (1e6, 0), (1, 1e9)):
        assert largest_variance([shift + scale * value for value in values], 3) == {0, 1, 4}
    assert largest_variance(values, 2) == {0, 4} and largest_variance(values, 3) == {0, 1, 4}
    noise = torch.Generator().manual_seed(0)
    for count in range(3, 12):
        values = torch.randn(count, generator=noise).tolist()
        for size in range(2, count):
            best = max(pvariance(each) for each in combinations(values, size))
            found = pvariance(values[place] for place in largest_variance(values, size))
            assert found == pytest.approx(best)


def test_contrast_and_balance_take_both_ends() -> None:
    rewards = [0.9, 0.2, 0.8, 0.1, 0.5]
    assert contrast(rewards, 2) == {0, 3} and contrast(rewards, 3) == {0, 2, 3}
    assert balanced(rewards[:4], 2, target=0.5) == {0, 3}
    assert balanced(rewards, 2, target=1.0) == {0, 2} and balanced(rewards, 2, target=0) == {1, 3}
    assert balanced([each * 1e-9 for each in rewards[:4]], 2, target=5e-10) == {0, 3}
    assert balanced([1, 0, 0, 1, 0, 1, 0, 0], 4, target=0.5) == {1, 2, 3, 5}


def test_clean_success_keeps_the_proportion_and_two_of_each() -> None:
    """3 failures and 5 successes of which 4 are kept: 2 and 2, as in rStar2-Agent."""
    assert split(5, 3, 4) == 2 and split(12, 4, 8) == 6
    assert split(15, 1, 8) == 7 and split(1, 15, 8) == 1 and split(14, 2, 8) == 6
    calls = {"tool_calls": 4}
    made_errors = [0, 3, 1, 2, 1]
    items = [made(0, episode=number, facts={"tool_errors": 4, **calls}) for number in range(3)]
    items += [
        made(1, episode=3 + number, facts={"tool_errors": errors, **calls})
        for number, errors in enumerate(made_errors)
    ]
    (result,) = picked(group(*items), rule="clean_success", n=4)
    assert episodes(result) == [0, 1, 3, 5]
    assert [item.episode for item in result.unused] == [2, 4, 6, 7]


def test_the_penalty_is_errors_per_call_and_a_half_without_a_call() -> None:
    facts: list[dict[str, float]] = [
        {"tool_errors": 3, "tool_calls": 4},
        {"tool_errors": 0, "tool_calls": 0},
        {"tool_errors": 1, "tool_calls": 4},
        {"tool_errors": 0, "tool_calls": 2, "form": 0.9},
        {"tool_errors": 1, "tool_calls": 3, "form": 0.1},
    ]
    items = group(*(made(1, episode=place, facts=each) for place, each in enumerate(facts)))
    assert episodes(picked(items, rule="clean_success", n=4)[0]) == [1, 2, 3, 4]
    with_form = picked(items, rule="clean_success", n=4, extra="form")
    assert episodes(with_form[0]) == [0, 1, 2, 4]
    turns = [made(1, turns=((1, 2),) * 4, episode=0, facts={"tool_errors": 1})]
    turns += [made(1, episode=place, facts={"tool_errors": 1}) for place in range(1, 4)]
    turns += [made(1, episode=4, facts={"tool_errors": 0})]
    assert episodes(picked(group(*turns), rule="clean_success", n=4)[0]) == [0, 1, 2, 4]


def test_sampling_prefers_small_penalties_and_repeats_with_the_seed() -> None:
    def chosen(seed: int) -> list[int]:
        items = [
            made(1, episode=place, seed=seed, facts={"tool_errors": place % 2, "tool_calls": 1})
            for place in range(12)
        ]
        return episodes(picked(group(*items), rule="clean_success", n=4, order="sample")[0])

    assert chosen(3) == chosen(3)
    draws = [place for seed in range(50) for place in chosen(seed)]
    assert len({tuple(chosen(seed)) for seed in range(50)}) > 10
    assert sum(place % 2 == 0 for place in draws) > 0.9 * len(draws)


def test_an_environment_without_the_fact_is_refused() -> None:
    items = [made(1, facts={"errors": 1.0})] * 5
    with pytest.raises(
        ConfigError, match=r"'tool_errors'.* reports errors.* choose other techniques"
    ):
        picked(group(*items), rule="clean_success")
    failed = group(*[made(0)] * 5)
    assert len(picked(failed, rule="clean_success")[0].trajectories) == 4


def test_n_goes_to_last_and_smaller_groups_stay_whole() -> None:
    batch = rewarded(*range(8))
    sizes = [
        len(picked(batch, progress=share, rule="contrast", n=2, last=6)[0].trajectories)
        for share in (0.0, 0.5, 1.0)
    ]
    assert sizes == [2, 4, 6]
    small = rewarded(1, 0, 0)
    assert picked(small, rule="contrast") == [small]


def test_variance_picks_from_the_whole_batch_and_keeps_the_advantages() -> None:
    """Groups of equal rewards give way to the others. Branches go with their episode."""
    branch = made(episode=90)
    right = made(1, episode=0, branches=(branch,))
    mixed = group(right, *(made(0, episode=place) for place in (1, 2, 3)))
    equal = group(*(made(1, episode=10 + place) for place in range(4)), number=1)
    parts = {"episode_filter": techniques()["episode_filter"].makes(EpisodeFilterConfig(n=2))}
    scored, metrics = Techniques(parts).credit(
        [equal, mixed], progress=0.0, version=0, estimate=grpo, identify=lambda task: task.key
    )
    assert [each.trajectory.episode for each in scored] == [0, 90, 1, 2, 3]
    assert scored == grpo([equal, mixed])[4:]
    assert metrics["filter/trained_share"] == 4 / 8
    assert metrics["filter/trained_success_share"] == 1 / 5


def test_episodes_that_an_estimator_leaves_out_are_not_picked() -> None:
    groups = [
        group(*(made(each, episode=4 * n + i) for i, each in enumerate((1, 0, 0, 0))), number=n)
        for n in range(2)
    ]

    def without_first(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        return [each for each in grpo(groups) if each.trajectory.episode not in (0, 4)]

    parts = {"episode_filter": techniques()["episode_filter"].makes(EpisodeFilterConfig(n=2))}
    scored, _ = Techniques(parts).credit(
        groups, progress=0.0, version=0, estimate=without_first, identify=lambda task: task.key
    )
    assert len(scored) == 4 and not {0, 4} & {each.trajectory.episode for each in scored}


def test_sizes_that_do_not_fit_are_refused_at_the_start() -> None:
    for values, message in [
        (
            {"schedule.group_size": 4},
            r"episode_filter\.n must be < 4 \(schedule\.group_size\), got 4",
        ),
        (
            {"episode_filter.last": 9},
            r"episode_filter\.last must be <= 8 \(schedule\.group_size\), got 9",
        ),
        ({"episode_filter.last": 1}, r"episode_filter\.last must be 0 or >= 2"),
        (
            {"episode_filter.rule": "clean_success", "episode_filter.n": 3},
            r"must be >= 4 with episode_filter\.rule = clean",
        ),
        ({"episode_filter.target": 0.3}, r"episode_filter\.target is an option of balanced"),
        (
            {"trainer.minibatches_per_batch": 65},
            r"must be <= 64 \(episode_filter\.n \* schedule\.groups_per_step\)",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            override(RUN, values)
    facts = check(override(RUN, {"episode_filter.last": 6})).facts
    assert (
        "a part of the episodes of a task is trained on, 4 at first, 6 at the end"
        in facts["techniques"]
    )


def test_the_linter_warns_of_a_baseline_over_the_chosen_episodes() -> None:
    values = {
        "advantage.estimator": "reinforce_batch",
        "advantage.group_baseline": False,
        "episode_filter.rule": "balanced",
    }
    (finding,) = check(override(RUN, values)).warnings
    assert "episode_filter.rule is balanced" in finding.wrong
    assert finding.fixes == (
        {"advantage.group_baseline": True},
        {"episode_filter.rule": "variance"},
    )
    assert not check(override(RUN, {**values, "episode_filter.rule": "variance"})).warnings


SEEDS, TASKS, SIZE, ARMS, KEPT = 64, 4, 16, 12, 4


def cosine(choose: Callable[[list[float], int], Collection[int]] | None, *, batch: bool) -> float:
    """Return the cosine of the chosen episodes' gradient with the exact one, mean over seeds.

    With `batch` the choice is by advantage over all tasks, else by reward within each. Without a
    choice, the first episodes of each group are taken.
    """
    noise = torch.Generator().manual_seed(0)
    p = torch.randn(SEEDS, TASKS, ARMS, generator=noise).softmax(-1)
    value = (torch.rand(p.shape, generator=noise) < 0.3).double()
    exact = p * (value - (p * value).sum(-1, keepdim=True))
    arms = torch.multinomial(p.reshape(-1, ARMS), SIZE, replacement=True, generator=noise)
    arms = arms.reshape(SEEDS, TASKS, SIZE)
    reward = value.gather(2, arms)

    def advantage(kept: Tensor) -> Tensor:
        count = kept.sum(2, keepdim=True)
        centred = (reward - (reward * kept).sum(2, keepdim=True) / count) * kept
        return centred / ((centred**2).sum(2, keepdim=True) / (count - 1)).sqrt().clamp(min=1e-6)

    every = torch.ones_like(reward)
    kept = torch.zeros_like(reward)
    if choose is None:
        kept[..., :KEPT] = 1
    elif batch:
        for row, values in zip(kept.view(SEEDS, -1), advantage(every).view(SEEDS, -1), strict=True):
            row[list(choose(values.tolist(), KEPT * TASKS))] = 1
    else:
        for row, values in zip(kept.view(-1, SIZE), reward.view(-1, SIZE), strict=True):
            row[list(choose(values.tolist(), KEPT))] = 1
    weight = advantage(every) * kept if batch else advantage(kept)
    gradient = (weight[..., None] * (one_hot(arms, ARMS) - p[:, :, None])).sum(2)
    return float(cosine_similarity(gradient.flatten(1), exact.flatten(1)).mean())


def test_chosen_episodes_have_a_better_gradient_than_as_many_at_random() -> None:
    """Measured, 4 of 16 episodes: by variance 0.70, at random 0.61; within a group by contrast or
    balance 0.66, the first ones 0.50. All 16: 0.84.
    """
    noise = torch.Generator().manual_seed(1)

    def at_random(values: list[float], size: int) -> list[int]:
        return torch.randperm(len(values), generator=noise)[:size].tolist()

    assert cosine(largest_variance, batch=True) > cosine(at_random, batch=True) + 0.05
    by_contrast = cosine(contrast, batch=False)
    assert by_contrast > cosine(None, batch=False) + 0.1
    # With rewards of 0 and 1 both rules choose alike.
    assert cosine(lambda v, n: balanced(v, n, target=0.5), batch=False) == by_contrast


ANSWERS = [
    [
        (0.6, {"reward": 1, "facts": {"tool_errors": errors}}),
        (0.4, {"reward": 0, "facts": {"tool_errors": errors}}),
    ]
    for errors in (0, 1)
]
"""Answers without and with a tool error. They are right equally often."""


def test_clean_successes_teach_fewer_tool_errors() -> None:
    """Measured: after 20 steps the share of answers with an error is 0.57, with the rule 0.06.

    In the first step it is 0.13 in the chosen successes, and 0.51 in the chosen failures.
    """
    plain, clean = (Learner(ANSWERS, [0.0, 0.0], size=16) for _ in range(2))
    parts = {"episode_filter": EpisodeFilter(EpisodeFilterConfig(rule="clean_success", n=8))}
    first = clean.step(parts)
    plain.step({})
    shares = {}
    for kind in (True, False):
        errors = [each.trajectory.tokens[0] for each in first if each.trajectory.success == kind]
        shares[kind] = sum(errors) / len(errors)
    assert shares[True] < 0.25 and abs(shares[False] - 0.5) < 0.1
    for _ in range(19):
        plain.step({})
        clean.step(parts)
    assert plain.p[1] > 0.4 and clean.p[1] < 0.2


def test_the_linter_warns_of_episodes_that_are_added_and_left_out() -> None:
    warnings = check(override(RUN, {"techniques": "allocate episode_filter"})).warnings
    (finding,) = [each for each in warnings if each.wrong == "episode_filter with allocate"]
    assert {"techniques": "allocate"} in finding.fixes
