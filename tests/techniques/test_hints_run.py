"""Test a whole asynchronous run with hints: they are recorded, trained on, and survive a resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_run import quiet
from tests.support.tiny_runs import EVEN_WORDS, save_tiny, tiny_run
from tests.support.toy import ToyTasks
from tests.techniques.test_tree_run import require_plain
from unstale.cli import session
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.journal import Journal, check
from unstale.model.policy import Policy
from unstale.records import Placed, Provenance, Sampled

pytestmark = pytest.mark.usefixtures("forked_children")

EVEN_TASKS = "tests.support.tiny_runs:EvenTasks"


def configure(model: Path, runs: Path, tasks: str, **values: Any) -> RunConfig:
    config = tiny_run(model, runs, max_steps=4)
    config = replace(
        config,
        schedule=replace(config.schedule, group_size=4),
        task=replace(config.task, env=tasks),
    )
    hints = {"techniques": "hints", "objective.placed": "anchor", "hints.shortest": 0.5}
    return override(config, {**hints, **values})


def test_hints_are_recorded_and_trained_on_and_the_text_after_them_is_exact(
    tmp_path: Path,
) -> None:
    save_tiny(tmp_path / "model")
    base = Policy.load(tmp_path / "model", dtype="float32")
    config = configure(tmp_path / "model", tmp_path, EVEN_TASKS)
    run = session.train(config, console=quiet())
    assert min(row["hints/token_share_mean"] for row in run.metrics) > 0.1
    assert {row["hints/episode_share"] for row in run.metrics} == {0.5}
    assert {row["old_logps/exact_share"] for row in run.metrics} == {1.0}
    with Journal.read(run.folder) as reader:
        assert check(reader) == []
        ended = [each.trajectory for each in reader.trajectories()]
    hinted = [each for each in ended if each.fork]
    assert hinted
    for each in hinted:
        (hint,) = (piece for piece in each.pieces if isinstance(piece, Placed))
        assert hint.provenance == Provenance.FORCED and each.fork
        assert each.fork.text == (hint,)
        at = each.pieces.index(hint)
        assert isinstance(each.pieces[at + 1], Sampled), "the policy ends the reply"
        assert base.tokenizer.decode(list(hint.tokens)) in EVEN_WORDS
    with torch.inference_mode():
        assert sum(require_plain(base, each) for each in hinted)


def test_tasks_without_solutions_are_refused_before_the_run(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    with pytest.raises(
        ConfigError, match=r"hints needs demonstration.. or data_of.. of the task set"
    ):
        session.train(
            configure(tmp_path / "model", tmp_path, f"{ToyTasks.__module__}:ToyTasks"),
            console=quiet(),
        )
    with pytest.raises(ConfigError, match=r"has no field 'proof'"):
        session.train(
            configure(
                tmp_path / "model",
                tmp_path / "other",
                EVEN_TASKS,
                **{"hints.solution": "proof"},
            ),
            console=quiet(),
        )


def test_a_solution_with_a_banned_token_is_refused_before_the_run(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    policy = Policy.load(tmp_path / "model", dtype="float32")
    token = policy.tokenizer.encode(EVEN_WORDS, add_special_tokens=False)[-1]
    banned = {"engine.logit_bias": f"{token}=-inf"}
    config = configure(tmp_path / "model", tmp_path, EVEN_TASKS, **banned)
    with pytest.raises(ConfigError, match=f"has token {token}, which engine.logit_bias bans"):
        session.train(config, console=quiet())
