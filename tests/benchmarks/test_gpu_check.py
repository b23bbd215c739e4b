"""Test `python -m benchmarks.gpu_check`: every part reports, and verdicts follow the figures.

With trainer ranks it runs in `tests/cluster/test_gpu_check_run.py`, because they need Ray.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_check, tables
from benchmarks.gpu_case import WARM, choose
from benchmarks.gpu_check import PARTS, TRAINER, WIDTH, Check, Found, budget_times, judged, measure
from benchmarks.gpu_kills import Death, Deaths, verdict
from benchmarks.gpu_machine import NO_GPU, Compared
from benchmarks.gpu_peers import PEERS, SOURCES, Speed, nearest
from benchmarks.gpu_steps import Budget, exposed_s, read
from unstale.analysis.planner.hardware import DEVICES
from unstale.analysis.planner.models import PRESETS
from unstale.cli.main import parse
from unstale.cli.recipe_options import configure

NEEDS_GPU = ("to GPU, pinned", "to GPU, pageable", "all-gather", "flash attention", "Triton")


def test_every_part_reports_at_tiny_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    target = gpu_check.main(["--tiny"])
    told = json.loads(target.read_text())
    assert list(told["parts"]) == list(PARTS) and told["tiny"] and told["commit"]
    assert [part["status"] for part in told["parts"].values()] == ["measured"] * len(PARTS)
    printed = capsys.readouterr().out
    values = {name: part["values"] for name, part in told["parts"].items()}
    for part in told["parts"].values():
        assert part["lines"] and all(len(line) <= WIDTH for line in part["lines"])
        assert all(line in printed for line in part["lines"])
    environment = values["environment"]
    assert all(environment[name]["text"] == NO_GPU for name in NEEDS_GPU)
    for name in ("write to /dev/shm", "write and fsync, runs", "large products", "main memory"):
        assert environment[name]["value"] > 0
    assert len(values["kernels"]) == 4
    seconds = values["steps"]["seconds"]
    for name in ("prepare", "score", "move", "put", "forward", "backward", "optimizer", "encode"):
        assert seconds[name]["measured"] > 0, name
    assert seconds["load"]["measured"] > 0 and seconds["stage"]["measured"] > 0
    on_path = [each["measured"] for name, each in seconds.items() if name in TRAINER]
    assert sum(on_path) == pytest.approx(2 * seconds["step"]["measured"], rel=0.2)
    planned = [name for name, each in seconds.items() if each["planned"] is not None]
    assert {"step", "forward", "backward", "communication", "stage", "load", "probe"} <= {*planned}
    assert values["exactness"]["exact share"]["value"] == 1
    assert values["exactness"]["abs log D, p99"]["value"] > 0
    assert "no probe" in values["exactness"]["probe error"]["text"]
    judged_by = values["verdicts"]["verdicts"]
    assert judged_by["exact share"]["result"] == judged_by["kernels"]["result"] == "met"
    assert all(judged_by[str(peer)]["result"] == NO_GPU for peer in PEERS)
    assert {"publish", "score", "communication"} <= values["share"]["lost"].keys()
    assert f"expected share of prime-rl's throughput: {NO_GPU}, lost: publish" in printed


def test_an_error_ends_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(check: Check) -> Found:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu_check.MEASURE, "steps", fail)  # type: ignore[arg-type]
    check = Check(Path(), is_tiny=True)
    assert measure("steps", check).not_run == "broke off: RuntimeError: out of memory"
    assert "needs the part `steps`" in measure("share", check).not_run


def judged_by(check: Check, exact: float = 1.0) -> dict[str, str]:
    check.rows = [{"old_logps/exact_share": exact, "rollout/episodes": 100}]
    check.rows[0]["rollout/total_tokens_mean"] = 1000.0
    return {each.name: each.result for each in judged(check)}


def test_verdicts_follow_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 tokens in 10 s, of which the trainer waits 2 s, on four GPUs: 3,125 tokens/s each."""
    monkeypatch.setattr(Check, "gpus", 8)
    check = Check(Path())
    check.case = choose(8, Path(), DEVICES["H100"])
    check.kernels = [Compared("norm", 0.01, 1.0, 2.0, limit=0.02)]
    check.times = {"step": (10.0, 9.0), "wait": (2.0, 1.0), "load": (3.0, 2.0)}
    check.times["interrupt"] = (0.5, None)
    found = judged_by(check)
    assert check.speed.tokens_per_s == pytest.approx(3125)
    assert found["prime-rl 4B, 8 H100, 16k"] == "met"  # 96% of 3,253
    assert found["prime-rl 4B, 8 H100, 65k"] == "met"  # 86% of 3,621
    assert found["torchtitan 8B, 8 H100, compile"] == "missed"
    assert found["kernels"] == found["exact share"] == found["standstill"] == "met"
    assert found["step beside its plan"] == "met"
    check.times |= {"step": (12.0, 9.0), "load": (3.6, 2.0)}
    check.kernels = [Compared("norm", 0.03, 1.0, 2.0, limit=0.02)]
    found = judged_by(check, exact=0.99)
    assert {found[name] for name in ("kernels", "exact share", "standstill")} == {"missed"}
    assert found["step beside its plan"] == "missed"
    monkeypatch.setattr(Check, "gpus", 0)
    assert judged_by(check)["standstill"] == NO_GPU


def test_a_peer_of_another_size_is_compared_by_the_share_of_the_peak() -> None:
    assert {peer.name for peer in PEERS} == SOURCES.keys()
    speed = Speed(PRESETS["4B"], tokens_per_s=3621 / 2, mfu=0.07)
    same, other = PEERS[2], PEERS[0]
    assert speed.share_of(same)[0] == pytest.approx(0.5, rel=1e-3)
    assert speed.share_of(other) == (pytest.approx(0.07 / 0.11), "its MFU of 11.0%")
    assert nearest(PRESETS["4B"], "prime-rl") == same  # the faster of two
    assert nearest(PRESETS["0.6B"], "prime-rl") == other
    assert nearest(PRESETS["32B"], "prime-rl").preset == "30B-A3B"


@pytest.mark.parametrize(
    ("device", "gpus", "model", "trainers"),
    [("H100", 1, "1.7B", 0), ("H100", 2, "1.7B", 1), ("H100", 8, "4B", 4), ("H200", 2, "4B", 1)],
)
def test_the_largest_preset_that_fits_is_trained(
    device: str, gpus: int, model: str, trainers: int, tmp_path: Path
) -> None:
    case = choose(gpus, tmp_path, DEVICES[device])
    assert (case.model, case.trainers) == (PRESETS[model], trainers)
    assert case.trainers + case.engines * case.tp == max(1, gpus) or gpus == 1
    config = configure(parse(case.words()[0:]))
    assert config.cluster.trainers == trainers and config.max_steps == WARM + case.steps
    assert config.trainer.max_tokens_per_microbatch == case.passes.microbatch
    assert (case.passes.microbatch > 4096) == (gpus > 1)
    assert 8 <= config.engine.max_running <= 3 * 16 * 8  # of three batches in flight
    if device == "H100" and gpus == 1:
        assert choose(1, tmp_path, DEVICES[device], lora_rank=16).model == PRESETS["4B"]


def test_the_parts_of_a_step_are_means_over_the_measured_steps(tmp_path: Path) -> None:
    """A rank and the driver, two steps of which the first is not measured."""

    def rows(*parts: tuple[int, str, float, float]) -> str:
        names = ("step", "part", "s", "at")
        return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in parts)

    rank = rows(
        (0, "forward", 9.0, 1.0),
        (0, "end", 7.0, 10.0),
        (1, "exposed", 0.25, 11.0),
        (1, "forward", 1.0, 12.0),
        (1, "forward", 1.0, 13.0),
        (1, "backward", 4.0, 14.0),
        (1, "encode", 0.5, 15.0),
        (1, "end", 8.0, 20.0),
        (2, "encode", 5.0, 21.0),
    )
    driver = rows((1, "apply", 0.7, 1.0), (1, "load", 0.2, 2.0), (1, "put", 3.0, 2.0))
    (tmp_path / "1.jsonl").write_text(rank)
    (tmp_path / "2.jsonl").write_text(driver)
    budget = read(tmp_path, 1)
    assert budget == Budget(
        10.0, {"forward": 2.0, "backward": 4.0, "encode": 0.5}, {"apply": 0.7, "load": 0.2}, 0.25, 8
    )
    times = budget_times(budget, [{"schedule/wait_for_batch_s": 1.0}], {"forward": 1.1})
    assert times["forward"] == (1.5, 1.1) and times["backward"] == (3.0, None)
    assert times["communication"][0] == 1.5 and times["wait"][0] == 1.0
    assert times["rest"][0] == pytest.approx(10 - 1 - 6 - 0.5 - 0.7)
    with pytest.raises(RuntimeError, match="took 2 steps"):
        read(tmp_path, 2)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(RuntimeError, match="noted no parts"):
        read(tmp_path, 1)


def event(name: str, start: float, end: float, device: str = "CUDA") -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name=device))


def test_communication_counts_only_where_nothing_is_computed() -> None:
    """Times are in microseconds. The second transfer overlaps by half with a product."""
    events = [
        event("ncclDevKernel_AllGather", 0, 10),
        event("gemm", 10, 30),
        event("ncclDevKernel_ReduceScatter", 20, 40),
        event("aten::mm", 0, 100, device="CPU"),
    ]
    assert exposed_s(events) == pytest.approx(20e-6)
    on_cpu = [event("gloo:all_gather", 0, 10, "CPU"), event("aten::mm", 5, 100, "CPU")]
    assert exposed_s(on_cpu) == pytest.approx(10e-6)


def test_a_killed_process_must_be_back_in_time_and_nothing_lost() -> None:
    found = Deaths(10.0, [Death("rank", 8.0), Death("raylet", 70.0)], [])
    text, is_met = verdict(found)
    assert is_met and "rank 8.0, raylet 70.0; a start takes 10.0; the run is sound" in text
    assert not verdict(replace(found, start_s=9.0))[1]
    assert not verdict(replace(found, wrong=["1 groups lost or twice"]))[1]
