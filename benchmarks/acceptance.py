"""Measure the tests that show what techniques of branching and placed text must do.

    python -m benchmarks.acceptance        # about two minutes of processor time

Rows are those of `unstale techniques --all`. Seconds are processor time of the test's process and
of those that it started, which other work on the machine hardly changes. Each test must take less
than 20. Writes benchmarks/results/acceptance-rows.md.
"""

import argparse
import os
import sys
from collections.abc import Generator
from typing import Any

import pytest

from benchmarks import tables

MOST = 20.0
"""Largest processor time of a test, in seconds."""
ROWS = {
    "biases of tree estimators": (
        "techniques/test_tree.py::test_the_biases_are_those_of_the_table",
    ),
    "D Gamma S": (
        "trainer/test_placed.py::test_guided_text_has_the_exact_gradient_and_imitation_another_one",
        "trainer/test_placed.py::test_the_figures_of_the_page_are_those_of_texts_of_one_token",
        "trainer/test_placed.py::test_foreign_text_with_a_known_source_has_the_weights_of_text_with_a_hint",
    ),
    "43 ETTRL": (
        "techniques/test_tree.py::test_14_episodes_forked_at_the_largest_entropies_have_57_percent_of_the_tokens",
        "techniques/test_majority.py::test_votes_raise_success_to_that_of_the_most_frequent_answers_and_then_it_collapses",
    ),
    "5 ECHO": (
        "techniques/test_live_tree.py::test_the_width_of_a_fork_grows_with_entropy_and_falls_with_confidence",
        "techniques/test_live_tree.py::test_no_tree_has_more_than_half_of_the_group_after_a_chain_of_large_entropies",
    ),
    "55 AEPO": (
        "techniques/test_live_tree.py::test_the_numbers_of_aepo_are_those_by_hand",
        "techniques/test_live_tree.py::test_the_first_reply_to_a_tool_decides_how_many_episodes_begin",
    ),
    "12 LATR": (
        "techniques/test_live_tree.py::test_a_fork_begins_with_the_other_one_of_two_likely_tokens",
        "techniques/test_live_tree.py::test_forks_with_the_other_likely_token_give_more_different_replies_a_token",
    ),
    "30 ARRoL": (
        "techniques/test_live_tree.py::test_the_kept_episodes_are_the_most_certain_of_both_kinds",
        "techniques/test_live_tree.py::test_pruning_by_a_learned_forecast_leaves_more_mixed_groups_for_fewer_tokens",
        "techniques/test_live_tree.py::test_one_of_eight_decisions_prunes_nothing",
    ),
    "14 BranchGRPO": (
        "techniques/test_tree.py::test_pruned_gradients_are_those_of_some_levels_or_of_middling_episodes",
        "techniques/test_tree.py::test_the_reward_of_a_place_is_fused_by_the_probabilities_of_its_branches",
    ),
    "56 MARS2": (
        "techniques/test_search.py::test_the_reward_of_an_improvement_is_that_of_the_paper",
        "techniques/test_search.py::test_the_best_of_a_search_is_above_the_best_of_independent_answers",
    ),
    "31 SWE-Reasoner": (
        "research/test_attempt.py::test_a_search_gains_more_than_a_choice_at_the_end_of_as_many_tokens",
    ),
    "34 R3L": (
        "techniques/test_retry.py::test_retries_open_the_lock_if_they_are_trained_on",
        "techniques/test_retry.py::test_replies_before_a_retry_have_no_loss_in_either_attempt",
    ),
    "9 SCOPE": (
        "techniques/test_retry_rules.py::test_corrections_open_the_lock_if_they_go_on_until_the_end",
    ),
    "40 CLEANER": (
        "techniques/test_retry_rules.py::test_a_similar_call_replaces_the_one_that_failed_behind_its_thoughts",
        "techniques/test_retry_rules.py::test_an_attempt_without_a_better_call_stays_as_it_is",
        "techniques/test_retry_rules.py::test_policies_that_learn_from_replaced_calls_are_evaluated_with_and_without_a_repair",
    ),
    "37 ADHint": (
        "techniques/test_hints.py::test_hints_open_the_lock_if_they_are_trained_on",
        "techniques/test_hints.py::test_noise_shortens_hints_and_shortest_gives_some_always",
    ),
    "7 XRPO": (
        "techniques/test_exemplars.py::test_the_success_without_examples_leaves_0",
        "techniques/test_exemplars.py::test_guided_attempts_have_the_exact_gradient_of_the_plain_prompt",
    ),
    "36 SAGE skills": (
        "envs/test_chain.py::test_only_a_useful_skill_raises_the_success_of_the_second_task",
        "envs/test_chain.py::test_a_skill_pays_nothing_for_a_failure_or_if_it_is_not_named",
    ),
    "44 SAGE plans": (
        "research/test_attempt.py::test_an_empty_plan_changes_nothing_and_one_that_helps_is_a_paired_gain",
    ),
    "46 UI-S1": (
        "envs/test_traces.py::test_no_return_crosses_a_patch",
        "envs/test_traces.py::test_the_semi_online_score_is_nearer_to_the_true_success_and_not_equal",
        "envs/test_traces.py::test_an_episode_ends_at_the_first_wrong_reply_after_its_patches",
    ),
    "15 Swarm": (
        "techniques/test_bus.py::test_a_node_that_knows_nothing_learns_from_one_that_does",
        "techniques/test_bus.py::test_a_run_goes_on_without_the_folder",
        "techniques/test_bus.py::test_foreign_text_is_in_no_ratio_and_learned_only_if_it_helped",
    ),
    "19 RTV and PDR": (
        "research/test_attempt.py::test_a_tournament_gains_what_its_judge_is_worth",
    ),
}
"""For each row the tests of what it must do, under tests/. All cases of a test are run."""


class Clock:
    """A pytest plugin that measures the processor time of each test, without fixtures."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        """Seconds of each case, by the name of the test without its case."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        start = sum(os.times()[:4])
        result = yield
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        self.seconds.setdefault(name, []).append(sum(os.times()[:4]) - start)
        return result


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    clock = Clock()
    names = [f"tests/{name}" for tests in ROWS.values() for name in tests]
    failed = pytest.main(["-q", "-m", "", "-p", "no:randomly", *names], plugins=[clock])
    if failed:
        sys.exit(int(failed))
    lines = [
        "Seconds are processor time of the slowest case of each test, without fixtures.",
        "",
        *tables.columns("row", "test", "cases", "seconds"),
    ]
    for row, tests in ROWS.items():
        for name in tests:
            cases = clock.seconds[name]
            lines.append(tables.row(row, f"`{name}`", len(cases), f"{max(cases):.1f}"))
    slowest = max(max(cases) for cases in clock.seconds.values())
    lines += ["", f"The slowest case takes {slowest:.1f} s; the limit is {MOST:g} s."]
    tables.write("acceptance-rows", "Processor time of the tests of rows", lines)
    if slowest >= MOST:
        sys.exit(f"a test takes {slowest:.1f} s, the limit is {MOST:g} s")


if __name__ == "__main__":
    main()
