"""The linter's answers to a table of configurations: `retail` with other options.

Every setting with which a run cannot learn, or learns something else than it seems to, is refused
or warned of. Every sound one is silent. Every fix that a finding names removes it.
"""

import re
from functools import cache

import pytest

from tests.lint.test_lint import ALLOWED, REFUSED, WARNED, configured
from unstale.config import ConfigError
from unstale.config.techniques import techniques
from unstale.lint import check, critic, stream
from unstale.lint.finding import Rule, find
from unstale.lint.rules import REFUSALS, WARNINGS
from unstale.recipes import RECIPES

SILENT = (
    "--techniques outer_step --outer_step.lowest 1 --trainer.lr 5e-5",
    "--correction.low 0.8 --correction.high 1.28",
    "--engine.temperature 0.01",
    "--engine.temperature 50",
    "--old_logps.route ppo_ewma_async --schedule.max_staleness 0",
    "--schedule.max_staleness 0",
    "--schedule.max_staleness 0 --old_logps.route old_logit_model",
    "--schedule.max_staleness 0 --old_logps.route snapshot_old",
    "--schedule.group_size 2",
    "--objective.kl_coef 100",
    "--trainer.lora_rank 8",
    "--trainer.lora_rank 8 --trainer.lr 2e-3 --old_logps.route ewma_prox",
    "--trainer.minibatches_per_batch 4 --old_logps.route interrupt_sync",
    "--objective.clip_high 1e6",
    "--engine.max_context 16",
    "--engine.max_completion_tokens 5000",
    "--correction.mode mask --correction.unit sequence --correction.aggregate sum",
    "--correction.mode truncate --correction.high inf",
    "--objective.loss_type dual_clip --objective.dual_clip 1.1",
    "--engine.max_running 1",
    "--trainer.weight_decay 10",
    "--old_logps.route ppo_ewma_async --old_logps.reset_below 0.99",
    "--advantage.estimator dr_grpo",
    "--objective.loss_aggregation constant --objective.constant 1",
    "--objective.entropy_coef 10",
    "--rollout.max_turns 1 --advantage.estimator turn_level",
)
HEARD = (
    "--objective.loss_type gspo --objective.clip_low 3e-4 --objective.clip_high 4e-4",
    "--objective.unit sequence --objective.aggregate sum",
    "--objective.unit sequence",
    "--schedule.group_size 1",
    "--schedule.group_size 1 --advantage.estimator rloo",
    "--correction.token_veto_threshold 1.0",
    "--correction.token_veto_threshold 0.99",
    "--correction.token_veto_threshold 0.9 --correction.mode none",
    "--objective.clip_low 0 --objective.clip_high 0",
    "--schedule.lookahead_window 100000",
    "--trainer.lr 10",
    "--trainer.lr inf",
    "--trainer.warmup_steps 10000",
    "--old_logps.route interp_prox_loglinear --schedule.max_staleness 6",
)
WARNING = (
    "--objective.placed anchor",
    "--objective.loss_type gspo",
    "--old_logps.route ewma_prox --old_logps.beta 0.9999",
    "--old_logps.route ewma_prox --old_logps.beta 0",
    "--old_logps.route ppo_ewma_async --old_logps.beta 0",
    "--correction.low 0.995 --correction.high 1.005",
    "--trainer.dtype bfloat16 --engine.dtype float32 --objective.clip_low 0.01 "
    "--objective.clip_high 0.01",
    "--old_logps.route eager --old_logps.fallback ewma_prox --schedule.max_staleness 0",
    "--objective.loss_type kl_penalty --objective.kl_penalty 0",
    "--objective.loss_type none",
)
REFUSED_TABLE = (
    "--old_logps.route current_recompute",
    "--old_logps.route current_recompute --old_logps.baseline true --correction.mode none",
    "--old_logps.route current_recompute --trainer.minibatches_per_batch 2 --correction.mode none",
    "--engine.keep_cache true",
    "--engine.keep_cache true --old_logps.route eager",
    "--engine.keep_cache true --schedule.max_staleness 0",
    "--old_logps.route ewma_prox --old_logps.beta 0 --correction.mode none",
    "--old_logps.route rollout --correction.mode truncate",
    "--old_logps.route rollout",
    "--old_logps.route eager --old_logps.fallback ewma_prox --correction.mode none",
    "--old_logps.route interp_prox_loglinear --old_logps.alpha 1",
    "--old_logps.route interp_prox_linear --schedule.max_staleness 1 --old_logps.fresh behavior",
    "--old_logps.route rollout --correction.mode none --correction.token_veto_threshold 0.01",
    "--objective.loss_type gspo --objective.unit turn",
)
CONFIG_ERROR = (
    "--engine.top_p 0.95 --engine.bitwise true",
    "--old_logps.route ewma_prox --old_logps.beta 1",
    "--objective.kl_coef -0.1",
    "--objective.clip_low 1.5",
    "--trainer.lr 0",
    "--trainer.lr -1e-4",
    "--trainer.lr nan",
    "--correction.high 0.9",
    "--trainer.minibatches_per_batch 1000",
    "--audit.share 1.5",
    "--deterministic true --engine.backend sglang",
)

HEARD += (
    "--schedule.group_size 1 --advantage.estimator turn_level --advantage.discount 0.9",
    "--schedule.group_size 1 --advantage.estimator reinforce_batch",
    "--schedule.group_size 1 --schedule.groups_per_step 1 "
    "--advantage.estimator reinforce_batch --advantage.group_baseline false",
    "--correction.token_veto_threshold 0.9999",
    "--engine.dtype float32 --correction.token_veto_threshold 1",
    "--old_logps.route ewma_prox --engine.dtype float32 --correction.token_veto_threshold 0.9",
    "--correction.mode mask --correction.unit sequence --correction.aggregate sum "
    "--correction.low 0.9 --correction.high 1.1",
    "--engine.dtype float32 --correction.low 1 --correction.high 1",
    "--objective.loss_type dual_clip --trainer.dtype bfloat16 --objective.dual_clip 1.01",
    "--objective.loss_type cispo --objective.unit sequence --objective.loss_aggregation kept",
    "--objective.loss_type gspo --objective.loss_aggregation sequence_mean",
    "--old_logps.route interp_prox_loglinear",
    "--old_logps.route interp_prox_loglinear --old_logps.alpha 0.9",
    "--old_logps.route interp_prox_linear --schedule.max_staleness 6 --correction.mode truncate",
    "--old_logps.route interp_prox_linear --schedule.max_staleness 3",
    "--old_logps.route current_recompute --old_logps.baseline true --correction.mode truncate",
    "--old_logps.route current_recompute --trainer.minibatches_per_batch 2 "
    "--correction.mode mask --correction.low 0",
    "--old_logps.route current_recompute --trainer.minibatches_per_batch 2 --correction.high inf",
    "--schedule.max_staleness 17",
    "--schedule.max_staleness 12 --schedule.lookahead_window 81",
    "--trainer.lr 0.02",
    "--trainer.lr 1e-8",
    "--trainer.optimizer SGD --trainer.lr 1e-6",
    "--trainer.optimizer SGD --trainer.lr 10",
    "--trainer.grad_clip 1e-8",
    "--trainer.warmup_steps 116",
    "--trainer.lora_rank 129",
    "--trainer.lora_rank 8 --trainer.lr 1e-7",
    "--trainer.weight_decay 1e5",
    "--trainer.weight_decay inf",
    "--objective.kl_coef inf",
    "--objective.loss_aggregation constant --objective.constant 1e9",
    "--objective.ratio_cap 0.5",
    "--objective.loss_type sapo --objective.tau_pos 1e5",
    "--objective.loss_type sapo --objective.tau_pos 2 --objective.unit sequence",
    "--objective.loss_type dppo --objective.unit sequence",
    "--objective.loss_type drpo --objective.unit turn",
    "--objective.loss_type vaco --objective.unit sequence",
    "--objective.loss_type vaco --objective.vaco_delta 1e-4",
    "--objective.opsm_threshold 1e-3",
    "--objective.loss_type drpo --objective.drpo_delta inf",
    "--objective.loss_type vespo --objective.unit sequence",
    "--objective.loss_type vespo --objective.vespo_lambda_pos 1e5",
    "--old_logps.route rollout --correction.mode kpop",
    "--old_logps.route rollout --correction.mode k3_mask",
    "--correction.mode kpop --correction.kl_limit 1e-5 --trainer.dtype bfloat16",
    "--old_logps.route current_recompute --old_logps.baseline true --correction.mode kpop "
    "--correction.kl_limit 5",
    "--objective.loss_type dppo --trainer.dtype bfloat16 --objective.divergence_low 1e-3",
    "--objective.loss_type dppo --objective.kl_tau 1e9",
    "--old_logps.route rollout --correction.mode clamp --correction.normalize true",
    "--engine.temperature 1e-4",
    "--engine.temperature 1e4",
    "--trainer.lora_rank 8 --trainer.lora_alpha 1e-6",
    "--trainer.lora_rank 100 --trainer.lora_alpha 1e-6",
    "--trainer.lora_rank 8 --trainer.lora_alpha 1e6",
    "--objective.kl_coef 1e9",
    "--objective.entropy_coef 1e9",
    "--objective.kl_coef 1e9 --objective.entropy_coef 1e9",
    "--objective.loss_type kl_penalty --objective.kl_penalty 1e9",
    "--objective.loss_type dro --objective.dro_beta 1e9",
    "--minutes 1e-6",
    "--trainer.optimizer Adagrad --trainer.lr 0.5",
    "--trainer.optimizer SGD --trainer.lr 1e-30",
    "--trainer.routing_replay true",
)

SILENT += (
    "--schedule.group_size 1 --advantage.estimator reinforce_batch "
    "--advantage.group_baseline false",
    "--correction.token_veto_threshold 0.01",
    "--correction.token_veto_threshold 0.5",
    "--engine.dtype float32 --correction.token_veto_threshold 0.9",
    "--objective.loss_type gspo --objective.clip_low 3e-4 --objective.clip_high 4e-4 "
    "--objective.loss_aggregation sequence_mean",
    "--objective.unit sequence --objective.aggregate sum --objective.clip_low 0.9 "
    "--objective.clip_high 10 --objective.loss_aggregation sequence_mean",
    "--old_logps.route interp_prox_loglinear --schedule.max_staleness 1",
    "--old_logps.route interp_prox_loglinear --schedule.max_staleness 6 "
    "--correction.low 0.85 --correction.high 1.2",
    "--old_logps.route current_recompute --trainer.minibatches_per_batch 2",
    "--old_logps.route current_recompute --old_logps.baseline true",
    "--schedule.max_staleness 12 --schedule.lookahead_window 65",
    "--trainer.lr 5e-3",
    "--trainer.lr 1e-6",
    "--trainer.optimizer SGD --trainer.lr 0.1",
    "--trainer.grad_clip 1e-3",
    "--trainer.grad_clip inf",
    "--objective.ratio_cap 3",
    "--objective.loss_type sapo",
    "--correction.mode kpop",
    "--correction.mode kpop --correction.unit sequence --correction.aggregate max",
    "--correction.mode k3_mask --correction.unit sequence --correction.kl_limit 0.01",
    "--objective.opsm_threshold 0.1",
    "--trainer.dtype float32 --engine.dtype float32 --objective.opsm_threshold 1e-4",
    "--objective.placed guided",
    "--objective.loss_type drpo",
    "--objective.loss_type vaco",
    "--objective.loss_type vespo",
    "--objective.loss_type vespo --objective.unit sequence --objective.aggregate sum "
    "--trainer.minibatches_per_batch 2",
    "--objective.loss_type vespo --old_logps.route rollout --correction.mode none",
    "--objective.loss_type dppo",
    "--objective.loss_type dppo --objective.divergence kl --objective.divergence_low 0.05 "
    "--objective.divergence_high 0.05",
    "--objective.loss_type dppo --objective.kl_tau 1e-3 --trainer.minibatches_per_batch 2",
    "--objective.loss_type dppo --trainer.lora_rank 8 --trainer.lr 1e-3",
    "--trainer.warmup_steps 115",
    "--trainer.lora_rank 128 --trainer.lr 1e-3",
    "--trainer.lora_rank 8 --trainer.lora_alpha 1",
    "--trainer.lora_rank 1 --trainer.lora_alpha 64",
    "--objective.loss_type kl_penalty --objective.kl_penalty 10",
    "--objective.loss_type dro",
    "--minutes 1",
    "--old_logps.route ewma_prox --correction.mode truncate",
    "--old_logps.route ewma_prox --schedule.max_staleness 1",
)


def answer(knobs: str) -> str:
    try:
        verdict = check(configured(knobs))
    except ConfigError:
        return "config error"
    if verdict.refusals:
        return "refused"
    return "warning" if verdict.warnings else "silent"


@pytest.mark.parametrize("knobs", HEARD)
def test_a_setting_that_cannot_work_is_not_passed_in_silence(knobs: str) -> None:
    assert answer(knobs) in ("refused", "warning")


@pytest.mark.parametrize("knobs", SILENT)
def test_a_sound_setting_is_silent(knobs: str) -> None:
    assert answer(knobs) == "silent", check(configured(knobs))


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        *((knobs, "refused") for knobs in REFUSED_TABLE),
        *((knobs, "warning") for knobs in WARNING),
        *((knobs, "config error") for knobs in CONFIG_ERROR),
    ],
)
def test_other_settings_keep_their_answer(knobs: str, expected: str) -> None:
    assert answer(knobs) == expected


def corrected(knobs: str, words: str) -> str:
    """Return the options after a fix, without those of techniques that it removes."""
    chosen = re.search(r"--techniques '?([^'-]*)'?", words)
    if not chosen:
        return f"{knobs} {words}"
    kept = re.sub(r"--techniques ('[^']*'|\S+)", "", knobs)
    for name in set(techniques()) - set(chosen[1].split()):
        kept = re.sub(rf"--{name}\.\S+ \S+", "", kept)
    return f"{kept} {words}"


@cache
def rules_that_fire(knobs: str, recipe: str) -> dict[Rule, str]:
    config = configured(knobs, recipe=recipe)
    return {rule: each.fix for rule, each in find(config, REFUSALS, WARNINGS).items()}


CASES = [
    *(("retail", knobs) for knobs in (*HEARD, *REFUSED_TABLE, *WARNING, *ALLOWED)),
    *(("retail", knobs) for knobs, _ in (*REFUSED, *WARNED)),
    *((name, "--correction.mode none") for name in RECIPES),
    *((name, "--engine.keep_cache true") for name in RECIPES),
]


@pytest.mark.costly(cases=60)
@pytest.mark.parametrize(("recipe", "knobs"), CASES)
def test_every_fix_of_a_finding_removes_it(recipe: str, knobs: str) -> None:
    for rule, fix in rules_that_fire(knobs, recipe).items():
        assert fix, "a finding without a fix"
        for words in fix.split(", or "):
            assert rule not in rules_that_fire(corrected(knobs, words), recipe), words


def test_every_rule_is_tried() -> None:
    tried = {rule for recipe, knobs in CASES for rule in rules_that_fire(knobs, recipe)}
    untried = {rule.__name__ for rule in {*REFUSALS, *WARNINGS} - tried}
    # test_moe_rules.py tries these
    with_experts = {"_free_experts", "_unrecorded_experts", "_adapters_of_experts"}
    of_streams = {
        rule.__name__ for rule in {*stream.REFUSALS, *stream.WARNINGS}
    }  # test_stream_rules.py tries these
    of_critics = {rule.__name__ for rule in critic.REFUSALS}  # test_critic_rules.py tries these
    assert untried == with_experts | of_streams | of_critics
