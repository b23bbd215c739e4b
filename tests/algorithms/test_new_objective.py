"""An objective is one file: once registered it trains, and every reader of objectives lists it."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.test_run import small
from tools.options_page import objective_rows
from unstale.analysis.advice.samples import Lengths, Thresholds
from unstale.analysis.dashboard.bounds import bounds
from unstale.cli import session
from unstale.cli.main import main
from unstale.cli.recipe_options import options_help
from unstale.config import ConfigError, CorrectionConfig, EvalConfig, ObjectiveConfig, RunConfig
from unstale.config.objectives import objectives
from unstale.lint import check

pytestmark = pytest.mark.usefixtures("forked_children")

FILE = '''
import math
from dataclasses import dataclass
from typing import ClassVar

from unstale.config.checks import Positive
from unstale.config.objectives import Bounds, ObjectiveConfig, ObjectiveDocs


@dataclass(frozen=True, kw_only=True)
class Ceiling(ObjectiveConfig):
    """A weight with a ceiling."""

    loss_type: str = "ceiling"
    ceiling: Positive = 1.5
    """The largest S that has a gradient."""

    docs: ClassVar = ObjectiveDocs(loss="-min(S, ceiling) A", source="a test", choose="never")

    def surrogate(self, log_staleness, advantage, *, sampled=None):
        from unstale.algorithms.objectives import Surrogate

        ratio = log_staleness.exp()
        above = ratio > self.ceiling
        return Surrogate(-ratio.clamp(max=self.ceiling) * advantage, above & False, above)

    def limit(self):
        return f"nothing above {self.ceiling:g}"

    def bounds(self):
        about = "objective.ceiling"
        return (Bounds(high=self.ceiling, above="any", name="ceiling of S", about=about),)

    def weight(self, ratio):
        return ratio, "S"
'''


@pytest.fixture
def ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "ceiling_objective.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("ceiling_objective")
    yield "ceiling"
    del ObjectiveConfig.registered["ceiling"]
    del sys.modules["ceiling_objective"]


def test_a_registered_objective_is_known_everywhere(
    ceiling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ceiling in objectives()
    with pytest.raises(ConfigError, match=r"objective.ceiling is an option of ceiling"):
        ObjectiveConfig(ceiling=2.0)
    with pytest.raises(ConfigError, match=r"objective.ceiling must be > 0, got 0"):
        ObjectiveConfig(loss_type=ceiling, ceiling=0.0)

    words = ["train", "retail"]
    assert "--objective.ceiling" in options_help(words, {"objective.loss_type": ceiling})
    assert "--objective.ceiling" not in options_help(words, {})
    with pytest.raises(SystemExit):
        main(["lint", "retail", f"--objective.loss_type={ceiling}", "--objective.ceiling=1.0001"])
    told = capsys.readouterr().out
    assert "S at 0.0001" in told  # narrower than the noise

    objective = ObjectiveConfig(loss_type=ceiling)
    config = RunConfig(recipe="", objective=objective)
    assert check(config).factors[1].bound.startswith("ceiling: nothing above 1.5")
    assert [each.name for each in bounds(CorrectionConfig(), objective)][-1] == "ceiling of S"
    clip = Thresholds.of(config, Lengths()).clip
    assert clip is not None and clip.high == pytest.approx(0.405, abs=1e-3)
    assert "| `ceiling` | -min(S, ceiling) A | a test | never |" in objective_rows()


def test_a_registered_objective_trains(ceiling: str, tmp_path: Path) -> None:
    options = ObjectiveConfig(loss_type=ceiling, ceiling=1.2)
    config = small(tmp_path, max_steps=2, objective=options, eval=EvalConfig(tasks=0))
    assert session.train(config).folder.joinpath("config.json").is_file()
