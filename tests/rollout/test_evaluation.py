"""Test the evaluation of a run: its sampling, its metrics, its best policy, and its end.

- `eval.samples` and `eval.temperature` act on held-out episodes only.
- The folder `best` has the weights that were evaluated best, also after a kill and a resume.
- `eval.patience` ends a run whose evaluations get no better.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.tiny_runs import save_tiny, tiny_run
from unstale import train
from unstale.config import ConfigError, EvalConfig, RunConfig
from unstale.durability.best_policy import BEST, RECORD, BestPolicy, read_best
from unstale.durability.run_folder import EVENTS
from unstale.model.policy import Policy
from unstale.rollout.evaluation import measure_success


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_tiny(folder)
    return folder


def evaluated(policy: Path, runs: Path, **options: object) -> RunConfig:
    config = tiny_run(policy, runs, max_steps=4)
    return replace(config, eval=EvalConfig(tasks=3, interval=1, **options))  # type: ignore[arg-type]


class Saved:
    """A function that saves a policy as its number."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.number))


def best_of(run: Path, values: Sequence[float], *, patience: int = 0, first: int = 0) -> BestPolicy:
    """Return what keeps the best policy, after evaluations from step `first` on."""
    saved = Saved()
    config = EvalConfig(tasks=3, interval=1, keep_best="reward_mean", patience=patience)
    best = BestPolicy(run, config, saved, step=first - 1)
    for step, value in enumerate(values, start=first):
        saved.number = step
        best.add(step, 10 + step, {"eval/reward_mean": value})
    return best


def test_the_success_is_the_mean_over_all_episodes_of_a_task() -> None:
    metrics = measure_success([True, False, None, False, False, False], samples=2)
    assert metrics == {
        "eval/success_rate": 1 / 6,
        "eval/tasks": 3.0,
        "eval/failed_tasks": 1.0,
        "eval/any_success_rate": 1 / 3,
    }
    assert math.isnan(measure_success([None, None], samples=2)["eval/success_rate"])
    assert "eval/any_success_rate" not in measure_success([True], samples=1)


def test_the_first_of_the_best_evaluations_is_kept(tmp_path: Path) -> None:
    best_of(tmp_path, [0.1, 0.5, math.nan, 0.5, 0.3])
    assert (tmp_path / BEST / "weights").read_text() == "1"
    assert read_best(tmp_path) == {
        "measured": {
            "metric": "eval/reward_mean",
            "temperature": -1.0,
            "samples": 1,
            "tasks": 3,
        },
        "value": 0.5,
        "step": 1,
        "version": 11,
        "worse": [3, 4],
    }
    assert [each.name for each in tmp_path.iterdir()] == [BEST]


def test_a_run_ends_after_some_evaluations_without_a_better_one(tmp_path: Path) -> None:
    assert not best_of(tmp_path / "a", [0.5, 0.4, 0.6, 0.1], patience=2).ends_run
    assert best_of(tmp_path / "b", [0.5, 0.4, math.nan, 0.5], patience=2).ends_run
    assert not best_of(tmp_path / "c", [0.5, 0.4, 0.3, 0.2]).ends_run


def test_a_resumed_run_forgets_the_evaluations_that_it_repeats(tmp_path: Path) -> None:
    best_of(tmp_path, [0.5, 0.4, 0.3], patience=2)
    resumed = best_of(tmp_path, [], patience=2, first=2)
    assert not resumed.ends_run
    resumed.add(1, 11, {"eval/reward_mean": 0.4})
    assert not resumed.ends_run
    resumed.add(2, 12, {"eval/reward_mean": 0.3})
    assert resumed.ends_run
    assert (tmp_path / BEST / "weights").read_text() == "0"


def test_an_evaluation_of_another_kind_is_not_compared(tmp_path: Path) -> None:
    best_of(tmp_path, [0.9])
    config = EvalConfig(tasks=3, interval=1, keep_best="reward_mean", samples=4)
    best = BestPolicy(tmp_path, config, Saved(), step=1)
    assert best.add(1, 11, {"eval/reward_mean": 0.1})


def test_a_kill_between_two_best_policies_loses_none(tmp_path: Path) -> None:
    best_of(tmp_path, [0.5])
    (tmp_path / BEST).rename(tmp_path / f"{BEST}.replaced")
    best_of(tmp_path, [0.4], first=1)
    assert (tmp_path / BEST / "weights").read_text() == "0"


def test_the_best_policy_of_a_run_is_the_one_that_was_evaluated(
    policy: Path, tmp_path: Path
) -> None:
    run = train(evaluated(policy, tmp_path, keep_best="reward_mean"))
    rows = [row for row in run.metrics if "eval/reward_mean" in row]
    values = [row["eval/reward_mean"] for row in rows]
    record = json.loads((run.folder / BEST / RECORD).read_text())
    assert record["value"] == max(values)
    assert record["step"] == rows[values.index(max(values))]["step"]
    assert len(rows) == 5
    saved, last = Policy.load(run.folder / BEST), Policy.load(run.folder / "policy")
    same = all(
        torch.equal(a, b)
        for a, b in zip(saved.weights().values(), last.weights().values(), strict=True)
    )
    assert same == (record["step"] == 4)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.costly
def test_a_run_without_a_better_evaluation_ends_early(
    policy: Path, tmp_path: Path, deterministic: bool
) -> None:
    options = evaluated(policy, tmp_path, keep_best="success_rate", patience=2)  # it stays 0
    run = train(replace(options, max_steps=20, deterministic=deterministic))
    assert run.metrics[-1]["step"] == 3
    assert (run.folder / "policy").is_dir()
    stopped = json.loads((run.folder / EVENTS).read_text().splitlines()[-1])
    assert "the best evaluation is that after step 0 (eval.patience = 2)" in stopped["detail"]


def test_evaluation_is_greedy_and_training_is_not(policy: Path, tmp_path: Path) -> None:
    greedy = evaluated(policy, tmp_path / "greedy", temperature=0.0)
    usual = evaluated(policy, tmp_path / "usual", samples=2)
    first, second = (
        [row for row in train(replace(each, max_steps=1)).metrics if "eval/tasks" in row]
        for each in (greedy, usual)
    )
    assert [row["eval/tasks"] for row in first] == [3.0, 3.0]
    assert first[0]["eval/reward_mean"] != second[0]["eval/reward_mean"]
    assert first[1]["rollout/total_tokens_mean"] == second[1]["rollout/total_tokens_mean"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0, "samples": 2}, "eval.samples must be 1 with eval.temperature = 0"),
        ({"temperature": -0.5}, "eval.temperature must be >= 0, or -1 for engine.temperature"),
        ({"keep_best": "reward_mean", "tasks": 0}, "eval.keep_best = reward_mean needs eval.tasks"),
        ({"keep_best": "reward_mean", "patience": 2}, "eval.patience = 2 needs eval.interval > 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalConfig(**options)  # type: ignore[arg-type]
