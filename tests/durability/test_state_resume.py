"""Test that killed runs with each feature that has state end equal to an unkilled one, bit for bit.

The engine is real and the policy tiny. Runs are killed before an optimizer step, between a step and
its checkpoint, in a publication and around an evaluation. Weights, checkpoints, versions, the best
policy with its record, the journal and the metrics are compared.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.durability import test_resume
from tests.durability.test_resume import killed
from tests.rewards.test_reward_model import save as save_reward_model
from tests.support.tiny_runs import EvenTasks, save_tiny, tiny_run
from unstale import loop
from unstale.cli import session
from unstale.config import AuditConfig, CheckpointConfig, RunConfig, TaskConfig, make_task
from unstale.config.options import override
from unstale.durability import best_policy, compare_runs
from unstale.durability.best_policy import BestPolicy, read_best
from unstale.durability.journal import Journal, check
from unstale.durability.run_folder import RunFolder
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.lint import check as lint
from unstale.records import Task
from unstale.rewards.reward_model import RewardModel

pytestmark = pytest.mark.usefixtures("forked_children")


class Fields(EvenTasks):
    """Tasks of two kinds, with an answer that a teacher may read."""

    def data_of(self, task: Task) -> Mapping[str, str]:
        return {"kind": ("odd", "even")[task.index % 2], "answer": f"w{4 + task.index % 8}"}


reward_model = cache(RewardModel)


async def liked(reply: str, row: Mapping[str, Any]) -> Mapping[str, float]:
    """Return the score of the reward model that the row names."""
    return await reward_model(row["model"]).reward(reply, row)


EVALUATED = {"eval.tasks": 3, "eval.interval": 1, "eval.keep_best": "reward_mean"}
DISTILLED = {"techniques": "distil", "distil.context": " {answer}"}
CASES: Mapping[str, Mapping[str, Any]] = {
    "most": {
        **EVALUATED,
        "advantage.estimator": "gae",
        "critic.model": "own",
        "critic.warmup_steps": 1,
        "engine.top_p": 0.9,
        "trainer.epochs_per_batch": 2,
        "old_logps.route": "queue_of_two",
    },
    "best policy": EVALUATED,
    "early stopping": {
        **EVALUATED,
        "eval.keep_best": "success_rate",  # it stays 0
        "eval.patience": 2,
        "max_steps": 8,
    },
    "critic on the trunk": {"advantage.estimator": "gae", "critic.warmup_steps": 2},
    "teacher with context": {**DISTILLED, "distil.teacher": "self"},
    "teachers by domain": {
        **DISTILLED,
        "distil.teacher": "odd=start even=OTHER",
        "distil.domain": "kind",
        "distil.divergence": "mixed",
    },
    "adapters": {
        "trainer.lora_rank": 2,
        "engine.adapters": "unmerged",
        "schedule.pin_versions": True,
    },
    "kept sets, replayed": {"engine.top_p": 0.9, "techniques": "replay", "replay.max_age": 3},
    "entropy-scaled regions": {"techniques": "estr", "estr.tau": 0.04},
    "the last two versions": {"old_logps.route": "queue_of_two"},
    "several epochs": {"trainer.epochs_per_batch": 2, "trainer.minibatches_per_batch": 2},
    "votes at test time": {
        "techniques": "majority",
        "majority.least": 0.0,
        "selection.pool": 4,
        "selection.test_time": True,
    },
    "reward model": {},
}


@pytest.fixture(scope="module", autouse=True)
def more_moments() -> Iterator[None]:
    moments = (
        (EmbeddedEngine, "load"),
        (loop, "evaluate"),
        (BestPolicy, "add"),
        (best_policy, "write_whole"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_resume, "MOMENTS", (*test_resume.MOMENTS, *moments))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("state")
    save_tiny(folder / "policy")
    yield folder
    if reward_model.cache_info().currsize:
        reward_model(str(folder / "liking")).close()


def rewarded_by_a_model(folder: Path) -> TaskConfig:
    model = save_reward_model(folder / "liking")
    rows = [{"prompt": f"w{4 + number}", "model": str(model)} for number in range(32)]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return make_task(env=f"dataset:{data}", reward=f"{__name__}:liked", held_out_share=0)


@pytest.fixture(scope="module")
def unkilled(folder: Path) -> Callable[[str], RunConfig]:
    """Return a function that returns the configuration of a run that was not killed."""

    @cache
    def run(case: str) -> RunConfig:
        config = tiny_run(
            folder / "policy",
            folder / case,
            name="whole",
            max_steps=3,
            task=TaskConfig(env=f"{__name__}:Fields"),
            checkpoint=CheckpointConfig(interval=2),
            audit=AuditConfig(share=0.0),
        )
        options = {"trainer.lr": 1e-2, **CASES[case]}
        if "distil.teacher" in options:
            other = str(folder / "policy")
            options["distil.teacher"] = options["distil.teacher"].replace("OTHER", other)
        if case == "reward model":  # its context is short
            config = replace(config, task=rewarded_by_a_model(folder))
            options["engine.max_completion_tokens"] = 8
        made = override(config, options)
        lint(made).require()
        session.train(made, console=Console(file=StringIO()))
        return made

    return run


PLACES = [("step", 3), ("snapshot", 2), ("load", 3)]
IN_EVALUATION = [("evaluate", 2), ("add", 3), ("write_whole", 3), ("write", 3)]
KILLS = [("most", "write_whole", 3)]
KILLS += [(case, *place) for case in CASES for place in PLACES]
KILLS += [(case, *place) for case in ("best policy", "early stopping") for place in IN_EVALUATION]


@pytest.mark.costly
@pytest.mark.parametrize(("case", "call", "number"), KILLS)
def test_a_killed_run_ends_equal(
    unkilled: Callable[[str], RunConfig], case: str, call: str, number: int
) -> None:
    made = unkilled(case)
    again = override(made, {"name": f"{call}{number}"})
    with killed(call, number):
        session.train(again, console=Console(file=StringIO()))
    run = made.runs / again.name
    session.resume(run, again, console=Console(file=StringIO()))
    assert compare_runs.differences(made.runs / "whole", run) == []
    with Journal.read(run) as reader:
        assert check(reader) == []
    steps = [row["step"] for row in RunFolder(run).metrics()]
    assert steps[-1] == 3
    if "eval.tasks" in CASES[case]:
        evaluations = read_best(run)["evaluations"]
        assert [step for step, _ in evaluations] == steps == [0, 1, 2, 3]
    if case == "best policy":
        assert read_best(run)["step"] > 0
