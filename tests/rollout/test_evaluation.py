"""Test the evaluation of a run: its sampling, its metrics, its best policy, and its end.

- `eval.samples`, `eval.temperature`, `eval.top_p`, `eval.top_k` and `eval.min_p` act on held-out
  episodes only, and no kept set of them is recorded.
- The folder `best` has the weights that were evaluated best, also after a kill and a resume.
- `eval.patience` ends a run whose evaluations get no better.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiny_runs import save_tiny, tiny_run
from unstale import train
from unstale.config import ConfigError, EngineConfig, EvalConfig, RunConfig
from unstale.durability.best_policy import BEST, RECORD, BestPolicy, read_best
from unstale.durability.run_folder import EVENTS
from unstale.model.policy import Policy
from unstale.records import Failure, Group, Sampled, Trajectory
from unstale.rollout.episode import Rollout
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


def best_of(
    run: Path,
    values: Sequence[float],
    *,
    patience: int = 0,
    first: int = 0,
    deterministic: bool = False,
) -> BestPolicy:
    """Return what keeps the best policy, after evaluations from step `first` on."""
    saved = Saved()
    options = EvalConfig(tasks=3, interval=1, keep_best="reward_mean", patience=patience)
    config = RunConfig(recipe="llm", eval=options, deterministic=deterministic)
    best = BestPolicy(run, config, saved, step=first)
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
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "samples": 1,
            "tasks": 3,
        },
        "value": 0.5,
        "step": 1,
        "version": 11,
        "evaluations": [[0, 0.1], [1, 0.5], [3, 0.5], [4, 0.3]],
    }
    assert [each.name for each in tmp_path.iterdir()] == [BEST]


def test_a_run_ends_after_some_evaluations_without_a_better_one(tmp_path: Path) -> None:
    assert not best_of(tmp_path / "a", [0.5, 0.4, 0.6, 0.1], patience=2).ends_run
    assert best_of(tmp_path / "b", [0.5, 0.4, math.nan, 0.5], patience=2).ends_run
    assert not best_of(tmp_path / "c", [0.5, 0.4, 0.3, 0.2]).ends_run


def test_a_resumed_run_forgets_the_evaluations_that_it_repeats(tmp_path: Path) -> None:
    best_of(tmp_path, [0.5, 0.4, 0.3], patience=2)
    resumed = best_of(tmp_path, [], patience=2, first=1)
    assert not resumed.ends_run
    resumed.add(1, 11, {"eval/reward_mean": 0.4})
    assert not resumed.ends_run
    resumed.add(2, 12, {"eval/reward_mean": 0.3})
    assert resumed.ends_run
    assert (tmp_path / BEST / "weights").read_text() == "0"


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_longer_run_keeps_the_evaluation_after_its_former_last_step(
    tmp_path: Path, deterministic: bool
) -> None:
    """Step 3 is no multiple of the interval, so the resumed run does not evaluate it again."""
    options = EvalConfig(tasks=3, interval=2, keep_best="reward_mean")
    short = RunConfig(recipe="llm", eval=options, deterministic=deterministic, max_steps=3)
    best = BestPolicy(tmp_path, short, Saved(), step=0)
    for step, value in ((0, 0.5), (2, 0.4), (3, 0.9)):
        best.add(step, 10 + step, {"eval/reward_mean": value})
    best = BestPolicy(tmp_path, replace(short, max_steps=8), Saved(), step=3)
    assert not best.add(4, 14, {"eval/reward_mean": 0.6})
    assert read_best(tmp_path)["evaluations"] == [[0, 0.5], [2, 0.4], [3, 0.9], [4, 0.6]]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_that_ended_with_its_best_evaluation_ends_also_after_a_resume(
    tmp_path: Path, deterministic: bool
) -> None:
    """The run ends for the evaluations before its last one, whatever the last one is."""
    ended = best_of(tmp_path, [0.5, 0.4, 0.3], patience=2)
    assert ended.ends_run
    ended.add(3, 13, {"eval/reward_mean": 0.9})
    resumed = best_of(tmp_path, [], patience=2, first=3, deterministic=deterministic)
    assert resumed.ends_run


def test_only_a_deterministic_run_replaces_a_better_policy_of_lost_steps(tmp_path: Path) -> None:
    """The undisturbed run replaced the policy of step 0 by that of step 1, and that by step 3's."""
    values = [0.5, 0.6, 0.1, 0.9]
    best_of(tmp_path / "whole", values)
    for deterministic in (False, True):
        run = tmp_path / str(deterministic)
        best_of(run, values)
        best_of(run, values[1:2], first=1, deterministic=deterministic)
        assert (run / BEST / "weights").read_text() == ("1" if deterministic else "3")
        best_of(run, values[2:], first=2, deterministic=deterministic)
        assert (run / BEST / "weights").read_text() == "3"
        assert read_best(run) == read_best(tmp_path / "whole")


def test_an_evaluation_of_another_kind_is_not_compared(tmp_path: Path) -> None:
    """Evaluations follow training's sampling where they have no sampling of their own."""
    best_of(tmp_path, [0.9])
    options = EvalConfig(tasks=3, interval=1, keep_best="reward_mean")
    for config in (
        RunConfig(recipe="llm", eval=replace(options, samples=4)),
        RunConfig(recipe="llm", eval=replace(options, top_p=0.9)),
        RunConfig(recipe="llm", eval=options, engine=EngineConfig(top_k=8)),
    ):
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


def sampled_ranks(
    policy: Policy, episode: Trajectory, limits: dict[str, float], heat: float
) -> list[int]:
    """Return the ranks of the tokens that version 0 sampled, 0 for the most probable token.

    Require that each is in the set that `limits` keep, and has its log-probability over this set.
    """
    tokens = torch.tensor([[token for piece in episode.pieces for token in piece.tokens]])
    with torch.no_grad():
        shares = torch.softmax(policy.model(input_ids=tokens).logits[0].double() / heat, -1)
    ranks, end = [], 0
    for piece in episode.pieces:
        end += len(piece.tokens)
        if not isinstance(piece, Sampled) or piece.version:
            continue
        for at, logp in zip(range(end - len(piece.tokens), end), piece.behavior_logp, strict=True):
            likely = shares[at - 1].sort(descending=True).values
            likely = likely[likely >= limits.get("min_p", 0) * likely[0]]
            likely = likely[: limits.get("top_k") or None]
            before = likely.cumsum(0) - likely
            likely = likely[before < limits.get("top_p", 1.0) * likely.sum()]
            share = shares[at - 1, tokens[0, at]]
            assert logp == pytest.approx(float((share / likely.sum()).log()), abs=1e-3)
            ranks.append(int((shares[at - 1] > share).sum()))
            assert ranks[-1] < len(likely)
    return ranks


@pytest.mark.parametrize(
    ("training", "options", "ranks"),
    [
        ({}, {"top_p": 0.6, "top_k": 9, "min_p": 0.01}, {"train": 64, "held-out": 9}),
        pytest.param(
            {"bitwise": True}, {"top_k": 5}, {"train": 64, "held-out": 5}, marks=pytest.mark.costly
        ),
        ({"top_k": 5}, {"top_k": 0}, {"train": 5, "held-out": 64}),
        pytest.param(
            {"top_k": 5},
            {"temperature": 0.7},
            {"train": 5, "held-out": 5},
            marks=pytest.mark.costly,
        ),
    ],
)
def test_evaluation_and_training_sample_each_from_their_own_sets(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    training: dict[str, Any],
    options: dict[str, Any],
    ranks: dict[str, int],
) -> None:
    """In the same run, and the options are in its folder."""
    save_tiny(tmp_path / "policy", bitwise="bitwise" in training)
    config = evaluated(tmp_path / "policy", tmp_path, **options)
    config = replace(config, max_steps=1, engine=replace(config.engine, **training))
    episodes: list[Trajectory] = []
    run_episode, run_group = Rollout.episode, Rollout.group

    async def watched(self: Rollout, *task: Any, **seeds: Any) -> Trajectory | Failure:
        outcome = await run_episode(self, *task, **seeds)
        assert isinstance(outcome, Trajectory)
        episodes.append(outcome)
        return outcome

    async def watched_group(self: Rollout, *request: Any, **options: Any) -> Group:
        group = await run_group(self, *request, **options)
        episodes.extend(group.trajectories)
        return group

    monkeypatch.setattr(Rollout, "episode", watched)
    monkeypatch.setattr(Rollout, "group", watched_group)
    run = train(config)
    stored = json.loads((run.folder / "config.json").read_text())
    assert options.items() <= stored["eval"].items()
    policy = Policy.load(tmp_path / "policy", dtype="float32")
    limits = {"train": training, "held-out": {**training, **options}}
    for split, most in ranks.items():
        heat = limits[split].get("temperature", 1.0)
        of_split = [each for each in episodes if each.task.split == split]
        found = [
            rank for each in of_split for rank in sampled_ranks(policy, each, limits[split], heat)
        ]
        assert most / 2 - 1 < max(found) < most
        records = split == "train" and "top_k" in training
        for each in of_split:
            pieces = [piece for piece in each.pieces if isinstance(piece, Sampled)]
            assert {piece.kept_sets is not None for piece in pieces} == {records}


@pytest.mark.costly
def test_the_sets_of_evaluations_do_not_change_training(policy: Path, tmp_path: Path) -> None:
    """Also with different sets in the same batches of the engine."""
    configs = [evaluated(policy, tmp_path / "a"), evaluated(policy, tmp_path / "b", top_k=5)]
    first, second = (train(replace(each, max_steps=1)) for each in configs)
    one, other = (Policy.load(run.folder / "policy").weights() for run in (first, second))
    assert all(torch.equal(one[name], other[name]) for name in one)
    measured = [
        [row["eval/reward_mean"] for row in run.metrics if "eval/reward_mean" in row]
        for run in (first, second)
    ]
    assert measured[0] != measured[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 1.5}, "eval.top_p must be between -1 and 1, got 1.5"),
        ({"min_p": -0.2}, "eval.min_p must be between 0 and 1, or -1 for engine.min_p, got -0.2"),
        ({"top_k": 1}, "eval.top_k = 1 keeps only the most probable token: set eval.temperature"),
        ({"top_p": 0.0}, "eval.top_p = 0 keeps only the most probable token"),
        ({"temperature": 0.0, "top_p": 0.9}, "cannot be used with eval.temperature = 0, which"),
        ({"temperature": 0.0, "samples": 2}, "eval.samples must be 1 with eval.temperature = 0"),
        ({"temperature": -0.5}, "eval.temperature must be >= 0, or -1 for engine.temperature"),
        ({"keep_best": "reward_mean", "tasks": 0}, "eval.keep_best = reward_mean needs eval.tasks"),
        ({"keep_best": "reward_mean", "patience": 2}, "eval.patience = 2 needs eval.interval > 0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalConfig(**options)  # type: ignore[arg-type]
