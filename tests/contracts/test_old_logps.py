"""Every old-logit route keeps the contract of `OldLogps`, under every dtype-independent promise that the suite checks.

The suite itself is tried on a route that lies about exactness, one that forgets, and one that lets a gradient through.
"""

from collections.abc import Callable

import pytest
from torch import Tensor

from unstale.build import build_old_logps
from unstale.config import OldLogpsConfig
from unstale.old_logps import OldLogps
from unstale.old_logps.current_recompute import CurrentRecompute
from unstale.old_logps.rollout import Rollout
from unstale.old_logps.scoring.scorer import LocalScorer
from unstale.records import Batch
from unstale.testing import check_old_logps

ROUTES = (
    "rollout", "current_recompute", "snapshot_old", "interp_prox_loglinear", "interp_prox_linear", "ewma_prox",
    "ppo_ewma_async", "interrupt_sync", "eager", "old_logit_model",
)  # fmt: skip


def maker(route: str) -> Callable[[LocalScorer], OldLogps]:
    return lambda scorer: build_old_logps(OldLogpsConfig(route=route), scorer)


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_keeps_the_contract(route: str) -> None:
    check_old_logps(maker(route))


class Liar(Rollout):
    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, batch.sampled & batch.clean


class Unclean(Rollout):
    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, batch.sampled & ~batch.clean


class Leaky(CurrentRecompute):
    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return super().logps(batch, now.requires_grad_())


class Forgetful(Rollout):
    def __init__(self) -> None:
        self.asked = 0

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += 1
        values, exact = super().logps(batch, now)
        return values * self.asked, exact


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (lambda _: Liar(), "called exact"),
        (lambda _: Unclean(), "kept cache"),
        (Leaky, "no gradient"),
        (lambda _: Forgetful(), "asked twice"),
    ],
)
def test_the_suite_finds_a_route_that_breaks_it(
    broken: Callable[[LocalScorer], OldLogps], what: str
) -> None:
    with pytest.raises(AssertionError, match=what):
        check_old_logps(broken)
