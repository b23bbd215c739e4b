"""`hard_task_stages`: all tasks in a first stage, then larger groups on fewer and fewer hard tasks.

In the first `steps` steps, each task of the pool is equally likely. Later, the next task is one of
the hardest, with groups of `size` episodes. The hardest tasks are those with the lowest success
rate: at first a share `hard` of all tasks seen so far. After each pass (as many groups as there are
hard tasks) only the share `keep` of the hard tasks remains. With `first_reply`, the replies of the
first stage have a smaller limit of tokens. From the abstract of DRIVE, which claims that the policy
then repeats itself less and stays diverse. That has not been measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any

from unstale.config.checks import ConfigError, Count, PositiveInt, Range, Section
from unstale.config.techniques import Entry, chosen, require_sequences
from unstale.research.techniques.success import RateOptions, SuccessShare, SuccessTracker
from unstale.techniques.hooks import Draw, DrawContext, Outcome

if TYPE_CHECKING:
    from unstale.config import RunConfig

ROUNDING = 1e-9
"""A constant subtracted before rounding up, so that a float's rounding error does not add a
task.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardTaskStagesConfig(Section, RateOptions, SuccessShare):
    """All tasks first, then larger groups on fewer and fewer hard tasks (DRIVE)."""

    steps: Count = 0
    """Number of steps of the first stage, whose groups have `schedule.group_size` episodes; 0 is
    half of the run.
    """
    first_reply: Count = 0
    """Largest number of tokens of a reply in the first stage; 0 is `engine.max_completion_tokens`,
    the limit of the second stage.
    """
    size: PositiveInt = 64
    """Number of episodes of the groups of the second stage."""
    hard: Annotated[float, Range(above=0, high=1)] = 0.25
    """Share of the tasks seen so far with which the second stage begins. These are the tasks with
    the lowest success rates.
    """
    keep: Annotated[float, Range(above=0, high=1)] = 0.5
    """Share of the hard tasks that remains hard after each pass. A pass ends when each hard task
    has had one group on average.
    """
    least: PositiveInt = 8
    """Smallest number of hard tasks. `keep` does not reduce them further."""
    decay: Annotated[float, Range(above=0, high=1)] = 1.0
    """Share of a task's counts of successes and failures that is kept after each batch."""


class HardTaskStages:
    """A technique that draws tasks in two stages: first all tasks, then the hardest."""

    def __init__(self, options: HardTaskStagesConfig) -> None:
        """Create the technique. `options.steps` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self._tracker = SuccessTracker(
            "hard_task_stages",
            prior=options.prior,
            decay=options.decay,
            success_at=options.success_at,
        )

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        options = self._options
        if context.step <= options.steps:
            return Draw(context.random.choice(tasks), reply_tokens=options.first_reply)
        drawn = context.number - options.steps * context.groups_per_step
        hard = self.hard_tasks(drawn)
        free = [task for task in tasks if task in hard]
        task = context.random.choice(free) if free else min(tasks, key=self._tracker.mean)
        return Draw(task, options.size)

    def hard_tasks(self, drawn: int) -> frozenset[str]:
        """Return the tasks that the second stage draws from after `drawn` groups of that stage."""
        options = self._options
        seen = sorted(self._tracker.tasks(), key=lambda task: (self._tracker.mean(task), task))
        size = max(options.least, ceil(options.hard * len(seen) - ROUNDING))
        while drawn >= size > options.least and options.keep < 1:
            drawn -= size
            size = max(options.least, ceil(options.keep * size - ROUNDING))
        return frozenset(seen[:size])

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._tracker.observe(outcomes)

    def state(self) -> Mapping[str, Any]:
        return self._tracker.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tracker.restore(state)


def _complete(options: HardTaskStagesConfig, config: RunConfig) -> HardTaskStagesConfig:
    return replace(options, steps=options.steps or max(1, config.max_steps // 2))


def _check(options: HardTaskStagesConfig, config: RunConfig) -> None:
    if (steps := _complete(options, config).steps) >= config.max_steps:
        raise ConfigError(
            f"hard_task_stages.steps must be below max_steps, got {steps} and {config.max_steps}: "
            "there is no second stage"
        )
    require_sequences(config, options.size, "hard_task_stages.size")
    most = config.engine.max_completion_tokens
    if options.first_reply >= most:
        raise ConfigError(
            f"hard_task_stages.first_reply must be below {most} (engine.max_completion_tokens), "
            f"got {options.first_reply}: the first stage would have no smaller limit. 0 sets none"
        )
    pool, candidates = config.selection.pool, config.selection.candidates
    if pool > candidates:
        raise ConfigError(
            "the technique hard_task_stages needs selection.candidates >= selection.pool, got "
            f"{candidates} and {pool}: otherwise hard tasks are missing among the candidates"
        )
    for entry in chosen(config.techniques):
        if entry.slot == "allocator":
            raise ConfigError(
                "the technique hard_task_stages chooses the number of episodes, and so does "
                f"{entry.name}. Remove one of them from the option techniques"
            )


def _describe(options: HardTaskStagesConfig) -> str:
    first = ""
    if options.first_reply:
        first = f"replies of at most {options.first_reply} tokens up to step {options.steps}; "
    return (
        f"{first}from step {options.steps + 1} on, groups of {options.size} episodes on the "
        f"hardest tasks ({options.hard:.0%} of those seen, {options.keep:.0%} of them after each "
        "pass); the objective is the expectation over these"
    )


_MEASURED = """
64 tasks without anything in common, 8 groups per step, a learning rate of 2, 8000 episodes; the
tasks whose success rate is below 0.05 at first; 20 seeds (standard error at most 0.023).
`tests/techniques/test_hard_task_stages.py` repeats the first and the last row.

| | solved at least once | success rate at the end |
|---|---|---|
| drawn uniformly, groups of 8 | 0.64 | 0.35 |
| drawn uniformly, groups of 32 | 0.61 | 0.10 |
| `steps` 24 | 0.62 | 0.07 |
| `steps` 24, `size` 32, `hard` 0.5, `keep` 0.75 | 0.77 | 0.09 |

More hard tasks are solved at least once if enough of them are left. But larger groups mean fewer
steps, so the success rates are lower at equally many episodes. It has not been measured on the
desks.
"""

ENTRY = Entry(
    name="hard_task_stages",
    slot="sampler",
    rows=(28,),
    makes=HardTaskStages,
    options=HardTaskStagesConfig,
    changes=frozenset({"tasks", "count"}),
    describe=_describe,
    check=_check,
    complete=_complete,
    use="Some tasks are hardly ever solved, and episodes are cheaper than steps.",
    measured=_MEASURED,
    exactness="In the second stage, the objective is the expectation over the hard tasks, and each "
    "step has more episodes. D and S do not change. Our own reading: the ranking by all past "
    "groups, which may bring tasks back, random draws within a pass, and all values "
    "but `size`.",
    requires=frozenset({"pool"}),
    evidence="abstract",
)
