"""The promises of `unstale advise`.

- Figures of a sample of tokens are those worked out by hand; routes that mix mu and pi are
  recomputed from the exact ratios.
- Every conclusion appears with figures that support it, and not with figures that do not.
- Options that are suggested are accepted by the linter.
- A folder of every route gives advice: killed, in progress, with and without audit or journal.
  Nothing in it changes. A folder that is not a run gives one line.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.support.fake_run import NoDisplay, fake_config
from unstale.analysis.advice import Evidence, conclude, gather_evidence
from unstale.analysis.advice.conclusion import Conclusion
from unstale.analysis.advice.evidence import FIGURES, with_route
from unstale.analysis.advice.measured import of_learning, of_metrics
from unstale.analysis.advice.remedies import band_options
from unstale.analysis.advice.rules import RULES
from unstale.analysis.advice.samples import (
    Factors,
    Lengths,
    Limit,
    Thresholds,
    difference,
    draw_sequences,
    factors_of_route,
    spread,
)
from unstale.cli.main import main, parse
from unstale.config import RunConfig
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import AUDIT, METRICS, RunLog, dumps
from unstale.lint import check
from unstale.observe.recorder import Outputs, Recorder

Row = tuple[float, float, int]
"""log D, log S and lag of a token."""
TOKENS = Lengths()
DOCS = Path(__file__).parents[2] / "docs"


def configure(route: str = "snapshot_old", **values: Any) -> RunConfig:
    config = with_route(fake_config(), route)
    return override(config, values)


def advise(
    figures: Mapping[str, float], *, config: RunConfig, **more: Any
) -> dict[str, Conclusion]:
    """Return the conclusions on a run with these figures, by name."""
    evidence = Evidence(
        folder="runs/r", state="finished", config=config, figures={"steps": 9.0, **figures}, **more
    )
    return {conclusion.name: conclusion for conclusion in conclude(evidence)}


def run_folder(  # noqa: PLR0913
    path: Path,
    config: RunConfig,
    tokens: Sequence[Row] = (),
    audited: Sequence[tuple[Row, Row]] = (),
    *,
    steps: int = 4,
    ended: bool = True,
) -> Path:
    """Write a run whose every step has these tokens, and pairs of a token by route and exact."""
    points: list[dict[str, float]] = [{"log_d": d, "log_s": s, "lag": lag} for d, s, lag in tokens]
    points += [
        {"log_d": d, "log_s": s, "true_log_d": true_d, "true_log_s": true_s, "lag": lag}
        for (d, s, lag), (true_d, true_s, _) in audited
    ]
    with (
        RunLog.create(path, config) as log,
        Journal(path / JOURNAL) as journal,
    ):
        recorder = Recorder(Outputs(log, NoDisplay()), journal=journal)
        for step in range(1, steps + 1):
            row = {
                "time_s": 2.0 * step,
                "trainer/action_tokens": 100.0,
                "trainer/tokens_with_gradient": 80.0,
                "trainer/update_s": 0.6,
                "old_logps/prepare_s": 0.3,
                "schedule/wait_for_batch_s": 0.1,
                "schedule/staleness_max": 2.0,
                "correction/kl_k3": 0.02,
                "objective/kl_k3": 0.06,
                "policy/kl_behavior_k3": 0.08,
                "completion/tokens_mean": 36.0,
                "rollout/turns_mean": 4.0,
                "rollout/episodes": 2.0,
            }
            if audited:
                row |= {"audit/tokens": 10.0, "audit/logp_error_abs_mean": 0.1}
            recorder.write(step, row)
            recorder.trained(step, points=points, events=())
        if ended:
            log.event("stopped", reason="finished")
    return path


# --- arithmetic ---


def factors(*rows: Row) -> Factors:
    return Factors.of([(*row, float(step)) for step, row in enumerate(rows)])


def test_the_spread_of_both_ratios_is_that_worked_out_by_hand() -> None:
    found = spread(factors((0.3, 0.1, 1), (-0.3, 0.1, 1), (0.3, -0.1, 1), (-0.3, -0.1, 1)))
    assert (found.log_d, found.log_s) == pytest.approx((0.3, 0.1))
    assert found.d_share == pytest.approx(0.9)  # 0.09 / (0.09 + 0.01)
    assert found.correlation == pytest.approx(0.0)
    assert found.d_share_se == pytest.approx(0.0, abs=1e-9), "each step left out gives 0.9"
    uneven = spread(factors((0.3, 0.1, 1), (-0.3, 0.0, 1), (0.1, -0.1, 1), (0.0, -0.2, 1)))
    assert uneven.d_share_se is not None and uneven.d_share_se > 0.01
    constant = spread(factors((0.0, 0.1, 1), (0.0, -0.1, 1)))
    assert (constant.d_share, constant.correlation, constant.d_share_se) == (0.0, None, None)
    assert spread(factors((0.0, 0.0, 0))).d_share is None


@pytest.mark.parametrize(
    ("route", "log_s"),
    [
        ("rollout", (0.6, 0.6, 0.6)),
        ("current_recompute", (0.0, 0.0, 0.0)),
        ("interp_prox_loglinear", (0.0, 0.6, 0.3)),  # alpha is 1 at lag 0, 0 at 1, 1/2 at 2
        ("interp_prox_linear", (0.0, 0.6, 0.6 - math.log((1 + math.exp(0.6)) / 2))),
    ],
)
def test_a_route_that_mixes_mu_and_pi_is_recomputed(route: str, log_s: tuple[float, ...]) -> None:
    true = factors((0.6, 0.0, 0), (0.2, 0.4, 1), (0.1, 0.5, 2))
    found = factors_of_route(configure(route), true)
    assert found.log_s.tolist() == pytest.approx(log_s)
    assert found.log_ratio.tolist() == pytest.approx([0.6] * 3)


def limits_of(config: RunConfig, lengths: Lengths = TOKENS) -> Thresholds:
    return Thresholds.of(config, lengths)


def test_decisions_are_counted_in_both_directions() -> None:
    true = factors((0.0, 0.3, 1), (0.3, 0.0, 1), (-0.2, 0.3, 1), (0.8, 0.0, 1), (0.0, -0.3, 1))
    rows = draw_sequences(true, 1)
    # the band is [0.5, 2] and the clip [0.8, 1.28]
    exact = limits_of(configure()).stopped(true, rows)
    assert exact[:, 0].tolist() == [True, False, True, True, True]
    product = factors_of_route(configure("rollout"), true)
    decided = limits_of(configure("rollout")).stopped(product, rows)
    assert decided[:, 0].tolist() == [True, True, False, True, True]
    changed = difference(exact, decided, effective=5)
    assert (changed.passed, changed.share) == (0.2, 0.4)


def test_ratios_of_sequences_are_those_of_sequences_drawn_from_a_step() -> None:
    true = Factors.of([(0.1, 0.02, 1.0, 1.0)] * 30 + [(-0.1, -0.02, 1.0, 2.0)] * 10)
    drawn = draw_sequences(true, 5)
    assert drawn.shape[1] == 5 and (drawn == draw_sequences(true, 5)).all()
    steps = true.step[drawn]
    assert (steps == steps[:, :1]).all(), "a sequence has tokens of one step"
    assert (steps[:, 0] == 1).mean() == pytest.approx(0.75, abs=0.03)
    narrow = {"objective.unit": "sequence", "objective.clip_low": 0.03, "objective.clip_high": 0.03}
    config = configure(**narrow)
    lengths = Lengths(sequence=5)
    assert not limits_of(config, lengths).clipped(true, drawn).any()  # the mean is 0.02
    product = override(config, {"objective.aggregate": "sum"})
    assert limits_of(product, lengths).clipped(true, drawn).all()  # the sum is 0.1
    by_rollout = factors_of_route(configure("rollout"), true)  # the mean of pi / mu is 0.12
    assert limits_of(configure("rollout", **narrow), lengths).clipped(by_rollout, drawn).all()


def test_a_ratio_is_aggregated_over_the_tokens_of_its_unit() -> None:
    rows = numpy.array([[0.3, -0.1, 0.0, 0.1, 0.2]])
    two = [[True, True, False, False, True]]
    assert Limit(-0.09, 0.09, tokens=2).outside(rows).tolist() == two  # 0.1, 0.05, 0.2
    farthest = Limit(-0.25, 0.25, tokens=2, how="max").outside(rows)
    assert farthest.tolist() == [[True, True, False, False, False]]
    assert Limit(-0.4, 0.4, tokens=5, how="sum").outside(rows).all()  # 0.5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (1, 1)),
        ({"correction.unit": "sequence"}, (40, 1)),
        ({"objective.loss_type": "gspo"}, (1, 40)),
        ({"objective.unit": "turn"}, (1, 8)),
        ({"correction.mode": "truncate"}, (None, 1)),
        ({"objective.loss_type": "kl_penalty"}, (1, None)),
    ],
)
def test_thresholds_are_those_of_the_configuration(
    values: dict[str, Any], expected: tuple[int | None, int | None]
) -> None:
    found = limits_of(configure(**values), Lengths(sequence=40, turn=8))
    assert tuple(limit and limit.tokens for limit in (found.band, found.clip)) == expected


# --- conclusions ---

EQUAL = {"changed/rollout": 0.0004, "changed/rollout_low": 0.0002, "changed/rollout_high": 0.0009}
OTHER = {"changed/rollout": 0.006, "changed/rollout_low": 0.004, "changed/rollout_high": 0.009}
UNSURE = {"changed/rollout": 0.001, "changed/rollout_low": 0.0005, "changed/rollout_high": 0.004}
BY_ROUTE = {"changed_by_route": 0.02, "changed_by_route_low": 0.015, "changed_by_route_high": 0.03}
TIMES = {"step_s": 2.0, "route_s": 0.3, "route_share": 0.15, "scoring_s": 0.3, "wait_s": 0.1}
WAITS = {**TIMES, "wait_s": 0.5}
MANY = {"sample_tokens": 9000.0}
INT4 = {"engine.quantise": "int4"}

CASES: list[tuple[str, str, dict[str, Any], dict[str, float], dict[str, float]]] = [
    # conclusion, route, options, figures with it, figures without it
    ("nothing_yet", "snapshot_old", {}, {"steps": 0.0}, {"steps": 1.0}),
    ("one_ratio_is_enough", "snapshot_old", {}, EQUAL | TIMES, UNSURE | TIMES),
    ("one_ratio_is_enough", "rollout", {}, EQUAL, OTHER),
    ("split_decides", "snapshot_old", {}, OTHER, UNSURE),
    ("split_decides", "rollout", {}, OTHER | TIMES, EQUAL | TIMES),
    ("too_few_tokens", "snapshot_old", {}, UNSURE | MANY, OTHER | MANY),
    ("too_few_tokens", "ewma_prox", {}, UNSURE | MANY, EQUAL | MANY),
    ("parts", "snapshot_old", {}, {"d_variance_share": 0.7}, {}),
    ("removable_discrepancy", "snapshot_old", INT4, {"d_variance_share": 0.07},
     {"d_variance_share": 0.03}),
    ("removable_discrepancy", "rollout", {"engine.dtype": "bfloat16"},
     {"d_variance_share": 0.5}, {}),
    ("removable_discrepancy", "snapshot_old", INT4, {"d_variance_share": 0.02,
     "log_d_abs_p99": 0.5}, {"d_variance_share": 0.9, "log_d_abs_p99": 0.004}),
    ("confounds", "ewma_prox", {}, BY_ROUTE | TIMES, BY_ROUTE | {"changed_by_route_low": 1e-4}),
    ("nearer_route", "ewma_prox", {}, BY_ROUTE | OTHER, BY_ROUTE | {"changed/rollout": 0.02,
     "changed/rollout_low": 0.01, "changed/rollout_high": 0.03}),
    ("large_error", "ewma_prox", {}, {"audit_error": 0.03}, {"audit_error": 0.02}),
    ("not_exact", "snapshot_old", {}, {"audit_error": 0.1, "audit_noise": 1e-3},
     {"audit_error": 5e-3, "audit_noise": 1e-3}),
    ("band_is_random", "snapshot_old", {"correction.low": 0.99, "correction.high": 1.01},
     {"band_share": 0.07, "log_d_abs_p999": 0.06}, {"band_share": 0.001, "log_d_abs_p999": 0.06}),
    ("band_is_random", "snapshot_old", {"correction.low": 0.999, "correction.high": 1.001},
     {"band_share": 0.0, "audit_noise": 1e-3}, {"band_share": 0.0, "audit_noise": 1e-6}),
    ("band_is_random", "snapshot_old", {"correction.unit": "sequence"}, {"kept_share": 0.4},
     {"kept_share": 0.999}),
    ("clip_is_tight", "snapshot_old", {}, {"clip_outside_share": 0.4},
     {"clip_outside_share": 0.02}),
    ("clip_never_acts", "snapshot_old", {}, {"log_s_abs_p999": 0.01, **MANY},
     {"log_s_abs_p999": 0.2, **MANY}),
    ("fitting_thresholds", "snapshot_old", {}, {"log_d_abs_p999": 0.1, "log_s_abs_p99": 0.2}, {}),
    ("equal_rewards", "snapshot_old", {}, {"equal_rewards_share": 0.6},
     {"equal_rewards_share": 0.4}),
    ("no_success", "snapshot_old", {}, {"reward_share": 0.01}, {"reward_share": 0.1}),
    ("cut_off", "snapshot_old", {}, {"cut_off_share": 0.3}, {"cut_off_share": 0.1}),
    ("uneven_ratios", "snapshot_old", {}, {"ratio_ess_share": 0.3}, {"ratio_ess_share": 0.9}),
    ("entropy_lost", "snapshot_old", {}, {"entropy_left": 0.1}, {"entropy_left": 0.9}),
    ("old_replays", "snapshot_old", {"techniques": "replay", "replay.max_age": 16},
     {"replay_clip_share": 0.7}, {"replay_clip_share": 0.1}),
    ("noisy_steps", "snapshot_old", {}, {"signal_share": 0.1}, {"signal_share": 0.6}),
    ("cost", "snapshot_old", {}, WAITS, {}),
    ("not_audited", "rollout", {}, {}, {"steps": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "route", "options", "figures", "others"), CASES)
def test_a_conclusion_needs_figures_that_support_it(
    name: str,
    route: str,
    options: dict[str, Any],
    figures: dict[str, float],
    others: dict[str, float],
) -> None:
    config = configure(route, **options)
    assert name not in advise(others, config=config)
    found = advise(figures, config=config)[name]
    assert found.text.endswith(".") and found.reason
    assert set(found.figures) <= {*FIGURES, *figures}
    if found.options:
        changed = override(config, found.options)
        assert changed != config and not check(changed).refusals
    if found.command:
        assert parse(shlex.split(found.command)[1:]).verb == "train"


def test_symptoms_are_read_off_the_last_half_of_the_steps() -> None:
    rows = [
        {
            "reward/zero_std_group_share": step / 10,
            "completion/truncated_share": 0.2,
            "rollout/episodes": 4.0,
            "policy/entropy_mean": 2.0 if step < 4 else 0.5,
            "outer_step/signal_share": 0.1,
        }
        for step in range(8)
    ]
    found = of_learning(rows)
    assert found == pytest.approx(
        {
            "equal_rewards_share": 0.55,
            "cut_off_share": 0.2,
            "entropy_left": 0.25,
            "signal_share": 0.1,
        }
    )
    advice = advise(found, config=configure())
    assert {"equal_rewards", "entropy_lost", "noisy_steps"} <= advice.keys()
    assert "cut_off" not in advice and "no_success" not in advice
    rate = configure().trainer.lr
    assert advice["noisy_steps"].options == {"trainer.lr": rate / 5}
    assert "k times as many minibatches" in advice["noisy_steps"].reason
    assert of_learning([]) == {}


def test_every_conclusion_has_a_case_and_is_in_the_docs() -> None:
    names = {case[0] for case in CASES}
    assert len(names) == len(RULES)
    page = (DOCS / "advise.md").read_text("utf-8")
    for name in names:
        assert f"`{name}`" in page


def test_exact_routes_are_suggested_where_the_run_has_time_for_them() -> None:
    config = configure("rollout")
    busy = advise(OTHER | TIMES, config=config)["split_decides"].options
    assert busy == {"old_logps.route": "snapshot_old", "correction.mode": "mask_weight"}
    waiting = advise(OTHER | WAITS, config=config)["split_decides"].options
    assert waiting["old_logps.route"] == "eager"
    exact = advise(WAITS, config=configure())["cost"]
    assert exact.options == {"old_logps.route": "eager"}
    assert not advise(TIMES, config=configure())["cost"].options
    assert not advise(WAITS | {"route_share": 0.01}, config=configure())["cost"].options


@pytest.mark.parametrize(
    ("share", "low", "high", "steps"),
    [(0.001, 0.0006, 0.0016, 90), (0.0004, 0.0001, 0.0012, 18), (0.0005, 0.0, 0.002, 36)],
)
def test_a_longer_run_is_long_enough_for_its_interval(
    share: float, low: float, high: float, steps: int
) -> None:
    figures = {"changed/rollout": share, "changed/rollout_low": low, "changed/rollout_high": high}
    limited = configure(minutes=8.0)
    command = advise(figures, config=limited)["too_few_tokens"].command
    again = override(limited, parse(shlex.split(command)[1:]).values)
    assert again.max_steps == steps  # the run has 9
    assert again.minutes == 0, "the time limit of the run would end it before"


def test_one_ratio_is_suggested_with_what_it_saves() -> None:
    found = advise(EQUAL | TIMES, config=configure())["one_ratio_is_enough"]
    assert found.options == {"old_logps.route": "rollout", "correction.mode": "none"}
    assert "at most 15% of a step" in found.text
    waiting = advise(EQUAL | WAITS, config=configure())["one_ratio_is_enough"]
    assert waiting.options and "of a step" not in waiting.text, "the trainer waits in that time"
    weights = configure(**{"correction.mode": "truncate"})
    assert not advise(EQUAL | TIMES, config=weights)["one_ratio_is_enough"].options


def test_where_a_clip_stops_much_a_small_difference_is_small() -> None:
    figures = OTHER | {"stopped_share": 0.5}  # a twentieth is 2.5%, above the interval
    assert "one_ratio_is_enough" in advise(figures, config=configure())
    assert "split_decides" in advise(figures | {"stopped_share": 0.05}, config=configure())


def test_numerical_differences_are_compared_with_the_nearest_threshold() -> None:
    near = math.log(1.003)
    narrow = {"objective.unit": "sequence", "objective.clip_low": 0.5, "objective.clip_high": 0.003}
    figures = OTHER | {"log_d_abs_p99": 0.5, "log_d_unit_sd": 6 * near}
    found = advise(figures, config=configure(**narrow), lengths=Lengths(sequence=40))
    assert "6 times the nearest threshold" in found["split_decides"].reason


def test_percentiles_become_thresholds() -> None:
    tokens = {"log_d_abs_p999": 0.1, "log_s_abs_p99": 0.2}
    found = advise(tokens, config=configure())["fitting_thresholds"].text
    assert "[0.904, 1.11] would drop at most 0.1% of the tokens" in found  # e^-0.1, e^0.1
    assert "[0.81, 1.23] would stop at most 1%" in found
    narrow = advise({"log_d_abs_p999": 1e-5}, config=configure())["fitting_thresholds"].text
    assert "[0.99999, 1.000011] would" in narrow, "float32 engines differ by 1e-5"
    units = {"unit_tokens": 40.0, "log_s_unit_abs_p99": 0.02}
    config = configure(**{"objective.unit": "turn"})
    lengths = Lengths(sequence=40, turn=8)
    found = advise(tokens | units, config=config, lengths=lengths)["fitting_thresholds"].text
    assert "[0.904, 1.11] would drop at most 0.1% of the tokens" in found
    assert "[0.98, 1.021] would stop at most 1% of the turns" in found


def test_a_narrow_band_is_rounded_to_a_wider_one() -> None:
    for far, low, high in ((1e-5, 0.99998, 1.000021), (1e-3, 0.998, 1.0021)):
        wide = math.exp(2 * far)
        found = band_options(1 / wide, wide)
        assert found == {"correction.low": low, "correction.high": high}


def test_a_cause_of_the_discrepancy_is_named_by_the_option_that_removes_it() -> None:
    figures = {"d_variance_share": 0.4}

    def option(is_moe: bool = False, **values: Any) -> Any:
        config = configure(**{"engine.dtype": "float32", **values})
        found = advise(figures, config=config, is_moe=is_moe).get("removable_discrepancy")
        return dict(found.options) if found else None

    assert option() is None
    assert option(**INT4) == {"trainer.quantise": "int4"}
    assert option(**INT4, **{"trainer.quantise": "int4"}) is None
    int8 = {"engine.quantise": "int8", "engine.dtype": "bfloat16"}
    both = {"trainer.quantise": "int8", "engine.dtype": "float32"}
    assert option(**int8) == both, "with a bfloat16 engine the linter calls int8 useless"
    assert option(**{"engine.dtype": "bfloat16"}) == {"engine.dtype": "float32"}
    # the shipped policy is dense, so the linter refuses to replay its routes
    assert option(is_moe=True) is None


def test_a_clip_on_sequences_is_not_judged_by_tokens() -> None:
    config = configure(**{"objective.loss_type": "gspo"})
    figures = {"clip_outside_share": 0.6, "audit_error": 1.0, "log_s_abs_p999": 1e-9, **MANY}
    found = advise(figures, config=config, lengths=Lengths(sequence=40))
    assert not {"clip_is_tight", "clip_never_acts", "large_error"} & found.keys()


# --- run folders ---

STALE: list[Row] = [(0.01, 0.0, 0), (-0.01, 0.0, 0), (0.02, 0.3, 2), (-0.02, -0.1, 2)]


def test_an_exact_route_knows_both_ratios(tmp_path: Path) -> None:
    found = gather_evidence(run_folder(tmp_path / "run", configure(), STALE))
    assert (found.source, found.state, found.run) == ("exact", "finished", "run")
    assert found.figures["sample_tokens"] == 16
    assert found.figures["clip_outside_share"] == 0.25
    assert found.figures["changed/rollout"] == 0
    assert found.figures["changed/current_recompute"] == 0.25  # nothing clips
    assert (found.figures["step_s"], found.figures["route_share"]) == (2.0, 0.15)
    assert found.figures["tokens"] == 400


@pytest.mark.parametrize(
    ("values", "absent"),
    [
        ({"objective.loss_type": "sapo"}, ("clip_outside_share", "changed/")),
        ({"objective.loss_type": "cispo"}, ("clip_outside_share", "changed/")),
        ({"trainer.minibatches_per_batch": 2}, ("changed/current_recompute",)),
    ],
)
def test_decisions_are_compared_only_where_they_are_known(
    tmp_path: Path, values: dict[str, Any], absent: tuple[str, ...]
) -> None:
    usual = gather_evidence(run_folder(tmp_path / "usual", configure(), STALE)).figures
    found = gather_evidence(run_folder(tmp_path / "run", configure(**values), STALE)).figures
    for name in absent:
        assert any(each.startswith(name) for each in usual)
        assert not any(each.startswith(name) for each in found)
    assert "band_share" in found
    assert ("changed/rollout" in found) == ("changed/" not in absent)


def test_an_audit_gives_an_inexact_route_its_exact_ratios(tmp_path: Path) -> None:
    by_route = [(d + s / 2, s / 2, lag) for d, s, lag in STALE]
    pairs = list(zip(by_route, STALE, strict=True))
    config = configure("ewma_prox")
    found = gather_evidence(run_folder(tmp_path / "run", config, 30 * by_route, pairs))
    assert found.source == "audited"
    assert (found.figures["changed_by_route"], found.figures["passed_by_route"]) == (0.25, 0.25)
    assert (found.figures["audit_tokens"], found.figures["audit_error"]) == (40, 0.1)
    names = [conclusion.name for conclusion in conclude(found)]
    assert "confounds" in names and "not_audited" not in names


def test_rollout_without_an_audit_knows_d_from_fresh_tokens(tmp_path: Path) -> None:
    product = [(0.0, d + s, lag) for d, s, lag in STALE]
    found = gather_evidence(run_folder(tmp_path / "few", configure("rollout"), product))
    assert found.source == "none" and "d_variance_share" not in found.figures
    run = run_folder(tmp_path / "run", configure("rollout"), product, steps=60)
    found = gather_evidence(run)
    assert found.source == "lag 0"
    variance = numpy.var([0.01, -0.01, 0.32, -0.12])
    assert found.figures["d_variance_share"] == pytest.approx(0.01**2 / variance)
    found_by_name = {conclusion.name: conclusion for conclusion in conclude(found)}
    assert "lag 0" in found_by_name["not_audited"].reason
    chosen = parse(shlex.split(found_by_name["not_audited"].command)[1:])
    assert chosen.config == run / "config.json" and chosen.values["audit.share"] == 0.5


def test_the_audit_of_a_recording_is_used(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", configure("rollout"))
    columns = {
        name: [row[at] for row in STALE] for at, name in enumerate(("log_d", "log_s", "lag"))
    }
    rows = [{"route": "rollout", "logp_error_abs_mean": 0.015, "discrepancy_leak": 1.0}]
    (run / AUDIT).write_text(dumps({"points": columns, "routes": rows, "tokens": 900}))
    found = gather_evidence(run)
    assert found.source == "replayed"
    assert (found.figures["audit_error"], found.figures["audit_tokens"]) == (0.015, 900)
    assert found.figures["changed_by_route"] == found.figures["changed/rollout"]


@pytest.mark.parametrize(
    ("values", "of_d", "of_s"),
    [
        ({"objective.unit": "sequence"}, 0.1 / 6, 0.2 / 6),  # means of 36 tokens
        ({"objective.unit": "sequence", "objective.aggregate": "sum"}, 0.1 * 6, 0.2 * 6),
        ({"correction.unit": "turn", "correction.low": 0.9, "objective.unit": "sequence",
          "objective.clip_low": 0.5, "objective.clip_high": 1.0}, 0.1 / 3, 0.2 / 3),
    ],
)  # fmt: skip
def test_ratios_of_units_are_aggregated_as_the_nearest_threshold_does(
    tmp_path: Path, values: dict[str, Any], of_d: float, of_s: float
) -> None:
    run = run_folder(tmp_path / "run", configure(**values))
    points = {"log_d": [0.1, -0.1] * 500, "log_s": [0.2, -0.2] * 500, "lag": [1] * 1000}
    (run / AUDIT).write_text(dumps({"points": points}))
    found = gather_evidence(run).figures
    assert found["log_d_unit_sd"] == pytest.approx(of_d, rel=0.1)
    assert found["log_s_unit_sd"] == pytest.approx(of_s, rel=0.1)
    assert ("log_d_unit_abs_p99" in found) == ("correction.unit" in values)
    assert "log_s_unit_abs_p99" in found


def test_without_a_journal_variances_are_estimated(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", configure(), STALE)
    (run / JOURNAL).unlink()
    found = gather_evidence(run)
    assert found.source == "moments" and any("journal" in gap for gap in found.gaps)
    assert found.figures["d_variance_share"] == pytest.approx(0.25)
    assert found.figures["log_s_sd"] == pytest.approx(math.sqrt(0.12))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_route_gets_advice_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in routes():
        run = run_folder(tmp_path / name, configure(name), STALE, ended=False)
        with (run / METRICS).open("a") as file:
            file.write('{"step": 5, "tim')  # a killed run
        before = contents(run)
        with pytest.raises(SystemExit, match="0"):
            main(["advise", str(run)])
        assert contents(run) == before
        text = " ".join(capsys.readouterr().out.split())
        assert name in text and "in progress, or killed" in text


def test_the_figures_are_printed_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", configure(), STALE)
    with pytest.raises(SystemExit, match="0"):
        main(["advise", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["route"], found["exact"], found["source"]) == ("snapshot_old", True, "exact")
    assert found["figures"]["step_s"] == {"value": 2.0, "unit": "s", "about": "time of a step"}
    for conclusion in found["conclusions"]:
        assert set(conclusion["figures"]) <= found["figures"].keys()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ((), "is not a run folder"),
        (("metrics.jsonl",), "has no readable config.json"),
        (("config.json",), "config.json, nonsense"),
    ],
)
def test_a_folder_that_is_not_a_run_gives_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], files: tuple[str, ...], words: str
) -> None:
    for name in files:
        (tmp_path / name).write_text('{"nonsense": {}}\n')
    with pytest.raises(SystemExit, match="2"):
        main(["advise", str(tmp_path)])
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and str(tmp_path) in text
    if files != ("config.json",):
        assert words in text


def test_the_mean_staleness_is_that_of_all_sampled_tokens() -> None:
    """Also of the tokens without a gradient, over which each row has its mean."""
    rows = [
        {
            "schedule/staleness_mean": age,
            "trainer/action_tokens": tokens,
            "trainer/tokens_with_gradient": trained,
        }
        for age, tokens, trained in ((1.0, 300.0, 10.0), (2.0, 100.0, 90.0))
    ]
    assert of_metrics(rows)["staleness_mean"] == 1.25
