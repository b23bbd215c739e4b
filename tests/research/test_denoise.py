"""Policies that draw in steps: exact log-probabilities, trees of steps, exploring, and learning."""

import asyncio
import json
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unstale.cli.main import main
from unstale.config import ConfigError
from unstale.records import Group, Sampled
from unstale.research.denoise.images import PIXELS, Images
from unstale.research.denoise.plans import (
    COLUMNS,
    END,
    LANES,
    MASK,
    Plans,
    Reader,
    disturbed,
    right,
)
from unstale.research.denoise.steps import Plan, Sampler, Steps
from unstale.research.denoise.train import DenoiseOptions, Learner, copied, train
from unstale.research.techniques.episode_filter import contrast
from unstale.research.techniques.tree_advantage import effective_leaves, trees

SMALL = {"steps": 3, "groups": 2, "group_size": 4, "pace": 3}


def planner(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    network = Reader(16)
    with torch.no_grad():
        for each in network.parameters():
            each.mul_(3)
    return network


def actions(plan: Tensor, columns: list[int], size: int) -> Iterator[Tensor]:
    """Yield every action that draws `size` of some columns of a plan."""
    for chosen in permutations(columns, size):
        for lanes in product(range(LANES + 1), repeat=size):
            after, order = plan.clone(), torch.full((COLUMNS,), -1)
            for rank, (column, lane) in enumerate(zip(chosen, lanes, strict=True)):
                after[column], order[column] = lane, rank
            yield torch.stack([after, order])


def gradient(value: Tensor, network: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(value, list(network.parameters()), retain_graph=True)


def steps_of(plan: Tensor, found: list[Tensor], place: int, road: Tensor) -> Steps:
    count = len(found)
    places = torch.full((count,), place)
    many = plan.expand(count, -1), torch.stack(found), places, road.expand(count, -1, -1)
    return Steps(*many)


@pytest.mark.parametrize(("place", "masked"), [(2, [0, 2, 4, 5]), (4, [])])
def test_the_probabilities_of_all_drafts_and_edits_are_1_in_all(
    place: int, masked: list[int]
) -> None:
    model = Plans(start=0)
    road = model.contexts([3], held_out=False)[0]
    plan = torch.tensor([1, 1, 2, 3, 4, 3, 2, 1])
    plan[masked] = MASK
    found = list(actions(plan, masked or [*range(COLUMNS)], 2))
    steps = steps_of(plan, found, place, road)
    assert model.logp(planner(0), steps).exp().sum().item() == pytest.approx(1, abs=1e-5)
    one = Steps(*(getattr(steps, name)[:1] for name in ("state", "action", "place", "context")))
    random = torch.Generator().manual_seed(0)
    drawn = [model.draw(planner(0), one, model.noise(random)[None]) for _ in range(20)]
    for action, logp in drawn:
        same = torch.tensor([torch.equal(action[0], each) for each in found])
        assert same.sum() == 1
        assert logp.item() == pytest.approx(model.logp(planner(0), steps)[same].item(), abs=1e-5)


def test_d_and_s_give_the_exact_gradient_of_plans_of_two_versions() -> None:
    """The first step is of version 0 and the second of version 1, drawn in bfloat16."""
    model = Plans(drafts=(5, 1, 1), edits=(), start=0)
    road = model.contexts([5], held_out=False)[0]
    plan = torch.tensor([1, 2, 2, MASK, 2, MASK, 2, 2])
    first, second, now = (planner(seed) for seed in range(3))

    def score(network: nn.Module, steps: Steps) -> Tensor:
        return model.logp(network, steps)

    true = weighted = torch.zeros(())
    ways = list(actions(plan, [3, 5], 1))
    for action in ways:
        after = action[0]
        last = list(actions(after, (after == MASK).nonzero().flatten().tolist(), 1))
        one = steps_of(plan, [action] * len(last), 2, road)
        two = steps_of(after, last, 3, road)
        reward = torch.stack([each[0] for each in last]).sum(1).float() * 0.1
        logp = score(now, one) + score(now, two)
        true = true + (logp.exp() * reward).sum()
        with torch.no_grad():
            mu = [score(copied(net, "bfloat16"), at) for net, at in ((first, one), (second, two))]
            old = [score(net, at) for net, at in ((first, one), (second, two))]
            log_d = sum(after - before for after, before in zip(old, mu, strict=True))
            log_s = score(now, one) - old[0] + score(now, two) - old[1]
            weight = sum(mu).exp() * (log_d + log_s).exp() * reward
        assert log_d.abs().max() > 1e-4
        weighted = weighted + (weight * logp).sum()
    expected, found = (
        torch.cat([each.flatten() for each in gradient(value, now)]) for value in (true, weighted)
    )
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_disturbed_plan_has_lanes_of_the_plan_moved_along_or_across() -> None:
    plan = torch.arange(COLUMNS).remainder(LANES).expand(256, -1)
    found = disturbed(plan, torch.Generator().manual_seed(0))
    assert (
        set(found.unique().tolist()) <= {*range(LANES), END}
        and (found != plan).any(1).float().mean() > 0.9
    )
    road, expert = Plans(start=0)._roads
    assert right(expert, road).all() and right(disturbed(expert), road).mean() < 0.5


class Point(nn.Module):
    """The exact velocity of a flow whose only image is 0."""

    def forward(self, image: Tensor, time: Tensor, digit: Tensor) -> Tensor:
        return image / time[:, None]


def test_steps_of_images_keep_the_distribution_of_the_flow() -> None:
    """x(t) of the flow has the deviation t at all pixels."""
    model = Images(places=100, start=0)
    random = torch.Generator().manual_seed(0)
    state = torch.randn(64, PIXELS, generator=random)
    for place in range(75):
        places = torch.full((64,), place)
        steps = Steps(state, state, places, places)
        state, logp = model.draw(Point(), steps, torch.randn(64, PIXELS, generator=random))
        steps = Steps(steps.state, state, places, places)
        torch.testing.assert_close(model.logp(Point(), steps), logp)
    assert state.std().item() == pytest.approx(0.25, rel=0.05)


def groups(model: Any, plan: Plan, precision: Any = "float32") -> tuple[Sampler, Group]:
    sampler = Sampler(model, plan, 0)
    network = model.network(0)
    sampler.load(0, copied(network, "float32"), copied(network, precision))
    return sampler, asyncio.run(sampler.group(0, 3))


def test_a_tree_of_steps_is_drawn_once_and_compared_by_depth() -> None:
    model = Images(start=1, width=16)
    sampler, group = groups(model, Plan(size=2, forks=(3, 6)))
    assert len(group.trajectories) == 8
    assert sampler.counts["engine"] == 2 * 3 + 4 * 3 + 8 * 2 == len(sampler.tape)
    learner = Learner(model, DenoiseOptions(), model.network(0))
    batch = learner.batch([group])
    assert batch.sampled.sum() == 34
    by_fork = {each.fork.at if each.fork else 0: each for each in group.trajectories}
    rewards = [each.reward for each in group.trajectories]
    last = (torch.tensor(rewards) - torch.tensor(rewards).mean()) / torch.tensor(rewards).std(
        correction=0
    )
    spans = [start + 7 for start, _ in batch.spans()]
    torch.testing.assert_close(batch.advantage[spans], last * 2 / 8, rtol=1e-4, atol=1e-5)
    assert set(by_fork) == {0, 3, 6}
    steps = sampler.tape.take(batch.tokens[batch.sampled].tolist())
    version = batch.version[batch.sampled]
    torch.testing.assert_close(
        learner.old_logp(steps, version), batch.behavior_logp[batch.sampled], rtol=1e-4, atol=1e-4
    )


def test_the_mean_log_density_of_pixels_spreads_the_weights_of_branches() -> None:
    """The sum over the pixels leaves the whole weight to one of four leaves in most trees."""
    model = Images(start=20, width=32)
    _, forked = groups(model, Plan(size=16, forks=(2, 5)))
    roots = trees(forked)
    assert effective_leaves(roots) < 1.6
    assert effective_leaves(roots, PIXELS) > 3.7

    _, group = groups(model, Plan(size=1, forks=(4,)))
    parent, child = group.trajectories
    first, second = (
        sum(
            logp
            for piece in each.pieces
            if isinstance(piece, Sampled)
            for logp in piece.behavior_logp[-4:]
        )
        for each in (parent, child)
    )
    share = torch.tensor((first - second) / PIXELS).sigmoid().item()
    (root,) = trees(group)
    expected = share * parent.reward + (1 - share) * child.reward
    assert root.fused(PIXELS) == pytest.approx(expected, abs=1e-5)
    assert 0.2 < share < 0.8
    lone = Learner(model, DenoiseOptions(fork_at=(4,), fusion="path_mean"), model.network(0))
    assert lone.effective_leaves([group]) == pytest.approx(1 / (share**2 + (1 - share) ** 2))


def test_pruned_gradients_leave_what_is_drawn_as_it_is() -> None:
    model = Images(start=1, width=16)
    whole = {**SMALL, "steps": 1, "fork_at": (2, 5), "group_size": 2}
    results = [
        train(model, DenoiseOptions(**whole, **pruned), 0)
        for pruned in ({}, {"kept_leaves": "extremes"}, {"kept_depths": 0.5})
    ]
    plain, *others = (each.rows[0] for each in results)
    for result, row in zip(results[1:], others, strict=True):
        assert row["reward_mean"] == plain["reward_mean"] and row["trained"] < plain["trained"]
        assert result.computed["engine"] == results[0].computed["engine"]


def test_the_best_and_worst_explored_objects_are_drawn_again() -> None:
    model = Images(start=20, width=32)
    _, every = groups(model, Plan(size=12))
    sampler, chosen = groups(model, Plan(size=4, explore=12))
    rewards = [each.reward for each in every.trajectories]
    expected = [rewards[place] for place in sorted(contrast(rewards, 4))]
    assert [each.reward for each in chosen.trajectories] == pytest.approx(expected, abs=1e-5)
    assert sampler.counts == {"explorer": 12 * 8, "engine": 4 * 8} and len(sampler.tape) == 4 * 8
    _, rounded = groups(model, Plan(size=4, explore=12), "nvfp4")
    for each in rounded.trajectories:
        assert min(abs(each.reward - reward) for reward in rewards) < 1e-5


def test_d_is_small_if_only_the_explorer_rounds() -> None:
    model = Images(start=20, width=32)
    drawn = {"explore": 8, **SMALL}
    explored = train(model, DenoiseOptions(**drawn), 0).rows[-1]["log_d_abs_mean"]
    rounded = train(model, DenoiseOptions(**SMALL, engine="nvfp4"), 0).rows[-1]["log_d_abs_mean"]
    assert 0 < explored < 0.1 * rounded


def test_steps_of_old_versions_have_exact_old_log_probabilities() -> None:
    """The engine computes as the trainer does, so D is 1 for every version."""
    options = DenoiseOptions(**{**SMALL, "steps": 6}, engine="float32", max_staleness=1)
    rows = train(Images(start=1, width=16), options, 0).rows
    assert all(row["log_d_abs_mean"] < 1e-4 for row in rows)
    assert max(row["schedule/staleness_max"] for row in rows) == 1
    assert max(row["schedule/mixed_version_share"] for row in rows) == 1
    assert rows[-1]["log_s_abs_mean"] > 1e-4 > 10 * rows[-1]["log_d_abs_mean"]
    again = train(Images(start=1, width=16), options, 0).rows
    assert [row["reward_mean"] for row in again] == [row["reward_mean"] for row in rows]


@pytest.mark.costly
def test_rewards_of_images_and_of_edited_plans_rise() -> None:
    images = train(Images(), DenoiseOptions(steps=60), 0)
    assert images.after["reward"] > images.before["reward"] + 0.02
    plans = train(Plans(), DenoiseOptions(steps=40, groups=8, group_size=8), 0)
    assert plans.after["reward"] > plans.before["reward"] + 0.04
    assert plans.after["reward"] > plans.after["draft"] + 0.05


def test_the_command_prints_figures_before_and_after(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["denoise", "plans", "--steps", "1", "--groups", "1", "--group-size", "2", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["runs"][0]["after"]) == {"reward", "draft", "edit_gain"}


def test_training_of_drafts_is_measured_with_edits() -> None:
    whole, drafts = Plans(start=20), Plans(start=20, edits=())
    options = DenoiseOptions(**SMALL)
    trained = train(drafts, options, 0, whole)
    assert trained.before == train(whole, options, 0).before
    assert trained.computed["engine"] == 3 * 2 * 4 * drafts.places == 96
    assert drafts.places == whole.places - 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"fork_at": (0,)},
            "a step with noise before each, between any two and after the last, got 0",
        ),
        ({"fork_at": (2, 2)}, "between any two and after the last, got 2 2"),
        ({"fork_at": (2,), "noisy": (0, 1)}, "after the last, got 2"),
        ({"fork_at": (2, 4), "noisy": (0, 5)}, "between any two"),
        ({"noisy": (8,)}, "steps from 0 to 7, got 8"),
        ({"explore": 16}, "above --group-size 16"),
        ({"explore": 32, "fork_at": (2,)}, "without --fork-at"),
        ({"fusion": "path"}, "only for --rule depth with --fork-at"),
        ({"fusion": "path_mean", "fork_at": (2,), "rule": "loo"}, "only for --rule depth"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DenoiseOptions(**options).check(8)
