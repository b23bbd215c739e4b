"""Compare trust regions with the losses, gradients, masks and weights of other trainers.

Equal are DPPO of prime-rl, SkyRL and verl, VESPO and OPSM of TRL, OPSM of slime, DRPO of UniRL, DRO
of verl, VACO of open-instruct, KPop and IcePop by the geometric mean of AReaL, and nine masks of
verl's `rollout_rs`. `old_logp = BEHAVIOR` is the route `rollout`, for methods whose old policy is
mu. Where a peer means something else, a test states what:

- verl's DPPO caps the ratio at `clip_ratio_c` (3 by default) without a part of the loss for it.
- TRL multiplies the weights D of all tokens into the ratio of a sequence for VESPO.
- slime measures OPSM from its old policy, TRL and this library from mu.
- AReaL's `kl_k3` has the two policies of `k3_mask` exchanged.
- verl's normalised weights of sequences have the mean 1 over sequences, ours over tokens.
"""

import math
from typing import Any

import pytest
import torch

from tests.support.peers import (
    ADVANTAGE,
    BEHAVIOR,
    BY_D,
    COUNT,
    NOW,
    OLD,
    SAMPLED,
    SINGLE,
    close,
    corrected,
    made_by,
    our_loss,
    the_batch,
)
from unstale.config import CorrectionConfig, ObjectiveConfig


def dppo(divergence: Any, low: float, high: float, **options: float) -> ObjectiveConfig:
    limits: dict[str, Any] = {"divergence_low": low, "divergence_high": high, **options}
    return ObjectiveConfig(loss_type="dppo", divergence=divergence, **limits)


LIMITS = [("tv", 0.1, 0.08), ("kl", 0.026, 0.016)]


# --- objectives
# ------------------------------------------------------------------------------------------------


def test_dppo_with_a_penalty_is_the_default_loss_of_prime_rl() -> None:
    theirs = made_by("prime-rl", "default loss")
    loss, slope = our_loss(dppo("tv", 0.1, 0.08, kl_tau=1e-3), old_logp=BEHAVIOR)
    close(loss * COUNT, theirs["loss"])  # theirs is a sum
    close(slope * COUNT, theirs["gradient"])


@pytest.mark.parametrize(("divergence", "low", "high"), LIMITS)
def test_dppo_is_that_of_skyrl(divergence: str, low: float, high: float) -> None:
    theirs = made_by("SkyRL", f"dppo {divergence}")
    loss, slope = our_loss(dppo(divergence, low, high), old_logp=BEHAVIOR)
    close(loss * COUNT, theirs["loss"], SINGLE)
    close(slope * COUNT, theirs["gradient"], SINGLE)
    assert 0 < (slope[SAMPLED] == 0).sum() < COUNT


@pytest.mark.parametrize(("divergence", "low", "high"), LIMITS)
def test_dppo_with_a_cap_has_the_gradient_of_verls(
    divergence: str, low: float, high: float
) -> None:
    """verl's loss is -sg(min(S, clip_ratio_c)) A log pi, so only gradients are equal."""
    theirs = made_by("verl", f"dppo {divergence}")
    capped = dppo(divergence, low, high, ratio_cap=1.5)
    _, slope = our_loss(capped, old_logp=BEHAVIOR)
    close(slope, theirs["gradient"])
    close((slope * NOW).sum(), theirs["loss"])
    far = SAMPLED & ((NOW - BEHAVIOR).exp() > 1.5) & (slope != 0)
    assert 0 < far.sum() < COUNT


def test_vespo_has_the_gradient_of_trls() -> None:
    theirs = made_by("trl", "vespo")
    _, slope = our_loss(ObjectiveConfig(loss_type="vespo"))
    close(slope, theirs["gradient"])
    close((slope * NOW).sum(), theirs["loss"])  # theirs has log pi, ours log S


def test_trls_vespo_with_importance_weights_is_ours_with_the_route_rollout() -> None:
    theirs = made_by("trl", "vespo with D")["gradient"]
    objective = ObjectiveConfig(loss_type="vespo")
    close(our_loss(objective, old_logp=BEHAVIOR)[1], theirs)
    _, weighted = our_loss(objective, correction=BY_D)  # D stays a weight of its token
    assert (weighted - theirs).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("peer", "signs", "threshold"),
    [
        ("trl", "of one sign", 0.2),
        ("trl", "of both signs", 0.1),
        ("slime", "of one sign", 0.1),
        ("slime", "of both signs", 0.05),
    ],
)
def test_opsm_drops_the_tokens_of_trl_and_slime(peer: str, signs: str, threshold: float) -> None:
    """slime's old policy takes the place of mu."""
    old = {"trl": BEHAVIOR, "slime": OLD}[peer]
    advantage = {"of one sign": -ADVANTAGE.abs(), "of both signs": ADVANTAGE}[signs]
    batch = the_batch(behavior_logp=old, advantage=advantage)
    masked = ObjectiveConfig(loss_type="none", opsm_threshold=threshold)
    _, slope = our_loss(masked, old_logp=old, batch=batch)
    _, everywhere = our_loss(ObjectiveConfig(loss_type="none"), old_logp=old, batch=batch)
    kept = SAMPLED & made_by(peer, f"opsm {signs}")["keep"].bool()
    close(slope, torch.where(kept, everywhere, 0.0))
    assert 0 < kept.sum() < COUNT


def test_drpo_is_that_of_unirl() -> None:
    theirs = made_by("UniRL", "drpo")
    loss, slope = our_loss(ObjectiveConfig(loss_type="drpo", drpo_delta=0.3), old_logp=BEHAVIOR)
    close(loss, theirs["loss"])
    close(slope, theirs["gradient"])


def test_dro_has_the_gradient_of_verls() -> None:
    """verl's loss has A log pi in place of A log S."""
    theirs = made_by("verl", "dro")
    loss, slope = our_loss(ObjectiveConfig(loss_type="dro", dro_beta=0.3), old_logp=BEHAVIOR)
    close(slope, theirs["gradient"])
    close(loss - (ADVANTAGE * BEHAVIOR)[SAMPLED].mean(), theirs["loss"])


def test_vaco_drops_and_weights_the_tokens_of_open_instruct() -> None:
    """Its mask is made from the trainer's policy before the step: here `logp` is that policy."""
    weight = made_by("open-instruct", "vaco")["weight"]
    objective = ObjectiveConfig(loss_type="vaco", vaco_delta=0.12)
    _, slope = our_loss(objective, old_logp=BEHAVIOR, logp=OLD)
    close(slope, -weight * ADVANTAGE / COUNT)
    assert 0 < (weight[SAMPLED] == 0).sum() < COUNT


# --- corrections
# ------------------------------------------------------------------------------------------------


def test_kpop_drops_and_weights_the_tokens_of_areal() -> None:
    theirs = made_by("AReaL", "kpop")
    keep, factor = corrected(CorrectionConfig(mode="kpop", kl_limit=0.006))
    close(keep.double(), theirs["keep"])
    close(factor, theirs["weight"], SINGLE)
    assert 0 < keep.sum() < COUNT


def test_a_band_of_the_geometric_mean_is_that_of_areal() -> None:
    theirs = made_by("AReaL", "geometric mean")
    band: dict[str, Any] = {"unit": "sequence", "aggregate": "mean", "low": 0.97, "high": 1.06}
    keep, factor = corrected(CorrectionConfig(mode="mask_weight", **band))
    close(keep.double(), theirs["keep"])
    close(factor, theirs["weight"], SINGLE)
    assert 0 < keep.sum() < COUNT


def test_areals_k3_has_the_policies_exchanged() -> None:
    """It is 1 / D - 1 + log D; `k3_mask` and verl limit D - 1 - log D."""
    theirs = made_by("AReaL", "kl_k3")["keep"]
    options = CorrectionConfig(mode="k3_mask", unit="sequence", kl_limit=0.009)
    exchanged, _ = corrected(options, old_logp=BEHAVIOR, behavior_logp=OLD)
    close(exchanged.double(), theirs)
    ours, _ = corrected(options)
    assert 0 < theirs.sum() < ours.sum() < COUNT


def translated(option: str, threshold: str) -> CorrectionConfig:
    """Return the correction that does the same as an option of verl's `rollout_rs`.

    Its `k1` is log mu / pi_old, between the logarithms of two limits. Its `k2` is k1^2 / 2.
    """
    *over, kind = option.split("_")
    options: dict[str, Any] = {"mode": "k3_mask" if kind == "k3" else "mask"}
    if over != ["token"]:
        options |= {"unit": "sequence", "aggregate": over[1]}
    match kind:
        case "k1":
            low, high = map(float, threshold.split("_"))
            options |= {"low": 1 / high, "high": 1 / low}
        case "k2":
            width = math.sqrt(2 * float(threshold))
            options |= {"low": math.exp(-width), "high": math.exp(width)}
        case "k3":
            options |= {"kl_limit": float(threshold)}
    return CorrectionConfig(**options)


@pytest.mark.parametrize(
    ("option", "threshold"),
    [
        ("token_k1", "0.85_1.1"),
        ("token_k2", "0.01"),
        ("token_k3", "0.01"),
        ("seq_mean_k1", "0.95_1.03"),
        ("seq_mean_k3", "0.014"),
        ("seq_sum_k1", "0.8_1.1"),
        ("seq_sum_k3", "0.08"),
        ("seq_max_k2", "0.06"),
        ("seq_max_k3", "0.06"),
    ],
)
def test_masks_of_verls_rollout_rs(option: str, threshold: str) -> None:
    theirs = made_by("verl", f"{option} {threshold}")["keep"]
    keep, _ = corrected(translated(option, threshold))
    close(keep.double(), theirs)
    assert 0 < keep.sum() < COUNT


def test_normalised_weights_of_tokens_are_verls() -> None:
    theirs = made_by("verl", "normalized token weights")["weight"]
    _, factor = corrected(CorrectionConfig(mode="truncate", high=1.05, normalize=True))
    close(factor, theirs, SINGLE)  # it adds 1e-8 to the divisor


def test_normalised_weights_of_sequences_have_another_mean_in_verl() -> None:
    theirs = made_by("verl", "normalized sequence weights")["weight"]
    options: dict[str, Any] = {
        "mode": "truncate",
        "high": 1.05,
        "unit": "sequence",
        "aggregate": "sum",
    }
    _, factor = corrected(CorrectionConfig(**options))
    of_sequences = factor.max(1).values
    close(factor / of_sequences.mean(), theirs, SINGLE)
    _, normalised = corrected(CorrectionConfig(**options, normalize=True))
    close(normalised, factor / factor[SAMPLED].mean())
