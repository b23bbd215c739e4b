"""Compare distillation with the losses and gradients of TRL, verl, prime-rl, AReaL and slime.

Equal are TRL's GKD for every `beta`, verl's `forward_kl_topk` over the whole vocabulary and `k1`
with its policy gradient, and AReaL's loss without rewards. Where a peer means something else, a
test states what:

- verl's `forward_kl_topk` with k below the vocabulary leaves out the other tokens.
- verl's `k3`, its default, has in expectation the gradient of the forward KL if it is
  differentiated, and of the reverse minus the forward KL as an advantage.
- prime-rl's trust region drops a token that became less likely, also if the teacher likes it.
- AReaL's loss with rewards has no gradient that depends on the teacher.
- slime rewards the old policy, not the one in training.
"""

from typing import Any

import pytest
import torch

from tests.support.peers import (
    BEHAVIOR,
    BY_D,
    COUNT,
    INPUTS,
    NOW,
    OLD,
    SAMPLED,
    SINGLE,
    close,
    made_by,
    our_loss,
    the_batch,
)
from unstale.config import ObjectiveConfig
from unstale.techniques.distil import Distil, DistilConfig

LOGITS, TEACHER = INPUTS["logits"], INPUTS["teacher_logits"]
WHERE = SAMPLED[: len(LOGITS)]
GAP = INPUTS["teacher_logp"] - NOW
DUAL: dict[str, Any] = {
    "loss_type": "dual_clip",
    "clip_low": 0.2,
    "clip_high": 0.2,
    "dual_clip": 3.0,
}


def full(divergence: Any, at: float = 1.0, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a divergence over the vocabulary, and its gradient by the logits."""
    distil = Distil(DistilConfig(teacher="a", divergence=divergence, **options))
    logits = LOGITS.clone().requires_grad_()
    both = [(each / at).log_softmax(-1)[WHERE] for each in (logits, TEACHER)]
    loss = distil.divergence(*both).mean()
    (slope,) = torch.autograd.grad(loss, logits)
    return loss.detach(), slope


def sampled(coef: float = 1.0, advantage_coef: float = 0.0) -> DistilConfig:
    return DistilConfig(teacher="a", coef=coef, advantage_coef=advantage_coef)


@pytest.mark.parametrize(
    ("beta", "temperature", "options"),
    [
        (0.0, 1.0, {"divergence": "forward"}),
        (1.0, 1.0, {"divergence": "reverse"}),
        (0.1, 1.0, {"divergence": "mixed", "beta": 0.1}),
        (0.5, 1.0, {"divergence": "mixed"}),
        (0.5, 0.7, {"divergence": "mixed"}),
    ],
)
def test_divergences_are_those_of_trl(
    beta: float, temperature: float, options: dict[str, Any]
) -> None:
    theirs = made_by("trl", f"jsd {beta} at {temperature}")
    loss, slope = full(at=temperature, **options)
    close(loss, theirs["loss"])
    close(slope, theirs["gradient"])


def test_verls_forward_kl_over_all_tokens_is_ours() -> None:
    theirs = made_by("verl", "forward_kl_topk 5")
    loss, slope = full("forward")
    close(loss, theirs["loss"], SINGLE)
    close(slope, theirs["gradient"], SINGLE)


def test_verls_forward_kl_over_the_top_two_leaves_out_the_rest() -> None:
    """No renormalisation: ours minus the terms q log(q / p) of the other tokens."""
    theirs = made_by("verl", "forward_kl_topk 2")
    logits, q = LOGITS.clone().requires_grad_(), TEACHER.log_softmax(-1)
    others = torch.ones_like(q).scatter(-1, q.topk(2).indices, 0.0)
    left_out = (others * q.exp() * (q - logits.log_softmax(-1))).sum(-1)[WHERE].mean()
    (of_others,) = torch.autograd.grad(left_out, logits)
    loss, slope = full("forward")
    close(loss - left_out.detach(), theirs["loss"], SINGLE)
    close(slope - of_others, theirs["gradient"], SINGLE)
    assert (slope - theirs["gradient"]).abs().max() > 0.01


def test_verls_policy_gradient_with_k1_is_the_sampled_divergence() -> None:
    theirs = made_by("verl", "distillation by policy gradient, k1")
    loss, slope = our_loss(ObjectiveConfig(**DUAL), distil=sampled())
    close(loss, theirs["loss"])
    close(slope, theirs["gradient"])


def test_verls_k3_is_in_expectation_another_divergence() -> None:
    """A token's gradient is that of log p, times 1 - q / p or, as an advantage, times S k3."""
    k3 = GAP.exp() - 1 - GAP
    inside = SAMPLED & (k3 < 10)  # verl cuts off what is above
    differentiated = made_by("verl", "distillation by backpropagation, k3")["gradient"]
    close(differentiated, torch.where(inside, 1 - GAP.exp(), 0.0) / COUNT)
    as_advantage = made_by("verl", "distillation by policy gradient, k3")["gradient"]
    unclipped = SAMPLED & ((NOW - OLD).exp() > 0.8)
    wanted = torch.where(unclipped, k3.clamp(max=10) * (NOW - OLD).exp() / COUNT, 0.0)
    close(as_advantage, wanted)
    assert COUNT > inside.sum() > 0 and COUNT > unclipped.sum() > 0

    p, q = LOGITS[WHERE].softmax(-1), TEACHER[WHERE].softmax(-1)
    ratio = q / p
    slopes = {name: full(name)[1][WHERE] * len(p) for name in ("forward", "reverse")}
    for weight, wanted in (
        (1 - ratio, slopes["forward"]),
        (ratio - 1 - ratio.log(), slopes["reverse"] - slopes["forward"]),
    ):
        # sum over v of p(v) weight(v) d log p(v) / d logits
        expected = p * weight - p * (p * weight).sum(-1, keepdim=True)
        close(expected, wanted)


def test_prime_rls_ref_kl_is_dppo_except_for_unlikelier_tokens_that_the_teacher_likes() -> None:
    """Its mask is on pi - mu < -0.2 whatever the sign of log q - log p; kl_tau is 1e-3."""
    theirs = made_by("prime-rl", "ref_kl loss")
    dppo: dict[str, Any] = {"divergence_low": 0.2, "divergence_high": 1.0, "kl_tau": 1e-3}
    objective = ObjectiveConfig(loss_type="dppo", **dppo)
    loss, slope = our_loss(objective, old_logp=BEHAVIOR, distil=sampled())
    fell = SAMPLED & (NOW.exp() - BEHAVIOR.exp() < -0.2)
    kept_only_here = torch.where(fell & (GAP > 0), (NOW - BEHAVIOR).exp() * GAP, 0.0)
    assert fell.sum() == 2 and (kept_only_here > 0).sum() == 1
    close(slope * COUNT + kept_only_here, theirs["gradient"])
    close(loss * COUNT + kept_only_here.sum(), theirs["loss"])


@pytest.mark.parametrize("route", ["exact", "rollout"])
def test_areals_loss_without_rewards_is_the_sampled_divergence(route: str) -> None:
    """It weights by pi / mu without a limit, which is D S for any old policy."""
    theirs = made_by("AReaL", "distillation without rewards")
    old = OLD if route == "exact" else BEHAVIOR
    objective = ObjectiveConfig(loss_type="none")
    loss, slope = our_loss(objective, correction=BY_D, old_logp=old, distil=sampled(coef=0.3))
    close(loss, theirs["loss"])
    close(slope, theirs["gradient"])


def test_areals_loss_with_rewards_has_no_gradient_of_the_teacher() -> None:
    """It adds 0.3 (log p - log q), whose gradient is 0.3 for each token, whatever q is."""
    theirs = made_by("AReaL", "distillation with rewards")
    clips: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    objective = ObjectiveConfig(loss_type="dual_clip", **clips)
    loss, slope = our_loss(objective)
    close(slope + SAMPLED.double() * 0.3 / COUNT, theirs["gradient"])
    close(loss - 0.3 * GAP[SAMPLED].mean(), theirs["loss"])
    _, with_teacher = our_loss(objective, distil=sampled(coef=0.3, advantage_coef=1.0))
    assert (with_teacher - theirs["gradient"])[SAMPLED].abs().max() > 0.1 / COUNT


def test_slime_rewards_the_old_policy() -> None:
    theirs = made_by("slime", "distillation")["advantage"][SAMPLED]
    distil = Distil(sampled(coef=0.7, advantage_coef=1.0))
    taught, where = INPUTS["teacher_logp"].flatten(), SAMPLED.flatten()
    at_old, at_now = (
        distil.rewarded(the_batch(), taught, logp.flatten()).advantage[where] for logp in (OLD, NOW)
    )
    close(at_old, theirs)
    close(theirs - at_now, 0.7 * (NOW - OLD)[SAMPLED])
