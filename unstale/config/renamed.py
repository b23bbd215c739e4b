"""Options that were renamed. Using an old name is an error whose message gives the new name."""

from unstale.config.checks import ConfigError

RENAMED = {
    "credit": "advantage",
    "credit.estimator": "advantage.estimator",
    "correction.veto_below": "correction.token_veto_threshold",
    "engine.kind": "engine.backend",
    "engine.max_reply_tokens": "engine.max_completion_tokens",
    "objective.entropy": "objective.entropy_coef",
    "objective.normalise": "objective.loss_aggregation",
    "objective.reference_kl": "objective.kl_coef",
    "schedule.window": "schedule.lookahead_window",
    "tensorboard": "trackers",
    "trainer.micro_tokens": "trainer.max_tokens_per_microbatch",
    "trainer.recompute": "trainer.gradient_checkpointing",
    "trainer.steps_per_batch": "trainer.minibatches_per_batch",
}
"""The present name of each option or section that had another name before."""


def refuse_renamed(name: str, source: str) -> None:
    """Raise `ConfigError` with the new name, if `name` is a former name of an option or section.

    `source` says where the name was found, such as a file name. It begins the message.

    >>> refuse_renamed("trainer.lr", "run.toml")
    >>> refuse_renamed("schedule.window", "run.toml")
    Traceback (most recent call last):
    unstale.config.checks.ConfigError: run.toml: schedule.window is now schedule.lookahead_window
    """
    if name in RENAMED:
        raise ConfigError(f"{source}: {name} is now {RENAMED[name]}")
