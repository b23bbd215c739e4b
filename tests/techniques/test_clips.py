"""Test the techniques that replace or change the clip on the ratio."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.lagged_bandit import clip, learn, ratio
from tests.support.signals import at_sampled, made, packed
from unstale.config import ConfigError, ObjectiveConfig, RunConfig
from unstale.config.options import override
from unstale.research.techniques.confidence_clip import (
    ConfidenceClip,
    ConfidenceClipConfig,
    confidence,
)
from unstale.research.techniques.m2po import M2po, M2poConfig, under_limit
from unstale.research.techniques.preserve_clip import PreserveClip, PreserveClipConfig

NONE = RunConfig(recipe="mine")


def test_m2po_drops_the_largest_squares_until_the_mean_is_under_the_limit() -> None:
    def kept(limit: float) -> str:
        found = under_limit(torch.tensor([4.0, 0.01, 0.09, 1.0]), limit)
        return "".join(str(int(each)) for each in found)

    assert [kept(limit) for limit in (5.1 / 4, 1.2, 0.37, 0.36, 0.04, 0.005)] == [
        "1111",
        "0111",
        "0111",
        "0110",
        "0100",
        "0000",
    ]
    assert kept(1e9) == "1111" and not len(under_limit(torch.empty(0), 1.0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "0111"), ({"over": "all"}, "0011"), ({"of": "staleness"}, "1111")],
)
def test_m2po_masks_tokens_that_move_away(options: dict, expected: str) -> None:
    """A token with r < 1 and a positive advantage moves back, and is kept."""
    batch = packed(1, 4)
    batch = replace(batch, advantage=at_sampled(batch, torch.tensor([1.0, 1, -1, 1])))
    logp = at_sampled(batch, torch.tensor([0.8, -0.9, -0.1, 0.1]))
    old_logp = logp.clone()
    logp[0], old_logp[0] = 50.0, -50.0  # of no token that was sampled
    options = {"limit": 0.02, **options}
    out = M2po(M2poConfig(**options)).shape(batch, made(batch, logp=logp, old_logp=old_logp))
    assert "".join(str(int(each)) for each in out.keep[batch.sampled]) == expected
    assert torch.equal(out.advantage, batch.advantage) and not out.keep[0]


def test_m2po_of_staleness_is_refused_with_an_interpolating_route() -> None:
    route = {"techniques": "m2po", "old_logps.route": "interp_prox_linear"}
    assert override(NONE, route).technique_options
    with pytest.raises(ConfigError, match=r"m2po.of = staleness needs .*Set m2po.of whole"):
        override(NONE, {**route, "m2po.of": "staleness"})


@pytest.mark.parametrize(
    ("of", "route"), [("discrepancy", "rollout"), ("staleness", "current_recompute")]
)
def test_m2po_refuses_a_ratio_that_is_always_1(of: str, route: str) -> None:
    values = {"techniques": "m2po", "old_logps.route": route, "m2po.of": of}
    with pytest.raises(ConfigError, match=f"m2po.of = {of} masks nothing .*Set m2po.of whole"):
        override(NONE, values)
    assert override(NONE, {**values, "m2po.of": "whole"})


def m2po(logp: Tensor, behavior_logp: Tensor, advantage: Tensor) -> Tensor:
    weight = ratio(logp, behavior_logp, advantage)
    for k, each in enumerate(advantage):
        batch = packed(1, each.numel())
        batch = replace(
            batch,
            advantage=at_sampled(batch, each),
            behavior_logp=at_sampled(batch, behavior_logp[k]),
        )
        out = M2po(M2poConfig()).shape(batch, made(batch, logp=at_sampled(batch, logp[k])))
        weight[k] *= out.keep[batch.sampled].reshape(each.shape)
    return weight


def test_with_old_data_m2po_stops_fewer_tokens_than_a_clip_and_learns_more() -> None:
    """Without any limit, this toy learns most: there is nothing that a large step could break."""
    clipped, masked, free = (learn(each, lag=16) for each in (clip, m2po, ratio))
    assert masked.stopped < 0.6 * clipped.stopped
    assert masked.success.mean() > clipped.success.mean() + 0.04
    assert free.success.mean() > masked.success.mean()


def losses(technique: object, rho: list[float], advantage: list[float]) -> tuple[Tensor, Tensor]:
    """Return the loss of each sampled token, and its slope in the token's log-probability."""
    batch = packed(1, len(rho))
    batch = replace(
        batch,
        advantage=at_sampled(batch, torch.tensor(advantage)),
        behavior_logp=at_sampled(batch, torch.zeros(len(rho))),
    )
    log_ratio = at_sampled(batch, torch.tensor(rho).double().log()).requires_grad_()
    out = technique.surrogate(log_ratio, batch, ObjectiveConfig())  # type: ignore[attr-defined]
    out.loss.sum().backward()
    assert log_ratio.grad is not None
    return out.loss.detach()[batch.sampled], log_ratio.grad[batch.sampled]


def test_preserve_clip_keeps_the_gradient_above_the_clip_alone() -> None:
    loss, slope = losses(
        PreserveClip(PreserveClipConfig()), [1.5, 0.5, 1.1, 1.5, 0.5], [1, -1, 2, -1, 1]
    )
    assert loss.tolist() == pytest.approx([-1.28, 0.8, -2.2, 1.5, -0.5])
    assert slope.tolist() == pytest.approx([-1.28, 0, -2.2, 1.5, -0.5])
    with pytest.raises(ConfigError, match=r"preserve_clip needs objective.loss_type = ppo_clip or"):
        override(NONE, {"techniques": "preserve_clip", "objective.loss_type": "cispo"})


def preserved(logp: Tensor, behavior_logp: Tensor, advantage: Tensor) -> Tensor:
    log_ratio = (logp - behavior_logp).flatten().requires_grad_()
    batch = packed(1, len(log_ratio))
    batch = replace(batch, advantage=at_sampled(batch, advantage))
    whole = torch.zeros(len(batch.tokens)).double().index_put((batch.sampled,), log_ratio.double())
    out = PreserveClip(PreserveClipConfig()).surrogate(whole, batch, ObjectiveConfig())
    out.loss.sum().backward()
    assert log_ratio.grad is not None
    return -log_ratio.grad.reshape(logp.shape)


def test_with_old_data_preserve_clip_stops_fewer_tokens_and_learns_more() -> None:
    clipped, kept = (learn(each, lag=16) for each in (clip, preserved))
    assert kept.stopped < 0.9 * clipped.stopped
    assert kept.success.mean() > clipped.success.mean() + 0.04


def test_echo_narrows_the_clip_of_a_confident_sequence() -> None:
    """At confidence 1, its width is that of the configured clip."""
    options = ConfidenceClipConfig()
    loss, slope = losses(ConfidenceClip(options), [1.5, 1.27, 0.65, 0.85], [1, 1, -1, -1])
    assert loss.tolist() == pytest.approx([-1.28, -1.27, 0.8, 0.85])
    assert slope.tolist() == pytest.approx([0, -1.27, 0, 0.85])
    widths = []
    for chance in (0.99, 0.6, 0.1):
        batch = packed(1, 2)
        behavior = at_sampled(batch, torch.full((2,), chance).log())
        batch = replace(batch, behavior_logp=behavior, advantage=at_sampled(batch, torch.ones(2)))
        log_ratio = at_sampled(batch, torch.full((2,), 3.0))
        out = ConfidenceClip(options).surrogate(log_ratio, batch, ObjectiveConfig())
        widths.append(-out.loss[batch.sampled][0].item() - 1)
        expected = 0.28 * (0.5 + torch.sigmoid(torch.tensor(5 * (1 - chance))).item())
        assert widths[-1] == pytest.approx(expected, rel=1e-5)
    assert widths == sorted(widths)


def test_echo_multiplies_advantages_by_entropy_and_confidence() -> None:
    batch = packed(2, 3)
    behavior = at_sampled(batch, torch.tensor([0.1, 0.5, 0.7, 1, 1, 1]).log())
    advantage = at_sampled(batch, torch.tensor([1.0, 1, 1, -2, -2, -2]))
    batch = replace(batch, behavior_logp=behavior, advantage=advantage)
    assert confidence(batch, 2).tolist() == pytest.approx([0.6, 1])
    assert confidence(batch, 64)[0].item() == pytest.approx(1.3 / 3)
    entropy = at_sampled(batch, torch.tensor([1.0, 2, 3, 0, 0, 1.5]))
    entropy[~batch.sampled] = 50.0
    shaper = ConfidenceClip(ConfidenceClipConfig(tail=2, a=0.5, alpha=0.25, beta=1.0))
    out = shaper.shape(batch, made(batch, entropy=entropy)).advantage[batch.sampled]
    one, other = 1 + 0.5 * (0.25 * 2 + 0.4), 1 + 0.5 * 0.25 * 0.5
    assert out.tolist() == pytest.approx([one] * 3 + [-2 * other] * 3)


def test_echo_refuses_other_objectives() -> None:
    with pytest.raises(
        ConfigError, match=r"confidence_clip needs objective.loss_type = ppo_clip, got cispo"
    ):
        override(NONE, {"techniques": "confidence_clip", "objective.loss_type": "cispo"})
