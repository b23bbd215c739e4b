"""Rules for `advantage.estimator = gae`, for which the trainer computes advantages with a critic.

They refuse options that need the advantages before the trainer has the whole batch.
"""

from collections.abc import Sequence

from unstale.config import RunConfig
from unstale.config.techniques import chosen
from unstale.lint.finding import Finding, Fix, Rule
from unstale.lint.techniques import without

_GROUPS: Fix = {"advantage.estimator": "rloo"}
BEFORE_TRAINER = ("recredit", "source")
"""Slots (kinds) of techniques that use advantages before the trainer has computed them."""


def _has_critic(config: RunConfig) -> bool:
    return config.advantage.estimator == "gae"


def early_gradient(config: RunConfig) -> Finding | None:
    if not _has_critic(config) or not config.trainer.stream:
        return None
    return Finding(
        "trainer.stream with a critic",
        "not built: the gradient of a group begins before its batch is complete, and a critic "
        "whitens the advantages of the batch and divides its loss by the batch's actions",
        ({"trainer.stream": False}, _GROUPS),
    )


def divided_pass(config: RunConfig) -> Finding | None:
    if not _has_critic(config) or config.cluster.context == 1:
        return None
    return Finding(
        f"cluster.context {config.cluster.context} with a critic",
        "not built: a rank has the hidden states of its part of a pass only, and the forecasts of "
        "the others are not gathered",
        ({"cluster.context": 1}, _GROUPS),
    )


def second_model_on_ranks(config: RunConfig) -> Finding | None:
    if not _has_critic(config) or not config.cluster.trainers or config.critic.model == "trunk":
        return None
    return Finding(
        "critic.model own on trainer ranks",
        "not built: their checkpoints have one divided model",
        ({"critic.model": "trunk"}, {"cluster.trainers": 0}),
    )


def early_techniques(config: RunConfig) -> Finding | None:
    if not _has_critic(config):
        return None
    names = [
        each.name
        for each in chosen(config.techniques)
        if each.slot in BEFORE_TRAINER or each.name == "episode_filter"
    ]
    if not names:
        return None
    return Finding(
        f"{' and '.join(names)} with a critic",
        f"not built: {names[0]} needs advantages before the trainer has the batch, and a critic "
        "computes them in the trainer",
        (without(config, *names), _GROUPS),
    )


def filters_of_a_batch(config: RunConfig) -> Finding | None:
    if not _has_critic(config):
        return None
    names = [each.name for each in chosen(config.techniques) if each.slot == "filter"]
    if not names or "episode_filter" in names:
        return None
    return Finding(
        f"{' and '.join(names)} with a critic",
        "not built: if no episode of a batch is left, its episodes get the advantage 0, and a "
        "critic would give them others",
        (without(config, *names), _GROUPS),
    )


def groups_left_out(config: RunConfig) -> Finding | None:
    if not _has_critic(config) or not config.schedule.resampled_groups:
        return None
    return Finding(
        "schedule.resampled_groups with a critic",
        "groups of equal rewards are left out, though they have a gradient with a critic: it does "
        "not compare them",
        ({"schedule.resampled_groups": 0}, _GROUPS),
    )


def endless_warmup(config: RunConfig) -> Finding | None:
    steps = config.max_steps * config.trainer.steps_per_batch
    if not _has_critic(config) or config.critic.warmup_steps < steps:
        return None
    return Finding(
        f"critic.warmup_steps {config.critic.warmup_steps} in a run of {steps} optimizer steps",
        "only the critic learns in them, so the policy never changes",
        ({"critic.warmup_steps": steps // 10},),
    )


REFUSALS: Sequence[Rule] = (
    early_gradient,
    divided_pass,
    second_model_on_ranks,
    early_techniques,
    filters_of_a_batch,
    groups_left_out,
    endless_warmup,
)
