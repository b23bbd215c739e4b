"""Test the rules of `trainer.stream`.

What needs the whole batch before its gradient is refused, with a reason, and the first fix removes
it. What treats each group alone is accepted, also an estimator of the user.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.lint.test_lint import configured
from unstale.algorithms.advantages import ESTIMATORS, grpo
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.config.routes import routes
from unstale.config.techniques import ON_BATCH, techniques
from unstale.lint import check
from unstale.lint.finding import Finding
from unstale.lint.stream import REFUSALS, batch_advantages
from unstale.records import Group, ScoredTrajectory

STREAM = "--trainer.stream true "
REFUSED = {
    "--schedule.groups_per_step 1": "only group",
    "--trainer.minibatches_per_batch 2": "2 optimizer steps per batch",
    "--advantage.estimator reinforce_batch": "its advantages depend on the other groups",
    "--advantage.estimator reinforce_batch --advantage.group_baseline false": "reinforce_batch",
    "--correction.normalize true": "mean weight of the batch",
    "--old_logps.route ppo_ewma_async": "depends on the lag of all tokens",
    "--techniques m2po": "m2po needs all groups",
    "--techniques 'token_entropy_advantage top_tokens'": "token_entropy_advantage and top_tokens",
    "--techniques outer_step": "outer_step needs all groups",
    "--techniques replay": "replay needs all groups",
    "--techniques truncated": "truncated needs all groups",
    "--techniques episode_filter": "episode_filter needs all groups",
    "--techniques 'tool_bonus reward_channels'": "reward_channels needs all groups",
    "--techniques baseline --baseline.centre mean --baseline.scale batch": "baseline needs all",
    "--techniques least_variance_baseline --least_variance_baseline.scope batch": (
        "least_variance_baseline needs all groups"
    ),
    "--techniques top_turns --top_turns.over batch": "top_turns needs all groups",
}
ACCEPTED = (
    "",
    "--schedule.max_staleness 0",
    "--old_logps.route ewma_prox",
    "--old_logps.route ppo_ewma_async --old_logps.beta 0.5",
    "--correction.mode mask --correction.unit sequence",
    "--objective.loss_aggregation kept",
    "--objective.kl_coef 0.01 --objective.entropy_coef 0.01",
    "--techniques 'entropy_advantage_reweighting unlikely_token_bonus novelty "
    "confident_error_penalty top_turns minpro ess_lr preserve_clip'",
    "--techniques 'tool_bonus step_groups'",
    "--techniques least_variance_baseline",
    "--techniques baseline --baseline.centre loo",
    "--techniques 'difficulty_bin_weights beta_sampler' --selection.pool 100",
    "--trainer.lora_rank 8 --trainer.lr 1e-3",
)


def refusals(knobs: str) -> list[Finding]:
    try:
        found = check(configured(STREAM + knobs)).refusals
    except ConfigError as error:
        pytest.fail(f"{knobs}: {error}")
    return [each for each in found if each.wrong.startswith("trainer.stream")]


@pytest.mark.parametrize("knobs", REFUSED)
def test_what_needs_the_whole_batch_is_refused(knobs: str) -> None:
    (found,) = refusals(knobs)
    assert REFUSED[knobs] in str(found)
    assert {"trainer.stream": False} in found.fixes
    for fix in found.fixes:
        fixed = override(configured(STREAM + knobs), fix)
        assert not [rule for rule in REFUSALS if rule(fixed)]


def test_trainer_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.stream needs cluster\.trainers = 0, got 2"):
        configured(STREAM + "--cluster.trainers 2")


@pytest.mark.parametrize("knobs", ACCEPTED)
def test_what_treats_each_group_alone_is_accepted(knobs: str) -> None:
    assert refusals(knobs) == []


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_only_estimators_of_groups_are_accepted(name: str) -> None:
    found = batch_advantages(configured(f"{STREAM} --advantage.estimator {name}"))
    assert bool(found) == (name == "reinforce_batch")


def test_an_estimator_of_the_user_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_groups(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        return [
            replace(each, advantage=tuple(value / len(groups) for value in each.advantage))
            for each in grpo(groups)
        ]

    made = configured(STREAM)
    monkeypatch.setitem(ESTIMATORS, "grpo", over_groups)
    found = batch_advantages(made)
    assert found and "grpo" in found.wrong


def test_an_estimator_that_cannot_be_tried_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_format(groups: Sequence[Group]) -> list[ScoredTrajectory]:
        assert all(each.rewards["format"] for group in groups for each in group.trajectories)
        return grpo(groups)

    made = configured(STREAM)
    monkeypatch.setitem(ESTIMATORS, "grpo", by_format)
    verdict = check(made)
    assert not [each for each in verdict.refusals if each.wrong.startswith("trainer.stream")]
    (found,) = [each for each in verdict.warnings if each.wrong.startswith("trainer.stream")]
    assert "raised an error" in found.why and {"trainer.stream": False} in found.fixes


def test_only_routes_that_follow_the_lag_need_the_whole_batch() -> None:
    assert [name for name, spec in routes().items() if spec().needs.whole_batch] == [
        "ppo_ewma_async"
    ]


def test_by_group_is_declared_of_slots_that_read_it() -> None:
    declared = [each for each in techniques().values() if each.by_group(each.options())]
    assert declared and all(each.slot in ON_BATCH for each in declared)
