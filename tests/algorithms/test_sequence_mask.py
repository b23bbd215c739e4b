"""Test off-policy sequence masking (`objective.opsm_threshold`) against plain Python.

- Tokens with A < 0 of a sequence whose mean log(mu / pi) is above the threshold get no gradient.
- It holds for every objective in the trainer, and the metrics count it as a clip from below.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import tensor

from tests.trainer.test_trainer import a_batch, gradient, make
from unstale.algorithms.objectives import mask_sequences, none
from unstale.config import CorrectionConfig, ObjectiveConfig
from unstale.testing import plain_logps, tiny_policy

SEQUENCE = tensor([0, 0, 0, 1, 1, 2, 2])
SAMPLED = tensor([False, True, True, True, True, True, True])
MU = tensor([-1.0] * 7)


def test_a_negative_sequence_that_pi_left_has_no_gradient() -> None:
    """Means of log(mu / pi): 0.3, 0.3 and -0.3; the second has a token with A >= 0."""
    log_s = tensor([9.0, -0.5, -0.1, -0.6, 0.0, 0.4, 0.2], requires_grad=True)
    advantage = tensor([0.0, -1.0, -1.0, -1.0, 2.0, -1.0, -1.0])
    found = mask_sequences(
        none(log_s, advantage),
        MU + log_s.detach(),
        MU,
        advantage,
        sequence=SEQUENCE,
        sampled=SAMPLED,
        threshold=0.25,
    )
    (slope,) = torch.autograd.grad(found.loss.sum(), log_s)
    kept = [0, 0, 0, 0, -2.0, math.exp(0.4), math.exp(0.2)]
    assert slope.tolist() == pytest.approx(kept)
    assert found.clipped_low.tolist() == [False, True, True, True, False, False, False]
    assert not found.clipped_high.any()


def test_junk_off_the_mask_does_not_count() -> None:
    logp = tensor([math.nan, -1.5, -1.5, -1.0, -1.0, -1.0, -1.0])
    behavior = tensor([-math.inf, *MU[1:].tolist()])
    advantage = tensor([math.nan, *[-1.0] * 6])
    surrogate = none(torch.zeros(7), torch.where(SAMPLED, advantage, 0.0))
    options = {"sequence": SEQUENCE, "sampled": SAMPLED, "threshold": 0.4}
    found = mask_sequences(surrogate, logp, behavior, advantage, **options)
    assert found.loss.tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("loss_type", ["ppo_clip", "vespo", "dppo", "kl_penalty"])
def test_the_trainer_masks_sequences_for_every_objective(loss_type: str) -> None:
    """Of two sequences with A < 0, pi is below mu by a mean of about 0.2 in the second only."""
    gradients, shares = [], []
    for masked in (True, False):
        policy, batch = tiny_policy(dtype="float64"), a_batch()
        trainer = make(
            policy,
            route="rollout",
            objective=ObjectiveConfig(loss_type=loss_type, opsm_threshold=0.05 * masked),
            correction=CorrectionConfig(mode="none"),
        )
        rows = [batch.tokens[start:end].tolist() for start, end in batch.spans()]
        now = torch.cat([plain_logps(policy, row) for row in rows])
        shift = torch.randn(len(now), generator=torch.Generator().manual_seed(1)) * 0.1
        shift += torch.where(batch.sequence >= 3, 0.2, -0.2)
        batch = replace(batch, behavior_logp=torch.where(batch.sampled, now + shift, 0.0))
        (part,) = trainer.prepare(batch)
        if not masked:
            far = part.batch.advantage == -1.0  # the other sequence with A < 0 has -0.5
            part = replace(part, factor=torch.where(far, 0.0, part.factor))
        trainer.backward(part)
        gradients.append(gradient(trainer))
        shares.append(trainer.metrics()["objective/clip_low_share"])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-12)
    assert gradients[0].any() and shares[0] > shares[1]
