"""Compare losses, weights, masks, metrics and advantages with public implementations.

The vectors (float64) come from `../shared/oracles/vectors.json` if it exists, else from the copy in
`data/`. Where a definition differs on purpose, the test checks the identity between the two:

- CISPO uses log S instead of log pi. Values differ by `weight * A * old_logp`; gradients are equal.
- A `k1` mask is a band on mu / old. Ours is a band on old / mu, with reciprocal, swapped ends.
- A group without spread, or of one, gets 0 here. No vector has one.
- Public averages divide by a count + 1e-8; tolerances allow for it.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.algorithms import advantages
from unstale.algorithms.corrections import (
    aggregate,
    clamp,
    divergence,
    k3,
    k3_mask,
    keep_all,
    log_discrepancy,
    log_staleness,
    mask,
    mask_weight,
    truncate,
    unit_ids,
)
from unstale.algorithms.objectives import (
    Surrogate,
    cispo,
    dual_clip,
    gspo,
    token_norm,
)

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "oracles" / "vectors.json"
COPY = ROOT / "tests" / "data" / "oracles.json"
VECTORS = json.loads((SHARED if SHARED.exists() else COPY).read_text())


def double(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


INPUTS = VECTORS["inputs"]
BEHAVIOR, OLD, NOW = (double(INPUTS[name]) for name in ("behavior_logp", "old_logp", "logp"))
SAMPLED = torch.tensor(INPUTS["mask"]).bool()
ADVANTAGE = double(INPUTS["advantage"])[:, None].expand(SAMPLED.shape)
SEQUENCE = torch.arange(len(SAMPLED))[:, None].expand(SAMPLED.shape)
UNITS = {
    name: unit_ids(
        name,
        sequence=SEQUENCE,
        turn=SAMPLED.long() - 1,
        version=torch.tensor(INPUTS["version"]),
        sampled=SAMPLED,
    )
    for name in ("token", "sequence")
}
LOG_D = log_discrepancy(OLD, BEHAVIOR, sampled=SAMPLED)
NORMS = {
    "token-mean": {"how": "action_tokens"},
    "seq-mean-token-mean": {"how": "sequence_mean"},
    "seq-mean-token-sum": {"how": "constant", "constant": 1.0},
    "seq-mean-token-sum-norm": {"how": "constant", "constant": 11.0},
}


def case(section: str, **wanted: Any) -> Any:
    return next(
        item
        for item in VECTORS[section]
        if all(item[key] == value for key, value in wanted.items())
    )


def factor(level: str, threshold: float | str) -> Tensor:
    log_d = aggregate(LOG_D, UNITS[level], sampled=SAMPLED, how="sum")
    if isinstance(threshold, float):
        return truncate(log_d, keep_all(SAMPLED), high=threshold).factor
    low, high = map(float, threshold.split("_"))
    return mask_weight(log_d, keep_all(SAMPLED), low=low, high=high).factor


def staleness(logp: Tensor, unit: str = "token") -> Tensor:
    return log_staleness(logp, OLD, unit=UNITS[unit], sampled=SAMPLED)


def norm(name: str) -> Tensor:
    return token_norm(SAMPLED, SAMPLED, sequence=SEQUENCE, **NORMS[name])


def check_loss(name: str, loss: Tensor, logp: Tensor, surrogate: Surrogate) -> None:
    expected = case("losses", name=name)
    (gradient,) = torch.autograd.grad(loss, logp)
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-8)
    torch.testing.assert_close(gradient, double(expected["grad_logp"]), rtol=1e-8, atol=1e-12)
    clipped = surrogate.clipped[SAMPLED].double().mean().item()
    assert clipped == pytest.approx(expected["metrics"]["actor/pg_clipfrac"], rel=1e-8)


def test_the_copy_is_the_shared_file() -> None:
    assert not SHARED.exists() or COPY.read_bytes() == SHARED.read_bytes()


@pytest.mark.parametrize("reduction", NORMS)
def test_clipped_loss(reduction: str) -> None:
    logp = NOW.clone().requires_grad_()
    surrogate = dual_clip(staleness(logp), ADVANTAGE, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    check_loss(f"ppo_clip/{reduction}", (surrogate.loss * norm(reduction)).sum(), logp, surrogate)


def test_gspo_loss() -> None:
    logp = NOW.clone().requires_grad_()
    surrogate = gspo(staleness(logp, "sequence"), ADVANTAGE, clip_low=3e-2, clip_high=4e-2)
    loss = (surrogate.loss * norm("seq-mean-token-mean")).sum()
    check_loss("gspo/seq-mean-token-mean", loss, logp, surrogate)


def test_cispo_loss_up_to_a_constant() -> None:
    logp = NOW.clone().requires_grad_()
    surrogate = cispo(staleness(logp), ADVANTAGE, clip_low=0.2, clip_high=0.28)
    weight = (NOW - OLD).exp().clamp(0.8, 1.28)
    constant = (weight * ADVANTAGE * OLD * norm("token-mean"))[SAMPLED].sum()
    check_loss(
        "cispo/token-mean", (surrogate.loss * norm("token-mean")).sum() - constant, logp, surrogate
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [1.05, "0.95_1.05"])
def test_discrepancy_weights_and_the_loss_they_weigh(level: str, threshold: float | str) -> None:
    weight = factor(level, threshold)
    expected = case("discrepancy", kind="weight", level=level, threshold=threshold)
    torch.testing.assert_close(weight, double(expected["values"]), rtol=1e-12, atol=1e-12)
    logp = NOW.clone().requires_grad_()
    surrogate = dual_clip(staleness(logp), ADVANTAGE, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    loss = (surrogate.loss * weight * norm("token-mean")).sum()
    check_loss(f"ppo_clip_weighted/{level}/{threshold}", loss, logp, surrogate)


@pytest.mark.parametrize(
    ("option", "level", "how"),
    [
        ("token_k1", "token", "mean"),
        ("seq_mean_k1", "sequence", "mean"),
        ("seq_sum_k1", "sequence", "sum"),
    ],
)
def test_k1_masks_are_bands_with_reciprocal_ends(option: str, level: str, how: Any) -> None:
    expected = case("discrepancy", kind="mask", option=option)
    low, high = map(float, expected["threshold"].split("_"))
    log_d = aggregate(LOG_D, UNITS[level], sampled=SAMPLED, how=how)
    kept = mask(log_d, keep_all(SAMPLED), low=1 / high, high=1 / low).keep
    assert kept.int().tolist() == expected["values"]


@pytest.mark.parametrize(("option", "level"), [("token_k3", "token"), ("seq_mean_k3", "sequence")])
def test_k3_masks(option: str, level: str) -> None:
    expected = case("discrepancy", kind="mask", option=option)
    statistic = aggregate(k3(LOG_D, BEHAVIOR), UNITS[level], sampled=SAMPLED)
    kept = k3_mask(LOG_D, keep_all(SAMPLED), k3=statistic, kl_limit=float(expected["threshold"]))
    assert kept.keep.int().tolist() == expected["values"]


def test_sequence_max_mask_drops_a_sequence_by_its_worst_token() -> None:
    """verl's `seq_max_k2`: keep a sequence while the greatest (log D)^2 / 2 is at most a bound."""
    worst = [
        max(abs(old - mu) for old, mu, own in zip(*row, strict=True) if own)
        for row in zip(OLD.tolist(), BEHAVIOR.tolist(), SAMPLED.tolist(), strict=True)
    ]
    bound = sorted(worst)[2] ** 2 / 2  # three of the six sequences stay
    band = math.exp(math.sqrt(2 * bound) * (1 + 1e-12))
    log_d = aggregate(LOG_D, UNITS["sequence"], sampled=SAMPLED, how="max")
    kept = mask(log_d, keep_all(SAMPLED), low=1 / band, high=band).keep
    expected = torch.tensor([size**2 / 2 <= bound for size in worst])
    assert expected.sum() == 3 and torch.equal(kept, SAMPLED & expected[:, None])


def test_normalized_and_clamped_weights_against_loops() -> None:
    """verl's `rollout_is_batch_normalize` on token weights, slime's `tis_clip_low`."""
    ratios = [
        math.exp(old - mu)
        for old, mu, own in zip(
            OLD.flatten().tolist(),
            BEHAVIOR.flatten().tolist(),
            SAMPLED.flatten().tolist(),
            strict=True,
        )
        if own
    ]
    held = [min(ratio, 1.05) for ratio in ratios]
    mean = sum(held) / len(held)
    ours = truncate(LOG_D, keep_all(SAMPLED), high=1.05, normalize=True).factor[SAMPLED]
    assert ours.tolist() == pytest.approx([weight / mean for weight in held], rel=1e-12)
    both = clamp(LOG_D, keep_all(SAMPLED), low=0.95, high=1.05).factor[SAMPLED]
    assert both.tolist() == pytest.approx([min(max(ratio, 0.95), 1.05) for ratio in ratios])


def test_offpolicy_metrics() -> None:
    ours = divergence(OLD, BEHAVIOR, sequence=SEQUENCE, sampled=SAMPLED)
    names = {
        "kl": "kl_k1",
        "k3_kl": "kl_k3",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_sequence",
        "rollout_log_ppl": "behavior_log_ppl_mean",
        "training_log_ppl": "old_log_ppl_mean",
        "log_ppl_diff": "log_ppl_diff_mean",
        "log_ppl_abs_diff": "log_ppl_diff_abs_mean",
        "log_ppl_diff_min": "log_ppl_diff_min",
        "log_ppl_diff_max": "log_ppl_diff_max",
    }
    for public, name in names.items():
        assert ours[f"correction/{name}"] == pytest.approx(
            VECTORS["offpolicy_metrics"][public], rel=1e-6
        ), public


def test_perplexities_are_means_of_what_we_keep_as_logarithms() -> None:
    log_mu = -aggregate(BEHAVIOR, UNITS["sequence"], sampled=SAMPLED)[:, 0]
    log_old = -aggregate(OLD, UNITS["sequence"], sampled=SAMPLED)[:, 0]
    metrics = VECTORS["offpolicy_metrics"]
    assert log_mu.exp().mean().item() == pytest.approx(metrics["rollout_ppl"], rel=1e-6)
    assert log_old.exp().mean().item() == pytest.approx(metrics["training_ppl"], rel=1e-6)
    assert (log_old - log_mu).exp().mean().item() == pytest.approx(metrics["ppl_ratio"], rel=1e-6)


def test_mean_log_staleness_is_the_public_policy_kl() -> None:
    kl = -staleness(NOW)[SAMPLED].mean().item()
    assert kl == pytest.approx(VECTORS["losses"][0]["metrics"]["actor/ppo_kl"], rel=1e-8)


@pytest.mark.parametrize("name", ["grpo", "grpo_no_std", "rloo", "opo", "reinforce_pp_baseline"])
def test_advantages(name: str) -> None:
    expected = case("advantages", name=name)
    rewards, group = double(expected["rewards"]), torch.tensor(expected["group"])
    lengths = SAMPLED.sum(1).double()
    ours = {
        "grpo": lambda: advantages.grpo_advantage(rewards, group),
        "grpo_no_std": lambda: advantages.grpo_advantage(rewards, group, std=False),
        "rloo": lambda: advantages.rloo_advantage(rewards, group),
        "opo": lambda: advantages.opo_advantage(rewards, group, lengths=lengths),
        "reinforce_pp_baseline": lambda: advantages.batch_advantage(
            rewards, group, lengths=lengths
        ),
    }[name]()
    torch.testing.assert_close(
        ours[:, None] * SAMPLED, double(expected["advantage_tokens"]), rtol=1e-6, atol=1e-9
    )
