"""A route is one file: once registered it trains, and lint, help, audit and planner list it."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.test_run import small
from unstale.analysis.audit import audit
from unstale.analysis.planner.route_costs import route_cost
from unstale.cli import session
from unstale.cli.main import main
from unstale.cli.recipe_options import options_help
from unstale.config import AuditConfig, ConfigError, EvalConfig, OldLogpsConfig, RunConfig
from unstale.config.routes import routes
from unstale.lint import check
from unstale.recipes.routes import route_recipe

pytestmark = pytest.mark.usefixtures("forked_children")

FILE = '''
from dataclasses import dataclass
from typing import ClassVar

from unstale.config.checks import Share
from unstale.config.routes import Meaning, Needs, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps


class Shifted(OldLogps):
    def __init__(self, shift):
        self.shift = shift

    def logps(self, batch, now):
        return batch.behavior_logp - self.shift * batch.sampled, batch.sampled & False


@dataclass(frozen=True, kw_only=True)
class ShiftedSpec(OldLogpsConfig):
    """The engine's log-probability, shifted."""

    route: str = "shifted"
    shift: Share = 0.1
    """How far the log-probability is shifted."""

    docs: ClassVar = RouteDocs(
        policy="a shifted mu", exact="no", holds="nothing", costs="nothing", choose="never",
    )

    @property
    def needs(self):
        return Needs(forwards="one", averages=2)

    def meaning(self, run):
        return Meaning("mu - shift", "the engine's, shifted", "the shift", "the rest", "nothing")

    def variants(self, alphas):
        return [ShiftedSpec(shift=0.3)]

    def make(self, scorer, *, lockstep):
        return Shifted(self.shift)
'''


@pytest.fixture
def shifted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "shifted_route.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("shifted_route")
    yield "shifted"
    del OldLogpsConfig.registered["shifted"]
    del sys.modules["shifted_route"]


def test_a_registered_route_is_known_everywhere(
    shifted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shifted in routes()
    with pytest.raises(ConfigError, match=r"old_logps.shift is an option of shifted"):
        OldLogpsConfig(shift=0.2)
    with pytest.raises(ConfigError, match=r"old_logps.shift must be between 0 and 1, got 2"):
        OldLogpsConfig(route=shifted, shift=2)

    words = ["train", "retail"]
    assert "--old_logps.shift" in options_help(words, {"old_logps.route": shifted})
    assert "--old_logps.shift" not in options_help(words, {})
    with pytest.raises(SystemExit):
        main(["lint", "retail", f"--old_logps.route={shifted}", "--old_logps.shift=0.2"])
    assert "mu - shift" in capsys.readouterr().out

    config = RunConfig(recipe="", old_logps=OldLogpsConfig(route=shifted))
    assert check(config).factors[0].meaning == "the shift"
    assert route_cost(shifted).needs.averages == 2
    assert route_recipe(shifted)().old_logps.route == shifted


def test_a_registered_route_trains_and_is_audited(shifted: str, tmp_path: Path) -> None:
    config = small(
        tmp_path,
        max_steps=2,
        old_logps=OldLogpsConfig(route=shifted, shift=0.2),
        audit=AuditConfig(record=True),
        eval=EvalConfig(tasks=0),
    )
    run = session.train(config).folder
    settings = json.loads((run / "config.json").read_text())
    assert settings["old_logps"] == {"route": shifted, "baseline": False, "shift": 0.2}
    rows = audit(run, routes=[shifted])["routes"]
    assert [row["route"] for row in rows] == ["shifted shift=0.2", "shifted shift=0.3"]
