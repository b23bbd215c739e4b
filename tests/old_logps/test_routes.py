"""Compare the old-logit routes with independent calculations.

At lag 0 before any step, exact routes have S = 1 and `rollout` has S = pi / mu. For exact tokens, D
and S are those of the version that sampled them. `snapshot_old` equals independent full copies and
forwards no unneeded token. The average follows its age law, its linear-drift law and its precision.
"""

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from unstale.algorithms.corrections import log_discrepancy, log_staleness
from unstale.builders import build_old_logps
from unstale.builders.local import build_scorer
from unstale.config import OldLogpsConfig, RunConfig, TrainerConfig
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.ewma_prox import EwmaProx
from unstale.old_logps.ppo_ewma_async import PpoEwmaAsync, PpoEwmaAsyncSpec
from unstale.old_logps.rollout import RolloutRoute
from unstale.old_logps.scoring.average import Average
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.snapshot_old import SnapshotOld
from unstale.records import Batch, collate
from unstale.testing import episode, nudge, plain_logps, tiny_policy

ROUTES = (
    "rollout",
    "current_recompute",
    "snapshot_old",
    "interp_prox_loglinear",
    "interp_prox_linear",
    "ewma_prox",
    "queue_of_two",
    "ppo_ewma_async",
)
VERSIONS_IN_TURNS = {
    "one": [4, (5, 3)],
    "two in a turn": [4, (3, 2), (4, 3), 2],
    "two across turns": [4, (3, 2), 5, (4, 3)],
    "five in a turn": [4, (2, 0), (3, 1), (1, 2), (2, 3), (3, 4)],
    "five across turns": [4, (2, 0), 3, (3, 1), (2, 2), 4, (1, 2), (2, 3), 2, (3, 4), 1],
}


def oracles() -> dict:
    root = Path(__file__).parents[2]
    shared = root.parent / "shared" / "oracles" / "vectors.json"
    return json.loads(
        (shared if shared.is_file() else root / "tests" / "data" / "oracles.json").read_text()
    )


def build(route: str, policy: Policy, *, temperature: float = 1.0) -> OldLogps:
    return build_old_logps(OldLogpsConfig(route=route), LocalScorer(policy, temperature, 48))


def ask(route: OldLogps, policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    now = policy.score(batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=48).logp
    return route.logps(batch, now if route.needs.now or route.needs.inline else torch.empty(0))


def publish_five(policy: Policy, route: OldLogps) -> list[Policy]:
    """Publish versions 0 to 4 through the route and return full copies of them."""
    copies = []
    for version in range(5):
        if version:
            nudge(policy, seed=version)
        policy.version = version
        copies.append(policy.twin())
        route.on_published(live=range(version))
    return copies


@pytest.mark.parametrize("route", ROUTES)
def test_at_lag_zero_with_no_step_since_publication(route: str) -> None:
    policy = tiny_policy()
    old, batch = (
        build(route, policy),
        collate([episode(0, [4, (6, 0), 2, (3, 0)]), episode(1, [7, (9, 0)])]),
    )
    old.on_published(live={0})
    values, exact = ask(old, policy, batch)
    log_s = (policy.logps(batch, temperature=1.0).detach() - values)[batch.sampled]
    if route == "rollout":
        pi = torch.cat(
            [plain_logps(policy, batch.tokens[a:b].tolist()) for a, b in batch.spans()]
        ).float()
        torch.testing.assert_close(
            log_s, (pi - batch.behavior_logp)[batch.sampled], atol=1e-5, rtol=0
        )
        assert not exact.any()
    else:
        assert log_s.abs().max() < 1e-5
    if route in ("current_recompute", "queue_of_two", "snapshot_old"):
        assert torch.equal(exact, batch.sampled)


def test_a_scoring_pass_has_a_size_of_its_own_which_changes_no_bit() -> None:
    policy, batch = tiny_policy(), collate([episode(i, [4, (6, 0), 2, (3, 0)]) for i in range(5)])
    values = []
    for tokens in (0, 16, 1000):
        trainer = TrainerConfig(max_tokens_per_microbatch=40, max_tokens_per_scoring_pass=tokens)
        scorer = build_scorer(RunConfig(recipe="", trainer=trainer), policy)
        assert scorer.max_tokens == (tokens or 40)
        values.append(scorer.score(batch, batch.sampled).logp)
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2])
    default = TrainerConfig(max_tokens_per_microbatch=40)
    assert [default.scoring_tokens(on_gpu=on_gpu) for on_gpu in (False, True)] == [40, 160]


def test_once_a_step_is_taken_the_current_policy_stands_for_no_version() -> None:
    policy, batch = tiny_policy(), collate([episode(0, [4, (6, 0)])])
    recompute, snapshot = build("current_recompute", policy), build("snapshot_old", policy)
    for route in (recompute, snapshot):
        route.on_published(live={0})
    truth = plain_logps(policy, batch.tokens.tolist()).float()
    nudge(policy, seed=1)
    assert not ask(recompute, policy, batch)[1].any()
    values, exact = ask(snapshot, policy, batch)
    assert torch.equal(exact, batch.sampled)
    torch.testing.assert_close(values[batch.sampled], truth[batch.sampled], atol=1e-5, rtol=0)


@pytest.mark.parametrize("route", ["current_recompute", "snapshot_old"])
def test_the_factors_of_an_exact_token_are_those_of_the_version_that_sampled_it(route: str) -> None:
    """`current_recompute` is exact for tokens of the newest version alone."""
    policy = tiny_policy()
    old = build(route, policy)
    copies = publish_five(policy, old)
    batch = collate([episode(i, plan) for i, plan in enumerate(VERSIONS_IN_TURNS.values())])
    values, exact = ask(old, policy, batch)
    newest = batch.sampled & (batch.version == 4)
    assert torch.equal(exact, batch.sampled if route == "snapshot_old" else newest)
    truth, now = torch.zeros(len(exact)), torch.zeros(len(exact))
    for start, end in batch.spans():
        tokens = batch.tokens[start:end].tolist()
        now[start:end] = plain_logps(policy, tokens).float()
        for version, copy in enumerate(copies):
            of_version = batch.version[start:end] == version
            truth[start:end][of_version] = plain_logps(copy, tokens).float()[of_version]
    logp = policy.logps(batch, temperature=1.0).detach()
    unit = torch.arange(len(batch.tokens))
    log_d = log_discrepancy(values, batch.behavior_logp, sampled=batch.sampled)
    log_s = log_staleness(logp, values, unit=unit, sampled=batch.sampled)
    for ours, expected in ((log_d, truth - batch.behavior_logp), (log_s, now - truth)):
        torch.testing.assert_close(ours[exact], expected[exact], atol=1e-5, rtol=0)
    assert route == "current_recompute" or log_s[exact].abs().max() > 0.01, "old tokens moved"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("plan", VERSIONS_IN_TURNS.values(), ids=VERSIONS_IN_TURNS.keys())
def test_snapshots_equal_independent_full_copies(plan: list, dtype: str, tolerance: float) -> None:
    policy = tiny_policy(dtype=dtype)
    route = SnapshotOld(LocalScorer(policy, 0.7, 48))
    copies = publish_five(policy, route)
    batch = collate([episode(0, plan), episode(1, [6, (3, 4)]), episode(2, plan)])
    values, exact = route.logps(batch, torch.empty(0))
    assert torch.equal(exact, batch.sampled)
    for start, end in batch.spans():
        tokens = batch.tokens[start:end].tolist()
        for at in batch.sampled[start:end].nonzero().squeeze(1).tolist():
            truth = plain_logps(copies[int(batch.version[start + at])], tokens, temperature=0.7)[at]
            assert abs(values[start + at].item() - truth.item()) < tolerance


def test_snapshots_run_each_version_over_its_own_tokens_only() -> None:
    policy = tiny_policy()
    route = SnapshotOld(LocalScorer(policy, 1.0, 48))
    publish_five(policy, route)
    route.costs()
    batch = collate([episode(0, [4, (2, 1), (3, 2), 5]), episode(1, [3, (4, 2)])])
    route.logps(batch, torch.empty(0))
    costs = route.costs()
    assert costs["forward_tokens"] == (4 + 2) + (4 + 2 + 3) + (3 + 4)
    one_copy = sum(tensor.nbytes for tensor in policy.weights().values())
    assert (
        costs["versions"] == 5
        and costs["model_bytes"] == one_copy
        and costs["memory_bytes"] < 4 * one_copy
    )
    assert route.costs()["forward_tokens"] == 0


def test_the_policy_scores_its_own_version_and_nothing_is_restored_for_it() -> None:
    policy = tiny_policy()
    route = SnapshotOld(LocalScorer(policy, 1.0, 48))
    publish_five(policy, route)
    route.logps(collate([episode(0, [4, (2, 4)])]), torch.empty(0))
    assert route.costs()["restore_s"] == 0
    route.logps(collate([episode(0, [4, (2, 3)])]), torch.empty(0))
    assert route.costs()["restore_s"] > 0


def test_a_version_that_nobody_declared_live_is_gone_with_numbers() -> None:
    policy = tiny_policy()
    route = SnapshotOld(LocalScorer(policy, 1.0, 48))
    for version, live in ((0, {0}), (1, {0, 1}), (2, {1, 2})):
        policy.version = version
        route.on_published(live)
    with pytest.raises(LookupError, match=r"version 0 is not stored, only \[1, 2\]"):
        route.logps(collate([episode(0, [4, (2, 0), (2, 1)])]), torch.empty(0))


@pytest.mark.parametrize("beta", [0.0, 0.4, 0.5, 0.75])
def test_the_age_of_an_average_follows_its_law_and_tends_to_its_limit(beta: float) -> None:
    average, weights, ages = Average(), [], []
    for k in range(60):
        average.add({"w": torch.tensor([float(k)], dtype=torch.float64)}, beta=beta)
        weights.append(average.weight)
        ages.append(average.age)
    shares = [
        beta**back for back in range(60)
    ]  # of the update `back` ago, before they are made to sum to 1
    for k in (0, 1, 2, 7, 59):
        slow = sum(share * back for back, share in enumerate(shares[: k + 1])) / sum(
            shares[: k + 1]
        )
        assert ages[k] == pytest.approx(slow, abs=1e-12)
        assert weights[k] == pytest.approx(sum(shares[: k + 1]))
    assert ages[59] == pytest.approx(beta / (1 - beta), abs=1e-5)


@given(
    lines=st.lists(st.tuples(st.floats(-10, 10), st.floats(-10, 10)), min_size=1, max_size=8),
    betas=st.lists(st.floats(0, 0.9999), min_size=1, max_size=40),
)
@example(lines=[(0.0, 1.0)], betas=[0.75] * 40)
def test_under_linear_drift_an_average_is_the_weights_of_its_age_ago_whatever_the_decays(
    lines: list[tuple[float, float]], betas: list[float]
) -> None:
    start, slope = torch.tensor(lines, dtype=torch.float64).unbind(1)
    average = Average()
    for k, beta in enumerate(betas):
        average.add({"w": start + k * slope}, beta=beta)
        torch.testing.assert_close(
            average.tensors["w"], start + (k - average.age) * slope, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("beta", [0.5, 0.75])
def test_a_thousand_small_updates_are_not_lost(beta: float) -> None:
    """Weights near 0.02, updates of 1e-6: below bfloat16's spacing, 500 times float32's."""

    def error(updated: Mapping[str, Tensor], reference: Tensor, theta: Tensor) -> float:
        return ((updated["w"].double() - reference).abs() / (theta - reference).abs()).max().item()

    noise = torch.Generator().manual_seed(0)
    theta = 0.02 + 1e-3 * torch.randn(200, generator=noise, dtype=torch.float64)
    step = 1e-6 * torch.where(torch.rand(200, generator=noise) < 0.5, 1.0, -1.0).double()
    average, weight, reference = Average(), 1.0, theta.clone()
    average.add({"w": theta.float()}, beta=beta)
    for _ in range(1000):
        theta = theta + step
        average.add({"w": theta.float()}, beta=beta)
        weight = beta * weight + 1
        reference = reference + (theta - reference) / weight
    assert average.tensors["w"].dtype == torch.float32
    assert error(average.tensors, reference, theta) < 0.01
    assert error({"w": theta.float()}, reference, theta) > 0.9  # the newest weights are no average
    assert (
        error({"w": average.tensors["w"].bfloat16()}, reference, theta) > 1
    )  # nor is one that was kept in bfloat16


def test_bfloat16_weights_are_averaged_in_float32() -> None:
    policy = tiny_policy(dtype="bfloat16")
    route = EwmaProx(LocalScorer(policy, 1.0, 48), beta=0.5)
    publish_five(policy, route)
    assert {tensor.dtype for tensor in route.average.tensors.values()} == {torch.float32}


def test_the_average_scores_with_the_average_and_counts_each_version_once() -> None:
    policy, batch = tiny_policy(), collate([episode(0, [4, (5, 0), 2, (3, 1)])])
    route = EwmaProx(LocalScorer(policy, 1.0, 48), beta=0.5)
    first = {name: tensor.clone() for name, tensor in policy.weights().items()}
    route.on_published(live={0})
    at_first, _ = route.logps(batch, torch.empty(0))
    alone = plain_logps(policy, batch.tokens.tolist()).float()
    torch.testing.assert_close(at_first[batch.sampled], alone[batch.sampled], atol=1e-5, rtol=0)
    nudge(policy, seed=1)
    policy.version = 1
    route.on_published(live={0, 1})
    route.on_published(live={1})
    # w_1 = 0.5 + 1: the average holds a third of version 0 and two thirds of version 1, and is a
    # third of a version old
    assert route.average.weight == 1.5 and route.average.age == pytest.approx(1 / 3)
    mean = policy.twin()
    mean.load_weights(
        {name: first[name] / 3 + tensor * 2 / 3 for name, tensor in policy.weights().items()}
    )
    values, exact = route.logps(batch, torch.empty(0))
    truth = plain_logps(mean, batch.tokens.tolist()).float()
    torch.testing.assert_close(values[batch.sampled], truth[batch.sampled], atol=1e-5, rtol=0)
    assert not exact.any()
    assert route.costs()["forward_tokens"] == 2 * 14 and route.costs()["ewma_age"] == pytest.approx(
        1 / 3
    )


def test_an_average_of_nothing_says_so() -> None:
    route = EwmaProx(LocalScorer(tiny_policy(), 1.0, 48), beta=0.5)
    with pytest.raises(LookupError, match="no version was published"):
        route.logps(collate([episode(0, [4, (2, 0)])]), torch.empty(0))


@pytest.mark.parametrize("placement", ["twin", "own"])
def test_a_queue_of_two_scores_with_the_version_before_the_newest(placement: str) -> None:
    policy = tiny_policy()
    spec = OldLogpsConfig(route="queue_of_two", placement=placement)
    route = build_old_logps(spec, LocalScorer(policy, 1.0, 48))
    copies = publish_five(policy, route)
    route.on_published(live={4})  # a repeated notice changes nothing
    batch = collate([episode(0, [4, (3, 2), (4, 3), 2, (3, 4)])])
    values, exact = route.logps(batch, torch.empty(0))
    truth = plain_logps(copies[3], batch.tokens.tolist()).float()
    torch.testing.assert_close(values[batch.sampled], truth[batch.sampled], atol=1e-5, rtol=0)
    assert torch.equal(exact, batch.sampled & (batch.version == 3))
    again = build_old_logps(spec, LocalScorer(policy, 1.0, 48))
    again.restore(route.state())
    assert torch.equal(again.logps(batch, torch.empty(0))[0], values)


def test_a_queue_of_one_version_scores_with_it_and_an_empty_one_says_so() -> None:
    policy, batch = tiny_policy(), collate([episode(0, [4, (5, 0)])])
    route = build("queue_of_two", policy)
    with pytest.raises(LookupError, match="no version was published"):
        route.logps(batch, torch.empty(0))
    route.on_published(live={0})
    truth = plain_logps(policy, batch.tokens.tolist()).float()
    values, exact = route.logps(batch, torch.empty(0))
    torch.testing.assert_close(values[batch.sampled], truth[batch.sampled], atol=1e-5, rtol=0)
    assert torch.equal(exact, batch.sampled)


@pytest.mark.parametrize("case", oracles()["ewma"], ids=lambda case: f"beta {case['beta']}")
def test_averages_agree_with_the_published_recursion(case: dict) -> None:
    average = Average()
    average.add({"w": torch.tensor(case["theta"][0], dtype=torch.float64)}, beta=case["beta"])
    for theta, (weight, ewma) in zip(case["theta"][1:], trace_of(case), strict=True):
        average.add({"w": torch.tensor(theta, dtype=torch.float64)}, beta=case["beta"])
        assert average.weight == pytest.approx(weight, abs=1e-12)
        torch.testing.assert_close(
            average.tensors["w"], torch.tensor(ewma, dtype=torch.float64), atol=1e-12, rtol=0
        )


def trace_of(case: dict) -> list[tuple[float, float]]:
    return [(row["weight"], row["ewma"]) for row in case["trace"]]


def test_the_rollout_proximal_policy_agrees_with_a_public_implementation() -> None:
    vectors = oracles()
    case = next(case for case in vectors["proximal"] if case["method"] == "rollout")
    inputs = {
        name: torch.tensor(vectors["inputs"][name]) for name in ("behavior_logp", "mask", "version")
    }
    sampled = inputs["mask"].bool()
    batch = collate([episode(i, [1, (10, 0)]) for i in range(6)])
    flat = {
        "behavior_logp": torch.where(sampled, inputs["behavior_logp"], 0.0).flatten(),
        "sampled": sampled.flatten(),
        "version": inputs["version"].flatten(),
    }
    batch = Batch(**{name: flat.get(name, getattr(batch, name)) for name in Batch.__slots__})
    values, _ = RolloutRoute().logps(batch, torch.empty(0))
    expected = torch.tensor(case["values"]).flatten()
    torch.testing.assert_close(values[batch.sampled], expected[batch.sampled], atol=1e-6, rtol=0)


def follow(route: PpoEwmaAsync, policy: Policy, lags: list[int], *, first: int = 0) -> list[float]:
    """Train on one batch per lag and version. Return the age of the first average after each."""
    ages = []
    for version, lag in enumerate(lags, start=first):
        policy.version = version
        route.on_published(live={version})
        route.logps(collate([episode(version, [3, (4, version - lag)])]), torch.empty(0))
        route.trained(kept=1.0)
        nudge(policy, seed=version)
        ages.append(route.averages[0].age)
    return ages


def test_an_average_follows_the_staleness_of_the_data_and_stays_there() -> None:
    """From age 0 the age rises by less than 1 an update to the target of 3, and not beyond."""
    policy = tiny_policy()
    ages = follow(
        PpoEwmaAsync(LocalScorer(policy, 1.0, 48), PpoEwmaAsyncSpec()), policy, [0, 1, 2, *[3] * 60]
    )
    assert ages[0] == 0
    assert all(0 <= later - earlier < 1 for earlier, later in pairwise(ages))
    assert ages[-10:] == pytest.approx([3.0] * 10, abs=1e-3)


def test_a_batch_of_fresh_tokens_alone_does_not_empty_an_average() -> None:
    lags = [0, 1, 2, *[3] * 40, 0, 3]
    kept = {}
    for memory in (0.8, 0.0):
        policy = tiny_policy()
        options = PpoEwmaAsyncSpec(lag_memory=memory)
        kept[memory] = follow(PpoEwmaAsync(LocalScorer(policy, 1.0, 48), options), policy, lags)
    assert kept[0.8][-3:-1] == pytest.approx([3.0, 2.4], abs=1e-3)
    assert kept[0.8][-1] > 2.3
    assert kept[0.0][-2] == 0 and kept[0.0][-1] < 1


def test_a_restored_route_follows_the_same_lag() -> None:
    policy = tiny_policy()
    route = PpoEwmaAsync(LocalScorer(policy, 1.0, 48), PpoEwmaAsyncSpec())
    follow(route, policy, [0, 1, 2, 3, 3])
    again = PpoEwmaAsync(LocalScorer(policy, 1.0, 48), PpoEwmaAsyncSpec())
    again.restore(route.state())
    policy.version = 5
    batch = collate([episode(5, [3, (4, 5)])])
    for each in (route, again):
        each.logps(batch, torch.empty(0))
    assert again.averages[0].age == route.averages[0].age > 1


def test_a_fixed_decay_has_its_own_age() -> None:
    policy = tiny_policy()
    ages = follow(
        PpoEwmaAsync(LocalScorer(policy, 1.0, 48), PpoEwmaAsyncSpec(beta=0.5)),
        policy,
        [0, 1, 2, *[3] * 20],
    )
    assert ages[-1] == pytest.approx(1.0, abs=1e-5)


def test_the_weights_of_a_version_count_once_and_before_any_step() -> None:
    policy = tiny_policy()
    route = PpoEwmaAsync(LocalScorer(policy, 1.0, 48), PpoEwmaAsyncSpec(beta=0.5))
    batch = collate([episode(0, [3, (4, 0)])])
    truth = plain_logps(policy, batch.tokens.tolist()).float()
    values, exact = route.logps(batch, torch.empty(0))
    torch.testing.assert_close(values[batch.sampled], truth[batch.sampled], atol=1e-5, rtol=0)
    assert not exact.any() and route.averages[0].weight == 1
    nudge(policy, seed=1)
    assert torch.equal(route.logps(batch, torch.empty(0))[0], values)
    policy.version = 1
    nudge(policy, seed=2)
    with pytest.raises(RuntimeError, match="version 1 is gone"):
        route.logps(batch, torch.empty(0))


def test_each_token_takes_the_average_nearest_to_its_lag() -> None:
    policy = tiny_policy()
    options = PpoEwmaAsyncSpec(averages=2, lag_memory=0)
    route = PpoEwmaAsync(LocalScorer(policy, 1.0, 48), options)
    for version in range(12):
        policy.version = version
        batch = collate([episode(version, [3, (4, max(0, version - 4)), 2, (4, version)])])
        values, _ = route.logps(batch, torch.empty(0))
        if version < 11:
            nudge(policy, seed=version)
    young, old = route.averages
    assert young.age == pytest.approx(0, abs=1e-6) and old.age == pytest.approx(4, abs=0.05)
    for average, where in ((young, batch.version == 11), (old, batch.version == 7)):
        mean = policy.twin()
        mean.load_weights(average.tensors)
        truth = plain_logps(mean, batch.tokens.tolist()).float()
        torch.testing.assert_close(values[where], truth[where], atol=1e-5, rtol=0)
    assert route.costs()["ewma_age_1"] == old.age


def test_a_low_kept_share_resets_the_reference_after_patience_and_cooldown() -> None:
    policy = tiny_policy()
    options = PpoEwmaAsyncSpec(beta=0.75, reset_below=0.5, reset_patience=2, reset_cooldown=4)
    route = PpoEwmaAsync(LocalScorer(policy, 1.0, 48), options)
    ages, happened = [], []
    for version, kept in enumerate([0.9, 0.4, 0.9, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.9]):
        policy.version = version
        route.logps(collate([episode(version, [3, (4, version)])]), torch.empty(0))
        for _ in range(2):  # two optimizer steps on the batch count once
            route.trained(kept)
        nudge(policy, seed=version)
        ages.append(route.averages[0].age)
        happened += route.events()
    assert [event["version"] for event in happened] == [5, 9]
    assert [version for version, age in enumerate(ages) if age == 0] == [0, 5, 9]
    assert happened[0]["kind"] == "ewma_reset" and "kept 0.400, 0.400" in happened[0]["reason"]


def test_an_average_of_optimizer_steps_counts_steps() -> None:
    policy = tiny_policy()
    route = EwmaProx(LocalScorer(policy, 1.0, 48), beta=0.5, every_step=True)
    policy.version = 0
    route.on_published(live={0})
    for step in range(3):
        nudge(policy, seed=step)
        route.trained(kept=1.0)
    policy.version = 1
    route.on_published(live={0, 1})
    assert route.average.weight == 1 + 0.5 + 0.25 + 0.125


@pytest.mark.parametrize("method", ["loglinear", "linear"])
def test_interpolated_proxies_agree_with_a_public_implementation(method: str) -> None:
    """AReaL's alpha is 0 at lag 0 and is computed in float32."""
    vectors = oracles()
    case = next(case for case in vectors["proximal"] if case["method"] == method)
    inputs = {
        name: torch.tensor(vectors["inputs"][name])
        for name in ("behavior_logp", "logp", "mask", "version")
    }
    sampled = inputs["mask"].bool()
    policy = tiny_policy()
    policy.version = vectors["inputs"]["current_version"]
    blank = collate([episode(i, [1, (10, 0)]) for i in range(6)])
    flat = {
        "behavior_logp": torch.where(sampled, inputs["behavior_logp"], 0.0).flatten(),
        "sampled": sampled.flatten(),
        "version": inputs["version"].flatten(),
    }
    batch = Batch(**{name: flat.get(name, getattr(blank, name)) for name in Batch.__slots__})
    config = OldLogpsConfig(route=f"interp_prox_{method}", fresh="behavior")  # type: ignore[arg-type]
    values, exact = build_old_logps(config, LocalScorer(policy, 1.0, 48)).logps(
        batch, inputs["logp"].flatten()
    )
    expected = torch.tensor(case["values"]).flatten()
    torch.testing.assert_close(values[batch.sampled], expected[batch.sampled], atol=1e-6, rtol=0)
    assert not exact.any() and not values[~batch.sampled].any()
