"""Test combinations of techniques: every pair through the linter, and named pairs in whole runs.

A pair from different slots is accepted, or refused with a fix. A new technique is covered without
a change here, unless it needs options of its own (`CONDITIONS`). A named pair trains the tiny model
for three steps with two resumes, of which one is after a kill. Such a run must be equal to one that
was not disturbed. `pytest -m slow tests/techniques/test_pairs.py` runs all named pairs.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.durability.test_resume import killed
from tests.support.tiny_runs import EvenEnv, EvenTasks, save_tiny, tiny_run
from unstale.cli import session
from unstale.config import AuditConfig, CheckpointConfig, ConfigError, RunConfig, ScheduleConfig
from unstale.config.options import override
from unstale.config.techniques import EXCLUSIVE, techniques
from unstale.durability import compare_runs
from unstale.durability.journal import Journal, check
from unstale.durability.run_folder import RunFolder
from unstale.envs import Message, Turn
from unstale.lint import check as lint
from unstale.recipes import calculator, retail
from unstale.records import Task
from unstale.research.recipes import systems
from unstale.research.recipes import techniques as combined
from unstale.techniques.hooks import Techniques

CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "baseline": {"selection.pool": 6},
    "beta_sampler": {"selection.pool": 6},
    "difficulty_bin_weights": {"selection.pool": 6},
    "predicted_sampler": {"selection.pool": 6},
    "hard_task_stages": {
        "selection.pool": 6,
        "hard_task_stages.steps": 1,
        "hard_task_stages.least": 2,
        "hard_task_stages.size": 4,
    },
    "bin_sizes": {"selection.pool": 6},
    "limits": {"limits.successes": 1, "limits.free_every": 2},
    "segments": {
        "segments.table": "96:2:2 128:4:4 256:6:9",
        "segments.tokens": 16,
        "segments.calls": 2,
        "segments.max_concurrent_episodes": 3,
        "segments.window": 4,
    },
    "episode_filter": {"episode_filter.n": 2},
    "proxy": {"proxy.score": "even"},
    "distil": {"distil.teacher": "start", "distil.advantage_coef": 1.0},
    "estr": {"estr.tau": 0.04},
    "tree": {"schedule.group_size": 4},
    "majority": {"majority.least": 0.0},
    "hints": {"objective.placed": "anchor", "hints.shortest": 0.5},
    "retry": {"objective.placed": "anchor"},
    "bus": {"objective.placed": "anchor", "bus.load": "runs/earlier"},
    "exemplars": {"objective.placed": "anchor"},
    "regenerate": {
        "engine.precise_engines": 1,
        "engine.quantise": "nvfp4",
        "engine.processes": 2,
        "schedule.group_size": 8,
    },
    "opmd": {"objective.loss_type": "none"},
    "truncated": {"engine.max_completion_tokens": 160, "engine.max_context": 2048},
}
"""Options without which a technique is refused, by its name, or has no episode to train on. They
are set in every test here.
"""
REFUSED_ALONE: Mapping[str, str] = {
    "reward_channels": "reward_channels needs several named rewards",
    "tree": "tree needs the technique tree_advantage",
    "tree_advantage": "tree_advantage needs the technique tree",
    "hint_entropy_weights": "hint_entropy_weights needs the technique hints",
}
"""The reasons for which a technique is refused alone in the recipe `retail`."""

NAMED: tuple[str, ...] = (
    "ess_lr outer_step confident_error_penalty",
    "least_variance_baseline m2po preserve_clip",
    "minpro token_entropy_advantage top_tokens",
    "minpro balance",
    "minpro ess_lr",
    "rollout_figures confident_error_penalty",
    "tool_bonus reward_channels",
    "beta_sampler baseline novelty",
    "truncated step_groups",
    "episode_filter step_groups",
    "episode_filter baseline",
    "allocate ess_lr",
    "beta_sampler allocate",
    "replay outer_step",
    "replay beta_sampler",
    "replay minpro",
    "difficulty_bin_weights bin_sizes",
    "bin_sizes baseline",
    "difficulty_bin_weights step_groups",
    "flawed_success_penalty truncated",
    "proxy episode_filter",
    "confidence_clip unlikely_token_bonus",
    "confidence_clip entropy_advantage_reweighting",
    "m2po truncated",
    "novelty outer_step",
    "least_variance_baseline beta_sampler",
    "tree tree_advantage",
    "hints opmd",
    "hints hint_entropy_weights",
    "exemplars allocate",
    "majority tree tree_advantage",
)
"""Combinations that are trained. `make test-all` trains the first `QUICK`, `-m slow` all."""
QUICK = 2
NOT_EQUAL = ("bus", "regenerate")
"""Techniques that a deterministic run refuses: they depend on other runs or processes."""
OTHERS = tuple(
    f"{each} ess_lr" for each in techniques() if each not in [*" ".join(NAMED).split(), *NOT_EQUAL]
)
"""Other techniques that are in no named combination, each with one from another slot."""


def chosen(names: str, config: RunConfig) -> RunConfig:
    """Return a configuration with some techniques, and with the options that they need."""
    needed = [CONDITIONS.get(name, {}) for name in names.split()]
    options = {key: value for each in needed for key, value in each.items()}
    return override(config, {"techniques": names, **options})


@pytest.mark.parametrize("name", techniques())
def test_each_technique_is_accepted_alone_or_refused_for_its_known_reason(name: str) -> None:
    if name in REFUSED_ALONE:
        with pytest.raises(ConfigError, match=REFUSED_ALONE[name]):
            chosen(name, retail())
        return
    config = chosen(name, retail())
    if name == "majority":  # the tasks of retail have no answers
        assert lint(config).refusals
        config = chosen(name, calculator())
    verdict = lint(config)
    assert not verdict.refusals
    assert verdict.facts["techniques"].startswith(f"{name}: ")
    assert list(Techniques.of(config).parts) == [name]


def is_explained(message: str, *names: str) -> bool:
    """Return True if a refusal names both techniques, or an option of one with a reason.

    A technique may also be refused for the reason for which it is refused alone.
    """
    if all(re.search(rf"\b{name}\b", message) for name in names):
        return True
    if any(re.search(REFUSED_ALONE[name], message) for name in names if name in REFUSED_ALONE):
        return True
    needed = [option for name in names for option in CONDITIONS.get(name, {})]
    has_option = any(re.search(rf"\b{name}\.\w+", message) for name in names) or any(
        option in message for option in needed
    )
    reason = message.partition(": ")[2].partition(". ")[0]
    return has_option and len(reason.split()) > 3


@pytest.mark.costly
def test_every_pair_is_accepted_or_refused_with_what_to_do() -> None:
    """Two of a slot that holds one are refused. Others are built, with both in the facts."""
    accepted = 0
    for one, other in combinations(techniques().values(), 2):
        names = f"{one.name} {other.name}"
        try:
            config = chosen(names, retail())
        except ConfigError as error:
            assert is_explained(str(error), one.name, other.name), (names, error)
            continue
        assert one.slot != other.slot or one.slot not in EXCLUSIVE, names
        verdict = lint(config)
        for finding in (*verdict.refusals, *verdict.warnings):
            assert finding.fix, (names, finding)
        if verdict.refusals:
            continue
        accepted += 1
        assert list(Techniques.of(config).parts) == names.split()
        facts = verdict.facts["techniques"]
        assert facts.index(f"{one.name}: ") < facts.index(f"{other.name}: "), names
    assert accepted


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder)
    return folder


def resume(folder: Path, config: RunConfig) -> None:
    session.resume(folder, config, console=Console(file=StringIO()))


def train(config: RunConfig) -> Path:
    session.train(config, console=Console(file=StringIO()))
    return config.runs / config.name


def small(policy: Path, folder: Path) -> RunConfig:
    """Return a run of three steps."""
    return tiny_run(
        policy,
        folder,
        name="whole",
        max_steps=3,
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=2, group_size=3),
        checkpoint=CheckpointConfig(interval=1),
        audit=AuditConfig(share=0.0),
    )


def run_undisturbed_and_killed(config: RunConfig) -> Path:
    """Train twice, once with a kill, and compare. Return the run's folder."""
    lint(config).require()
    whole = train(config)
    again = override(config, {"name": "killed"})
    with killed("prepare", 3):  # in the third step, after checkpoints of both steps before
        train(again)
    resume(config.runs / "killed", again)
    assert compare_runs.differences(whole, config.runs / "killed") == []
    return whole


def require_trained(folder: Path, steps: int) -> None:
    """Check that each step has finite figures, staleness within its bound, and a sound journal."""
    rows = RunFolder(folder).metrics()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    for row in rows:
        assert math.isfinite(row["objective/loss"]) and row["trainer/grad_norm"] > 0
        assert row["schedule/staleness_max"] <= row["schedule/staleness_bound"]
    with Journal.read(folder) as reader:
        assert check(reader) == []


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=[pytest.mark.slow] * (at >= QUICK))
        for at, names in enumerate((*NAMED, *OTHERS))
    ],
)
def test_a_pair_trains_and_ends_equal_after_a_kill(
    names: str, policy: Path, tmp_path: Path
) -> None:
    config = chosen(names, small(policy, tmp_path))
    require_trained(run_undisturbed_and_killed(config), steps=3)


class ErringEnv(EvenEnv):
    """An environment that counts odd words as errors of a tool."""

    async def step(self, reply: Message) -> Turn:
        turn = await super().step(reply)
        odd = sum(int(word[1:]) % 2 for word in reply.content.split() if word[1:].isdigit())
        return replace(turn, facts={**turn.facts, "tool_errors": float(odd)})


class ErringTasks(EvenTasks):
    """Tasks with tools that fail."""

    def env(self, task: Task, seed: int) -> ErringEnv:
        return ErringEnv(task, self)


OF_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "small_group": {"selection.pool": 6},
    "long_horizon": {"schedule.group_size": 4},
    "hard_tasks": {"retry.number": 1},
    "test_time": {"selection.pool": 6, "majority.least": 0.0},
    "dart": {"selection.pool": 6, "allocate.max": 6, "allocate.mean": 3.0},
}
"""Options with which the tiny run of a recipe is small."""


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [*combined.RECIPES, *systems.RECIPES])
def test_a_recipe_trains_and_ends_equal_after_a_kill(
    recipe: Callable[..., RunConfig], policy: Path, tmp_path: Path
) -> None:
    """The tiny run has the recipe's techniques, route, correction, loss and number of steps."""
    base = small(policy, tmp_path)
    config = replace(
        recipe(),
        recipe=base.recipe,
        model=base.model,
        runs=base.runs,
        name=base.name,
        max_steps=base.max_steps,
        minutes=base.minutes,
        deterministic=True,
        engine=base.engine,
        task=base.task,
        audit=base.audit,
        eval=base.eval,
        checkpoint=base.checkpoint,
    )
    options: Mapping[str, Any] = {
        **CONDITIONS["truncated"],
        "task.env": f"{__name__}:ErringTasks",
        "schedule.max_staleness": 2,
        "schedule.groups_per_step": 2,
        "schedule.group_size": 3,
    }
    config = override(config, {**options, **OF_RECIPES.get(recipe.__name__, {})})
    require_trained(run_undisturbed_and_killed(config), steps=3)


def test_the_linter_names_the_order_of_techniques_that_change_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        name: replace(techniques()["confident_error_penalty"], name=name) for name in ("one", "two")
    }
    monkeypatch.setattr("unstale.config.techniques.techniques", lambda: known)
    facts = lint(override(retail(), {"techniques": "two one"})).facts
    assert facts["order"] == "two, then one change the advantages of tokens"
    assert "order" not in lint(override(retail(), {"techniques": "one"})).facts
