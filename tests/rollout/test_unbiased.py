"""Promise: with both factors in place, the gradient is that of the objective, exactly and for every
proxy.

Nothing is sampled. Vocabulary 4, length 3: all 64 sequences are enumerated in float64, and
expectations are sums. The engine's policy mu is, token by token, a perturbed version. Everything
under test goes through the public functions; only the true gradients are written out here.

- (a) the product over the sequence times the sequence's score is unbiased, whatever stands in for
  `old_logp`;
- (b) so are prefix products for step rewards;
- (c) token-level ratios have the gradient of another quantity, which is asserted, and it is not
  grad J unless pi = mu;
- without D, (a) fails, unless `old_logp` is the engine's, whose D is 1;
- a version may depend on the tokens before it; throwing replies away because of their tokens is
  biased;
- the denominators: `constant` has the gradient of J, `sequence_mean` that of reward / length;
- the estimators: `rloo` has the gradient of J, `grpo_no_std` (n - 1) / n of it, others neither;
- weights with mean 1 are biased and have less variance.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unstale.algorithms.advantages import (
    batch_advantage,
    grpo_advantage,
    opo_advantage,
    rloo_advantage,
    rloo_first_advantage,
)
from unstale.algorithms.corrections import (
    aggregate,
    keep_all,
    log_discrepancy,
    log_staleness,
    truncate,
    unit_ids,
)
from unstale.algorithms.objectives import none, token_norm

VOCABULARY, LENGTH = 4, 3
SEQUENCES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
PREFIX = [
    SEQUENCES[:, :t] @ torch.tensor([VOCABULARY**i for i in range(t)], dtype=torch.long)
    for t in range(LENGTH)
]
SAMPLED = torch.ones(SEQUENCES.shape, dtype=torch.bool)
SEQUENCE = torch.arange(len(SEQUENCES))[:, None].expand(SEQUENCES.shape)
SCHEDULES = [(0, 0, 0), (0, 0, 1), (0, 1, 2), (1, 2, 2)]
PROXIES = ["exact", "behavior", "now", "loglinear", "arbitrary"]

Policy = list[Tensor]
"""Logits of the next token, one row per prefix: shapes [1, 4], [4, 4], [16, 4]."""


def noise(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        * scale
    )


def policy(seed: int) -> Policy:
    return [noise(seed + 10 * t, VOCABULARY**t, VOCABULARY) for t in range(LENGTH)]


def moved(base: Policy, seed: int, *, scale: float) -> Policy:
    return [row + noise(seed + 10 * t, *row.shape, scale=scale) for t, row in enumerate(base)]


def logps(of: Policy) -> Tensor:
    """`[64, 3]`: the log-probability of every token of every sequence, given what precedes it."""
    columns = [torch.log_softmax(of[t], -1)[PREFIX[t], SEQUENCES[:, t]] for t in range(LENGTH)]
    return torch.stack(columns, 1)


ADVANTAGE = noise(900, len(SEQUENCES))
VERSIONS = [policy(1), moved(policy(1), 2, scale=0.3), moved(policy(1), 3, scale=0.6)]
NOW = moved(policy(1), 4, scale=0.8)
ENGINES = [moved(version, 50 + v, scale=0.2) for v, version in enumerate(VERSIONS)]


def of_schedule(policies: list[Policy], schedule: tuple[int, ...]) -> Tensor:
    return torch.stack([logps(policies[v])[:, t] for t, v in enumerate(schedule)], 1)


def proxy(name: str, *, behavior: Tensor, exact: Tensor, now: Tensor) -> Tensor:
    return {
        "exact": exact,
        "behavior": behavior,
        "now": now,
        "loglinear": behavior + 0.4 * (now - behavior),
        "arbitrary": noise(77, *now.shape),
    }[name]


def leaves() -> Policy:
    return [row.clone().requires_grad_() for row in NOW]


def gradient(value: Tensor, of: Policy) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(value, of)])


def true_gradient(reward: Tensor) -> Tensor:
    """Return grad of J = sum over sequences of pi(x) * reward(x)."""
    theta = leaves()
    return gradient((logps(theta).sum(1).exp() * reward).sum(), theta)


def expected_gradient(
    old_logp: Tensor, behavior: Tensor, *, reward: Tensor, whole: bool = True, correct: bool = True
) -> Tensor:
    """Return minus the gradient of the loss, averaged over sequences drawn from mu.

    Tokens with a non-finite `reward` `[64, 3]` are left out. `whole` multiplies ratios over a
    sequence; otherwise they are per token.
    """
    theta = leaves()
    logp = logps(theta)
    sampled = reward.isfinite()
    unit = unit_ids(
        "sequence" if whole else "token",
        sequence=SEQUENCE,
        turn=SEQUENCE,
        version=SEQUENCE,
        sampled=sampled,
    )
    log_d = log_discrepancy(old_logp, behavior, sampled=sampled)
    log_s = log_staleness(logp, old_logp, unit=unit, sampled=sampled, how="sum")
    control = keep_all(sampled)
    if correct:
        control = truncate(
            aggregate(log_d, unit, sampled=sampled, how="sum"), control, high=float("inf")
        )
    assert max(log_d.abs().sum(1).max(), log_s.detach().abs().max()) < 20, "the clamp would act"
    norm = token_norm(
        sampled, control.keep, sequence=SEQUENCE, how="constant", constant=1 / len(SEQUENCES)
    )
    loss = none(log_s, reward.nan_to_num()).loss * control.factor * norm
    return gradient(-(behavior.sum(1).exp()[:, None] * loss).sum(), theta)


def per_token(reward: Tensor) -> Tensor:
    return reward[:, None].expand(SEQUENCES.shape)


def setting(schedule: tuple[int, ...], name: str) -> tuple[Tensor, Tensor]:
    behavior = of_schedule(ENGINES, schedule)
    exact = of_schedule(VERSIONS, schedule)
    return proxy(name, behavior=behavior, exact=exact, now=logps(NOW)), behavior


def assert_close(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-13)


def turn(ours: Tensor, truth: Tensor) -> float:
    """Return the distance of two directions."""
    return float((ours / ours.norm() - truth / truth.norm()).norm())


def assert_turned(ours: Tensor, truth: Tensor, *, least: float = 0.05) -> None:
    """Assert that `ours` is no multiple of `truth`."""
    assert turn(ours, truth) > least


def assert_apart(ours: Tensor, truth: Tensor) -> None:
    assert (ours - truth).norm() > 0.05 * truth.norm()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROXIES)
def test_sequence_products_are_unbiased_for_every_proxy(
    name: str, schedule: tuple[int, ...]
) -> None:
    old_logp, behavior = setting(schedule, name)
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE))
    assert_close(ours, true_gradient(ADVANTAGE))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROXIES)
def test_prefix_products_are_unbiased_for_step_rewards(
    name: str, schedule: tuple[int, ...]
) -> None:
    """The reward of step k depends on the first k tokens and is weighted by the product up to k."""
    old_logp, behavior = setting(schedule, name)
    rewards = [noise(300 + k, VOCABULARY ** (k + 1)) for k in range(LENGTH)]
    earned = [rewards[k][PREFIX[k] + VOCABULARY**k * SEQUENCES[:, k]] for k in range(LENGTH)]
    ours = torch.zeros(())
    for k, reward in enumerate(earned):
        upto = torch.where(torch.arange(LENGTH) <= k, per_token(reward), float("nan"))
        ours = ours + expected_gradient(old_logp, behavior, reward=upto)
    assert_close(ours, true_gradient(sum(earned, torch.zeros(()))))


def one_token_replaced(behavior: Tensor) -> Tensor:
    """Return grad of sum_t E[x_<t ~ mu, x_t ~ pi, x_>t ~ mu] A."""
    theta = leaves()
    logp = logps(theta)
    swapped = [behavior.sum(1) - behavior[:, t] + logp[:, t] for t in range(LENGTH)]
    return gradient(sum(((row.exp() * ADVANTAGE).sum() for row in swapped), torch.zeros(())), theta)


@pytest.mark.parametrize("name", PROXIES)
def test_token_ratios_have_the_gradient_of_another_quantity(name: str) -> None:
    old_logp, behavior = setting((0, 1, 2), name)
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE), whole=False)
    assert_close(ours, one_token_replaced(behavior))
    assert_apart(ours, true_gradient(ADVANTAGE))


def test_token_ratios_are_unbiased_when_the_engine_is_the_policy() -> None:
    now = logps(NOW)
    for name in PROXIES:
        old_logp = proxy(name, behavior=now, exact=now, now=now)
        ours = expected_gradient(old_logp, now, reward=per_token(ADVANTAGE), whole=False)
        assert_close(ours, true_gradient(ADVANTAGE))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["exact", "now", "loglinear", "arbitrary"])
def test_without_the_discrepancy_it_is_biased(name: str, schedule: tuple[int, ...]) -> None:
    """`now` without D is plain REINFORCE on stale data. `behavior` is left out: its D is 1."""
    old_logp, behavior = setting(schedule, name)
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE), correct=False)
    assert_apart(ours, true_gradient(ADVANTAGE))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_the_discrepancy_the_engines_own_log_probabilities_are_enough(
    schedule: tuple[int, ...],
) -> None:
    """The route `rollout`: D is 1, and S is the whole ratio."""
    old_logp, behavior = setting(schedule, "behavior")
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE), correct=False)
    assert_close(ours, true_gradient(ADVANTAGE))


@pytest.mark.parametrize("name", PROXIES)
def test_a_switch_may_depend_on_the_tokens_before_it(name: str) -> None:
    """The second token has version 1 after an odd token; the third moves on after a 3."""
    first = SEQUENCES[:, 0] % 2
    version = torch.stack([first * 0, first, first + (SEQUENCES[:, 1] == 3)], 1)
    behavior, exact = (
        torch.stack([logps(each) for each in policies]).gather(0, version[None])[0]
        for policies in (ENGINES, VERSIONS)
    )
    assert behavior.sum(1).exp().sum().item() == pytest.approx(1)
    old_logp = proxy(name, behavior=behavior, exact=exact, now=logps(NOW))
    ours = expected_gradient(old_logp, behavior, reward=per_token(ADVANTAGE))
    assert_close(ours, true_gradient(ADVANTAGE))


def test_replies_thrown_away_because_of_their_tokens_bias_the_rest() -> None:
    """A reply of version 0 that begins with token 0 is dropped and sampled again by version 1."""
    first, second = (logps(engine) for engine in ENGINES[:2])
    begins_with_0 = SEQUENCES[:, 0] == 0
    again = first.sum(1).exp()[begins_with_0].sum()
    kept = torch.where(begins_with_0, 0.0, ADVANTAGE)
    ours = expected_gradient(first, first, reward=per_token(kept))
    ours = ours + again * expected_gradient(second, second, reward=per_token(ADVANTAGE))
    assert_turned(ours, true_gradient(ADVANTAGE))


# --- denominators
# ------------------------------------------------------------------------------------------------

SIZE = torch.where((SEQUENCES == 0).any(1), (SEQUENCES == 0).int().argmax(1) + 1, LENGTH)
"""Action tokens of a sequence that ends with its first token 0."""
TEXT = torch.where(torch.arange(LENGTH) < SIZE[:, None], SEQUENCES, 0)
REWARD = 1 + noise(901, len(SEQUENCES))[TEXT @ VOCABULARY ** torch.arange(LENGTH)]
"""A reward of the tokens up to the end."""


def mean_gradient(how: str, *, batch: int = 1) -> Tensor:
    """Return minus the mean gradient of the loss of `batch` sequences, drawn from the policy.

    Each sequence's score counts reward * norm, with the norm of its batch. Batches of equal lengths
    have equal norms, so that the lengths of the other sequences are enough.
    """
    theta = leaves()
    score = torch.where(torch.arange(LENGTH) < SIZE[:, None], logps(theta), 0.0).sum(1)
    chance = logps(NOW).sum(1).exp()
    of_size = [float(chance[size == SIZE].sum()) for size in range(1, LENGTH + 1)]
    weight = torch.zeros(len(SEQUENCES), dtype=torch.float64)
    for sizes in itertools.product(range(1, LENGTH + 1), repeat=batch):
        rows = torch.arange(batch).repeat_interleave(torch.tensor(sizes))
        everything = torch.ones_like(rows, dtype=torch.bool)
        norm = token_norm(everything, everything, sequence=rows, how=how, constant=7.0)  # type: ignore[arg-type]
        others = math.prod(of_size[size - 1] for size in sizes[1:])
        weight += torch.where(sizes[0] == SIZE, batch * others * norm[0], 0.0)
    return gradient((chance * weight * REWARD * score).sum(), theta)


def test_a_constant_denominator_has_the_gradient_of_the_reward() -> None:
    for batch in (1, 3):
        assert_close(7 * mean_gradient("constant", batch=batch), true_gradient(REWARD))


def test_the_mean_over_a_sequence_trains_on_reward_over_length() -> None:
    for batch in (1, 3):
        ours = mean_gradient("sequence_mean", batch=batch)
        assert_close(ours, true_gradient(REWARD / SIZE))
        assert_turned(ours, true_gradient(REWARD))


def test_the_bias_of_a_random_count_of_tokens_falls_with_the_batch() -> None:
    truth = true_gradient(REWARD)
    small, large = (turn(mean_gradient("action_tokens", batch=size), truth) for size in (1, 5))
    assert small > 0.05 and large < 0.35 * small
    assert_close(mean_gradient("action_tokens", batch=1), mean_gradient("sequence_mean", batch=1))


# --- advantage estimators
# ------------------------------------------------------------------------------------------------

CHOICE = noise(902, 4)
"""Logits of a policy that chooses one of four replies."""
REWARDS = torch.tensor([1.0, 0.0, 0.3, -0.5], dtype=torch.float64)
LENGTHS = torch.tensor([5.0, 1.0, 2.0, 9.0], dtype=torch.float64)
"""Tokens of the four replies, for estimators that weigh them."""
ESTIMATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "grpo": lambda rewards, group, lengths: grpo_advantage(rewards, group),
    "grpo_no_std": lambda rewards, group, lengths: grpo_advantage(rewards, group, std=False),
    "rloo": lambda rewards, group, lengths: rloo_advantage(rewards, group),
    "opo": lambda rewards, group, lengths: opo_advantage(rewards, group, lengths=lengths),
    "reinforce_batch": lambda rewards, group, lengths: batch_advantage(rewards, group),
}


def estimated_gradient(
    name: str, siblings: int, *, groups: int = 1, lengths: Tensor = LENGTHS
) -> Tensor:
    """Return the mean of advantage * score over all batches of groups drawn from the policy."""
    theta = CHOICE.clone().requires_grad_()
    logp = torch.log_softmax(theta, 0)
    group = torch.arange(groups).repeat_interleave(siblings)
    total = torch.zeros((), dtype=torch.float64)
    for drawn in itertools.product(range(4), repeat=siblings * groups):
        picked = torch.tensor(drawn)
        advantage = ESTIMATES[name](REWARDS[picked], group, lengths[picked])
        chance = logp.detach()[picked].sum().exp()
        total = total + chance * (advantage * logp[picked]).mean()
    return torch.autograd.grad(total, theta)[0]


def best_gradient() -> Tensor:
    theta = CHOICE.clone().requires_grad_()
    return torch.autograd.grad((torch.softmax(theta, 0) * REWARDS).sum(), theta)[0]


@pytest.mark.parametrize("siblings", [2, 3, 4])
def test_leaving_a_sibling_out_of_its_baseline_is_unbiased(siblings: int) -> None:
    assert_close(estimated_gradient("rloo", siblings), best_gradient())


def added_gradient(estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the mean of the sum of advantage * score over groups of 2 episodes.

    Two more are added if both have rewards below 0.5. `estimate` gets the rewards `[n]`, and True
    for the first episodes `[n]`.
    """
    theta = CHOICE.clone().requires_grad_()
    logp = torch.log_softmax(theta, 0)
    total = torch.zeros((), dtype=torch.float64)
    for size in (2, 4):
        first = torch.arange(size) < 2
        for drawn in itertools.product(range(4), repeat=size):
            picked = torch.tensor(drawn)
            if bool((REWARDS[picked[:2]] < 0.5).all()) == (size == 4):
                chance = logp.detach()[picked].sum().exp()
                total = total + chance * (estimate(REWARDS[picked], first) * logp[picked]).sum()
    return torch.autograd.grad(total, theta)[0]


def test_episodes_that_are_added_after_failures_bias_a_mean_over_all_of_them() -> None:
    """With the mean of the first ones as the baseline, the gradient is E[n] times that of J."""
    failing = float(torch.softmax(CHOICE, 0)[REWARDS < 0.5].sum())
    group = torch.zeros(4, dtype=torch.long)
    ours = added_gradient(
        lambda rewards, first: rloo_first_advantage(rewards, group[: len(first)], first=first)
    )
    assert_close(ours, (2 + 2 * failing**2) * best_gradient())
    mean = added_gradient(
        lambda rewards, first: grpo_advantage(rewards, group[: len(first)], std=False)
    )
    assert_turned(mean, best_gradient(), least=0.01)


def test_the_mean_over_a_group_enlarged_after_failures_is_not_the_success_rate() -> None:
    """It has 4 episodes, and 4 more if all fail. With success rate 0.2 its mean is 0.241."""
    rate, mean = 0.2, 0.0
    for size in (4, 8):
        for drawn in itertools.product((0.0, 1.0), repeat=size):
            rewards = torch.tensor(drawn, dtype=torch.float64)
            if bool(rewards[:4].any()) == (size == 4):
                group = torch.zeros(size, dtype=torch.long)
                baseline = rewards - grpo_advantage(rewards, group, std=False)
                chance = math.prod(rate if reward else 1 - rate for reward in drawn)
                mean += chance * float(baseline[0])
    assert mean == pytest.approx(0.241, abs=5e-4)
    assert mean == pytest.approx(rate + (1 - rate) ** 4 * rate / 2)


@pytest.mark.parametrize("siblings", [2, 3, 4])
def test_a_baseline_that_holds_the_reward_itself_shortens_the_gradient(siblings: int) -> None:
    ours = estimated_gradient("grpo_no_std", siblings)
    assert_close(ours, (siblings - 1) / siblings * best_gradient())
    assert_close(estimated_gradient("opo", siblings, lengths=LENGTHS * 0 + 5), ours)


@pytest.mark.parametrize("name", ["grpo", "opo"])
@pytest.mark.parametrize("siblings", [2, 3])
def test_division_by_the_deviation_and_weights_by_length_turn_the_gradient(
    name: str, siblings: int
) -> None:
    assert_turned(estimated_gradient(name, siblings), best_gradient())


def test_normalization_over_the_batch_turns_the_gradient() -> None:
    assert_turned(estimated_gradient("reinforce_batch", 2, groups=2), best_gradient(), least=0.01)


def test_a_cap_on_the_weight_is_biased() -> None:
    """Truncation is biased, so the unbiasedness tests above can fail."""
    old_logp, behavior = setting((0, 1, 2), "exact")
    unit = SEQUENCE
    theta = leaves()
    log_d = aggregate(
        log_discrepancy(old_logp, behavior, sampled=SAMPLED), unit, sampled=SAMPLED, how="sum"
    )
    log_s = log_staleness(logps(theta), old_logp, unit=unit, sampled=SAMPLED, how="sum")
    weight = truncate(log_d, keep_all(SAMPLED), high=1.0).factor
    loss = none(log_s, per_token(ADVANTAGE)).loss * weight
    assert_apart(
        gradient(-(behavior.sum(1).exp()[:, None] * loss).sum(), theta), true_gradient(ADVANTAGE)
    )


def weighted_gradient(size: int, *, normalize: bool) -> tuple[Tensor, float]:
    """Return the mean and the variance of the gradient of a batch of `size` stale replies.

    Each reply is one token. The variance is summed over the parameters.
    """
    theta = CHOICE.clone().requires_grad_()
    logp = torch.log_softmax(theta, 0)
    scores = torch.stack([torch.autograd.grad(each, theta, retain_graph=True)[0] for each in logp])
    behavior = torch.log_softmax(CHOICE + noise(903, 4, scale=0.8), 0)
    log_d = log_discrepancy(logp.detach(), behavior, sampled=torch.ones(4, dtype=torch.bool))
    mean, square = torch.zeros(4, dtype=torch.float64), 0.0
    for drawn in itertools.product(range(4), repeat=size):
        picked = torch.tensor(drawn)
        everything = keep_all(torch.ones(size, dtype=torch.bool))
        factor = truncate(log_d[picked], everything, high=math.inf, normalize=normalize).factor
        found = ((factor * REWARDS[picked])[:, None] * scores[picked]).mean(0)
        chance = float(behavior[picked].sum().exp())
        mean += chance * found
        square += chance * float(found @ found)
    return mean, square - float(mean @ mean)


@pytest.mark.parametrize("size", [2, 4])
def test_weights_with_mean_one_are_biased_and_have_less_variance(size: int) -> None:
    plain, more = weighted_gradient(size, normalize=False)
    ours, less = weighted_gradient(size, normalize=True)
    assert_close(plain, best_gradient())
    assert_apart(ours, best_gradient())
    assert less < 0.9 * more
