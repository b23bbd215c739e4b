"""Test how a simulation and a plan account for `limits`, `segments` and `replay`."""

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from tests.analysis.test_simulate import COSTS, LENGTHS, SCHEDULE, TAILED
from unstale.analysis.planner.analytic import TrainingSetup
from unstale.analysis.planner.candidates import PlanRequest, best_candidate
from unstale.analysis.planner.costs import LinearCosts
from unstale.analysis.planner.hardware import DEVICES, Shares
from unstale.analysis.planner.models import Model
from unstale.analysis.planner.simulate import (
    Constant,
    EpisodeShape,
    Fleet,
    LogNormal,
    SimulatedTechniques,
    TurnShape,
    Workload,
    simulate,
)
from unstale.analysis.planner.simulated_techniques import (
    SimulatedReplay,
    choose,
    of_run,
    shorten,
    shorten_groups,
)
from unstale.analysis.planner.workload import EpisodeStats
from unstale.cli.main import main, parse
from unstale.cli.recipe_options import configure
from unstale.config import ConfigError, RunConfig, ScheduleConfig
from unstale.config.options import override
from unstale.records import NO_BUDGET, EpisodeBudget
from unstale.techniques.limits import LimitsConfig
from unstale.techniques.replay import ReplayConfig
from unstale.techniques.segments import SegmentsConfig

ASYNC = ScheduleConfig(max_staleness=2, groups_per_step=4, group_size=4)


def shape(*turns: tuple[int, int], prompt: int = 10) -> EpisodeShape:
    return EpisodeShape(prompt, tuple(TurnShape(reply, answer) for reply, answer in turns))


THREE = shape((5, 3), (5, 3), (5, 0))


def test_an_episode_is_cut_off_where_a_run_would_cut_it_off() -> None:
    assert shorten(THREE, None, NO_BUDGET) == THREE == shorten(THREE, 3, NO_BUDGET)
    assert shorten(THREE, 2, NO_BUDGET) == shape((5, 3), (5, 3))  # with the last answer
    assert shorten(THREE, None, EpisodeBudget(context=20)) == shape((5, 3), (2, 3))
    assert shorten(THREE, None, EpisodeBudget(calls=1)) == shape((5, 3))
    two = EpisodeBudget(segments=2, segment_tokens=4)
    assert shorten(THREE, None, two) == shape((5, 3), (3, 3))
    with pytest.raises(ConfigError, match=r"a prompt of 10 tokens leaves no room .* 10 tokens"):
        shorten(THREE, None, EpisodeBudget(context=10))


def test_a_simulation_has_the_limit_of_the_technique() -> None:
    """Three of four episodes have one turn, and one has nine: the quantile 0.75 of 64 is 3."""
    one, nine = shape((20, 4)), shape(*[(20, 4)] * 9)
    work = Workload(recorded=((one, one, one, nine),))
    limits = LimitsConfig(successes=64, window=64)
    made = simulate(
        work, Fleet(), ASYNC, COSTS, steps=60, techniques=SimulatedTechniques(limits=limits)
    )
    plain = simulate(work, Fleet(), ASYNC, COSTS, steps=60)
    assert plain.trained_sampled == (60 - plain.filling) * 4 * 12 * 20
    # Four steps have the first 64 successes, and two more are in flight. Of eight later groups one
    # has 12 replies and seven have 6.
    whole, limited = 4 * 12 * 20, 4 * 20 * (12 + 7 * 6) / 8
    assert made.trained_sampled == 3 * whole + 54 * limited
    assert made.mean_step_s < 0.75 * plain.mean_step_s
    groups = [[one, one, one, nine]] * 16
    cut = shorten_groups(groups, limits)
    assert [len(group[3].turns) for group in cut] == [9, *[3] * 7] * 2
    assert shorten_groups(groups, None) == groups


def test_stored_groups_add_their_tokens_to_the_training_of_a_batch() -> None:
    replay = SimulatedReplay(ReplayConfig(fresh_share=0.5, max_age=2), seed=0)
    assert replay.tokens([(100, 0)] * 2) == 0  # nothing is stored before the first batch
    assert replay.tokens([(10, 0)] * 2) == 200
    assert replay.tokens([(10, 1)] * 2) in (20, 110, 200)
    assert replay.tokens([(1, 0)] * 2) == 20  # those of 100 tokens are too old
    small = SimulatedReplay(ReplayConfig(fresh_share=0.8, capacity=1), seed=0)
    small.tokens([(7, 0)] * 4)
    assert small.tokens([(7, 0)] * 4) == 7  # a fifth of the batch, and one is stored


def test_replay_takes_the_time_of_its_tokens() -> None:
    costs = LinearCosts(decode=1e-4, train_token=1e-3)
    made = {}
    for share in (1.0, 0.5):
        techniques = SimulatedTechniques(
            replay=ReplayConfig(fresh_share=share) if share < 1 else None
        )
        made[share] = simulate(LENGTHS, Fleet(), ASYNC, costs, steps=12, techniques=techniques)
    fresh = 4 * 4 * 150
    assert made[1.0].mean_step_s == pytest.approx(fresh * 1e-3, rel=0.05)
    assert made[0.5].mean_step_s == pytest.approx(2 * fresh * 1e-3, rel=0.05)
    assert made[0.5].replayed_tokens == made[0.5].trained_tokens == made[1.0].trained_tokens
    assert made[1.0].replayed_tokens == 0
    assert made[0.5].sampled_tokens == made[1.0].sampled_tokens


def segments(**options: Any) -> SimulatedTechniques:
    given = {"tokens": 30, "calls": 100, "table": "5000:500:900", **options}
    return SimulatedTechniques(segments=SegmentsConfig(**given))


def test_with_enough_slots_segments_change_nothing_but_requests() -> None:
    plain = simulate(TAILED, Fleet(), ASYNC, COSTS, steps=8)
    made = simulate(TAILED, Fleet(), ASYNC, COSTS, steps=8, techniques=segments(tokens=10_000))
    assert made == plain and made.slot_share == 0


def test_slots_limit_the_episodes_that_run() -> None:
    """With one slot, all episodes of a step run one after another, whatever their segments."""
    costs = LinearCosts(decode=0.01)
    for tokens in (7, 50, 1000):
        made = simulate(
            LENGTHS,
            Fleet(),
            SCHEDULE,
            costs,
            steps=3,
            techniques=segments(max_concurrent_episodes=1, tokens=tokens),
        )
        assert made.mean_step_s == pytest.approx(16 * 50 * 0.01, rel=1e-6)
        assert made.slot_share > 0.8 and made.trained_sampled == made.trained_tokens // 3 * 1.0
    half = simulate(
        LENGTHS,
        Fleet(),
        SCHEDULE,
        costs,
        steps=3,
        techniques=segments(max_concurrent_episodes=8, tokens=1000),
    )
    assert half.mean_step_s == pytest.approx(2 * 50 * 0.01, rel=1e-6)


def test_every_token_is_trained_on_once_also_if_engines_die_and_tools_time_out() -> None:
    work = replace(TAILED, timeout_s=2.0, retries=99)
    fleet = Fleet(engines=3, max_running=8, failures_per_hour=200.0, restart_s=3.0)
    for schedule in (ASYNC, SCHEDULE, replace(ASYNC, lookahead_window=3)):
        made = simulate(
            work, fleet, schedule, COSTS, steps=12, techniques=segments(max_concurrent_episodes=5)
        )
        assert made.deaths and made.failed_episodes and made.slot_share > 0
        assert made.staleness_max <= made.staleness_bound
        if schedule in (ASYNC, SCHEDULE):  # with a window, the last batches have other groups
            plain = simulate(TAILED, Fleet(), schedule, COSTS, steps=12)
            trained = sum(made.staleness_histogram.values())
            assert trained == sum(plain.staleness_histogram.values())


def test_limits_grow_in_a_simulation() -> None:
    table = "100:99:9 200:99:9 5000:99:99"
    made = simulate(
        TAILED, Fleet(), ASYNC, COSTS, steps=30, techniques=segments(table=table, window=32)
    )
    first = simulate(TAILED, Fleet(), ASYNC, COSTS, steps=30, techniques=segments(table="100:99:9"))
    plain = simulate(TAILED, Fleet(), ASYNC, COSTS, steps=30)
    assert first.trained_tokens < made.trained_tokens < plain.trained_tokens
    assert made.trained_tokens > 0.8 * plain.trained_tokens


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        ("allocate", {}, "allocate cannot be simulated; there are: limits, segments, replay"),
        ("limits", {"replay.fresh_share": 0.5}, "replay.fresh_share needs --techniques replay"),
        ("limits segments", {}, "limits or segments, not both"),
        ("limits", {"limits.extend": 4}, r"limits\.extend must be 0 in a simulation, got 4"),
        ("replay", {"replay.fresh_share": 2.0}, "replay.fresh_share must be between"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    names: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(names, values)


def test_options_of_a_run_that_need_rewards_or_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"limits.scope must be run in a simulation, got task"):
        SimulatedTechniques(limits=LimitsConfig(scope="task"))
    with pytest.raises(ConfigError, match="must be uniform and all in a simulation, got failed"):
        SimulatedTechniques(replay=ReplayConfig(rule="failed"))
    techniques = SimulatedTechniques(replay=ReplayConfig(max_age=2))
    with pytest.raises(ConfigError, match=r"replay.max_age must be > 2 \(the staleness bound\)"):
        simulate(LENGTHS, Fleet(), ASYNC, COSTS, steps=3, techniques=techniques)


def test_a_recorded_run_brings_its_techniques_and_is_not_cut_off_twice() -> None:
    run = RunConfig(recipe="mine", techniques="limits replay")
    assert of_run(run, None) == SimulatedTechniques(replay=ReplayConfig())
    none = SimulatedTechniques()
    assert of_run(run, none) == none
    with pytest.raises(ConfigError, match="have cut off the recorded episodes already"):
        of_run(run, SimulatedTechniques(limits=LimitsConfig()))
    options = {"techniques": "segments", "segments.table": "50:2:2 100:5:4"}
    segmented = of_run(override(RunConfig(recipe="mine"), options), None)
    assert segmented.segments and segmented.segments.table == "100:5:4"
    with pytest.raises(ConfigError, match="its segments have cut off the recorded episodes"):
        of_run(override(RunConfig(recipe="mine"), options), segments())


def test_a_recorded_run_with_other_techniques_is_refused_unless_they_are_left_out() -> None:
    options = {
        "techniques": "hard_task_stages confident_error_penalty",
        "selection.pool": 9,
        "hard_task_stages.steps": 5,
    }
    run = override(RunConfig(recipe="mine"), options)
    with pytest.raises(
        ConfigError, match=r"cannot be simulated: hard_task_stages\. Set --techniques ''"
    ):
        of_run(run, None)
    assert of_run(run, SimulatedTechniques()) == SimulatedTechniques()


WORDS = "--steps 6 --set costs.decode=0.001 costs.train_token=0.001 schedule.max_staleness=1"


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    return int(ended.value.code or 0)


def test_the_command_simulates_techniques(capsys: pytest.CaptureFixture[str]) -> None:
    added = [
        *WORDS.split(),
        "replay.fresh_share=0.5",
        "segments.max_concurrent_episodes=4",
        "segments.tokens=9",
    ]
    added += ["segments.table=4000:9:999", "workload.reply_tokens=50"]
    assert run_command("simulate", "--techniques", "replay segments", *added) == 0
    out = " ".join(capsys.readouterr().out.split())  # without the line breaks of the table
    assert " replayed" in out and "waiting for a slot" in out
    assert run_command("simulate", "--techniques", "replay", "--json", *WORDS.split()) == 0
    assert json.loads(capsys.readouterr().out)["replayed_tokens"] > 0
    assert run_command("simulate", *WORDS.split(), "limits.quantile=0.5") == 2
    assert "limits.quantile needs --techniques limits" in capsys.readouterr().err


def request(techniques: SimulatedTechniques, **options: Any) -> PlanRequest:
    work = Workload(prompt_tokens=Constant(2000), turns=LogNormal(8, 0.6, 32), max_tokens=65_536)
    stats = EpisodeStats.of(
        work, group_size=8, shorten=lambda groups: shorten_groups(groups, techniques.limits)
    )
    setup = TrainingSetup(
        model=Model.parse("4B"), device=DEVICES["H100"], shares=Shares(), lr=1e-6, episodes=stats
    )
    return PlanRequest(setup=setup, workload=work, devices=8, techniques=techniques, **options)


def test_a_plan_estimates_longer_training_and_shorter_episodes() -> None:
    plain = best_candidate(request(SimulatedTechniques()), "snapshot_old", SCHEDULE)
    replay = SimulatedTechniques(replay=ReplayConfig(fresh_share=0.25))
    longer = replace(plain, request=request(replay))
    batch = round(plain.costs.batch)
    added_s = plain.costs.train_s(4 * batch) - plain.costs.train_s(batch)
    assert longer.estimate.step_s - plain.estimate.step_s == pytest.approx(added_s, rel=0.01)
    half = request(SimulatedTechniques(limits=LimitsConfig(quantile=0.5)))
    limited = best_candidate(half, "snapshot_old", SCHEDULE)
    assert limited.episodes.turns < 0.8 * plain.episodes.turns
    assert limited.episodes.longest <= plain.episodes.longest


def test_the_command_of_a_plan_has_its_techniques(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "layers=4,hidden=256,ffn=768,heads=4,kv_heads=2,head_dim=64,vocab=4096,tied=true"
    words = f"plan --model {sizes} --gpus 2 --lag 1 --groups 4 --group-size 2 --rounds 2 --turns 2"
    words += " --reply 50 --prompt 100 --route snapshot_old"
    options = ["--techniques", "replay limits"]
    options += ["--set", "replay.fresh_share=0.7", "limits.quantile=0.9", "limits.window=256"]
    assert run_command(*words.split(), *options, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert "; techniques limits replay;" in plan["suggestion"]
    assert "limits.window" not in plan["command"]  # the default
    config = configure(parse(shlex.split(plan["command"])[1:]))
    assert config.technique_options == {
        "limits": LimitsConfig(quantile=0.9),
        "replay": ReplayConfig(fresh_share=0.7),
    }
    assert run_command(*words.split(), *options) == 0
    assert plan["command"] in capsys.readouterr().out.splitlines()  # also if that is a long line
    assert run_command(*words.split(), "--json") == 0
    assert "techniques" not in capsys.readouterr().out


def test_a_plan_with_segments_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "4B", "--gpus", "8", "--techniques", "segments"]
    assert run_command(*words) == 2
    assert "segments cannot be planned" in capsys.readouterr().err
