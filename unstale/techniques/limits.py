"""`limits`: a limit of turns at a quantile of the turns of past successes.

The limit is the `quantile` of the turns of the latest `window` successes, with linear interpolation
and rounded up, at most `rollout.max_turns`. No limit is set before `successes` successes. Only
successes of groups without a limit count, because a limit shortens the successes under it. So every
`free_every`-th group has no limit. With `scope = task`, each task has a limit of its own, and
`quantile` 1 is then the limit of DART: the longest past success of the task.

The environment's last messages before the limit end with a reminder of the number of replies left.
With `extend`, an episode that reaches the limit gets `extend` more turns: if its last reply
contains `request`, or, without `request`, if the environment has paid a reward for a turn since the
last limit. An episode gets at most `extensions` extensions. From the abstract of a paper on turn
control (a fixed limit at the 0.75 quantile with reminders, and extensions on demand).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal

from unstale.config.checks import ConfigError, Count, PositiveInt, Range, Section
from unstale.config.techniques import Entry
from unstale.records import TurnLimit
from unstale.techniques.hooks import Outcome

if TYPE_CHECKING:
    from unstale.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig(Section):
    """A limit of turns at a quantile of the turns of past successes."""

    quantile: Annotated[float, Range(0.01, 1)] = 0.75
    """The limit is this quantile of the turns of past successes: this share of them had at most as
    many.
    """
    scope: Literal["run", "task"] = "run"
    """One limit for all tasks, or one for each task of the pool, from its own successes."""
    successes: PositiveInt = 64
    """Number of successes before a limit is set. With `scope = task`, set a small number, because
    each task needs this number of its own successes.
    """
    window: PositiveInt = 256
    """Number of the latest successes whose turns are used."""
    free_every: Annotated[int, Range(2)] = 8
    """Every group whose number is a multiple of this has no limit, so that its successes can be
    counted.
    """
    remind: Count = 2
    """The environment's messages end with a reminder from this number of remaining replies on; 0
    sends none.
    """
    extend: Count = 0
    """Number of further turns that an episode at its limit can get; 0 gives none."""
    extensions: PositiveInt = 1
    """Only with `extend`: largest number of times that an episode gets further turns."""
    request: str = "MORE TURNS"
    """Only with `extend`: text by which a reply asks for further turns. If it is empty, an episode
    gets them if the environment rewarded a turn since the last limit.
    """

    def check_combination(self) -> None:
        if self.window < self.successes:
            raise ConfigError(
                f"limits.window must be >= {self.successes} (limits.successes), got {self.window}"
            )
        if not self.extend and (self.extensions != 1 or self.request != "MORE TURNS"):
            raise ConfigError(
                "limits.extensions and limits.request are used only with limits.extend > 0"
            )


class Limits:
    """A technique that limits turns by the number of turns of past successes."""

    def __init__(self, options: LimitsConfig) -> None:
        self._options = options
        self._turns: dict[str, list[int]] = {}
        """Turns of the latest successes in groups without a limit, oldest first. The key is the
        task's identity, or "" if all tasks have one limit.
        """

    def turn_limit(self, number: int, task: str) -> TurnLimit | None:
        options = self._options
        turns = self._turns.get(self._key(task), [])
        if number % options.free_every == 0 or len(turns) < options.successes:
            return None
        return limit_at(turns, options)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if not outcome.turn_limit and outcome.success_turns:
                key = self._key(outcome.task)
                turns = [*self._turns.get(key, []), *outcome.success_turns]
                self._turns[key] = turns[-self._options.window :]

    def state(self) -> Mapping[str, Any]:
        return {"turns": {key: list(turns) for key, turns in self._turns.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._turns = {key: list(turns) for key, turns in state["turns"].items()}

    def _key(self, task: str) -> str:
        return task if self._options.scope == "task" else ""


def limit_at(turns: Sequence[int], options: LimitsConfig) -> TurnLimit:
    """Return the limit for the `turns` of past successes."""
    return TurnLimit(
        turns=limit_of(turns, options.quantile),
        remind=options.remind,
        extend=options.extend,
        extensions=options.extensions if options.extend else 0,
        request=options.request if options.extend else "",
    )


def limit_of(turns: Sequence[int], share: float) -> int:
    """Return the limit of turns: the quantile `share` of the `turns` of successes, rounded up."""
    import numpy as np

    return max(1, ceil(round(float(np.quantile(turns, share)), 9)))


def _describe(options: LimitsConfig) -> str:
    whose = " of its task" if options.scope == "task" else ""
    parts = [
        f"an episode has as many turns as {options.quantile:.0%} of the latest {options.window} "
        f"successes{whose}, after the first {options.successes}; every {options.free_every}th "
        "group has no such limit"
    ]
    if options.remind:
        parts.append(f"the environment's last {options.remind} answers end with a reminder")
    if options.extend:
        asked = f"replies with {options.request!r}" if options.request else "rewards of turns"
        parts.append(f"{asked} give {options.extend} more turns, {options.extensions} times")
    return "; ".join(parts)


def _check(options: LimitsConfig, config: RunConfig) -> None:
    if config.rollout.max_turns < 2:
        raise ConfigError(
            "the technique limits needs rollout.max_turns >= 2, got 1: no limit is lower"
        )
    if options.scope == "task" and not config.selection.pool:
        raise ConfigError(
            "limits.scope = task needs selection.pool > 0, got 0: tasks must come again. Set "
            "--selection.pool to the number of tasks"
        )


_MEASURED = """
A policy solves a task in 2, 3, 4, 5, 8, 9, 10 or 20 turns, each equally often and with success 0.6;
24 policies share the limit, 2 groups of 8 each per step. Mean turns of an episode without a limit:

| steps | no technique | `quantile` 0.9 | 0.75 | 0.5 |
|---|---|---|---|---|
| 24 | 7.5 | 7.5 | 5.3 | 3.5 |
| 96 | 8.0 | 6.0 | 3.4 | 2.2 |

So turns fall at an equal rate of success. They go on falling: the limit follows the policy, as long
as shorter successes exist. It has not been measured on the desks, where a limit may cost success.
"""

ENTRY = Entry(
    name="limits",
    slot="limiter",
    rows=(11, 23),
    makes=Limits,
    options=LimitsConfig,
    changes=frozenset({"turns"}),
    describe=_describe,
    use="Some episodes wander on for many turns after the length at which successes end "
    "(`completion/max_turns_share`), and turns are expensive.",
    measured=_MEASURED,
    exactness="Episodes that the limit cuts off have no reward, so the objective prefers short "
    "ones. Reminders are text of the environment: they have no loss, and the evaluation during "
    "training has none. `--limit-turns` of `eval` and `serve` sets the limit of a run's successes. "
    "D and S do not change. With `scope = run`, a task that needs more turns than the limit is "
    "learned from the groups without a limit, or by extensions. Our own reading: groups without "
    "a limit, the number of successes, the texts, and rounding up.",
    evidence="abstract",
    check=_check,
)
