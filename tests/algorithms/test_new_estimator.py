"""An advantage estimator is one file: once imported, help lists it and a run trains with it."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.cli.test_run import small
from unstale.algorithms.advantages import ESTIMATORS, estimator
from unstale.builders import build_advantage
from unstale.cli import session
from unstale.cli.recipe_options import options_help
from unstale.config import AdvantageConfig, ConfigError, EvalConfig
from unstale.config.declared import choices
from unstale.records import Group
from unstale.testing import episode

pytestmark = pytest.mark.usefixtures("forked_children")

FILE = '''
from unstale.algorithms.advantages import estimator
from unstale.records import ScoredTrajectory


@estimator
def discounted_reward(groups, *, discount=1.0):
    """The reward without a baseline, discounted by the number of turns."""
    return [
        ScoredTrajectory(item, (item.reward * discount**item.num_turns,))
        for group in groups
        for item in group.trajectories
    ]
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "discounted_reward"
    (tmp_path / "my_estimator.py").write_text(FILE)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("my_estimator")
    yield name
    del ESTIMATORS[name], choices("advantages", "estimator")[name], sys.modules["my_estimator"]


def test_it_is_an_option_and_scores_groups(added: str) -> None:
    assert added in options_help(["train", "retail"], {})
    with pytest.raises(ConfigError, match=r"advantage\.group_baseline is an option of"):
        AdvantageConfig(estimator=added, group_baseline=False)
    estimate = build_advantage(AdvantageConfig(estimator=added, discount=0.5))
    item = episode(0, [2, (3, 0)]).trajectory
    (scored,) = estimate([Group(item.task, (item,))])
    assert scored.advantage == (0.5,)


def test_a_run_trains_with_it(added: str, tmp_path: Path) -> None:
    config = small(
        tmp_path, max_steps=1, advantage=AdvantageConfig(estimator=added), eval=EvalConfig(tasks=0)
    )
    assert len(session.train(config).metrics) == 1


def test_a_shipped_name_is_refused() -> None:
    def grpo(groups: object) -> None: ...

    with pytest.raises(ValueError, match="estimator grpo is registered already"):
        estimator(grpo)
