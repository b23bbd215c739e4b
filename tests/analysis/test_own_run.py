"""Test the fit to recorded runs, and the comparison of a run with its own simulation.

Known costs are found again in simulated runs, and times in the spans of a run. What the steps do
not show is left open, and a simulation that needs it is refused with what would show it. The
recorded run in `recorded_run.json` is predicted within 10%, with its own bottleneck. It was made by
`unstale train retail --steps 16 --schedule.groups_per_step 4 --schedule.group_size 4
--eval.tasks 0` on two cores with other programs. Options that the simulation does not read are
left out.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from tests.support.fake_run import FakeClock, FakeEpisodes
from unstale.analysis.planner import own_run
from unstale.analysis.planner.costs import LinearCosts, Overheads, Pace
from unstale.analysis.planner.fit import fit
from unstale.analysis.planner.measured import fit_costs, setup_of
from unstale.analysis.planner.own_run import open_questions, require_alike, simulate_own
from unstale.analysis.planner.recorded import (
    RecordedRun,
    RecordedStep,
    delayed,
    episode_shapes,
    recorded_groups,
    recorded_steps,
)
from unstale.analysis.planner.simulate import (
    Constant,
    EpisodeShape,
    Fleet,
    LogNormal,
    TurnShape,
    Workload,
    simulate,
)
from unstale.analysis.planner.workload import Prefix
from unstale.cli.main import main
from unstale.config import ConfigError, RunConfig, ScheduleConfig
from unstale.config.options import stored_config
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import RunFolder, RunLog
from unstale.records import ContextPiece, Fork, Sampled, Task, Trajectory


def recorded_run() -> RecordedRun:
    row = json.loads(Path(__file__).with_name("recorded_run.json").read_text())
    groups = tuple(
        tuple(
            EpisodeShape(
                prompt,
                tuple(TurnShape(*turn) for turn in turns),
                tuple(Prefix(*prefix) for prefix in prefixes),
            )
            for prompt, turns, prefixes in siblings
        )
        for siblings in row["groups"]
    )
    steps = tuple(RecordedStep(**step) for step in row["steps"])
    return RecordedRun(
        **(row | {"config": stored_config(row["config"]), "steps": steps, "groups": groups})
    )


RECORDED = recorded_run()
COSTS = LinearCosts(decode=0.004, decode_reply=3e-4, prefill_token=2e-5, train_token=1e-4)
SYNCHRONOUS = ScheduleConfig(max_staleness=0, groups_per_step=2, group_size=2)
ONE_TURN = Workload(prompt_tokens=Constant(100), turns=Constant(1), reply_tokens=Constant(50))


def test_the_costs_of_simulated_engines_are_found_again() -> None:
    """Ten runs of other sizes, each with the work and the busy seconds of its engine."""
    seconds, work = [], []
    for groups in range(1, 11):
        workload = replace(ONE_TURN, turns=Constant(1 + groups % 3), tool_tokens=Constant(40))
        schedule = replace(SYNCHRONOUS, groups_per_step=groups)
        outcome = simulate(workload, Fleet(max_running=12), schedule, COSTS, steps=4)
        seconds.append(outcome.engine_busy_share * sum(outcome.steady_s))
        did = outcome.work
        work.append(
            {"decode": did.steps, "decode_reply": did.sampled, "prefill_token": did.prefilled}
        )
    found = fit(seconds, work)
    for name, value in found.seconds.items():
        assert value == pytest.approx(getattr(COSTS, name), rel=1e-6)
    assert found.half_width(work[0]) < 1e-6 * seconds[0]


def test_batches_of_one_size_leave_open_what_another_size_takes() -> None:
    def work(tokens: int) -> dict[str, float]:
        return {"train": 1.0, "train_token": tokens}

    equal = fit([1.0, 1.1, 0.9, 1.0, 1.0], [work(1000)] * 5)
    assert equal.predict(work(1000)) == pytest.approx(1.0)
    assert equal.half_width(work(1000)) < 0.2
    assert equal.half_width(work(2000)) > 1000
    assert equal.half_width(work(2000), given=("train", "train_token")) == 0
    different = fit([0.6, 1.11, 1.49, 2.02, 2.5], [work(500 * n) for n in range(1, 6)])
    assert different.half_width(work(4000)) < 0.3
    assert different.predict(work(4000)) == pytest.approx(4.0, rel=0.05)


def test_a_fit_keeps_the_measured_sum() -> None:
    """Least squares alone would give 5.4 s: a line through the origin keeps no mean."""
    found = fit([3.0, 3.0], [{"token": 1.0}, {"token": 2.0}])
    assert found.predict({"token": 3.0}) == pytest.approx(6.0)


@dataclass
class Spans:
    """Spans of a run's steps, on a clock that they move on. All durations are times `pace`."""

    clock: FakeClock
    log: RunLog
    pace: float = 1.0

    def spend(self, lane: str, label: str, seconds: float, after: float = 0.0) -> None:
        with self.log.span(lane, label):
            self.clock.now += seconds * self.pace
        self.clock.now += after * self.pace

    def publish(self, version: int) -> None:
        with self.log.span("publish", f"version {version}"):
            self.clock.now += (0.15 + 0.05) * self.pace  # to prepare and to stage
            self.spend("standstill", f"version {version}", 0.25)

    def step(self, step: int, version: int, states: float = 0.0) -> dict[str, Any]:
        """Record the spans of a step that trains `version` for 5 s. Return its metrics.

        With `states`, a technique reads hidden states for so many seconds.
        """
        self.spend("wait", f"for the groups of step {step}", 2.0, after=0.1)
        if states:
            self.spend("trainer", f"step {step}", states)
        self.spend("old_logps", f"step {step}", 1.0)
        self.spend("trainer", f"step {step}", 2.5)
        self.spend("trainer", f"step {step}", 0.5, after=0.2)
        self.publish(version + 1)
        return {
            "step": step,
            "version": version,
            "engine/steps": 7,
            "rollout/episodes": 4,
            "publish/trainer_s": 0.15 * self.pace,
            "schedule/staleness_histogram": {},
        }


def test_the_times_of_a_step_are_found_in_its_spans(tmp_path: Path) -> None:
    """Each step: 2 s of waiting, 0.1 s to build the batch, 1 s, 2.5 s, 0.5 s, 0.2 s to record it,
    0.15 s to publish, 0.05 s to stage, 0.25 s of loading, and 0.6 s for a checkpoint in every
    second step."""
    clock = FakeClock()
    rows = []
    with RunLog.create(tmp_path, {}, clock=clock) as log:
        spans = Spans(clock, log)
        for step in range(1, 7):
            rows.append(spans.step(step, version=step - 1))
            if step % 2 == 0:
                spans.spend("checkpoint", f"step {step}", 0.6)
            if step == 3:
                spans.spend("eval", f"step {step}", 5.0)
    events = list(RunFolder(tmp_path).rows("events.jsonl"))
    steps = recorded_steps(rows, events, dict.fromkeys(range(1, 7), 1.5))
    assert [each.step for each in steps] == [2, 3, 4, 5, 6]
    for each in steps:
        found = (each.publish, each.stage, each.load, each.optimizer, each.versions)
        assert found == pytest.approx((0.15, 0.05, 0.25, 0.5, 1.5))
        assert each["engine/steps"] == 7
        assert each.checkpoint == pytest.approx(0.6 * (each.step % 2 == 0))
        late = {3: 0.6, 4: 5.0, 5: 0.6}.get(each.step, 0.0)
        assert each.seconds == pytest.approx(6.75 + late)
        # an evaluation is no work of the event loop, and its step is left out of comparisons
        assert each.between == pytest.approx(0.3 + 5.0 * (each.step == 4))
    assert [each.step for each in delayed(steps, 0) if each.evaluation] == [4, 5]


def test_a_pass_that_reads_hidden_states_is_no_part_of_training(tmp_path: Path) -> None:
    """It precedes scoring, so that three spans of the trainer are in a step: 0.4, 2.5, 0.5 s."""
    clock = FakeClock()
    with RunLog.create(tmp_path, {}, clock=clock) as log:
        spans = Spans(clock, log)
        rows = [spans.step(step, version=step - 1, states=0.4) for step in range(1, 7)]
    events = list(RunFolder(tmp_path).rows("events.jsonl"))
    steps = recorded_steps(rows, events, dict.fromkeys(range(1, 7), 1.5))
    assert len(steps) == 5
    for each in steps:
        assert (each.optimizer, each.between) == pytest.approx((0.5, 0.3 + 0.4))


@pytest.mark.parametrize("restart", ["resumed", "trainer_died"])
def test_a_resumed_run_has_the_times_since_its_last_resume(tmp_path: Path, restart: str) -> None:
    """It is killed after step 5, and continues from step 3 with all times doubled. Step 4 begins
    with version 6 in place of 3, because 4 and 5 have been published."""
    steps = 9
    clock = FakeClock()
    with (
        RunLog.create(tmp_path, RunConfig(recipe="mine"), clock=clock) as log,
        Journal(tmp_path / JOURNAL) as journal,
    ):
        log.event("started", cores=2)
        spans = Spans(clock, log)
        spans.publish(0)
        rows = [spans.step(step, version=step - 1) for step in range(1, 6)][:3]
        log.event(restart, step=3, **({"cores": 8} if restart == "resumed" else {}))
        spans.pace = 2.0
        spans.publish(6)
        rows += [spans.step(step, version=step + 2) for step in range(4, steps + 1)]
        log.rewind([{**row, "rollout/tool_wait_s": 8.0} for row in rows])
        episodes = FakeEpisodes(tmp_path, journal, "")
        for step in range(1, steps + 1):
            episodes.step(step, 0.5, Random(step))
        episodes.close(steps)
    recorded = RecordedRun.read(tmp_path)
    assert [each.step for each in recorded.steps] == [5, 6, 7, 8, 9]  # 4 warms up the processes
    for each in recorded.steps:
        found = (each.seconds, each.publish, each.load, each.optimizer, each.between)
        assert found == pytest.approx((13.5, 0.3, 0.5, 1.0, 0.6))
    assert recorded.resumed == 3 and recorded.cores == (8 if restart == "resumed" else 2)
    filling = recorded.config.schedule.max_staleness + 1
    assert [each.step for each in recorded.steady] == [*range(4 + filling, steps + 1)]
    # Four episodes and 8 s of tool calls a step, also in those that were lost
    calls = [sum(turn.calls for turn in each.turns) for group in recorded.groups for each in group]
    assert recorded.call_s == pytest.approx(8.0 / (4 * fmean(calls)))
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows[:-2])))
    with pytest.raises(ConfigError, match="has 4 steps with engine metrics since it was resumed"):
        RecordedRun.read(tmp_path)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_a_sound_journal_is_refused(tmp_path: Path, damaged: bool) -> None:
    with RunLog.create(tmp_path, RunConfig(recipe="mine")) as log:
        for step in range(1, 7):
            log.write(step, {"engine/steps": 7})
    if damaged:
        (tmp_path / JOURNAL).write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match=f"the journal of {tmp_path} cannot be read, and its"):
        RecordedRun.read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        recorded_groups(tmp_path, [])


def test_contexts_that_episodes_share_have_one_name() -> None:
    """Two siblings take the same first turn, and a third says something else."""
    prompt, reply, answer = (7, 8, 1), (2, 3), (5,)

    def taken(prompt: tuple[int, ...], reply: tuple[int, ...]) -> Trajectory:
        said = Sampled(reply, (0.0,) * len(reply), 0)
        last = Sampled((4,), (0.0,), 0)
        pieces = (ContextPiece(prompt), said, ContextPiece(answer), last)
        return Trajectory(pieces, {}, "done", Task("t", "train", 0), 0)

    siblings = [taken(prompt, reply), taken(prompt, reply), taken(prompt, (2, 6))]
    (one, two, three), (other,) = episode_shapes([siblings, [taken((7, 8, 9), reply)]])
    assert one.prefixes == two.prefixes == (Prefix(0, 2), Prefix(1, 3), Prefix(2, 6))
    assert three.prefixes == (Prefix(0, 2), Prefix(1, 3), Prefix(3, 6))
    assert other.prefixes == (Prefix(0, 2), Prefix(4, 3), Prefix(5, 6))


def test_a_forked_episode_begins_with_contexts_of_its_parent_and_its_share_of_the_calls() -> None:
    said, last = Sampled((2, 3), (0.0, 0.0), 0), Sampled((4,), (0.0,), 0)
    pieces = (ContextPiece((7, 8, 1)), said, ContextPiece((5,)), last)
    task = Task("t", "train", 0)
    parent = Trajectory(pieces, {}, "done", task, 0, facts={"tool_calls": 4.0})
    fork = Fork(0, 6)
    own = (*fork.prefix_of(pieces), replace(last, tokens=(6,)))
    ((one, two),) = episode_shapes([[parent, replace(parent, pieces=own, episode=1, fork=fork)]])
    assert one.prefixes == two.prefixes == (Prefix(1, 3), Prefix(2, 6))
    assert (two.prompt, two.turns) == (6, (TurnShape(1, 0, 2),))
    assert one.turns == (TurnShape(2, 1, 2), TurnShape(1, 0, 2))


def test_an_engine_copies_what_it_has_computed_for_a_sibling() -> None:
    """A prompt of 100 tokens and one turn of 10 and 40: the second episode computes nothing."""
    prefixes = (Prefix(0, 30), Prefix(1, 100), Prefix(2, 150))
    shape = EpisodeShape(100, (TurnShape(10, 40), TurnShape(5, 0, 0)), prefixes)
    schedule = replace(SYNCHRONOUS, groups_per_step=1)
    costs = LinearCosts(decode=0.01)
    fleet = Fleet(max_running=8, keep_cache=True)

    def computed(*siblings: EpisodeShape) -> float:
        workload = Workload(recorded=(siblings,))
        outcome = simulate(workload, fleet, schedule, costs, steps=2)
        return outcome.work.prefilled / len(outcome.steady_s)

    apart = shape._replace(prefixes=(Prefix(0, 30), Prefix(3, 100), Prefix(4, 150)))
    # The group is used again in every step, under other names: only the first 30 are known. The
    # prompt of the step after the last is computed too.
    assert computed(shape, shape) == 70 + 40 + 70
    assert computed(shape, apart) == 2 * (70 + 40 + 70)


def test_calls_of_siblings_can_take_equally_long() -> None:
    workload = replace(ONE_TURN, turns=Constant(3), tool_s=LogNormal(5, 1.0))
    costs = LinearCosts(decode=0.001)
    longest = {
        equal: simulate(
            replace(workload, equal_tool_s=equal),
            Fleet(),
            replace(SYNCHRONOUS, groups_per_step=1, group_size=16),
            costs,
            steps=8,
        ).mean_step_s
        for equal in (False, True)
    }
    assert longest[True] < 0.7 * longest[False]  # the longest of 16 draws, or one draw


def test_the_smaller_parts_of_a_step_lengthen_it() -> None:
    costs = LinearCosts(decode=0.01, train=1.0, old=0.5)

    def steps(overheads: Overheads) -> tuple[float, ...]:
        outcome = simulate(ONE_TURN, Fleet(), SYNCHRONOUS, costs, steps=4, overheads=overheads)
        return outcome.steps_s

    assert steps(Overheads()) == pytest.approx([2.0] * 4)
    assert steps(Overheads(audit_s=0.3, batch_s=0.2, reply_s=0.1)) == pytest.approx([2.6] * 4)
    # the next episodes are sampled in 0.5 s, during the checkpoint
    every = steps(Overheads(checkpoint_s=0.9, checkpoint_every=2))
    assert every == pytest.approx([2.0, 2.9, 1.5, 2.9])
    paces = (Pace(), Pace(engine=2.0, train=3.0, old=4.0))
    assert steps(Overheads(paces=paces)) == pytest.approx([2.0, 6.0, 2.0, 6.0])


def test_turns_that_end_together_wait_for_the_event_loops() -> None:
    schedule = replace(SYNCHRONOUS, groups_per_step=4, group_size=5)
    costs = LinearCosts(decode=0.01, train=1.5)

    def mean_s(**overheads: Any) -> float:
        given = Overheads(**overheads)
        return simulate(ONE_TURN, Fleet(), schedule, costs, steps=4, overheads=given).mean_step_s

    assert mean_s() == pytest.approx(2.0)
    assert mean_s(turn_s=0.05) == pytest.approx(3.0), "20 turns, one after the other"
    assert mean_s(turn_s=0.05, processes=2) == pytest.approx(2.5)
    assert mean_s(run_turn_s=0.02, processes=2) == pytest.approx(2.4), "one loop has all"
    assert mean_s(turn_s=0.05, run_turn_s=0.02, processes=2) == pytest.approx(2.54)


def test_the_recorded_run_is_predicted_with_its_bottleneck() -> None:
    _, result, own = simulate_own(RECORDED, setup_of(RECORDED, fit_costs([RECORDED])))
    assert own.steps == len(RECORDED.steady) == 13
    assert abs(own.error) <= 0.1 and not own.problems
    assert own.run.bottleneck == own.simulated.bottleneck == "Training"
    assert result.mean_step_s == own.figures[0].predicted


def scaled(run: RecordedRun, seconds: float) -> RecordedRun:
    """Return the run with every step longer by a factor, which no part of it explains."""
    steps = tuple(replace(each, seconds=seconds * each.seconds) for each in run.steps)
    return replace(run, steps=steps)


def test_a_run_that_is_not_explained_is_no_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RecordedRun, "read", lambda path: scaled(RECORDED, 1.5))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as left:
        main(["simulate", "--like", str(tmp_path), "--set", "schedule.max_staleness=4"])
    told = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 1
    assert "Other settings are not predicted" in told and "more than 10%" in told
    assert "Furthest off: trainer" in told and "staleness mean" not in told


def test_errors_that_cancel_are_no_source() -> None:
    *_, own = simulate_own(RECORDED, setup_of(RECORDED, fit_costs([RECORDED])))

    def but(name: str, predicted: float) -> list[str]:
        figures = (
            replace(each, measured=0.4 if each.unit == "share" else 100.0, predicted=predicted)
            if each.name == name
            else each
            for each in own.figures
        )
        return replace(own, figures=tuple(figures)).problems

    shares = [each.name for each in own.figures if each.unit == "share"]
    assert len(shares) == 4
    for name in shares:
        assert but(name, 0.49) == but(name, 0.31) == []
        for predicted, shown in ((0.54, "54%"), (0.26, "26%")):
            (problem,) = but(name, predicted)
            assert f"{name}, 40% of the step measured and {shown} simulated" in problem
    assert but(own_run.DECODING, 124) == but(own_run.DECODING, 76) == []
    (problem,) = but(own_run.DECODING, 53)
    assert "decoding steps a step, 100 measured and 53 simulated: -47% (limit 25%)" in problem


def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str) -> Any:
    """Return the exit code and the JSON of `simulate --like` on the recorded run."""
    monkeypatch.setattr(RecordedRun, "read", lambda path: RECORDED)
    monkeypatch.setattr(RunFolder, "__init__", lambda self, path: None)
    with pytest.raises(SystemExit) as left:
        main(["simulate", "--like", "runs/x", "--json", *words.split()])
    return left.value.code, json.loads(capsys.readouterr().out)


@pytest.mark.costly
def test_the_command_refuses_what_the_run_does_not_show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = ask(monkeypatch, capsys, "")
    assert code == 0 and told["refused"] == [] and len(told["simulated"]) == 1
    (own,) = told["own_runs"]
    assert own["bottlenecks"] == {"run": "Training", "simulated": "Training"}
    code, told = ask(monkeypatch, capsys, "--steps 5 --set schedule.groups_per_step=24")
    assert code == 1 and told["simulated"] == []
    assert any("the time of training is not identified" in each for each in told["refused"])
    assert any("another schedule.groups_per_step" in each for each in told["refused"])
    code, told = ask(monkeypatch, capsys, "--steps 5 --set fleet.engines=4")
    assert code == 1
    assert any("fleet.engines=4 is not identified" in each for each in told["refused"])


def test_another_staleness_bound_is_refused_if_the_trainers_cores_depend_on_it() -> None:
    fitted = fit_costs([RECORDED])
    setup = setup_of(RECORDED, fitted)
    result = setup.simulate(5)
    other = replace(setup, schedule=replace(setup.schedule, max_staleness=7))
    (refused,) = open_questions([RECORDED], fitted, other, result, ())
    assert "max_staleness=7" in refused and "--trainer.threads 1" in refused
    given = (*fitted.train.seconds,)
    trainer = replace(RECORDED.config.trainer, threads=1)
    fixed = replace(RECORDED, config=replace(RECORDED.config, trainer=trainer))
    assert open_questions([RECORDED], fitted, setup, result, ()) == []
    assert open_questions([RECORDED], fitted, other, result, given) == []
    assert open_questions([fixed], fitted, other, result, ()) == []
    assert open_questions([replace(RECORDED, cores=64)], fitted, other, result, ()) == []


def test_costs_that_are_given_need_no_record() -> None:
    fitted = fit_costs([RECORDED])
    setup = setup_of(RECORDED, fitted)
    setup = replace(setup, fleet=replace(setup.fleet, engines=4))
    result = setup.simulate(5)
    names = [*fitted.engine.seconds, *fitted.train.seconds, *fitted.old.seconds]
    assert open_questions([RECORDED], fitted, setup, result, names) == []
    assert open_questions([RECORDED], fitted, setup, result, ())


def test_a_second_run_identifies_what_one_leaves_open() -> None:
    """The second run has batches four times as large, at the same costs."""
    step = RECORDED.steps[0]

    def run(sizes: tuple[int, ...]) -> RecordedRun:
        steps = tuple(_trained(step, number, size) for number, size in enumerate(sizes, 4))
        return replace(RECORDED, steps=steps)

    small, large = run((1000, 1001, 999, 1000, 1002)), run((4000, 4004, 3996, 4000, 4002))
    work = {"train": 1.0, "train_token": 8000.0}
    assert fit_costs([small]).train.half_width(work) > 1.0
    both = fit_costs([small, large]).train
    assert both.half_width(work) < 0.1
    assert both.predict(work) == pytest.approx(0.2 + 8000 * 1e-3, rel=0.01)


def _trained(step: RecordedStep, number: int, tokens: int) -> RecordedStep:
    noise = 0.005 * (-1) ** number
    metrics = {
        **step.metrics,
        "rollout/episodes": 1.0,
        "rollout/total_tokens_mean": float(tokens),
        "trainer/update_s": 0.2 + tokens * 1e-3 + noise,
    }
    return replace(step, step=number, metrics=metrics)


def test_runs_of_other_settings_are_not_fitted_together() -> None:
    config = replace(RECORDED.config, engine=replace(RECORDED.config.engine, dtype="float32"))
    other = replace(RECORDED, name="other", config=config)
    require_alike([RECORDED, RECORDED])
    with pytest.raises(ConfigError, match=r"must have the same engine.dtype, got 'bfloat16'"):
        require_alike([RECORDED, other])
    with pytest.raises(ConfigError, match="must be of the same machine"):
        require_alike([RECORDED, replace(RECORDED, cores=64)])


def test_a_run_without_a_full_queue_is_not_compared() -> None:
    short = replace(RECORDED, steps=RECORDED.steps[:4])
    with pytest.raises(ConfigError, match="needs 4"):
        simulate_own(short, setup_of(RECORDED, fit_costs([RECORDED])))
    assert own_run.MIN_STEPS == 4
