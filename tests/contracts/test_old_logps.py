"""Run `check_old_logps` on every route.

Three faulty routes test the suite itself: one claims exactness, one forgets scores, and one lets a
gradient through.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from torch import Tensor

from unstale.build import build_old_logps
from unstale.config import OldLogpsConfig
from unstale.config.routes import routes
from unstale.old_logps import OldLogps
from unstale.old_logps.current_recompute import CurrentRecompute
from unstale.old_logps.rollout import RolloutRoute
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch
from unstale.testing import check_old_logps, tiny_policy


def maker(route: str) -> Callable[[Scorer], OldLogps]:
    return lambda scorer: build_old_logps(OldLogpsConfig(route=route), scorer)


@pytest.mark.parametrize("route", routes())
def test_a_route_keeps_the_contract(route: str) -> None:
    check_old_logps(maker(route))


@pytest.mark.parametrize("name", routes())
def test_a_route_declares_what_it_needs(name: str) -> None:
    config = OldLogpsConfig(route=name)
    with closing(config.make(Scorer(tiny_policy(), 1.0, 32), lockstep=False)) as route:
        assert route.needs == config.needs


class Liar(RolloutRoute):
    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, batch.sampled & batch.clean


class Unclean(RolloutRoute):
    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return batch.behavior_logp, batch.sampled & ~batch.clean


class Leaky(CurrentRecompute):
    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        return super().logps(batch, now.requires_grad_())


class Forgetful(RolloutRoute):
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
        (lambda _: Unclean(), "kept KV cache"),
        (Leaky, "no gradient"),
        (lambda _: Forgetful(), "second call"),
    ],
)
def test_the_suite_finds_a_route_that_breaks_it(
    broken: Callable[[Scorer], OldLogps], what: str
) -> None:
    with pytest.raises(AssertionError, match=what):
        check_old_logps(broken)


def test_the_docs_have_the_table_that_the_routes_declare() -> None:
    lines = [
        "| route | pi_old comes from | exact | extra memory | extra time | choose it |",
        "|---|---|---|---|---|---|",
    ]
    for name, spec in routes().items():
        row = spec.docs
        cells = (f"`{name}`", row.policy, row.exact, row.holds, row.costs, row.choose)
        lines.append(f"| {' | '.join(cells)} |")
    page = Path(__file__).parents[2] / "docs" / "old-logps.md"
    assert "\n".join(lines) in page.read_text(encoding="utf-8")
