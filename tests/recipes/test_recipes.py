"""A recipe is one file: it is registered, listed with its first line, and runs under its name."""

from pathlib import Path

import pytest

from tests.support.distributions import add_distribution
from unstale.config import OldLogpsConfig
from unstale.config.plugins import read_entry_points
from unstale.envs.desk import DeskConfig
from unstale.recipes import RECIPES, find_recipes, make_recipe

ONE_MORE = """
from unstale.config import RunConfig

def tiny():
    \"\"\"A tiny recipe.\"\"\"
    return RunConfig(recipe="tiny", max_steps=1)
"""


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_its_own_name_and_a_docstring(name: str) -> None:
    assert RECIPES[name]().recipe == name
    assert RECIPES[name]().max_steps > 0 and RECIPES[name].__doc__


@pytest.mark.parametrize("name", ["calculator", "desks_small", "retail"])
def test_a_recipe_says_what_to_expect_on_which_hardware(name: str) -> None:
    doc = " ".join(str(RECIPES[name].__doc__).split())
    assert "Expected result:" in doc and "two CPU cores" in doc


@pytest.mark.parametrize("name", ["airline", "telecom", "delivery", "instore", "desks"])
def test_a_desk_has_the_settings_of_a_model_that_must_read_its_rules(name: str) -> None:
    config, base = RECIPES[name](), RECIPES["llm"]()
    assert isinstance(config.task, DeskConfig) and config.task.env == name
    assert config.task.level == "2", "the prompt of level 1 has no rules"
    assert (config.model, config.engine, config.trainer) == (
        base.model,
        base.engine,
        base.trainer,
    )
    assert config.minutes == 0.0 and config.model != "base"


def test_the_recipe_of_an_average_resets_it() -> None:
    assert RECIPES["route_ppo_ewma_async"]().old_logps == OldLogpsConfig(
        route="ppo_ewma_async", reset_below=0.5
    )


def test_one_file_adds_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one_more.py").write_text(ONE_MORE)
    add_distribution(tmp_path, "one-more", {"unstale.recipes": {"tiny": "one_more:tiny"}})
    monkeypatch.syspath_prepend(tmp_path)
    read_entry_points.cache_clear()
    assert find_recipes().keys() - RECIPES.keys() == {"tiny"}
    assert make_recipe("tiny").max_steps == 1
    read_entry_points.cache_clear()
