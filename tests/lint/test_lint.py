"""Test the linter of recipes.

For every route the page names the policy in each ratio, and "1 by construction" agrees with the
route. Every refusal has a reason, and its first suggested fix removes it. Shipped recipes pass.
`train` refuses before it creates anything.
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from unstale.algorithms.advantages import ESTIMATORS, grpo
from unstale.builders import build_old_logps
from unstale.cli import main, recipe_options, session
from unstale.config import ConfigError, ObjectiveConfig, RunConfig
from unstale.config.options import options, stored_config
from unstale.config.routes import routes
from unstale.durability.run_folder import plain
from unstale.lint import check, page
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.recipes import RECIPES
from unstale.records import Group, ScoredTrajectory, collate
from unstale.testing import episode, tiny_policy


def configured(knobs: str = "", *, recipe: str = "retail") -> RunConfig:
    """Return a recipe's config with options parsed as on the command line."""
    given = ["lint", recipe, *shlex.split(knobs)]
    return recipe_options.configure(main.parse(given))


def shown(config: RunConfig) -> str:
    console = Console(file=StringIO(), width=100)
    console.print(page(check(config)))
    return console.file.getvalue()  # type: ignore[attr-defined]


PROXIES = {
    "rollout": ("mu", "1 by construction", "the whole ratio"),
    "current_recompute": ("pi_now", "numerics and all staleness", "1 by construction"),
    "snapshot_old": ("pi_old", "numerics alone", "learning alone"),
    "old_logit_model": ("pi_old", "numerics alone", "learning alone"),
    "interrupt_sync": ("pi_old", "numerics alone", "learning alone"),
    "eager": ("pi_old", "numerics alone", "learning alone"),
    "eager --old_logps.fallback ewma_prox": (
        "pi_old or ewma",
        "numerics where scored in time",
        "learning where scored in time",
    ),
    "interp_prox_loglinear": ("mu^(1-a) pi^a", "(pi / mu)^a", "(pi / mu)^(1-a)"),
    "interp_prox_loglinear --old_logps.alpha 0.25": (
        "mu^0.75 pi^0.25",
        "(pi / mu)^0.25",
        "(pi / mu)^0.75",
    ),
    "interp_prox_linear": ("(1-a) mu + a pi", "a part of pi / mu", "the rest of pi / mu"),
    "interp_prox_linear --old_logps.alpha 0": (
        "1 mu + 0 pi",
        "1 by construction",
        "the whole ratio",
    ),
    "ewma_prox": ("ewma", "numerics, and staleness as far as", "learning since the average"),
    "ppo_ewma_async": ("ewma", "numerics, and staleness as far as", "learning since the average"),
    "queue_of_two": ("pi_last", "numerics at lag 1", "learning since the version before"),
}


@pytest.mark.parametrize("route", PROXIES)
def test_the_page_names_the_policies_in_d_and_s_of_each_route(route: str) -> None:
    proxy, meaning_of_d, meaning_of_s = PROXIES[route]
    verdict = check(configured(f"--old_logps.route {route}"))
    d, s = verdict.factors
    assert (d.name, d.numerator, d.denominator) == ("D", proxy, "mu")
    assert (s.name, s.numerator, s.denominator) == ("S", "pi", proxy)
    assert d.meaning.startswith(meaning_of_d) and s.meaning.startswith(meaning_of_s)
    assert {proxy, "mu", "pi"} <= verdict.facts.keys(), "each of them is explained"


def test_every_route_is_in_the_table() -> None:
    assert {name.split()[0] for name in PROXIES} == set(routes())


EXACT = ("snapshot_old", "old_logit_model", "interrupt_sync", "eager")


@pytest.mark.parametrize("route", list(routes()))
def test_the_page_says_if_a_route_is_exact_and_what_it_costs(route: str) -> None:
    facts = check(configured(f"--old_logps.route {route}")).facts
    assert facts["exact"].startswith("yes") == (route in EXACT)
    free = route in ("rollout", "interp_prox_loglinear", "interp_prox_linear")
    assert facts["costs"].startswith("nothing") == free


FRESH = "--old_logps.fresh behavior"
BY_CONSTRUCTION = {
    "--old_logps.route rollout": "D",
    "--old_logps.route current_recompute": "S",
    "--old_logps.route interp_prox_loglinear --old_logps.alpha 0": "D",
    "--old_logps.route interp_prox_linear --old_logps.alpha 1": "S",
    "--old_logps.route interp_prox_loglinear --schedule.max_staleness 0": "S",
    f"--old_logps.route interp_prox_linear --schedule.max_staleness 0 {FRESH}": "D",
    f"--old_logps.route interp_prox_loglinear --schedule.max_staleness 1 {FRESH}": "D",
    "--old_logps.route interp_prox_loglinear --schedule.max_staleness 1": "",
    f"--old_logps.route interp_prox_loglinear --schedule.max_staleness 2 {FRESH}": "",
    "--old_logps.route interp_prox_linear --old_logps.alpha 0.5": "",
}


@pytest.mark.parametrize("knobs", BY_CONSTRUCTION)
def test_a_ratio_called_1_by_construction_is_1_in_the_route_itself(knobs: str) -> None:
    config, policy = configured(knobs), tiny_policy()
    policy.version = 5
    lags = range(config.schedule.staleness_bound + 1)
    batch = collate([episode(lag, [3, (4, 5 - lag)]) for lag in lags])
    scorer = LocalScorer(policy, 1.0, 64)
    now = scorer.score(batch, batch.sampled).logp
    old_logp, _ = build_old_logps(config.old_logps, scorer).logps(batch, now)
    told = "".join(
        factor.name for factor in check(config).factors if factor.meaning == "1 by construction"
    )
    own = batch.sampled
    found = {
        "D": torch.equal(old_logp[own], batch.behavior_logp[own]),
        "S": torch.equal(old_logp[own], now[own]),
    }
    assert (
        told == BY_CONSTRUCTION[knobs] == "".join(name for name, is_one in found.items() if is_one)
    )


_RESET = "--old_logps.route ppo_ewma_async --old_logps.reset_below 0.5"
REFUSED = [
    (
        "--techniques majority --selection.pool 64 --selection.test_time true",
        "majority at task.env retail",
    ),
    ("--deterministic true --minutes 3", "a deterministic run that ends by the clock"),
    ("--old_logps.route current_recompute", "S is identically 1, ppo_clip can never act"),
    (
        "--old_logps.route current_recompute --objective.loss_type dual_clip",
        "dual_clip can never act",
    ),
    ("--old_logps.route current_recompute --objective.loss_type gspo", "gspo can never act"),
    ("--old_logps.route current_recompute --objective.loss_type cispo", "cispo can never act"),
    (
        "--old_logps.route current_recompute --objective.loss_type kl_penalty",
        "kl_penalty can never act",
    ),
    ("--old_logps.route interp_prox_loglinear --old_logps.alpha 1", "S is identically 1"),
    (
        "--old_logps.route interp_prox_linear --old_logps.alpha 1 --trainer.minibatches_per_batch "
        "4",
        "S is identically 1",
    ),
    ("--old_logps.route interp_prox_linear --schedule.max_staleness 0", "S is identically 1"),
    (
        "--old_logps.route rollout --correction.mode mask",
        "D is identically 1, mask can never act",
    ),
    (
        "--old_logps.route rollout --correction.mode none --correction.token_veto_threshold 0.1",
        "D is identically 1, token_veto_threshold can never act",
    ),
    ("--old_logps.route current_recompute --objective.loss_type sapo", "sapo can never act"),
    ("--old_logps.route current_recompute --objective.loss_type dppo", "dppo can never act"),
    ("--objective.loss_type dppo --objective.unit turn", "dppo cannot take S as the geometric"),
    ("--objective.loss_type vespo --objective.unit sequence", "vespo cannot take S as the geo"),
    ("--old_logps.route current_recompute --objective.loss_type dro", "dro can never act"),
    (
        "--old_logps.route interp_prox_loglinear --correction.normalize true",
        "the mean weight of the batch is not known in time",
    ),
    ("--old_logps.route rollout --correction.mode clamp", "a weight on D (clamp) beside a loss"),
    ("--old_logps.route rollout --correction.mode kpop", "a weight on D (kpop) beside a loss"),
    ("--old_logps.route rollout --correction.mode k3_mask", "D is identically 1, k3_mask can"),
    ("--old_logps.route rollout", "a weight on D (mask_weight) beside a loss"),
    ("--old_logps.route rollout --correction.mode truncate", "a weight on D (truncate) beside"),
    (
        "--old_logps.route interp_prox_loglinear --old_logps.alpha 0",
        "beside a loss that is anchored on mu",
    ),
    *(
        (
            f"--old_logps.route {route} --correction.mode none",
            "D is neither bounded nor weighted",
        )
        for route in (
            "current_recompute --old_logps.baseline true",
            "current_recompute --trainer.minibatches_per_batch 2",
            "interp_prox_loglinear",
            "interp_prox_linear --old_logps.alpha 0.5",
            "ewma_prox",
            "ewma_prox --schedule.max_staleness 0",
            "ppo_ewma_async",
            "eager --old_logps.fallback ewma_prox",
        )
    ),
    (
        "--old_logps.route ewma_prox --correction.mode none --correction.token_veto_threshold 0.1",
        "not bounded from above",
    ),
    *(
        (f"--old_logps.route {route} --engine.keep_cache true", "the engine keeps its cache")
        for route in (*EXACT, "eager --old_logps.fallback ewma_prox")
    ),
    (
        "--schedule.max_staleness 0 --schedule.lookahead_window 4",
        "a window of 4 positions has nothing to look ahead at",
    ),
    (
        "--old_logps.route interp_prox_loglinear --objective.loss_aggregation kept",
        "is not known in time",
    ),
    (f"{_RESET} --correction.mode truncate", "the average can never be reset"),
    ("--techniques distil --distil.teacher start", "start with distil.advantage_coef 0"),
    ("--engine.max_context 2049", "2049, but the policy has 2048 positions"),
    (
        "--objective.loss_type gspo --objective.unit turn",
        "gspo cannot take S as the geometric mean over a turn",
    ),
    (
        "--objective.loss_type gspo --objective.unit sequence --objective.aggregate sum",
        "as the product over a sequence",
    ),
]


@pytest.mark.parametrize("knobs, says", REFUSED)
def test_a_wrong_combination_is_refused_and_the_first_fix_lifts_it(knobs: str, says: str) -> None:
    (refusal,) = check(configured(knobs)).refusals
    assert says in refusal.wrong and refusal.why
    mended = configured(f"{knobs} {refusal.fix.split(', or ')[0]}")
    assert not check(mended).refusals


@pytest.mark.parametrize("text_config", ["null", "3", "{}"])
def test_a_config_json_may_have_a_text_config_without_options(
    tmp_path: Path, text_config: str
) -> None:
    """The policy is refused when it is loaded, if it is wrong."""
    for text in (f'{{"max_position_embeddings": 64, "text_config": {text_config}}}', "[1]"):
        (tmp_path / "config.json").write_text(text)
        found = check(configured(f"--model {tmp_path} --engine.max_context 65")).refusals
        assert [each.wrong for each in found if "65" in each.wrong] == [
            "engine.max_context = 65, but the policy has 64 positions"
        ] * (text[0] == "{")


def test_group_size_1_is_refused_only_if_the_estimator_gives_0_to_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused is only one that gives 0 to each. It may need rewards of the user's environment."""

    def to_all(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        every = [(g.number, each) for g in groups for each in g.trajectories]
        rewards = {(number, each.episode): each.reward for number, each in every}
        mean = sum(rewards.values()) / len(rewards)
        return [
            ScoredTrajectory(each, (rewards[number, each.episode] - mean,))
            for number, each in every
        ]

    def by_format(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        assert all(each.rewards["format"] for group in groups for each in group.trajectories)
        return grpo(groups)

    single = configured("--schedule.group_size 1")
    assert "grpo gives every episode the advantage 0" in check(single).refusals[0].wrong
    for estimate in (to_all, by_format):
        monkeypatch.setitem(ESTIMATORS, "grpo", estimate)
        assert not check(single).refusals


def test_the_support_of_mu_is_told() -> None:
    assert "the whole vocabulary" in check(configured()).facts["mu"]
    mu = check(configured("--engine.top_p 0.9 --engine.top_k 50")).facts["mu"]
    assert "the kept set of each token (engine.top_p = 0.9, engine.top_k = 50)" in mu


def test_the_sampling_of_evaluations_is_named_if_it_is_not_that_of_training() -> None:
    evaluation = check(configured("--eval.temperature 0.6 --eval.top_p 0.95")).facts["evaluation"]
    assert "sampled with eval.temperature = 0.6, eval.top_p = 0.95" in evaluation
    assert "evaluation" not in check(configured()).facts


ALLOWED = [
    "--old_logps.route current_recompute --trainer.minibatches_per_batch 2",
    "--old_logps.route current_recompute --old_logps.baseline true",
    "--old_logps.route current_recompute --objective.loss_type none",
    "--old_logps.route rollout --correction.mode none",
    "--old_logps.route rollout --old_logps.baseline true",
    "--old_logps.route interp_prox_loglinear --old_logps.alpha 1 --old_logps.baseline true",
    "--old_logps.route current_recompute --schedule.max_staleness 0 "
    "--trainer.minibatches_per_batch 2 --correction.mode none",
    "--correction.mode none",
    "--engine.bitwise true --engine.dtype float32 --trainer.dtype float32 --eval.top_p 0.95",
    "--schedule.max_staleness 2 --schedule.lookahead_window 400",
    "--old_logps.route ewma_prox --engine.keep_cache true",
    f"{_RESET} --correction.mode truncate --correction.token_veto_threshold 0.1",
]


@pytest.mark.parametrize("knobs", ALLOWED)
def test_combinations_close_to_refused_ones_are_accepted(knobs: str) -> None:
    assert not check(configured(knobs)).refusals


NEAREST = "--trainer.rounding nearest --trainer.lr 1e-6"


@pytest.mark.parametrize(("stored", "is_lost"), [("bfloat16", True), ("float32", False)])
def test_lost_updates_are_warned_of_only_if_most_weights_are_bfloat16(
    tmp_path: Path, stored: str, is_lost: bool
) -> None:
    other = torch.float32 if stored == "bfloat16" else torch.bfloat16
    weights = {
        "large": torch.zeros(100, dtype=getattr(torch, stored)),
        "bias": torch.zeros(4, dtype=other),
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = check(configured(f"--model {tmp_path} {NEAREST} --trainer.dtype bfloat16"))
    assert is_lost == any("rounded to nearest" in each.wrong for each in found.warnings)


NARROW = "--correction.low 0.995 --correction.high 1.005"
GSPO = "--objective.loss_type gspo --objective.clip_low 3e-4 --objective.clip_high 4e-4"
ROUNDED = "--engine.quantise int4"
WARNED = [
    ("--objective.loss_type gspo", "gspo with the band of a single token"),
    ("--objective.loss_type none", "nothing bounds S"),
    ("--objective.loss_type kl_penalty --objective.kl_penalty 0", "nothing bounds S"),
    (
        "--techniques m2po --objective.loss_type none --old_logps.route snapshot_old "
        "--m2po.of discrepancy",
        "nothing bounds S",
    ),
    (
        "--old_logps.route ewma_prox --schedule.max_staleness 6",
        "the average is 1 versions old, the tokens 0 to 6",
    ),
    (
        "--old_logps.route ppo_ewma_async --old_logps.beta 0.9",
        "the average is 9 versions old, the tokens 0 to 2",
    ),
    ("--old_logps.route ppo_ewma_async --engine.keep_cache true", "the engine keeps its cache"),
    (f"--trainer.dtype bfloat16 --correction.unit sequence {NARROW}", "D at 0.005"),
    (f"--trainer.dtype bfloat16 {GSPO}", "S at 0.0004"),
    (NARROW, "narrower than the noise"),
    (f"{NARROW} --correction.unit sequence --correction.aggregate max", "D at 0.005"),
    (
        f"--model nobody/unknown --trainer.dtype bfloat16 {NEAREST}",
        "a learning rate of 1e-06 with weights that are rounded to nearest in bfloat16",
    ),
    (
        f"--model nobody/unknown --trainer.dtype float16 {NEAREST}",
        "a learning rate of 1e-06 with weights that are rounded to nearest in float16",
    ),
    ("--trainer.lora_rank 8 --trainer.lr 1e-5", "adapters at a learning rate of 1e-05"),
    (f"{ROUNDED} --correction.high 1.2", "narrower than the noise"),
    (f"{ROUNDED} --correction.token_veto_threshold 0.2", "drops sequences for mere noise"),
    (
        f"{ROUNDED} --old_logps.route rollout --correction.mode none",
        "the rounding of the engine",
    ),
    ("--engine.quantise fp8 --trainer.quantise fp8", "removes little"),
    ("--task.level 2", "the policy base at level 2"),
    ("--techniques ess_lr --trainer.lr 5e-5", "ess_lr at a learning rate of 5e-05"),
    ("--techniques minpro", "minpro with ppo_clip"),
    (
        "--techniques token_entropy_advantage --token_entropy_advantage.a 0.5",
        "token_entropy_advantage.a is 0.5",
    ),
    (
        "--techniques 'tree tree_advantage' --tree.branch peaks --tree_advantage.rule pooled",
        "tree_advantage.rule pooled and tree.branch peaks",
    ),
    (
        "--techniques 'tree tree_advantage' --tree.branch none --tree.prune mixed --tree.spare 0",
        "tree.spare 0",
    ),
    (
        "--techniques episode_filter --episode_filter.rule contrast --advantage.estimator "
        "reinforce_batch --advantage.group_baseline false",
        "episode_filter.rule is contrast",
    ),
    ("--techniques allocate", "allocate.gain dars_et with advantage.estimator"),
    (
        "--techniques 'allocate baseline' --allocate.gain dars_hw --baseline.centre loo",
        "allocate.gain dars_hw with baseline.centre loo",
    ),
    (
        "--techniques 'truncated baseline' --schedule.group_size 9 --baseline.centre median",
        "baseline.centre median with truncated",
    ),
    (
        "--techniques 'allocate reward_channels tool_bonus'",
        "allocate.gain dars_et with reward_channels",
    ),
    (
        "--techniques 'allocate baseline' --allocate.gain v05_risk --selection.pool 9 "
        "--baseline.leave_out true",
        "allocate.gain v05_risk with baseline.centre shrink",
    ),
    (
        "--techniques 'allocate episode_filter' --advantage.estimator rloo_first",
        "episode_filter with allocate",
    ),
    ("--techniques 'limits truncated'", "limits with truncated"),
    (
        "--techniques segments --segments.table 64:4:2 --segments.max_concurrent_episodes 9999",
        "segments.max_concurrent_episodes is 9999",
    ),
    (
        "--techniques replay --replay.rule failed --selection.pool 256",
        "replay.rule is failed, and a task comes again after 16 steps",
    ),
    ("--techniques novelty --novelty.success_at 2", "novelty.success_at is 2"),
    (
        "--techniques 'difficulty_bin_weights bin_sizes baseline' --selection.pool 64 "
        "--difficulty_bin_weights.success_at 3 --bin_sizes.success_at 2",
        "difficulty_bin_weights.success_at is 3, bin_sizes.success_at is 2",
    ),
    (
        "--techniques 'difficulty_bin_weights baseline' --selection.pool 64 "
        "--baseline.reward_max 0.5",
        "difficulty_bin_weights.success_at is 1",
    ),
]


@pytest.mark.parametrize("knobs, says", WARNED)
def test_what_is_likely_a_mistake_is_a_warning(knobs: str, says: str) -> None:
    verdict = check(configured(knobs))
    assert not verdict.refusals
    assert says in " ".join(warning.wrong for warning in verdict.warnings)


@pytest.mark.parametrize(
    "recipe, knobs, fix",
    [
        ("airline", "--model base --task.level 1", "--model base-desks"),
        ("airline", "--model base", "--model base-desks --task.level 1"),
        ("airline", "--model base-desks", "--task.level 1"),
        ("desks_small", "--model base --task.desks retail,telecom", "--model base-desks"),
        ("desks_small", "--model base --task.desks retail", ""),
        ("desks_small", "", ""),
        ("airline", "", ""),
        ("calculator", "", ""),
    ],
)
def test_a_small_policy_at_a_desk_that_it_did_not_practise_is_a_warning(
    recipe: str, knobs: str, fix: str
) -> None:
    warnings = check(configured(knobs, recipe=recipe)).warnings
    assert [each.fix for each in warnings if "the policy base" in each.wrong] == [fix] * bool(fix)


@pytest.mark.parametrize("centre", ["shrink", "prior"])
def test_allocate_with_v05_risk_and_its_baseline_gives_no_warning(centre: str) -> None:
    names = "--techniques 'allocate baseline' --allocate.gain v05_risk --selection.pool 9"
    verdict = check(configured(f"{names} --baseline.centre {centre}"))
    assert not [each for each in verdict.warnings if "allocate" in each.wrong]


def test_thresholds_above_the_noise_are_nothing_to_warn_of() -> None:
    assert not check(configured(f"{NARROW} --correction.unit sequence")).warnings, (
        "a mean averages it out"
    )
    assert not check(configured(f"{NARROW} --engine.dtype float32")).warnings
    assert not check(configured("--trainer.dtype bfloat16")).warnings
    assert not check(configured(f"{GSPO} --objective.loss_aggregation sequence_mean")).warnings


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_passes_without_a_warning(name: str) -> None:
    """But for `hard_tasks`, which imitates right replies and is told so."""
    verdict = check(RECIPES[name]())
    imitates = ["objective.placed anchor"] if name == "hard_tasks" else []
    assert not verdict.refusals and [each.wrong for each in verdict.warnings] == imitates
    assert verdict.recipe == name


def test_there_is_a_recipe_for_every_route_and_only_the_route_differs() -> None:
    made = {route: RECIPES[f"route_{route}"]() for route in list(routes())}
    shared = {
        (
            config.task,
            config.rollout,
            config.engine,
            config.schedule,
            config.advantage,
            config.objective,
            config.trainer,
            config.audit,
            config.eval,
            config.max_steps,
            config.minutes,
        )
        for config in made.values()
    }
    assert len(shared) == 1
    assert [config.old_logps.route for config in made.values()] == list(made)
    odd = {
        route
        for route, config in made.items()
        if config.correction != RunConfig(recipe="").correction
    }
    assert odd == {"rollout"}, "whose D is 1: it has none to control"


def test_bounds_and_versions_are_told_with_their_numbers() -> None:
    knobs = (
        "--schedule.max_staleness 3 --schedule.lookahead_window 20 --trainer.minibatches_per_batch "
        "2 --correction.unit turn --correction.token_veto_threshold 0.01 "
        "--objective.loss_type dual_clip"
    )
    verdict = check(configured(knobs))
    d, s = verdict.factors
    assert d.bound == (
        "mask_weight: a weight inside [0.5, 2], dropped outside, geometric mean over a turn; "
        "a sequence with a token under 0.01 is dropped"
    )
    assert s.bound.startswith(
        "dual_clip: no gradient for moving further outside [0.8, 1.28], per token; where A < 0"
    )
    assert verdict.facts["versions"] == (
        "a token is at most 5 versions old when its batch is taken (max_staleness 3, and 2 for a "
        "window of 20); an episode may have tokens of 6 versions; in optimizer steps, a token is "
        "at most 11 old"
    )
    assert verdict.facts["unbounded"] == "nothing"


@pytest.mark.parametrize("of", ["whole", "staleness"])
def test_the_mask_of_m2po_bounds_s(of: str) -> None:
    route = "--old_logps.route snapshot_old --objective.loss_type none"
    verdict = check(configured(f"{route} --techniques m2po --m2po.of {of}"))
    assert verdict.factors[1].bound == "nothing; changed by m2po (see techniques)"
    assert verdict.facts["unbounded"] == "nothing"
    assert not [each for each in verdict.warnings if "bounds S" in each.wrong]
    without = check(configured(route))
    assert without.factors[1].bound == "nothing" and without.facts["unbounded"] == "S"


@pytest.mark.parametrize("kind", ["sapo", "dro", "kl_penalty", "none"])
def test_limits_of_a_clip_are_refused_where_nothing_clips(kind: str) -> None:
    for name in ("clip_low", "clip_high"):
        with pytest.raises(ConfigError, match=f"objective.{name} is an option of .*ppo_clip"):
            configured(f"--objective.loss_type {kind} --objective.{name} 0.1")


def test_bounds_of_every_control_and_objective_are_told() -> None:
    knobs = (
        "--correction.mode clamp --correction.normalize true --correction.unit sequence "
        "--correction.aggregate max --objective.loss_type sapo --objective.tau_neg 2 "
        "--objective.ratio_cap 5"
    )
    d, s = check(configured(knobs)).factors
    assert d.bound == (
        "clamp: a weight held within [0.5, 2], the ratio farthest from 1 over a sequence; "
        "divided by the mean weight of the batch"
    )
    assert s.bound == (
        "sapo: a gradient that fades as S leaves 1 (tau 1 where A > 0, else 2), per token; "
        "pi / mu at most 5"
    )
    _, s = check(configured("--objective.opsm_threshold 0.1")).factors
    assert s.bound.endswith(
        "where A < 0 and the mean of log(mu / pi) over the sequence is above 0.1"
    )
    modes = {
        "kpop": "kpop: a weight, dropped where the binary KL is above 0.1, per token",
        "k3_mask": "k3_mask: dropped where D - 1 - log D is above 0.1, per token",
    }
    for mode, words in modes.items():
        assert check(configured(f"--correction.mode {mode}")).factors[0].bound == words
    facts = check(configured("--objective.loss_aggregation sequence_mean")).facts
    assert facts["loss"].endswith("then over sequences: it trains on reward / length")
    _, s = check(configured("--objective.loss_type dro --objective.dro_beta 0.1")).factors
    assert s.bound == "dro: pulled back by 0.05 (log S)^2, per token; no weight S"


def test_an_option_that_the_choice_does_not_read_is_refused() -> None:
    says = r"correction\.normalize is an option of truncate, clamp, mask_weight, kpop; .* is mask"
    with pytest.raises(ConfigError, match=says):
        configured("--correction.mode mask --correction.normalize true")
    with pytest.raises(ConfigError, match=r"objective\.tau_pos is an option of sapo"):
        configured("--objective.tau_pos 2")


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ("--objective.dual_clip 2", "objective.dual_clip is an option of dual_clip; "),
        ("--objective.kl_penalty 2", "objective.kl_penalty is an option of kl_penalty; "),
        (
            "--objective.constant 500",
            "objective.constant = 500.0 is used only with objective.loss_aggregation = constant",
        ),
        (
            "--correction.mode none --correction.low 0.9",
            "correction.low is an option of mask, clamp, mask_weight; correction.mode is none",
        ),
        (
            "--correction.mode none --correction.high 3",
            "correction.high is an option of mask, truncate, clamp, mask_weight; ",
        ),
        (
            "--endpoint.format_retries 5",
            "endpoint.format_retries = 5 is used only with endpoint.lenient = true",
        ),
        (
            "--selection.candidates 9",
            "selection.candidates = 9 is used only with selection.pool > 0",
        ),
    ],
)
def test_an_option_that_nothing_reads_is_refused(knobs: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        configured(knobs)
    option = options()[knobs.split()[-2].removeprefix("--")]
    default = {each.name: each.default for each in fields(option.owner)}[option.field]
    configured(f"{knobs.rpartition(' ')[0]} {default}")


def test_an_option_of_the_recipe_that_a_new_choice_does_not_read_is_reset() -> None:
    decoupled = configured("", recipe="areal_decoupled")
    assert (decoupled.correction.low, decoupled.correction.high) == (0.0, 5.0)
    changed = configured("--correction.mode none", recipe="areal_decoupled").correction
    assert (changed.low, changed.high) == (0.5, 2.0)
    truncated = configured("--correction.mode truncate", recipe="areal_decoupled").correction
    assert (truncated.low, truncated.high) == (0.5, 5.0)
    constant = ObjectiveConfig(loss_aggregation="constant", constant=5.0)
    assert constant.with_options(loss_aggregation="kept").constant == 1000.0


def test_a_run_folder_with_an_option_that_nothing_reads_can_be_read() -> None:
    stored = plain(configured("--correction.mode none"))
    stored["correction"]["low"] = 0.9
    stored["selection"]["candidates"] = 9
    assert stored_config(stored) == configured("--correction.mode none")


@pytest.mark.parametrize(
    "knobs, loose",
    [
        ("--correction.mode none", "D; S from above where A < 0"),
        ("--objective.loss_type none", "S"),
        ("--objective.loss_type kl_penalty", "S is pulled back, not cut"),
        ("--objective.loss_type cispo", "nothing"),
        ("--objective.loss_type sapo", "nothing"),
        ("--objective.loss_type dppo", "S from above where A < 0"),
        ("--objective.loss_type drpo", "S from above where A < 0"),
        ("--objective.loss_type vaco", "S from above where A < 0"),
        ("--objective.loss_type vespo", "nothing"),
        ("--objective.loss_type dppo --objective.ratio_cap 20", "nothing"),
        ("--objective.loss_type dro", "S is pulled back, not cut"),
        ("--objective.ratio_cap 3", "nothing"),
        ("--objective.ratio_cap 3 --correction.mode mask", "S from above where A < 0"),
        ("--old_logps.route current_recompute --old_logps.baseline true", "nothing"),
    ],
)
def test_the_page_names_the_ratios_that_nothing_bounds(knobs: str, loose: str) -> None:
    assert check(configured(knobs)).facts["unbounded"].startswith(loose)


def test_the_page_fits_100_columns_and_shows_brackets_as_they_are() -> None:
    text = shown(configured("--old_logps.route current_recompute"))
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.replace("│", " ").split())
    assert "[0.5," in words
    assert "S is identically 1" in words and "--trainer.minibatches_per_batch 2" in words
    assert shown(configured()).endswith("no problem found\n")
    assert shown(configured("--trainer.lr 10")).endswith("accepted, with warnings\n")


def test_a_missing_model_is_named_with_what_train_will_do() -> None:
    assert "policy" not in check(configured()).facts
    missing = check(configured("--model models/nope")).facts["policy"]
    assert missing.startswith("models/nope is no model folder here")
    assert missing.endswith("unstale train refuses it")
    words = "--model no-such/model --model_download"
    assert check(configured(words)).facts["policy"].endswith("unstale train downloads it")
    assert "reward" in check(configured()).facts["not read"]


def test_train_refuses_before_anything_is_made(tmp_path: Path) -> None:
    config = configured(
        "--old_logps.route rollout --schedule.max_staleness 0 --schedule.lookahead_window 2 "
        f"--runs {tmp_path}/runs"
    )
    with pytest.raises(ConfigError) as refusal:
        session.train(config, console=Console(file=StringIO()))
    lines = str(refusal.value).splitlines()
    assert (
        len(lines) == 2
        and "beside a loss that is anchored on mu" in lines[0]
        and "nothing to look ahead at" in lines[1]
    )
    assert not (tmp_path / "runs").exists()


def test_old_logps_baseline_does_not_lift_the_refusal_of_keep_cache() -> None:
    kept = configured("--old_logps.baseline true --engine.keep_cache true")
    assert len(check(kept).refusals) == 1


@pytest.mark.parametrize(
    ("fallback", "option"),
    [("snapshot_old", "beta 0.3"), ("interrupt_sync", "placement own")],
)
def test_an_option_that_the_fallback_does_not_read_is_refused_by_the_name_of_both(
    fallback: str, option: str
) -> None:
    with pytest.raises(ConfigError, match=f"old_logps.route is eager with the fallback {fallback}"):
        configured(f"--old_logps.route eager --old_logps.fallback {fallback} --old_logps.{option}")
