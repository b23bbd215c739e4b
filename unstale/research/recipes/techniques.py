"""Recipes that combine techniques (docs/techniques.md)."""

from typing import Any

from unstale.config import RunConfig, ScheduleConfig
from unstale.config.options import override, with_changes
from unstale.objectives.clips import Cispo
from unstale.recipes.llm import llm
from unstale.recipes.retail import retail


def steady(**changes: Any) -> RunConfig:
    """Tokens up to 6 versions old: smaller steps, ratios of a prefix, no cut-off episodes.

    The techniques are ess_lr, minpro and truncated. The desk and the model are those of `retail`.
    The techniques have not been measured together, so no result is promised.
    `benchmarks/studies/techniques.toml` compares ess_lr and minpro with the plain recipe.
    """
    config = retail(
        recipe="steady",
        techniques="ess_lr minpro truncated",
        schedule=ScheduleConfig(max_staleness=6, groups_per_step=16, group_size=8),
        objective=Cispo(clip_low=1.0),
    )
    return with_changes(config, changes)


def small_group(**changes: Any) -> RunConfig:
    """Groups of 4 episodes: a baseline that remembers a task, and tasks of middle difficulty.

    The recipe is for costly episodes. The techniques are beta_sampler, baseline (shrink) and
    novelty, with a pool of 256 tasks. The desk and the model are those of `retail`. The techniques
    have not been measured together, so no result is promised.
    """
    config = retail(
        recipe="small_group",
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=32, group_size=4),
    )
    values = {"techniques": "beta_sampler baseline novelty", "selection.pool": 256}
    return with_changes(override(config, values), changes)


def long_horizon(**changes: Any) -> RunConfig:
    """Tool agents of many turns: episodes are forked before a turn, and each part has its credit.

    The techniques are tree (each episode is forked once, before reply `tree.turn`) and
    tree_advantage (the replies before a fork are compared with other episodes, those after it with
    each other). Set `--tree.turn` to the middle of the episodes. For comparisons of turns without
    forks, use the technique `step_groups`. The desk and the model are those of `retail`, whose
    episodes are short: replace desk and model. In three seeds on SmolLM2 it was not told apart from
    the plain recipe (docs/techniques.md).
    """
    config = retail(
        recipe="long_horizon",
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=8, group_size=16),
    )
    return with_changes(override(config, {"techniques": "tree tree_advantage"}), changes)


def hard_tasks(**changes: Any) -> RunConfig:
    """Tasks that mostly fail: attempts continue from a right reply in place of the first wrong one.

    The technique is retry (`correct`), with the replies of the task's demonstration as hints. Half
    of the episodes of a group are first attempts. All desks have demonstrations. For tasks without
    any, use `--retry.rule reflect`, where the policy writes what to change. For tasks of one reply,
    use the technique `hints`. The loss imitates the right replies (`objective.placed anchor`). The
    desk and the model are those of `retail`, whose tasks are easy: replace both. In three seeds on
    SmolLM2 it was not told apart from the plain recipe (docs/techniques.md).
    """
    config = retail(
        recipe="hard_tasks",
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
    )
    values = {"techniques": "retry", "retry.rule": "correct", "objective.placed": "anchor"}
    return with_changes(override(config, values), changes)


def test_time(**changes: Any) -> RunConfig:
    """Train on the held-out tasks themselves, without their labels: most votes are the label.

    The technique is majority (TTRL), on 64 tasks that are repeated, with 16 votes each. Give
    `--model` and `--task.env` as for `llm`; without these options, Qwen3-0.6B trains on GSM8K.
    **The policy collapses in the end**, to one answer for each task, and earlier where most labels
    are wrong: on sums that SmolLM2 solves at 25%, one of three seeds fell to 3% and the others
    ended where they began, while `majority/share_mean` rose (docs/techniques.md). Measure first
    what votes are worth with `unstale attempt`, and stop early.
    """
    config = llm(
        recipe="test_time",
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=8, group_size=16),
    )
    values = {
        "techniques": "majority",
        "selection.pool": 64,
        "selection.test_time": True,
        "eval.tasks": 64,
    }
    return with_changes(override(config, values), changes)


def dart(**changes: Any) -> RunConfig:
    """Agents of many turns, as in DART: counts and lengths by task, stored successes, entropy.

    The techniques are allocate (fewer episodes where results are clear), limits (episodes at most
    as long as the task's longest past success), replay (only where every new episode failed) and
    top_turns (only the turns of highest entropy). The weight D is truncated. With the technique
    `bus`, successes of an earlier run of this recipe are loaded, too. The desk and the model are
    those of `retail`: replace both. The techniques have not been measured together, so no result is
    promised.
    """
    config = retail(
        recipe="dart",
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
    )
    values = {
        "techniques": "allocate limits replay top_turns",
        "allocate.gain": "sqrt_law",
        "limits.scope": "task",
        "limits.quantile": 1.0,
        "limits.successes": 4,
        "limits.window": 16,
        "limits.remind": 0,
        "replay.rule": "failed",
        "replay.episodes": "successes",
        "replay.max_age": 16,
        "selection.pool": 64,
        "correction.mode": "truncate",
    }
    return with_changes(override(config, values), changes)


RECIPES = (steady, small_group, long_horizon, hard_tasks, test_time, dart)
