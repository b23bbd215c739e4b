"""Test objects that a program gives in place of their names: rows, functions, task sets, tables.

Wrong values and names have the same messages as in a TOML file. Names of other trainers lead to
ours.
"""

import asyncio
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import unstale
from tests.cli.test_run import quiet, small
from tests.support.toy import ToyTasks
from unstale.cli.resume import load_config
from unstale.config import (
    ConfigError,
    EngineConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
    make_task,
)
from unstale.config.given import Given
from unstale.config.names import SYNONYMS
from unstale.config.options import options
from unstale.durability.run_folder import RunFolder
from unstale.envs import Message
from unstale.envs.registry import build_taskset

pytestmark = pytest.mark.usefixtures("forked_children")

PROMPTS = [f"What is {n} + 1?" for n in range(60)]
ROWS = [{"prompt": prompt, "answer": str(n + 1)} for n, prompt in enumerate(PROMPTS)]


def right(reply: str, row: dict[str, str]) -> float:
    return float(reply == row["answer"])


def short(reply: str, row: object) -> float:
    return 1 / (1 + len(reply.split()))


async def rewards_of(task: TaskConfig, reply: str) -> dict[str, float]:
    tasks = build_taskset(task)
    env = tasks.env(tasks.held_out(1)[0], 0)
    await env.begin()
    return dict((await env.step(Message("assistant", reply))).rewards)


def dataset(env: Any, **values: Any) -> TaskConfig:
    return unstale.recipes.llm(task={"env": env, "reward": right, **values}).task


def test_rows_and_functions_are_given_as_they_are() -> None:
    from datasets import Dataset

    for rows in (ROWS, tuple(ROWS), Dataset.from_list(ROWS)):
        tasks: Any = build_taskset(dataset(rows))
        assert [*tasks.data["train"], *tasks.data["held_out"]] != ROWS  # they are divided
        assert sorted(map(str, [*tasks.data["train"], *tasks.data["held_out"]])) == sorted(
            map(str, ROWS)
        )
    held_out = dataset(ROWS[:50], held_out_file=ROWS[50:])
    assert asyncio.run(rewards_of(held_out, "51")) == {"reward": 1.0}
    both = dataset(PROMPTS, reward=[short, lambda reply, row: 0.25])
    assert asyncio.run(rewards_of(both, "a")) == {"short": 0.5, "<lambda>": 0.25}


def test_an_object_is_recorded_by_a_name_and_stays_in_its_process() -> None:
    task = dataset(ROWS, reward=lambda reply, row: 1.0)
    assert json.loads(json.dumps(asdict(task)))["env"] == "dataset:__main__:rows"
    assert copy.deepcopy(task.env) is task.env and type(pickle.loads(pickle.dumps(task.env))) is str
    named: Any = dataset(ROWS)
    assert named.reward == f"{__name__}:right" and type(named.reward) is str
    again = make_task(**json.loads(json.dumps(asdict(task))))
    with pytest.raises(ConfigError, match=r"task\.reward '__main__.* cannot be used"):
        build_taskset(again)
    with pytest.raises(ConfigError, match=r"task\.env: the rows were given in Python"):
        build_taskset(replace(again, reward=named.reward))  # type: ignore[call-arg]


def test_a_task_set_or_its_class_is_given_as_it_is() -> None:
    toy: Any = ToyTasks()
    for env in (toy, lambda: toy):
        config: Any = TaskConfig(env=env)
        assert isinstance(config.env, Given) and build_taskset(config) is toy
    by_class: Any = ToyTasks
    assert TaskConfig(env=by_class).env == "tests.support.toy:ToyTasks"


@pytest.mark.costly
def test_a_run_with_given_rows_is_recorded_and_resumed_in_python(tmp_path: Path) -> None:
    config = replace(
        small(tmp_path, max_steps=1), task=dataset(ROWS, reward=lambda reply, row: 0.5)
    )
    run = unstale.train(config, console=quiet())
    assert RunFolder(run.folder).config()["task"]["env"] == "dataset:__main__:rows"
    with pytest.raises(ConfigError, match=r"names what a program gave .*unstale\.resume\(folder, "):
        load_config(run.folder, named={})
    more = unstale.resume(str(run.folder), replace(config, max_steps=2), console=quiet())
    assert more.metrics[-1]["step"] == 2
    changed = replace(config, max_steps=3, task=dataset(ROWS[1:], reward=lambda reply, row: 0.5))
    with pytest.raises(ConfigError, match="the rows of dataset:__main__:rows have changed"):
        unstale.resume(run.folder, changed, console=quiet())


def endless() -> Iterator[str]:
    while True:
        yield "again"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TrainerConfig(lr="1e-4"), r"trainer\.lr must be a number, got '1e-4'"),  # type: ignore[arg-type]
        (lambda: RunConfig(recipe="x", max_steps="5"), "steps must be a whole number, got '5'"),  # type: ignore[arg-type]
        (lambda: unstale.recipes.llm(max_steps=True), "steps must be a whole number, got True"),
        (
            lambda: RunConfig(recipe="x", engine={"max_context": 64}),  # type: ignore[arg-type]
            r"engine must be an EngineConfig, got \{'max_context': 64\}\. Write EngineConfig\(",
        ),
        (lambda: unstale.recipes.llm(engine=5), "engine must be a table of options, got 5"),
        (
            lambda: unstale.recipes.llm(learning_rate=1),
            r"learning_rate; did you mean trainer\.lr\?",
        ),
        (
            lambda: EngineConfig(max_new_tokens=1),  # type: ignore[call-arg]
            r"unknown option engine\.max_new_tokens; did you mean engine\.max_completion_tokens\?",
        ),
        (
            lambda: unstale.recipes.llm(actor={"optim": {"lr": 1}}),
            r"unknown option actor\.optim\.lr; did you mean trainer\.lr\?",
        ),
        (
            lambda: TaskConfig(env="a:b", reward="c:d"),  # type: ignore[call-arg]
            r"task\.reward is an option of DatasetConfig",
        ),
        (lambda: dataset(5), r"task\.env must be a text, got 5"),
        (lambda: build_taskset(dataset([5])), r"task\.env, row 1 must be a dict, a text or"),
        (lambda: build_taskset(dataset({"train": ROWS})), "got a dict with train. Give one of"),
        (lambda: build_taskset(dataset(endless())), "rows with a length, got a generator"),
        (
            lambda: build_taskset(dataset(ROWS, reward=lambda prompts, completions: 0.0)),
            r"it has the parameter completions, as for TRL's lists",
        ),
        (lambda: unstale.train("llm"), "config must be a RunConfig, such as .* got 'llm'"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_value_has_the_message_of_a_file(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_table_changes_a_section_of_the_recipe() -> None:
    before = unstale.recipes.llm().trainer
    assert unstale.recipes.llm(trainer={"lr": 1e-5}).trainer == replace(before, lr=1e-5)


def test_synonyms_lead_to_options() -> None:
    page = (Path(__file__).parents[2] / "docs" / "other-trainers.md").read_text()
    for name, value in SYNONYMS.items():
        targets = [each for each in value.partition("; ")[0].split(", ") if each]
        assert set(targets) <= options().keys() and name not in options(), name
    for name in ("num_generations", "max_completion_length", "learning_rate", "max_async_level"):
        assert f"`{name}`" in page and name in SYNONYMS


@pytest.mark.parametrize("call", [unstale.resume, unstale.evaluate])
def test_a_wrong_argument_of_resume_and_evaluate_is_named(call: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such argument: max_step\. .* mean max_steps\?"):
        call(tmp_path, max_step=3)
    with pytest.raises(ConfigError, match=r"config must be a RunConfig"):
        call(tmp_path)


def test_an_option_in_place_of_the_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no such argument: model_path\. .* mean model\?"):
        unstale.train(model_path="x")
