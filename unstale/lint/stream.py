"""Rules for `trainer.stream`, with which gradients are computed before their batch is complete.

They refuse options that need the whole batch before the first backward pass. With these, gradients
would depend on which groups happen to end first.
"""

from collections.abc import Sequence

from unstale.config import RunConfig
from unstale.config.routes import exact_routes
from unstale.config.techniques import ON_BATCH, chosen
from unstale.lint.estimator_trials import is_by_group
from unstale.lint.finding import Finding, Fix, Rule, use_route
from unstale.lint.techniques import without

_OFF: Fix = {"trainer.stream": False}


def single_group(config: RunConfig) -> Finding | None:
    if not config.trainer.stream or config.schedule.groups_per_step > 1:
        return None
    return Finding(
        "trainer.stream with batches of one group",
        "a batch is complete when its only group has ended, so nothing can be computed before",
        (_OFF, {"schedule.groups_per_step": 8}),
    )


def several_steps(config: RunConfig) -> Finding | None:
    steps = config.trainer.steps_per_batch
    if not config.trainer.stream or steps == 1:
        return None
    return Finding(
        f"trainer.stream with {steps} optimizer steps per batch",
        "the batch is divided into steps when it is complete, and the weights of the second step "
        "are known after the first",
        ({"trainer.minibatches_per_batch": 1, "trainer.epochs_per_batch": 1}, _OFF),
    )


def batch_advantages(config: RunConfig) -> Finding | None:
    """Refuse an advantage estimator that compares a group with other groups of the batch."""
    if not config.trainer.stream or _replaced(config) or is_by_group(config) is not False:
        return None
    name = config.advantage.estimator
    fixes = ({"advantage.estimator": "grpo"}, _OFF)
    return Finding(
        f"trainer.stream with advantage.estimator {name}",
        "its advantages depend on the other groups of the batch, which have not ended yet",
        fixes,
    )


def untried_advantages(config: RunConfig) -> Finding | None:
    """Warn of an advantage estimator that cannot be tried, because it fails for invented
    episodes.
    """
    if not config.trainer.stream or _replaced(config) or is_by_group(config) is not None:
        return None
    return Finding(
        f"trainer.stream with advantage.estimator {config.advantage.estimator}",
        "it raised an error for invented episodes, whose only reward is named reward, so it is not "
        "known whether its advantages depend on other groups. The run stops at the first batch in "
        "which they do",
        (_OFF, {"advantage.estimator": "grpo"}),
    )


def _replaced(config: RunConfig) -> bool:
    """Return True if a technique computes the advantages in place of the estimator."""
    return any(each.slot == "estimator" for each in chosen(config.techniques))


def batch_techniques(config: RunConfig) -> Finding | None:
    """Refuse techniques that compare, choose or add groups of a whole batch."""
    if not config.trainer.stream:
        return None
    options = config.technique_options
    names = [
        each.name
        for each in chosen(config.techniques)
        if (each.slot in ON_BATCH and not each.by_group(options[each.name]))
        or "halves" in each.requires
    ]
    if not names:
        return None
    return Finding(
        f"trainer.stream with {' and '.join(names)}",
        f"{names[0]} needs all groups of the batch before their gradient is computed",
        (without(config, *names), _OFF),
    )


def batch_mean_weight(config: RunConfig) -> Finding | None:
    if not config.trainer.stream or not config.correction.normalize:
        return None
    return Finding(
        "trainer.stream with correction.normalize",
        "the mean weight of the batch is not known before all groups have ended",
        ({"correction.normalize": False}, _OFF),
    )


def batch_route(config: RunConfig) -> Finding | None:
    """Refuse a method to get `old_logp` that needs the whole batch, such as some moving
    averages.
    """
    route = config.old_logps
    if not config.trainer.stream or not route.needs.whole_batch:
        return None
    fixes: list[Fix] = [use_route(config, name) for name in exact_routes()]
    if hasattr(route, "beta"):
        fixes.append({"old_logps.beta": 0.5, "old_logps.averages": 1})
    return Finding(
        f"trainer.stream with the route {route.route}",
        "what it computes depends on the lag of all tokens of the batch",
        (*fixes[-1:], *fixes[:1], _OFF),
    )


TRIES_ESTIMATOR: Sequence[Rule] = (batch_advantages, untried_advantages)
"""Rules that call the advantage estimator with invented episodes."""
WARNINGS: Sequence[Rule] = (untried_advantages,)
REFUSALS: Sequence[Rule] = (
    single_group,
    several_steps,
    batch_advantages,
    batch_techniques,
    batch_mean_weight,
    batch_route,
)
