"""Numbers as texts, and a run's bottleneck as a sentence, for terminal, report and dashboard."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

NONE = "—"
"""Text for a missing number."""


def number(value: Any) -> float | None:
    """Return a finite number as float, and None for anything else.

    >>> number(2), number("2"), number(None), number(float("nan"))
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def mapping(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a mapping, otherwise an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def records(value: Any, limit: int) -> list[dict[str, Any]]:
    """Return the dicts among the first `limit` items of a list. Empty if `value` is not a list."""
    items = value[:limit] if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, dict)]


def percent(share: float | None, digits: int = 0) -> str:
    """Return a share as text in percent. `NONE` if the share is None.

    >>> percent(0.4336), percent(0.9964), percent(0.9964, 1), percent(None)
    ('43%', '99.6%', '99.6%', '—')
    >>> percent(-1e-17), percent(-0.0, 1)
    ('0%', '0.0%')
    """
    if share is None:
        return NONE
    if digits == 0 and (0 < share < 0.01 or 0.99 < share < 1):
        digits = 1
    return f"{100 * share:z.{digits}f}%"


def duration(seconds: float | None) -> str:
    """Return a duration in seconds as text. `NONE` if it is None.

    >>> duration(4.26), duration(372), duration(7384), duration(None)
    ('4.3 s', '6:12', '2:03:04', '—')
    """
    if seconds is None:
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def amount(value: float | None) -> str:
    """Return a number as text with three significant digits and commas between thousands.

    >>> amount(2310.4), amount(0.004123), amount(12.0), amount(0), amount(1.5e-6), amount(None)
    ('2,310', '0.00412', '12', '0', '1.5e-06', '—')
    """
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and abs(value) < 1e-4:
        return f"{value:.2g}"
    return f"{value:z.3g}"


KEEPS_PACE, KEEPS_BUSY, HELD_BACK, OTHER = 0.1, 0.2, 0.5, 0.2
"""Shares by which the bottleneck is named.

`KEEPS_PACE`: the trainer counts as waiting if it waits for at least this share of the time.
`KEEPS_BUSY`: the engine counts as busy if it is idle for less than this share of the time.
`HELD_BACK`: tools can be the cause of an idle engine if episodes spend at least this share of their
time in them. The staleness budget is the cause if at least this share of the groups in flight is
finished and waits for older ones.
`OTHER`: if the bottleneck is an activity of the trainer, its longest other activity is named too if
it takes more than this share of the trainer's time.
"""

BOTTLENECKS = {
    "Generation": "a faster engine (engine.processes or engine.servers, engine.threads, "
    "engine.dtype: docs/engines.md) or shorter completions (engine.max_completion_tokens)",
    "Tools and rewards": "more concurrent groups (schedule.max_staleness), or faster tools and "
    "reward functions",
    "The staleness budget": "training on finished groups before older unfinished ones "
    "(schedule.adaptive_window or schedule.lookahead_window), or more concurrent groups "
    "(schedule.max_staleness)",
    "Taking turns": "generating while the trainer works (schedule.max_staleness above 0)",
    "Training": "more compute for the trainer (more cores with trainer.threads 0, a bfloat16 "
    "trainer.dtype) or smaller batches",
    "Scoring old log-probabilities": "more compute for the trainer (more cores with "
    "trainer.threads 0), or an old_logps.route that scores while the trainer waits (eager) or in "
    "its own process (old_logit_model)",
    "Publishing": "smaller transfers (the same dtype for engine and trainer, which enables weight "
    "deltas, or trainer.lora_rank)",
    "Checkpointing": "fewer checkpoints (checkpoint.interval)",
    "Evaluation": "fewer evaluations or fewer tasks (eval.interval, eval.tasks)",
    "Grading held-out tasks": "faster tools and reward functions, or fewer held-out tasks "
    "(eval.interval, eval.tasks)",
}
"""Possible bottlenecks of a run, each with a text on the options that help."""

_WORK = {
    "trainer/update_s": "Training",
    "old_logps/prepare_s": "Scoring old log-probabilities",
    "eval/duration_s": "Evaluation",
    "checkpoint/duration_s": "Checkpointing",
    "publish/duration_s": "Publishing",
}
"""Names of the trainer's activities, by the metric with the seconds of each. The last three can
overlap with the first two. So each activity counts only for the time of a step that no earlier
activity in this list has taken.
"""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The shares of time in which a run's trainer and engine waited. None if not recorded.

    `trainer` is the share in which the trainer waited for finished groups, `engine` the share in
    which the engine had no requests. `synchronous` is True if no staleness was allowed.
    """

    trainer: float | None
    engine: float | None
    work: Mapping[str, float] = field(default_factory=dict)
    """Share of the trainer's time that each of its activities took, by name."""
    tools: float | None = None
    """Share of their time in which training episodes waited for tools and rewards."""
    eval_tools: float | None = None
    """Share of their time in which held-out episodes waited for tools and rewards."""
    finished: float | None = None
    """Share of the groups in flight that were finished and only waited for older groups."""
    synchronous: bool = False

    @property
    def bottleneck(self) -> str:
        """The bottleneck of the run, a key of `BOTTLENECKS`. Empty if there is none or it is not
        known.

        If the trainer hardly waits, the bottleneck is the trainer's longest activity. If the
        trainer waits and the engine is busy, it is generation. If both wait, it is tools, the limit
        on staleness or synchronous training.
        """
        trainer = self.trainer or 0.0
        engine = self.engine or 0.0
        longest = max(self.work, key=lambda name: self.work[name], default="Training")
        if trainer < KEEPS_PACE:
            trains = longest in ("Training", "Scoring old log-probabilities")
            balanced = trains and engine < KEEPS_PACE
            is_unknown = balanced or (self.trainer is None and not engine)
            return "" if is_unknown else self._named(longest)
        if self.work.get("Evaluation", 0.0) >= trainer:
            return self._named("Evaluation")
        if engine < KEEPS_BUSY:
            return "Generation"
        if self.synchronous and (self.tools or 0.0) < HELD_BACK:
            return "Taking turns"
        held_back = (self.finished or 0.0) >= HELD_BACK or (
            self.tools is not None and self.tools < HELD_BACK
        )
        return "The staleness budget" if held_back else "Tools and rewards"

    def _named(self, activity: str) -> str:
        """Return `activity`. An evaluation that mostly waits for rewards is "Grading held-out
        tasks".
        """
        is_grading = activity == "Evaluation" and (self.eval_tools or 0.0) >= HELD_BACK
        return "Grading held-out tasks" if is_grading else activity

    @property
    def sentence(self) -> str:
        """A sentence that names the bottleneck, with the figures that show it."""
        if self.trainer is None and self.engine is None:
            return "Too little was recorded to find the bottleneck."
        facts = f"the trainer waited for episodes {percent(self.trainer)} of the time"
        if self.engine is not None:
            facts += f", the engine was idle {percent(self.engine)}"
        if self.trainer is None:
            facts = f"the engine was idle {percent(self.engine)} of the time"
        match self.bottleneck:
            case "":
                return f"Generation and training keep pace: {facts}."
            case "Tools and rewards" if self.tools is not None:
                facts += f", and episodes spent {percent(self.tools)} of their time in them"
            case "Grading held-out tasks":
                facts = (
                    f"evaluation took {percent(self.work['Evaluation'])} of the trainer's time, "
                    f"and held-out episodes spent {percent(self.eval_tools)} of theirs in tools and"
                    f" rewards; {self._other('Evaluation')}{facts}"
                )
            case "The staleness budget" if self.finished is not None:
                facts += f", and {percent(self.finished)} of the groups in flight were finished"
                facts += " but waited for older ones"
            case name if name in self.work:
                took = f"it took {percent(self.work[name])} of the trainer's time, "
                facts = f"{took}{self._other(name)}{facts}"
        return f"{self.bottleneck} is the bottleneck: {facts}."

    def _other(self, name: str) -> str:
        """Return a text with the trainer's longest activity other than `name`, and its share of the
        time.

        Empty if the share is at most `OTHER`.
        """
        unknown = 1 - (self.trainer or 0.0) - sum(self.work.values())
        others = {**self.work, name: 0.0, "what was not measured": unknown}
        share, largest = max((share, each) for each, share in others.items())
        return f"{largest[0].lower()}{largest[1:]} {percent(share)}, " if share > OTHER else ""

    @property
    def advice(self) -> str:
        """A sentence that names options against the bottleneck. Empty if there is none."""
        remedy = BOTTLENECKS.get(self.bottleneck, "")
        return f"What would help: {remedy}." if remedy and self.trainer is not None else ""


def waiting(rows: Sequence[Mapping[str, Any]]) -> Waiting:
    """Return the shares of waiting over a series of steps. `rows` has the metrics of each step.

    From the first row, only the time at which the step ended is used.

    >>> step = {"time_s": 20.0, "schedule/wait_for_batch_s": 4.0, "engine/busy_share": 0.9}
    >>> wait = waiting([{"time_s": 10.0}, step])
    >>> wait.bottleneck, wait.trainer, round(wait.engine, 2)
    ('Generation', 0.4, 0.1)
    """
    waited = elapsed = idle = measured = 0.0
    work = dict.fromkeys(_WORK.values(), 0.0)
    sums = dict.fromkeys(_SUMMED, 0.0)
    for previous, row in pairwise(rows):
        start = number(previous.get("time_s"))
        end = number(row.get("time_s"))
        if start is None or end is None or end <= start:
            continue
        wait = number(row.get("schedule/wait_for_batch_s"))
        busy = number(row.get("engine/busy_share"))
        left = end - start
        if wait is not None:
            waited += min(wait, left)
            elapsed += left
            left -= min(wait, left)
            for name, activity in _WORK.items():
                took = min(left, number(row.get(name)) or 0.0)
                work[activity] += took
                left -= took
        if busy is not None:
            idle += (1 - busy) * (end - start)
            measured = measured + end - start
        for name in _SUMMED:
            sums[name] += number(row.get(name)) or 0.0
    tools, generation, finished, in_flight, eval_tools, eval_generation = sums.values()
    bound = number(rows[-1].get("schedule/staleness_bound")) if rows else None
    return Waiting(
        trainer=waited / elapsed if elapsed else None,
        engine=min(1.0, max(0.0, idle / measured)) if measured else None,
        work={name: took / elapsed for name, took in work.items() if took} if elapsed else {},
        tools=tools / (tools + generation) if generation else None,
        finished=finished / in_flight if in_flight else None,
        eval_tools=eval_tools / (eval_tools + eval_generation) if eval_generation else None,
        synchronous=bound == 0,
    )


_SUMMED = (
    "rollout/tool_wait_s",
    "rollout/generation_wait_s",
    "schedule/groups_waiting",
    "schedule/groups_in_flight",
    "eval/tool_wait_s",
    "eval/generation_wait_s",
)

WAITING_METRICS = (
    "time_s",
    "schedule/wait_for_batch_s",
    "engine/busy_share",
    "schedule/staleness_bound",
    *_WORK,
    *_SUMMED,
)
"""Names of the metrics that `waiting` reads."""
