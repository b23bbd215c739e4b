"""A rule for the small models of this package, which were trained in a few environments only.

These environments are desks, such as `retail`: the agent serves a customer with tools.
"""

from pathlib import Path

from unstale.config import SHIPPED_POLICIES, RunConfig
from unstale.envs.desk import DeskConfig
from unstale.lint.finding import Finding, Fix
from unstale.lint.policy_files import local_folder

LEVEL = "1"
"""The value of `task.level` at which the small models of this package were trained."""
PRACTISED = {
    "base": ("retail",),
    "base-desks": ("airline", "delivery", "instore", "retail", "telecom"),
}
"""The desks (customer-service environments) on which each small model of this package was trained,
by the name of the model.
"""


def unpractised_desk(config: RunConfig) -> Finding | None:
    """Warn if the policy is a small model of this package that was not trained on the run's desk or
    level.
    """
    policy, task = _shipped(local_folder(config)), config.task
    if policy is None or not isinstance(task, DeskConfig):
        return None
    unknown = [name for name in task.names if name not in PRACTISED[policy]]
    fix: Fix = {"model": "base-desks"} if unknown else {}
    if task.level != LEVEL:
        fix = {**fix, "task.level": LEVEL}
    if not fix:
        return None
    where = f"the desk {', '.join(unknown)}" if unknown else f"level {task.level}"
    practised = f"{', '.join(PRACTISED[policy])} at level {LEVEL}"
    return Finding(
        f"the policy {policy} at {where}",
        f"it practised only {practised}, so it succeeds in almost no other episode and cannot "
        "learn from them",
        (fix,),
    )


def _shipped(folder: Path) -> str | None:
    """Return the name of a small model of the package, given its folder. None for other folders."""
    return next((name for name, each in SHIPPED_POLICIES.items() if each == folder), None)
