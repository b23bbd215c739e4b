"""Test forecasts of `predicted_sampler` in `allocate` and `baseline`, and the router of V0.

What matters are tasks that were never tried: their earlier results say nothing, and their words do.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from tests.techniques.test_predicted_sampler import outcome, world
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.durability.checkpoint import CHECKPOINTS
from unstale.durability.checkpoint_files import read_state
from unstale.envs.desk import shipped_desks
from unstale.recipes import RECIPES
from unstale.research.route import dispatch, read_counts, route
from unstale.research.techniques.allocate import Allocate
from unstale.research.techniques.baseline import PriorBaseline, shrink
from unstale.research.techniques.predicted_sampler import (
    PredictedSamplerConfig,
    TextSampler,
    make_sampler,
)
from unstale.techniques.hooks import DrawContext, GroupSoFar, StatesQuery, Techniques
from unstale.testing import checkpoint_round_trip

NAMES = "predicted_sampler allocate baseline"
SIZE, SEEN = 8, 128


def configured(forecast: str, **options: object) -> RunConfig:
    values = {
        "techniques": NAMES,
        "selection.pool": 200,
        "predicted_sampler.forecast": "model",
        "allocate.forecast": forecast,
        "baseline.forecast": forecast,
        "allocate.max": 16,
        "schedule.group_size": 4,
        **({} if options["allocate.gain"] == "v05_risk" else {"allocate.mean": 4}),
        **options,
    }
    return override(RECIPES["calculator"](), values)


def learned(
    texts: dict[str, str], rates: dict[str, float], seed: int, *, gain: str, forecast: str
) -> Techniques:
    """Return techniques that have seen one group of each of the first tasks."""
    made = Techniques.of(configured(forecast, **{"allocate.gain": gain}))
    sampler = made.parts["predicted_sampler"]
    assert isinstance(sampler, TextSampler)
    sampler.read(texts)
    rng = np.random.default_rng(seed)
    names = list(texts)[:SEEN]
    for at in range(0, SEEN, 8):
        batch = [
            outcome(name, *map(float, rng.random(SIZE) < rates[name]))
            for name in names[at : at + 8]
        ]
        for part in made.stateful.values():
            part.observe(batch)
    return made


def variance(sizes: Sequence[int], rates: Sequence[float]) -> float:
    """Return the mean variance of the mean reward of a group."""
    return float(np.mean([p * (1 - p) / n for n, p in zip(sizes, rates, strict=True)]))


@pytest.mark.costly
def test_budgets_of_tasks_that_were_never_tried_follow_the_forecast() -> None:
    found: dict[str, list[tuple[float, float]]] = {"counts": [], "sampler": []}
    for seed in range(6):
        texts, rates = world(seed, exchanged=False)
        new = list(texts)[SEEN:]
        for forecast, values in found.items():
            made = learned(texts, rates, seed, gain="sqrt_law", forecast=forecast)
            allocate = made.parts["allocate"]
            assert isinstance(allocate, Allocate)
            sizes = [allocate.first(name) for name in new]
            values.append((variance(sizes, [rates[name] for name in new]), float(np.mean(sizes))))
    by_counts, by_forecast = (np.mean(values, axis=0) for values in found.values())
    assert by_forecast[1] < by_counts[1], "no task gets more episodes on average"
    assert by_forecast[0] * by_forecast[1] < 0.93 * by_counts[0] * by_counts[1]


def test_the_baseline_of_new_tasks_has_a_smaller_error_with_the_forecast() -> None:
    """The squared error of V0.5's baseline, with 4 rewards in [-1, 1], on tasks never tried."""
    import torch

    errors: dict[str, list[float]] = {"counts": [], "sampler": []}
    for seed in range(6):
        texts, rates = world(seed, exchanged=False)
        rng = np.random.default_rng(100 + seed)
        rewards = {name: 2.0 * (rng.random(4) < rates[name]) - 1 for name in list(texts)[SEEN:]}
        for forecast, found in errors.items():
            made = learned(texts, rates, seed, gain="v05_risk", forecast=forecast)
            baseline = made.parts["baseline"]
            assert isinstance(baseline, PriorBaseline)
            for name, values in rewards.items():
                prior = torch.tensor(2 * baseline.value(name) - 1)
                mixed = shrink(torch.tensor(values.mean()), prior, 1 / 4)
                found.append((float(mixed) - (2 * rates[name] - 1)) ** 2)
    by_counts, by_forecast = map(np.mean, errors.values())
    assert by_forecast < 0.75 * by_counts


def encode(texts: Sequence[str], query: StatesQuery) -> torch.Tensor:
    """Return states with a large common part, in which only one of 24 features says the topic."""
    noise = torch.Generator().manual_seed(0)
    states = torch.randn(len(texts), 24, generator=noise) + 50
    states[:, 7] += torch.tensor([6.0 if "odd" in text else -6.0 for text in texts])
    return states


def encoded(**options: object) -> TextSampler:
    values: dict[str, Any] = {"encoder": "policy", "forecast": "model", **options}
    made = make_sampler(PredictedSamplerConfig(**values))
    made.read({f"{i}": f"{'odd' if i % 2 else 'even'} x{i}" for i in range(100)})
    made.read_vectors(encode)
    return made


def test_the_policy_as_encoder_forecasts_tasks_that_were_never_tried() -> None:
    made = encoded()
    for at in range(0, 60, 6):
        made.observe([outcome(f"{i}", *[float(i % 2)] * 4) for i in range(at, at + 6)])
    new = [f"{i}" for i in range(60, 100)]
    found = made.forecast(new)
    assert found[1::2].min() > 0.7 and found[::2].max() < 0.3
    other = encoded()
    other.restore(checkpoint_round_trip(made.state()))

    def moved(texts: Sequence[str], query: StatesQuery) -> torch.Tensor:
        raise AssertionError("the vectors are those of the run's first policy")

    other.read_vectors(moved)
    assert other.forecast(new).tolist() == found.tolist()


def test_only_reference_tasks_are_used_and_every_fourth_group_is_on_one() -> None:
    made = encoded(reference=10)
    tasks = [f"{i}" for i in range(100)]

    def drawn(number: int) -> str:
        return made.draw(tasks, DrawContext(number, 1, Random(number))).task

    seen = []
    for number in range(0, 80, 4):
        seen.append(drawn(number))
        made.observe([outcome(seen[-1], 1.0, 0.0), outcome(drawn(number + 1), 1.0, 1.0)])
    assert len(set(seen[:10])) == 10, "a task without a result comes first"
    used = {group[0] for group in made.state()["groups"]}
    assert used == set(seen)


@pytest.mark.usefixtures("forked_children")
@pytest.mark.costly
def test_a_run_reads_the_texts_of_its_pool_with_its_policy(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    config = override(
        tiny_run(tmp_path / "model", tmp_path, max_steps=2),
        {
            "techniques": "predicted_sampler",
            "selection.pool": 6,
            "predicted_sampler.encoder": "policy",
            "predicted_sampler.forecast": "model",
            "predicted_sampler.reference": 2,
        },
    )
    run = session.train(config, console=quiet())
    assert len(run.metrics) == 2
    loaded = {"predicted_sampler.load": str(run.folder), "predicted_sampler.passes": 0}
    again = session.train(override(config, {**loaded, "name": "again"}), console=quiet())
    (first, second) = (value_model_of(each.folder) for each in (run, again))
    for name, weights in first["model"]["weights"].items():
        assert torch.equal(weights, second["model"]["weights"][name]), "it is never updated"
    assert first["model"]["steps"] == second["model"]["steps"] > 0
    assert len(second["before"]) > len(first["before"]), "its trust follows this run"
    words = override(config, {**loaded, "name": "words", "predicted_sampler.encoder": "words"})
    with pytest.raises((ConfigError, RunFailed), match="the value model was trained on vectors of"):
        session.train(words, console=quiet())


def value_model_of(run: Path) -> dict[str, Any]:
    newest = max((run / CHECKPOINTS).glob("step*"))
    learned: dict[str, Any] = read_state(newest, "technique/predicted_sampler")["learned"]
    return learned


def test_a_model_is_loaded_only_from_a_run_that_has_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="passes 0 never trains the model: set predicted_sam"):
        PredictedSamplerConfig(forecast="model", passes=0)
    sampler = make_sampler(PredictedSamplerConfig(forecast="model", load=str(tmp_path)))
    with pytest.raises(ConfigError, match="has no checkpoint with a value model"):
        sampler.read({"a": "add 1"})


def test_desks_have_texts() -> None:
    for desk in shipped_desks().values():
        task = next(desk.train(0))
        opening = asyncio.run(desk.env(task, 0).begin()).messages[-1].content
        assert desk.text(task) == opening and opening


def test_restored_techniques_decide_the_same() -> None:
    texts, rates = world(0, exchanged=False)
    made = learned(texts, rates, 0, gain="v0", forecast="sampler")
    other = Techniques.of(configured("sampler", **{"allocate.gain": "v0"}))
    for name in ("allocate", "baseline", "predicted_sampler"):  # the sampler is restored last
        part = other.stateful[f"technique/{name}"]
        part.restore(checkpoint_round_trip(made.stateful[f"technique/{name}"].state()))
    other.parts["predicted_sampler"].read(texts)  # type: ignore[attr-defined]
    one, two = (each.parts["allocate"] for each in (made, other))
    sizes = [one.first(name) for name in texts]  # type: ignore[attr-defined]
    assert sizes == [two.first(name) for name in texts]  # type: ignore[attr-defined]
    assert len(set(sizes)) > 1
    group = GroupSoFar("150", (1.0, 0.0, 1.0, 1.0), 4, 4)
    assert one.more(group) == two.more(group)  # type: ignore[attr-defined]


def test_forecasts_need_the_sampler_and_must_be_the_same_in_both() -> None:
    alone = {"techniques": "allocate", "allocate.gain": "v0", "selection.pool": 9}
    with pytest.raises(ConfigError, match=r"allocate.forecast = sampler needs the technique"):
        override(RECIPES["calculator"](), {**alone, "allocate.forecast": "sampler"})
    with pytest.raises(ConfigError, match=r"allocate.forecast must be counts \(baseline.forecast"):
        configured("sampler", **{"allocate.gain": "v05_risk", "baseline.forecast": "counts"})


def save(path: Path, solved: dict[str, list[bool]]) -> Path:
    rows = [{"policy": path.stem}] + [
        {"task": key, "attempt": i, "success": each}
        for key, found in solved.items()
        for i, each in enumerate(found)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.costly
def test_the_router_sends_tasks_to_the_policy_that_fits(tmp_path: Path) -> None:
    """One policy solves sums, the other proofs. A dear third one solves both."""
    rng = np.random.default_rng(0)
    kinds = {f"t{i}": ("add up", "prove that")[i % 2] for i in range(200)}
    texts = {key: f"{kind} x{rng.integers(50)} y{rng.integers(50)}" for key, kind in kinds.items()}
    chances = [{"add up": 0.8, "prove that": 0.1}, {"add up": 0.1, "prove that": 0.7}]
    chances.append({"add up": 0.85, "prove that": 0.85})
    paths = [
        save(
            tmp_path / f"{number}.jsonl",
            {key: list(map(bool, rng.random(4) < each[kinds[key]])) for key in kinds},
        )
        for number, each in enumerate(chances)
    ]
    results = [read_counts(path) for path in paths]
    two = route(texts, results[:2], [1, 1], 0)
    assert two["router"].success > 0.7 > 0.5 > max(two[f"policy {i}"].success for i in (1, 2))
    assert two["best choice"].success >= two["router"].success
    cheap = route(texts, results, [1, 1, 5], 0.1)["router"]
    assert cheap.shares[2] < 0.2 and cheap.cost < 2
    assert route(texts, results, [1, 1, 5], 0)["router"].shares[2] > 0.5
    new = {**texts, "n0": "add up x1 y1", "n1": "prove that x2 y2", "n2": ""}
    sent = dispatch(new, results[:2], [1, 1], 0)
    assert sent["n0"][0] == 0 and sent["n1"][0] == 1 and sent.keys() == new.keys() - {"n2"}
    with pytest.raises(ConfigError, match="at least 8 are needed: they teach the router"):
        dispatch({"n0": "add up"}, results, [1, 1, 5], 0)
    with pytest.raises(ConfigError, match="Evaluate more tasks"):
        route(dict(list(texts.items())[:9]), results, [1, 1, 5], 0)
    with pytest.raises(ConfigError, match="is not a file of `unstale eval --save`"):
        read_counts(tmp_path / "none.jsonl")
