"""Promises: a comparison's intervals, paired differences, equal tokens and equal wall-clock are
those worked out by hand; what did not finish is shown and is in no mean; times are compared only of
runs that were alone. Every run's configuration is checked before the first begins, and what the
linter says of the arms is shown; runs that finished are kept, others begun again, one failure stops
nobody else, runs at the same time have cores of their own, Ctrl-C ends the run in progress, and a
killed command continues."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.support.fake_comparison import launched, trial
from tests.support.fake_run import fake_run
from tests.support.waits import wait_until
from unstale.analysis.report.compare import (
    UNCOUNTED,
    Comparison,
    SeedMean,
    TrainingBudget,
    mean_over_seeds,
    read_comparison,
)
from unstale.analysis.report.compare_tables import (
    conduct,
    equal,
    equal_steps,
    findings,
    remarks,
    tables,
)
from unstale.cli import main, recipe_options
from unstale.cli.recipe_options import configure_recipe
from unstale.config import ConfigError, OldLogpsConfig
from unstale.durability.machine import lock_folder
from unstale.durability.run_folder import dumps
from unstale.observe.statistics import PairedDifference, paired_difference
from unstale.research import launcher
from unstale.research.compare import Arm, ComparisonPlan, Planned, plan
from unstale.research.launcher import compare


def three_seeds(folder: Path) -> Comparison:
    finals = {"snapshot_old": (0.70, 0.85, 0.75), "ewma_prox": (0.80, 0.90, 0.70)}
    for arm, values in finals.items():
        for seed, final in enumerate(values):
            step_s = 30.0 if (arm, seed) == ("ewma_prox", 0) else 60.0
            trial(
                folder / f"{arm}-seed{seed}",
                seed=seed,
                evaluations=(0.4, 0.6, final),
                step_s=step_s,
            )
    launched(folder)
    return read_comparison(folder)


def values(found: SeedMean | None) -> tuple[float, float | None, float | None, int]:
    assert found is not None
    return found.mean, found.low, found.high, found.n


@pytest.mark.parametrize(
    "freedom, quantile",
    [
        (1, 12.7062),
        (2, 4.3027),
        (4, 2.7764),
        (9, 2.2622),
        (11, 2.2010),
        (30, 2.0423),
        (100, 1.9840),
    ],
)
def test_students_t(freedom: int, quantile: float) -> None:
    n = freedom + 1
    _, high = PairedDifference(n, mean=0.0, sd=math.sqrt(n)).interval(0.05)
    assert high == pytest.approx(quantile, abs=2e-4)


def test_an_interval_over_seeds() -> None:
    # sd 0.1 over 3 seeds: 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert values(mean_over_seeds([0.6, 0.7, 0.8])) == pytest.approx(
        (0.7, 0.4516, 0.9484, 3), abs=1e-4
    )
    # sd 0.0158114 over 5 seeds: 2.7764 * 0.0158114 / sqrt(5) = 0.019632
    assert values(mean_over_seeds([0.50, 0.51, 0.52, 0.53, 0.54])) == pytest.approx(
        (0.52, 0.500368, 0.539632, 5), abs=1e-5
    )


def test_one_seed_has_no_interval_and_none_no_mean() -> None:
    assert values(mean_over_seeds([None, 0.7])) == (0.7, None, None, 1)
    assert mean_over_seeds([None]) is None


def test_equal_values_have_no_interval(tmp_path: Path) -> None:
    """Their spread is unknown. An interval of width 0 would make any difference significant."""
    rounded = [0.75 - 0.5, 0.7 - 0.45]
    assert rounded[0] != rounded[1]
    assert values(mean_over_seeds(rounded)) == (pytest.approx(0.25), None, None, 2)
    assert paired_difference(rounded) is None
    finals = {"snapshot_old": (0.70, 0.85), "ewma_prox": (0.716, 0.866)}
    for arm, of_seeds in finals.items():
        for seed, final in enumerate(of_seeds):
            trial(tmp_path / f"{arm}-seed{seed}", seed=seed, evaluations=(0.4, 0.6, final))
    launched(tmp_path)
    found = read_comparison(tmp_path)
    assert findings(found)[1] == (
        "ewma_prox less snapshot_old: +1.6 points, 2 pairs: equal differences allow no interval."
    )
    row = next(row for row in equal_steps(found).rows if row[0] == "ewma_prox")
    assert row[3:5] == ("+1.6", "2")
    assert "neither have values that are all equal" in tables(found)


def test_arms_are_compared_seed_by_seed(tmp_path: Path) -> None:
    found = three_seeds(tmp_path)
    ewma = next(arm for arm in found.arms if arm.name == "ewma_prox")
    assert found.reference.name == "snapshot_old"
    # differences 0.10, 0.05, -0.05: mean 0.03333, sd 0.076376, half width 4.3027 * 0.076376 /
    # sqrt(3) = 0.18973
    assert values(found.versus(ewma)) == pytest.approx((0.03333, -0.15640, 0.22307, 3), abs=1e-4)
    assert found.versus(found.reference) is None
    assert findings(found) == [
        "After the same 2 steps, ewma_prox has the highest mean held-out success: "
        "80.0% (55.2% to 104.8%), 3 seeds.",
        "ewma_prox less snapshot_old: +3.3 (-15.6 to +22.3) points, 3 pairs: "
        "no significant difference.",
    ]


def test_only_seeds_that_both_arms_finished_are_paired(tmp_path: Path) -> None:
    three_seeds(tmp_path)
    (tmp_path / "ewma_prox-seed1" / "events.jsonl").write_text(
        '{"kind": "stopped", "reason": "failed"}\n'
    )
    (tmp_path / "ewma_prox-seed1" / "error.txt").write_text("Traceback\nValueError: loss is nan\n")
    found = read_comparison(tmp_path)
    ewma = next(arm for arm in found.arms if arm.name == "ewma_prox")
    assert values(found.versus(ewma))[0] == pytest.approx(0.025)
    assert values(found.success(ewma))[::3] == pytest.approx((0.75, 2))
    assert "Not all runs finished: ewma_prox 2 of 3." in remarks(found)
    assert "- ewma_prox-seed1: failed: ValueError: loss is nan" in tables(found)


def test_equal_wall_clock_is_the_quickest_runs_training_time(tmp_path: Path) -> None:
    found = three_seeds(tmp_path)
    quickest = TrainingBudget(
        "minutes", pytest.approx(1.0)
    )  # two steps of 30 s; starting and evaluating are not training
    assert found.budget("minutes") == quickest
    assert [trial.minutes for trial in found.trials if trial.seed == 1] == pytest.approx([2.0, 2.0])
    ewma = next(arm for arm in found.arms if arm.name == "ewma_prox")
    one, longer = TrainingBudget("minutes", 1.0), TrainingBudget("minutes", 1.5)
    assert [trial.after(one) for trial in ewma.finished] == pytest.approx([0.80, 0.6, 0.6])
    assert [trial.after(longer) for trial in ewma.finished[1:]] == pytest.approx([0.75, 0.65])
    assert ewma.finished[0].after(longer) is None
    assert values(found.success(ewma, one))[0] == pytest.approx(2.0 / 3)
    table = equal(found, "minutes")
    assert table and table.rows[0][:3] == ("ewma_prox", "3", "66.7% (38.0% to 95.4%)")


def test_equal_tokens_is_what_the_run_with_the_fewest_trained_on(tmp_path: Path) -> None:
    for seed in range(2):
        trial(
            tmp_path / f"good-seed{seed}",
            seed=seed,
            evaluations=(0.4, 0.6, 0.8),
            tokens=100 + 20 * seed,
        )
        trial(
            tmp_path / f"lost-seed{seed}", seed=seed, evaluations=(0.4, 0.5, 0.1), tokens=400
        )  # long episodes, no end
    launched(tmp_path)
    found = read_comparison(tmp_path)
    good, lost = found.arms
    budget = found.budget("tokens")
    assert budget == TrainingBudget("tokens", 200.0)
    assert [run.after(budget) for run in good.finished] == pytest.approx(
        [0.8, 0.6 + 0.2 * 80 / 120]
    )
    assert [run.after(budget) for run in lost.finished] == pytest.approx(
        [0.45, 0.45]
    )  # half way to step 1
    assert values(found.versus(lost, budget))[0] == pytest.approx(0.45 - (0.8 + 0.6 + 0.4 / 3) / 2)
    table = equal(found, "tokens")
    assert table and table.head[2] == "success after 200 sampled tokens"
    assert table.rows[1][:3] == ("lost", "2", "45.0%") and table.rows[1][-1] == "800"
    assert equal_steps(found).rows[1][2] == "10.0%", "equal values have no interval"
    assert "range from 220 (good) to 800 (lost)" in tables(found)


def test_runs_that_did_not_count_their_tokens_are_not_compared_at_equal_ones(
    tmp_path: Path,
) -> None:
    for arm, tokens in (("a", 0.0), ("b", 50.0)):
        trial(tmp_path / f"{arm}-seed0", seed=0, evaluations=(0.4, 0.6), tokens=tokens)
    (uncounted, counted) = read_comparison(tmp_path).trials
    assert uncounted.tokens is None and uncounted.after(TrainingBudget("tokens", 50.0)) is None
    assert counted.after(TrainingBudget("tokens", 50.0)) == 0.6
    (tmp_path / "b-seed0").rename(tmp_path / "b")
    found = read_comparison(tmp_path)
    assert equal(found, "tokens") is None
    assert UNCOUNTED in tables(found)


@pytest.mark.parametrize(
    "jobs, says", [(2, "up to 2 runs shared the machine"), (None, "some runs may have shared")]
)
def test_times_of_runs_that_shared_the_machine_are_left_out(
    tmp_path: Path, jobs: int | None, says: str
) -> None:
    trial(tmp_path / "a-seed0", seed=0, evaluations=(0.4, 0.6))
    launched(tmp_path)
    trial(tmp_path / "b-seed0", seed=0, evaluations=(0.4, 0.6))
    if jobs:
        launched(tmp_path, jobs=jobs)
    found = read_comparison(tmp_path)
    assert equal(found, "minutes") is None
    assert says in found.shared_machine
    assert says in tables(found)


def test_times_of_deterministic_runs_are_left_out_and_resets_are_counted(tmp_path: Path) -> None:
    for arm in ("snapshot_old", "average"):
        trial(tmp_path / f"{arm}-seed0", seed=0, evaluations=(0.4, 0.6))
    launched(tmp_path)
    assert conduct(read_comparison(tmp_path)).head[-1] == "exact"
    for kind in ("ewma_reset", "publish", "ewma_reset"):
        with (tmp_path / "average-seed0" / "events.jsonl").open("a") as file:
            file.write(dumps({"kind": kind}) + "\n")
    found = conduct(read_comparison(tmp_path))
    assert found.head[-1] == "resets" and [row[-1] for row in found.rows] == ["2.0", "0.0"]
    assert not read_comparison(tmp_path).shared_machine
    path = tmp_path / "average-seed0" / "config.json"
    path.write_text(dumps(json.loads(path.read_text()) | {"deterministic": True}))
    assert "the runs are deterministic" in read_comparison(tmp_path).shared_machine


def test_a_run_that_fell_to_under_half_of_its_best_collapsed(tmp_path: Path) -> None:
    for seed, evaluations in enumerate([(0.4, 0.8, 0.39), (0.4, 0.8, 0.41)]):
        trial(tmp_path / f"a-seed{seed}", seed=seed, evaluations=evaluations)
    (arm,) = read_comparison(tmp_path).arms
    assert [run.collapsed for run in arm.trials] == [True, False]
    assert arm.collapsed == 1


def test_a_falling_learning_rate_and_different_code_are_said(tmp_path: Path) -> None:
    found = three_seeds(tmp_path)
    assert remarks(found) == []
    config = json.loads((tmp_path / "ewma_prox-seed0/config.json").read_text())
    config["trainer"]["lr_schedule"] = "cosine"
    (tmp_path / "ewma_prox-seed0/config.json").write_text(json.dumps(config))
    with (tmp_path / "launches.jsonl").open("a") as file:
        file.write('{"kind": "began", "run": "ewma_prox-seed0", "jobs": 1, "commit": "def5678"}\n')
    told = " ".join(remarks(read_comparison(tmp_path)))
    assert "(cosine)" in told and "different versions of the code: abc1234, def5678" in told


def planned(folder: Path, *arms: Arm, seeds: int = 2, **values: Any) -> ComparisonPlan:
    arms = arms or (Arm.of_route("snapshot_old"), Arm.of_route("rollout"))
    values |= {"max_steps": 20, "runs": folder.parent, "name": folder.name}
    return plan(arms, seeds, recipe="retail", values=values)


def test_a_plan_alternates_arms_and_keeps_the_runs_comparable(tmp_path: Path) -> None:
    runs = planned(tmp_path / "x", **{"trainer.lr": 0.001}).runs
    assert [run.folder.name for run in runs] == [
        "snapshot_old-seed0",
        "rollout-seed0",
        "snapshot_old-seed1",
        "rollout-seed1",
    ]
    assert {
        (run.config.max_steps, run.config.minutes, run.config.eval.interval) for run in runs
    } == {(20, 0.0, 2)}
    assert {run.config.trainer.lr for run in runs} == {0.001}
    assert [run.config.correction.mode for run in runs[:2]] == ["mask_weight", "none"]
    for run in runs:
        assert recipe_options.configure(main.parse(run.words)) == run.config


def test_arms_of_other_knobs(tmp_path: Path) -> None:
    reset = Arm.parse(
        "with reset: old_logps.reset_below=0.9 old_logps.beta=0.75 old_logps.route=ppo_ewma_async"
    )
    run = planned(tmp_path, reset, Arm.parse("plain:")).runs[0]
    assert run.folder.name == "with-reset-seed0"
    assert run.config.old_logps == OldLogpsConfig(
        route="ppo_ewma_async", beta=0.75, reset_below=0.9
    )


@pytest.mark.parametrize("route", ["rollout", "current_recompute"])
def test_an_arm_of_a_route_changes_what_the_routes_own_recipe_does(route: str) -> None:
    recipe = f"route_{route}"
    config = configure_recipe(recipe, {})
    assert configure_recipe(recipe, Arm.of_route(route).values) == config
    assert configure_recipe(recipe, Arm.of_route("snapshot_old").values) != config


@pytest.mark.parametrize(
    "arms, says",
    [
        (["a:", "b: old_logps.beta=0.5"], "arm 'b': old_logps.beta is an option of"),
        (["a:", "b: old_logps.rout=eager"], "arm 'b': unknown argument --old_logps.rout"),
        (["a:", "b: old_logps.route=current_recompute"], "arm 'b': "),  # the linter's word
        (["a:", "b: max_steps=3"], "arm 'b': max_steps is the same for all arms"),
        (["a:", "b: eval.tasks=3"], "arm 'b': eval.tasks is the same for all arms"),
        (["a b:", "a/b: trainer.lr=1"], "arm 'a b' needs a unique name"),
        (["a:", "b"], "an arm is written"),
        (["a:"], "at least 2 arms"),
    ],
)
def test_a_mistake_in_an_arm_is_found_before_anything_runs(
    tmp_path: Path, arms: list[str], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        planned(tmp_path / "x", *map(Arm.parse, arms))
    assert not (tmp_path / "x").exists()


FAKE_TRAIN = """
import os, signal, sys, time
from pathlib import Path
from unstale.cli.main import parse
from unstale.cli.recipe_options import configure
from unstale.durability.run_folder import RunLog, dumps
from tests.support.fake_run import fake_run
config = configure(parse(sys.argv[1:]))
folder = config.runs / config.name
with (config.runs / "ran").open("a") as file:
    file.write(config.name + "\\n")
fake_run(folder, steps=config.max_steps, seed=config.seed)
(config.runs.parent / f"cores {config.name}").write_text(str(os.sched_getaffinity(0)))
(folder / "config.json").write_text(dumps(config))
reason = "finished"
if (config.runs.parent / f"break {config.name}").exists():
    (folder / "error.txt").write_text("Traceback\\nRuntimeError: broken \\x1b[2Jon purpose\\n")
    reason = "failed"
if (config.runs.parent / f"interrupt {config.name}").exists():
    try:
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
    except KeyboardInterrupt:
        reason = "Ctrl-C"
if (config.runs.parent / f"kill {config.name}").exists():
    os.kill(os.getppid(), signal.SIGKILL)
    while (config.runs.parent / f"kill {config.name}").exists():
        time.sleep(0.01)
with RunLog(folder) as log:
    log.event("stopped", reason=reason)
sys.exit({"finished": 0, "failed": 1, "Ctrl-C": 130}[reason])
"""


KILLED = """
import sys
from pathlib import Path
from tests.research.test_compare import FAKE_TRAIN, Planned, planned, start
real = Planned.command.fget
Planned.command = property(lambda run: [sys.executable, "-c", FAKE_TRAIN, *real(run)[3:]])
start(planned(Path(sys.argv[1])))
"""


@pytest.fixture
def fake_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are processes of their own that write a plausible folder instead of training."""
    real = Planned.command.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Planned, "command", property(lambda run: [sys.executable, "-c", FAKE_TRAIN, *real(run)[3:]])
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_the_status_counts_the_runs_that_have_ended(tmp_path: Path) -> None:
    made = planned(tmp_path, Arm("one", {}), Arm("two", {"trainer.lr": 1e-3}))
    status = launcher._Launcher(made, Console(), shares=[(0,), (1,)], lock=0)
    status._all, status._left = 4, 3
    status._going = {run.folder.name: run for run in made.runs[1:3]}
    steps = made.runs[0].config.max_steps
    assert status._status().plain == (
        f"1 of 4 runs have ended; two-seed0 step 0 of {steps}; one-seed1 step 0 of {steps}; "
        "time left unknown until the first run ends"
    )


def start(plan: ComparisonPlan, *, jobs: int = 1) -> str:
    said = io.StringIO()
    compare(
        plan, jobs=jobs, command="unstale compare retail", console=Console(file=said, width=200)
    )
    return said.getvalue()


def ran(folder: Path) -> list[str]:
    return (folder / "ran").read_text().split()


def is_free(folder: Path) -> bool:
    try:
        with lock_folder(folder):
            return True
    except ConfigError:
        return False


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_a_failed_run_stops_nobody_and_is_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (tmp_path / "break rollout-seed0").touch()
    said = start(planned(folder))
    every = ["snapshot_old-seed0", "rollout-seed0", "snapshot_old-seed1", "rollout-seed1"]
    assert ran(folder) == every
    shown = r"rollout-seed0: failed: RuntimeError: broken \x1b[2Jon purpose"
    assert shown in said and "\x1b" not in said
    assert [len(arm.finished) for arm in read_comparison(folder).arms] == [2, 1]
    assert "rollout | 1 of 2" in (folder / "compare.md").read_text()

    (tmp_path / "break rollout-seed0").unlink()
    assert "4 runs in" in start(planned(folder))
    assert ran(folder) == [*every, "rollout-seed0"]
    assert (folder / "rollout-seed0-attempt1" / "error.txt").exists()
    assert (folder / "rollout-seed0-attempt1.log").exists()
    assert [len(arm.finished) for arm in read_comparison(folder).arms] == [2, 2]

    start(planned(folder, seeds=3))
    assert ran(folder)[5:] == ["snapshot_old-seed2", "rollout-seed2"]
    assert not read_comparison(folder).shared_machine


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_runs_that_will_not_fit_on_the_disk_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(free=1)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    said = start(planned(tmp_path / "x"))
    assert said.count("the 3 runs left need") == said.count("runs left need") == 1
    usage.free = 10**12
    assert "runs left need" not in start(planned(tmp_path / "y"))


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_a_folder_with_another_configuration_is_refused_before_anything_runs(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "x"
    start(planned(folder, seeds=1))
    with pytest.raises(ConfigError, match=r"trainer.lr is 0.0005 and would be 0.1"):
        start(planned(folder, **{"trainer.lr": 0.1}))
    assert ran(folder) == ["snapshot_old-seed0", "rollout-seed0"]


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_runs_at_the_same_time_have_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_, last = 2 * sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(launcher, "cores", lambda: 4)
    monkeypatch.setattr(launcher.os, "sched_getaffinity", lambda _: [first, first, last, last])
    folder = tmp_path / "x"
    start(planned(folder, seeds=1), jobs=2)
    assert sorted(path.read_text() for path in tmp_path.glob("cores *")) == sorted(
        [f"{{{first}}}", f"{{{last}}}"]
    )
    assert "shared the machine" in read_comparison(folder).shared_machine


@pytest.mark.parametrize("jobs, count, most", [(3, 5, 2), (2, 3, 1), (0, 8, 4)])
def test_more_jobs_than_pairs_of_cores_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, count: int, most: int
) -> None:
    monkeypatch.setattr(launcher, "cores", lambda: count)
    with pytest.raises(ConfigError, match=rf"from 1 to {most}, got {jobs}: .* {count} cores"):
        start(planned(tmp_path / "x"), jobs=jobs)
    assert not (tmp_path / "x").exists()


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_what_the_linter_says_of_the_arms_is_said_once_and_stands_in_the_results(
    tmp_path: Path,
) -> None:
    young = [
        Arm.parse(f"{name}: old_logps.route=ewma_prox old_logps.beta=0.5")
        for name in ("young", "other")
    ]
    folder, warning = (
        tmp_path / "x",
        "young, other: the average is 1 versions old, the tokens 0 to 6",
    )
    plan = planned(folder, *young, Arm.of_route("snapshot_old"), **{"schedule.max_staleness": 6})
    assert start(plan).count(warning) == 1
    assert warning in (folder / "compare.md").read_text()
    assert f"## Linter warnings\n\n- {warning}" in (folder / "compare.md").read_text()
    (folder / "plan.json").unlink()
    assert "- Not recorded: other, snapshot_old, young." in tables(read_comparison(folder))


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_ctrl_c_ends_the_run_in_progress_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    (tmp_path / "interrupt rollout-seed0").touch()
    with pytest.raises(KeyboardInterrupt):
        start(planned(folder))
    assert ran(folder) == ["snapshot_old-seed0", "rollout-seed0"]
    assert '"reason": "Ctrl-C"' in (folder / "rollout-seed0" / "events.jsonl").read_text()
    assert "rollout | 0 of 2" in (folder / "compare.md").read_text()
    (tmp_path / "interrupt rollout-seed0").unlink()
    start(planned(folder))
    assert ran(folder)[2:] == ["rollout-seed0", "snapshot_old-seed1", "rollout-seed1"]


@pytest.mark.costly
@pytest.mark.usefixtures("fake_train")
def test_a_killed_comparison_waits_for_its_run_and_goes_on_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    kill = tmp_path / "kill rollout-seed0"
    kill.touch()
    killed = subprocess.run([sys.executable, "-c", KILLED, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    with pytest.raises(ConfigError, match="in use by another running process"):
        start(planned(folder))
    kill.unlink()  # the run, which outlived the command, finishes
    wait_until(lambda: is_free(folder), "the end of the run")
    start(planned(folder))
    assert ran(folder) == [f"{arm}-seed{s}" for s in (0, 1) for arm in ("snapshot_old", "rollout")]
    assert [len(arm.finished) for arm in read_comparison(folder).arms] == [2, 2]


def test_the_terminal_tells_how_far_a_run_is(tmp_path: Path) -> None:
    run = planned(tmp_path / "x").runs[0]
    assert launcher._progress(run) == "step 0 of 20"
    fake_run(run.folder, steps=12, planned=20)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "rollout/succ')  # torn: it is being written
    assert re.fullmatch(r"step 12 of 20, success \d+%", launcher._progress(run))


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with (
        lock_folder(tmp_path / "x"),
        pytest.raises(ConfigError, match="in use by another running process"),
    ):
        start(planned(tmp_path / "x"))


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    three_seeds(tmp_path)
    with pytest.raises(SystemExit) as end:
        main.main(["compare", "--report", str(tmp_path)])
    assert end.value.code == 0
    assert (tmp_path / "compare.md").exists()
    for words, says in (
        (
            ["retail", "--routes", "snapshot_old", "rolout"],
            "arm 'rolout': --old_logps.route cannot be 'rolout'",
        ),
        (["retail", "--routes", "rollout", "eager", "--minutes", "3"], "give --max_steps instead"),
        ([], "compare needs a recipe"),
    ):
        with pytest.raises(SystemExit) as end:
            main.main(["compare", *words])
        assert end.value.code == 2
        assert says in capsys.readouterr().err
