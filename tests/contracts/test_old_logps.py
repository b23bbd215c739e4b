"""Run `check_old_logps` on every route.

Routes and the audit use no member of a scorer that the Protocol lacks. Three faulty routes test the
suite itself: one claims exactness, one forgets scores, and one lets a gradient through.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from unstale.builders import build_old_logps
from unstale.config import CorrectionConfig, ObjectiveConfig, OldLogpsConfig
from unstale.config.routes import routes
from unstale.old_logps import OldLogps
from unstale.old_logps.current_recompute import CurrentRecompute
from unstale.old_logps.rollout import RolloutRoute
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.old_logps.scoring.scorer import Scorer
from unstale.records import Batch, collate
from unstale.testing import check_old_logps, episode, tiny_policy
from unstale.trainer.auditor import Auditor
from unstale.trainer.local import LossSpec

pytestmark = pytest.mark.usefixtures("forked_children")


def maker(route: str) -> Callable[[Scorer], OldLogps]:
    return lambda scorer: build_old_logps(OldLogpsConfig(route=route), scorer)


@pytest.mark.parametrize("route", routes())
def test_a_route_keeps_the_contract(route: str) -> None:
    check_old_logps(maker(route))


class OnlyTheProtocol:
    """A scorer with the members of the Protocol and no other, as one over several ranks has."""

    members = frozenset({*vars(Scorer), *Scorer.__annotations__})

    def __init__(self, scorer: Scorer) -> None:
        vars(self)["inner"] = scorer

    def __getattr__(self, name: str) -> object:
        if name not in self.members:
            raise AttributeError(f"{name} is no member of the Protocol Scorer")
        return getattr(vars(self)["inner"], name)

    def __setattr__(self, name: str, value: object) -> None:
        assert name in Scorer.__annotations__, f"{name} of a Scorer cannot be set"
        setattr(vars(self)["inner"], name, value)


@pytest.mark.costly(cases=3)
@pytest.mark.parametrize("route", routes())
def test_a_route_uses_no_more_of_a_scorer_than_its_protocol(route: str) -> None:
    check_old_logps(lambda scorer: maker(route)(cast(Scorer, OnlyTheProtocol(scorer))))


def test_the_audit_uses_no_more_of_a_scorer_than_its_protocol() -> None:
    policy = tiny_policy()
    first, second = (OnlyTheProtocol(LocalScorer(policy, 1.0, 64)) for _ in range(2))
    with closing(maker("snapshot_old")(cast(Scorer, first))) as route:
        rules = LossSpec(CorrectionConfig(), ObjectiveConfig())
        auditor = Auditor(cast(Scorer, second), route, rules, share=1.0)
        auditor.on_published(live=())
        route.on_published(live=())
        batch = collate([episode(1, [3, (9, 0)]), episode(2, [3, (9, 0)])])
        values, _ = route.logps(batch, torch.empty(0))
        assert auditor.look(batch, values)["audit/tokens"] == 18


@pytest.mark.parametrize("name", routes())
def test_a_route_declares_what_it_needs(name: str) -> None:
    config = OldLogpsConfig(route=name)
    with closing(config.make(LocalScorer(tiny_policy(), 1.0, 32), lockstep=False)) as route:
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
