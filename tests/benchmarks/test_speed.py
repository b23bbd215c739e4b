"""Test the benchmarks: what they compute without clocks, and their description in the docs.

Floating-point operations and bytes are worked
out by hand. Slower deltas are reported. Every route's short run passes the linter. The GPU and
publication benchmarks run at CPU sizes.
"""

import asyncio
import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from benchmarks import __main__ as benchmarks
from benchmarks import gpu, publish, route_steps, tables
from benchmarks.publish import Cell, Spent
from unstale.config.routes import routes
from unstale.lint import check

ROOT = Path(__file__).parents[2]


def test_every_benchmark_of_the_page_exists() -> None:
    page = (ROOT / "docs" / "speed.md").read_text()
    told = set(re.findall(r"python -m benchmarks\.(\w+)", page))
    assert {"train", "generate"} <= told <= set(benchmarks.names())


@pytest.mark.parametrize("name", benchmarks.SHORT)
def test_the_options_of_the_short_form_are_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(self: ArgumentParser, *_: Any) -> None:
        raise SystemExit(bool(self.parse_known_args()[1]))

    main = import_module(f"benchmarks.{name}").main
    monkeypatch.setattr(sys, "argv", [name, *benchmarks.SHORT[name].split()])
    monkeypatch.setattr(ArgumentParser, "parse_args", parse)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


def big(**changes: Any) -> gpu.Big:
    sizes: dict[str, Any] = {
        "layers": 2,
        "hidden": 8,
        "vocab": 10,
        "sequences": 1,
        "length": 3,
        "warm_steps": 1,
    }
    sizes |= {
        "inner": 6,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "max_tokens_per_microbatch": 64,
        "device": "cpu",
    }
    return gpu.Big(folder=Path(), **sizes | changes)


def test_operations_and_bytes_are_counted_as_by_hand() -> None:
    size = big()
    # A layer: q and o of 8 x 16, k and v of 8 x 8, three matrices of 8 x 6.
    assert size.body == 2 * (2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 6) and size.head == 80
    # Twice a weight and token forward, twice that backward; scores and values of half a square, 16
    # wide, in 2 layers.
    assert gpu.train_flops(size, [3, 1], sampled=2) == 6 * (4 * size.body + 2 * 80) + 6 * 2 * 16 * (
        9 + 1
    )
    # Two bytes a weight; keys and values of 2 heads of 4 in 2 layers, of 32 + 128 tokens a row.
    assert gpu.decode_bytes(size, 3) == 2 * (size.body + 80) + 3 * 160 * 2 * 2 * 2 * 4 * 2


def test_the_weights_that_are_counted_are_the_model_s() -> None:
    matrices: list[Tensor] = [
        tensor for tensor in big().policy().weights().values() if tensor.ndim == 2
    ]
    assert sum(tensor.numel() for tensor in matrices) == big().body + big().head


def test_where_a_delta_is_slower_is_said() -> None:
    def cell(model: str, delta_s: float) -> Cell:
        times = {"bytes": [9.0], "prepare_s": [0.0], "disk_s": [0.0]}
        spent = {
            "full": Spent(**times, standstill_s=[1.0]),
            "delta": Spent(**times, standstill_s=[delta_s]),
        }
        return Cell(model, 1e-6, 0.01, spent)

    standstill, both = publish.judged([cell("1M", 1.5), cell("5M", 0.98), cell("20M", 0.5)])
    assert (
        "less long than for whole weights in 1 of 3 cases, and longer in 1 (1M at 1e-06: 1.50"
        in standstill
    )
    assert "and longer in 1 (1M" in both


@pytest.mark.parametrize("name", list(routes()))
def test_every_route_has_a_run_that_means_something(name: str, tmp_path: Path) -> None:
    config = route_steps.config_of(name, route_steps.Setting(5, 6), seed=1, runs=tmp_path)
    check(config).require()
    assert config.old_logps.route == name and config.schedule.staleness_bound == 2
    assert config.max_steps == 5 + 4, "the first four do not count"


def test_the_trainer_s_time_is_told_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(route_steps, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def lasting(seconds: float) -> Callable[..., object]:
        def work(*_: object) -> dict[str, float]:
            now[0] += seconds
            return {}

        return work

    methods = {
        "before_publish": 1.0,
        "on_published": 2.0,
        "trained": 4.0,
        "before_update": 8.0,
        "score_while_idle": 16.0,
        "costs": 0.0,
    }
    old = SimpleNamespace(**{name: lasting(seconds) for name, seconds in methods.items()})
    machine: Any = SimpleNamespace(old=old, trainer=SimpleNamespace(prepare=lasting(32.0)))
    clock = route_steps.Clock()
    clock.watch(machine)
    for work in (
        machine.trainer.prepare,
        old.before_update,
        old.trained,
        old.costs,
        old.before_publish,
        old.on_published,
        old.score_while_idle,
    ):
        work()
    ((at, spent),) = clock.lines
    assert (at, dict(spent)) == (44.0, {"scoring": 32.0, "closing": 8.0, "publishing": 4.0})
    assert clock.spent == {"scoring": 32.0, "closing": 8.0, "publishing": 7.0, "idle": 16.0}
    ran = route_steps.Ran((90.0, 110.0), clock.spent, exact=1.0, mixed=0.5)
    assert ran.route_s == 47.0
    row = route_steps.table({"rollout": [ran]})[-1]
    assert row.startswith(
        "| `rollout` | 100.00 (100.00 to 100.00) | 1.00 (1.00 to 1.00) | 47.0% | 32.0% | 8.0% "
    )


@pytest.mark.costly
def test_the_gpu_s_script_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(gpu, "REPLY", 16)
    shape = (
        "--layers 1 --hidden 16 --inner 16 --heads 2 --kv-heads 1 --head-dim 8 --vocab 64 "
        "--sequences 2 --length 20"
    )
    words = f"--device cpu --sizes 0.6B {shape} --repeats 1 --warm-steps 1 --rows 1 2"
    text = gpu.main(words.split()).read_text()
    assert "tokens/s trained" in text and "Not run: needs CUDA" in text and "Broke off" not in text
    titles = re.findall("^### (.*)$", text, re.MULTILINE)
    assert titles == ["Scoring", "Decoding", "Memory by vocabulary"]
    assert all(f"| 0.6B | `{route}` |" in text for route in routes()) and "| 0.6B | 2 |" in text
    assert gpu.main([*words.split(), "--parts", "memory"]).name == "gpu-memory.md"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu"):
        gpu.arguments([])


@pytest.mark.costly
def test_a_version_gets_to_real_engines_both_ways(tmp_path: Path) -> None:
    size = publish.Size(tmp_path / "model", *publish.SHAPES["tiny"], 2, 20, 1)
    size.make()
    (cell,) = asyncio.run(publish.measure("tiny", size, [1e-5], repeats=1))
    full, delta = cell.spent["full"], cell.spent["delta"]
    assert full.bytes == [2 * sum(tensor.numel() for tensor in size.policy().weights().values())]
    assert 0 < delta.bytes[0] < full.bytes[0] / 4 and 0 < cell.changed < 0.5
    assert all(
        len(own) == 1 and own[0] > 0
        for way in (full, delta)
        for own in (way.prepare_s, way.standstill_s)
    )
