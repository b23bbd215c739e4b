"""docs/metrics.md lists exactly the metrics of a run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_run import quiet, small
from unstale.cli import session
from unstale.config import AuditConfig, CheckpointConfig

pytestmark = pytest.mark.usefixtures("forked_children")

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NOT_OF_A_RUN = "From library functions only"
OTHER_ROUTES = {
    "old_logps/ewma_age",
    "old_logps/scored_in_time_share",
    "old_logps/publish_wait_s",
    "old_logps/score_wait_s",
    "old_logps/closing_s",
    "old_logps/stall_s",
}
OTHER_POLICIES = {"routed_experts/missing_share", "trainer/packing_noise"}
OTHER_OPTIONS = {
    "eval/any_success_rate",
    "schedule/resampled_groups",
    "kept_sets/size_mean",
    "kept_sets/single_share",
    "critic/loss",
    "critic/explained_variance",
    "critic/value_mean",
    "critic/target_mean",
    "distil/divergence",
    "placed/token_share",
    "placed/trained_share",
    "placed/gamma_mean",
    "placed/log_gamma_mean",
    "placed/truncated_share",
}
OTHER_DTYPES = {
    "trainer/max_tokens_per_microbatch",
    "trainer/overflow_step_share",
    "trainer/loss_scale",
    "trainer/moved_weight_share",
    "trainer/due_weight_share",
}
OTHER_ENGINES = {"engine/probe_logp_error", "trainer/bitwise_tokens"}
GROUPS_OF_ENGINES = {
    "engine/rejects",
    "engine/forwards",
    "engine/moves",
    "engine/lost_caches",
    "engine/scenario_groups",
    "engine/prefill_engines",
    "engine/prefill_requests",
    "engine/decode_requests",
    "engine/prefill_busy_share",
    "engine/decode_busy_share",
}
REWARD_PROCESSES = {
    "reward_pool/processes",
    "reward_pool/processes_max",
    "reward_pool/waiting_max",
    "reward_pool/wait_s",
    "reward_pool/starts",
    "reward_pool/ends",
}
SEVERAL_RANKS = {"trainer/imbalance"}
TECHNIQUES = {
    "ess_lr/effective_share",
    "filter/trained_share",
    "filter/trained_success_share",
    "filter/trained_failure_share",
    "rollout_figures/reliability_share",
    "rollout_figures/coverage_share",
    "rollout_figures/tokens_per_success",
    "proxy/reward_mean",
    "proxy/score_mean",
    "proxy/reversed_share",
    "proxy/equal_score_share",
    "balance/sampled_mass",
    "balance/sampled_change",
    "balance/unsampled_loss_max",
    "step_groups/shared_share",
    "flawed_success_penalty/success_share",
    "flawed_success_penalty/mean",
    "long_reply_penalty/mean",
    "long_reply_penalty/share",
    "hints/episode_share",
    "search/best_mean",
    "search/improvement_mean",
    "search/lost",
    "search/other_share",
    "bus/episode_share",
    "bus/success_share",
    "bus/lost",
    "bus/refused",
    "retry/episode_share",
    "retry/success_share",
    "exemplars/episode_share",
    "exemplars/success_share",
    "exemplars/plain_success_share",
    "exemplars/stored",
    "regenerate/reward_gap_mean",
    "regenerate/equal_token_share",
    "retry/gain_mean",
    "retry/gain_error",
    "retry/text_tokens",
    "retry/untried_share",
    "hints/token_share_mean",
    "majority/share_mean",
    "majority/used_share",
    "majority/one_answer_share",
    "majority/label_success_mean",
    "tool_bonus/mean",
    "truncated/share",
    "replay/groups",
    "replay/token_share",
    "replay/age_mean",
    "replay/age_max",
    "replay/exact_share",
    "replay/kept_share",
    "replay/clip_share",
    "replay/log_d_mean",
    "replay/log_d_abs_mean",
    "replay/log_s_mean",
    "replay/log_s_abs_mean",
    "replay/s_ess_share",
    "baseline/prior_abs_error_mean",
    "difficulty_bin_weights/weight_mean",
    "baseline/forward_tokens",
    "baseline/kept_share",
    "baseline/loo_squared_error_mean",
    "baseline/probe_squared_error_mean",
    "rollout/context_limit_mean",
    "rollout/slot_wait_s",
    "rollout/pruned_share",
    "rollout/turn_limit_mean",
    "tree/forecast_error",
}
UNDEFINED = {
    "audit/mask_f1",
    "audit/clip_f1",
    "audit/log_d_log_s_corr",
    "audit/logp_error_abs_mean_se",
    "audit/staleness_leak",
    "audit/staleness_leak_se",
    "audit/discrepancy_leak",
    "audit/discrepancy_leak_se",
}
"""Absent when the data of so short a run does not define them."""


def listed_names() -> dict[str, str]:
    """Return the section of each metric that a table of the page defines."""
    names: dict[str, str] = {}
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        if "| metric | definition |" not in body:
            continue
        for line in body.splitlines():
            if line.startswith("| `"):
                cell = line.split(" | ")[0]
                names |= dict.fromkeys(re.findall(r"`([^`]+)`", cell), title)
    return names


def test_the_page_lists_what_a_run_logs(tmp_path: Path) -> None:
    config = replace(
        small(tmp_path), audit=AuditConfig(share=1.0), checkpoint=CheckpointConfig(interval=1)
    )
    rows = session.train(config, console=quiet()).metrics
    logged = {name for row in rows for name in row}
    listed = listed_names()
    patterns = [re.sub(r"<\w+>", r"\\w+", name) for name in listed]
    unlisted = {name for name in logged if not any(re.fullmatch(p, name) for p in patterns)}
    assert unlisted == set()
    expected = {
        name for name, section in listed.items() if section != NOT_OF_A_RUN and "<" not in name
    }
    others = OTHER_ROUTES | OTHER_POLICIES | OTHER_ENGINES | SEVERAL_RANKS | TECHNIQUES
    others |= GROUPS_OF_ENGINES | OTHER_DTYPES | OTHER_OPTIONS | REWARD_PROCESSES
    missing = expected - logged - others - UNDEFINED
    assert missing == set()
