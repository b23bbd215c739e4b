"""Test `opmd`: its loss and gradient, what is refused, and its effect under lag."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.lagged_bandit import clip, learn, ratio
from tests.support.signals import at_sampled, packed
from unstale.config import ConfigError, ObjectiveConfig, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.research.techniques.opmd import Opmd, OpmdConfig

NONE = RunConfig(recipe="mine")
FITTING = {"techniques": "opmd", "objective.loss_type": "none"}


def gradient(log_ratio: Tensor, advantage: Tensor, tau: float) -> Tensor:
    """Return the gradient of the loss by each token's log pi. Tokens are `[sequences, length]`."""
    batch = packed(*advantage.shape)
    batch = replace(batch, advantage=at_sampled(batch, advantage))
    given = at_sampled(batch, log_ratio)
    given[~batch.sampled] = torch.nan
    given.requires_grad_()
    found = Opmd(OpmdConfig(tau=tau)).surrogate(given, batch, ObjectiveConfig(loss_type="none"))
    assert not found.clipped.any()
    found.loss.sum().backward()
    assert given.grad is not None and not given.grad[~batch.sampled].any()
    return given.grad[batch.sampled].reshape(advantage.shape)


def test_its_gradient_is_that_of_log_pi_whatever_the_ratio() -> None:
    advantage = torch.tensor([[1.0, -2.0], [0.5, 0.0]]).double()
    for log_ratio in (torch.zeros(2, 2), torch.tensor([[50.0, -50.0], [1.0, 2.0]])):
        assert torch.equal(gradient(log_ratio, advantage, 1.0), -advantage / 2)
        assert torch.equal(gradient(log_ratio, advantage, 0.0), -advantage)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"objective.loss_type": "ppo_clip"},
            r"opmd needs objective\.loss_type = none, got ppo_clip",
        ),
        ({"objective.unit": "sequence"}, r"opmd needs objective\.unit = token, got sequence"),
        ({"techniques": "minpro opmd"}, "Remove minpro from --techniques"),
    ],
)
def test_what_has_a_ratio_is_refused(values: dict, message: str) -> None:
    assert not check(override(NONE, FITTING)).refusals
    with pytest.raises(ConfigError, match=message):
        override(NONE, {**FITTING, **values})


def test_under_lag_it_learns_more_than_the_clip_and_less_than_the_ratio() -> None:
    """Measured at lag 64 over 24 seeds: 0.39, with the clip 0.14, with the ratio 0.57."""

    def weigh(logp: Tensor, behavior_logp: Tensor, advantage: Tensor) -> Tensor:
        seeds, positions, sequences = advantage.shape
        found = gradient(
            (logp - behavior_logp).reshape(-1, sequences), advantage.reshape(-1, sequences), 1.0
        )
        return -found.reshape(seeds, positions, sequences).float()

    own = learn(weigh, lag=64, lr=2.0).success.mean()
    assert learn(clip, lag=64).success.mean() + 0.15 < own
    assert own < learn(ratio, lag=64).success.mean() - 0.1
