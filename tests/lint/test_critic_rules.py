"""Test the rules of a critic: what cannot work with it is refused, and the first fix removes it."""

import pytest

from tests.lint.test_lint import configured
from unstale.cli.resume import config_changes
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.lint import check
from unstale.lint.critic import REFUSALS

GAE = "--advantage.estimator gae "
REFUSED = {
    "--trainer.stream true": "trainer.stream with a critic",
    "--cluster.trainers 2 --cluster.context 2": "cluster.context 2 with a critic",
    "--cluster.trainers 2 --critic.model own": "critic.model own on trainer ranks",
    "--techniques replay": "replay with a critic",
    "--techniques episode_filter": "episode_filter with a critic",
    "--techniques truncated": "truncated with a critic",
    "--schedule.resampled_groups 1": "schedule.resampled_groups with a critic",
    "--critic.warmup_steps 500": "critic.warmup_steps 500 in a run of",
}
MEANINGLESS = ("--schedule.resampled_groups 1", "--critic.warmup_steps 500")
"""Options that could not do with a critic what they are for."""
ACCEPTED = (
    "",
    "--schedule.group_size 1",
    "--advantage.over turn --advantage.lam 0.95 --critic.lam 0.95 --critic.model own",
    "--cluster.trainers 2 --critic.warmup_steps 2",
    "--trainer.lora_rank 8 --trainer.lr 1e-3",
    "--trainer.minibatches_per_batch 2 --trainer.epochs_per_batch 2",
    "--techniques 'm2po minpro ess_lr'",
)


@pytest.mark.parametrize("knobs", REFUSED)
def test_what_cannot_work_with_a_critic_is_refused(knobs: str) -> None:
    config = configured(GAE + knobs)
    found = [each for each in check(config).refusals if each.wrong.startswith(REFUSED[knobs])]
    assert len(found) == 1, [each.wrong for each in check(config).refusals]
    assert found[0].why.startswith("not built: ") != (knobs in MEANINGLESS)
    fixed = override(config, found[0].fixes[0])
    assert not any(rule(fixed) for rule in REFUSALS)


@pytest.mark.parametrize("knobs", ACCEPTED)
def test_the_rest_is_accepted(knobs: str) -> None:
    assert [each.wrong for each in check(configured(GAE + knobs)).refusals] == []


def test_options_of_a_critic_need_one() -> None:
    with pytest.raises(
        ConfigError, match=r"critic.memory is used only with advantage.estimator = gae"
    ):
        configured("--critic.memory 0.9")
    with pytest.raises(ConfigError, match=r"critic.coef = 0.5 is used only with critic.model"):
        configured(f"{GAE} --critic.model own --critic.coef 0.5")
    with pytest.raises(ConfigError, match=r"advantage.lam is an option of gae"):
        configured("--advantage.lam 0.9")


def test_a_resumed_run_keeps_its_critic() -> None:
    runs = [configured(words) for words in ("", GAE, f"{GAE} --critic.model own")]
    for before, now, name in ((0, 1, "advantage.estimator"), (1, 2, "critic.model")):
        for pair in ((before, now), (now, before)):
            with pytest.raises(ConfigError, match=f"{name} cannot change .*: the checkpoint"):
                config_changes(*(runs[number] for number in pair))
