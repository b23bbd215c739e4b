"""What the numbers of a run say, in words: who waits for whom, what the two factors mean under a route, the outcome."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from unstale.config import staleness_bound
from unstale.config.routes import exact_routes, routes

NONE = "—"
"""Stands where a number is missing."""


def number(value: Any) -> float | None:
    """A finite number, or None: whatever else a run folder holds in its place.

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


def percent(share: float | None, digits: int = 0) -> str:
    """
    >>> percent(0.4336), percent(0.9964), percent(0.9964, 1), percent(None)
    ('43%', '99.6%', '99.6%', '—')
    """
    if share is None:
        return NONE
    if digits == 0 and (0 < share < 0.01 or 0.99 < share < 1):
        digits = 1
    return f"{100 * share:.{digits}f}%"


def duration(seconds: float | None) -> str:
    """
    >>> duration(4.26), duration(372), duration(7384), duration(None)
    ('4.3 s', '6:12', '2:03:04', '—')
    """
    if seconds is None:
        return NONE
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def amount(value: float | None) -> str:
    """A number for a reader: three significant digits, thousands grouped.

    >>> amount(2310.4), amount(0.004123), amount(12.0), amount(0), amount(1.5e-6), amount(None)
    ('2,310', '0.00412', '12', '0', '1.5e-06', '—')
    """
    if value is None:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value and abs(value) < 1e-4:
        return f"{value:.2g}"
    return f"{value:.3g}"


KEEPS_PACE, KEEPS_BUSY, HELD_BACK = 0.1, 0.2, 0.5
"""Shares of the time below which the trainer's waiting says nothing, and the engine's idling; the share from which on
tools, or finished groups that wait for older ones, are what is waited for."""

BOTTLENECKS = {
    "Generation": "give the engine more (engine.processes, engine.threads, servers: docs/engines.md) or less to say "
    "(engine.dtype, engine.max_completion_tokens)",
    "Waiting for tools": "let more groups be live (schedule.max_staleness), or make the tools quicker",
    "The staleness budget": "let finished groups overtake (schedule.lookahead_window), or more be live (schedule.max_staleness)",
    "Taking turns": "let groups be live while the trainer works (schedule.max_staleness above 0)",
    "Training": "give the trainer more (trainer.threads, a bfloat16 trainer.dtype) or take smaller batches",
    "Scoring old log-probabilities": "give the trainer more (trainer.threads), or score in time that is idle or in a "
    "process of its own, where the route does neither yet (old_logps.route eager, old_logit_model)",
    "Publishing": "let less travel (one dtype for engine and trainer, so that deltas do; trainer.lora_rank)",
    "Checkpointing": "make checkpoints more seldom (checkpoint.every)",
    "Evaluation": "grade more seldom, or on fewer tasks (eval.every, eval.tasks)",
}
"""What a run can wait for most, and the knobs that would help."""

_WORK = {
    "trainer/update_s": "Training",
    "old_logps/prepare_s": "Scoring old log-probabilities",
    "eval/duration_s": "Evaluation",
    "checkpoint/duration_s": "Checkpointing",
    "publish/duration_s": "Publishing",
}
"""What occupies the trainer's side, by metric. The last three go on beside the first two, and count where they do not:
as far as these and the waiting leave time."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Shares of the wall time: the trainer waiting for finished groups, the engine with nothing to generate."""

    trainer: float | None
    engine: float | None
    work: Mapping[str, float] = field(default_factory=dict)
    """What else the trainer's side did, by bottleneck."""
    tools: float | None = None
    """Of the time of episodes, what they waited for tools."""
    finished: float | None = None
    """Of the groups that are live when a batch is taken, those that are finished and wait for older ones."""
    synchronous: bool = False

    @property
    def bottleneck(self) -> str:
        """Which of `BOTTLENECKS`; empty if none is, or nothing was recorded.

        A trainer that waits waits for the engine, if that is never idle, and else for what keeps the episodes.
        """
        trainer, engine = self.trainer or 0.0, self.engine or 0.0
        most = max(self.work, key=lambda name: self.work[name], default="Training")
        if trainer < KEEPS_PACE:
            beside = most in ("Training", "Scoring old log-probabilities") and engine < KEEPS_PACE
            return "" if beside or (self.trainer is None and not engine) else most
        if self.work.get("Evaluation", 0.0) >= trainer:
            return "Evaluation"
        if engine < KEEPS_BUSY:
            return "Generation"
        if self.synchronous:
            return "Taking turns"
        held_back = (self.finished or 0.0) >= HELD_BACK or (
            self.tools is not None and self.tools < HELD_BACK
        )
        return "The staleness budget" if held_back else "Waiting for tools"

    @property
    def sentence(self) -> str:
        """The bottleneck, in one sentence."""
        if self.trainer is None and self.engine is None:
            return "Too little has been recorded to say who waits for whom."
        facts = f"the trainer waited for episodes {percent(self.trainer)} of the time"
        if self.engine is not None:
            facts += f", the engine stood idle {percent(self.engine)}"
        if self.trainer is None:
            facts = f"the engine stood idle {percent(self.engine)} of the time"
        match self.bottleneck:
            case "":
                return f"Generation and training keep pace: {facts}."
            case "Waiting for tools" if self.tools is not None:
                facts += f", and episodes spent {percent(self.tools)} of theirs in tools"
            case "The staleness budget" if self.finished is not None:
                facts += f", while {percent(self.finished)} of the live groups were finished and waited for older ones"
            case name if name in self.work:
                facts = f"it took {percent(self.work[name])} of the trainer's time, {facts}"
        return f"{self.bottleneck} is the bottleneck: {facts}."

    @property
    def advice(self) -> str:
        """What would help, in one sentence; empty where nothing has to."""
        help_with = BOTTLENECKS.get(self.bottleneck, "")
        return f"What would help: {help_with}." if help_with and self.trainer is not None else ""


def waiting(rows: Sequence[Mapping[str, Any]]) -> Waiting:
    """Over the steps of `rows`, which follow one another; the first row's time is where the count begins.

    >>> rows = [{"time_s": 10.0}, {"time_s": 20.0, "schedule/wait_for_batch_s": 4.0, "engine/busy_share": 0.9}]
    >>> waiting(rows).sentence
    'Generation is the bottleneck: the trainer waited for episodes 40% of the time, the engine stood idle 10%.'
    """
    waited = elapsed = idle = measured = 0.0
    work, sums = dict.fromkeys(_WORK.values(), 0.0), dict.fromkeys(_SUMMED, 0.0)
    for before, row in pairwise(rows):
        start, end = number(before.get("time_s")), number(row.get("time_s"))
        if start is None or end is None or end <= start:
            continue
        wait, busy, left = (
            number(row.get("schedule/wait_for_batch_s")),
            number(row.get("engine/busy_share")),
            end - start,
        )
        if wait is not None:
            waited, elapsed = waited + min(wait, left), elapsed + left
            left -= min(wait, left)
            for name, what in _WORK.items():
                took = min(left, number(row.get(name)) or 0.0)
                work[what], left = work[what] + took, left - took
        if busy is not None:
            idle, measured = idle + (1 - busy) * (end - start), measured + end - start
        for name in _SUMMED:
            sums[name] += number(row.get(name)) or 0.0
    tools, replies, finished, live = sums.values()
    bound = number(rows[-1].get("schedule/staleness_bound")) if rows else None
    return Waiting(
        trainer=waited / elapsed if elapsed else None,
        engine=min(1.0, max(0.0, idle / measured)) if measured else None,
        work={what: took / elapsed for what, took in work.items() if took} if elapsed else {},
        tools=tools / (tools + replies) if replies else None,
        finished=finished / live if live else None,
        synchronous=bound == 0,
    )


_SUMMED = (
    "rollout/tool_wait_s",
    "rollout/generation_wait_s",
    "schedule/groups_waiting",
    "schedule/groups_in_flight",
)


FATES = {
    "trained": "trained on",
    "waiting": "waiting to be trained on",
    "failed": "failed, begun again",
    "given_up": "failed, given up",
    "restarted": "begun again on resume",
    "open": "open",
}
"""How an attempt at an episode ended."""
LOST = frozenset({"failed", "given_up", "restarted"})

LOST_LEAST, LOST_ERRORS = 10, 3
"""Lost attempts, and standard errors between the means, from which on a difference is told."""


def survivorship(place: Mapping[str, Any]) -> tuple[str, bool]:
    """Whether what an environment lost differs in length from what was kept, and whether long ones were lost first.

    >>> means = {"lost": 30, "kept": 970, "lost_mean": 412.0, "kept_mean": 196.0, "se": 20.0}
    >>> print(survivorship({"contrast": means})[0])
    Lost attempts were 2.1 times as long as kept ones (412 sampled tokens against 196, 30 attempts): long ones are \
lost first.
    """
    kinds, means = place.get("kinds"), place.get("contrast")
    if isinstance(kinds, Mapping) and not LOST & kinds.keys():
        return "No attempt that ended was lost.", False
    found = means if isinstance(means, Mapping) else {}
    lost, kept = number(found.get("lost_mean")), number(found.get("kept_mean"))
    count, error = number(found.get("lost")), number(found.get("se"))
    if lost is None or kept is None or count is None or error is None:
        return (
            "No difference in length can be told: fewer than two attempts were lost, or fewer than two kept.",
            False,
        )
    means_told = f"{amount(lost)} sampled tokens against {amount(kept)}, {amount(count)} attempts"
    if count < LOST_LEAST or abs(lost - kept) <= LOST_ERRORS * error:
        return (
            f"No difference in length can be told between lost attempts and kept ones ({means_told}).",
            False,
        )
    times = f"{lost / kept:.2g} times" if kept else "infinitely"
    if lost > kept:
        return (
            f"Lost attempts were {times} as long as kept ones ({means_told}): long ones are lost first.",
            True,
        )
    told = f"Lost attempts broke after {times} the length of kept ones ({means_told}). "
    return told + "How long they would have become is not known.", False


def censored(place: Mapping[str, Any]) -> str:
    """What the open attempts of an environment are; empty if there are none."""
    kinds = place.get("kinds")
    alike = kinds.get("open") if isinstance(kinds, Mapping) else None
    count = number(alike.get("count")) if isinstance(alike, Mapping) else None
    if not count:
        return ""
    return (
        f"{count:,.0f} open: neither kept nor lost. Long episodes are over-represented among open ones by "
        "construction: they are open longer."
    )


def is_exact(setting: Any) -> bool:
    """Whether each token's old_logp is of the very version that sampled it, as `OldLogpsConfig.exact` has it."""
    return (setting("old_logps.fallback") or setting("old_logps.route")) in exact_routes()


def factor_names(route: str, *, exact: bool) -> tuple[str, str]:
    """What log D and log S are under a route, a sentence each, without claiming more than the route delivers."""
    if exact:
        return (
            "log D compares engine and trainer about the same weights: numerics, which should not depend on the age of "
            "a token.",
            "log S compares the trainer's weights now with those that sampled: movement, which should grow with age.",
        )
    if route == "rollout":
        return (
            "log D is 0 by construction: old_logp is the engine's own number.",
            "So log S holds both factors, numerics and staleness, in one ratio.",
        )
    return (
        f"log D here is old_logp - behavior_logp, which under {route} mixes numerics with part of the staleness.",
        "log S is logp - old_logp, only the rest of the staleness.",
    )


def semantics(setting: Any, exact_share: float | None) -> list[tuple[str, str]]:
    """What a run's settings mean, as (heading, sentence). `setting(name)` gives a knob; `exact_share` was measured."""
    route, budget = str(setting("old_logps.route", "unknown")), setting("schedule.max_staleness")
    bound = _bound(setting)
    return [
        ("Old log-probabilities", _route_words(route, exact_share)),
        ("Discrepancy", _control_words(setting)),
        ("Staleness", _objective_words(setting)),
        (
            "Schedule",
            "Synchronous: generation waits for every step."
            if budget == 0
            else f"Asynchronous: generation goes on while the trainer works; the budget lets tokens be at most {bound} "
            "versions behind, and nothing is thrown away for being slow.",
        ),
    ]


def _bound(setting: Any) -> str:
    knobs = [
        setting(f"schedule.{name}")
        for name in ("max_staleness", "groups_per_step", "lookahead_window")
    ]
    return (
        str(staleness_bound(*knobs))
        if all(isinstance(knob, int) for knob in knobs)
        else "an unknown number of"
    )


def _route_words(route: str, exact_share: float | None) -> str:
    share = (
        ""
        if exact_share is None
        else f" Measured: exact for {percent(exact_share, 1)} of the tokens with an advantage."
    )
    return route_about(route) + share


def route_about(route: str) -> str:
    """Return what is taken as old_logp under a route."""
    if route == "unknown":
        return "Not known: the configuration could not be read."
    if route not in routes():
        return f"{route} is not a route of this version."
    return routes()[route].docs.report


def _control_words(setting: Any) -> str:
    control, low, high = (
        setting("correction.control"),
        setting("correction.low"),
        setting("correction.high"),
    )
    band = f"[{low}, {high}], per {setting('correction.unit')}"
    where = "D = π_old / μ" if is_exact(setting) else "the stand-in for D = π_old / μ"
    match control:
        case "none":
            return f"Nothing is done about {where}."
        case "mask":
            return f"Tokens with {where} outside {band} are dropped."
        case "truncate":
            return f"Tokens are weighted by {where}, truncated at {high}."
        case "mask_weight":
            return f"Tokens are weighted by {where} inside {band} and dropped outside."
    return "Not known."


def _objective_words(setting: Any) -> str:
    kind = setting("objective.kind")
    where = "S = π / π_old" if is_exact(setting) else "the stand-in for S = π / π_old"
    match kind:
        case "none":
            return f"Nothing bounds {where}."
        case "kl_penalty":
            return f"{where} is held by a quadratic penalty with coefficient {setting('objective.kl_penalty')}."
        case None:
            return "Not known."
    low, high = number(setting("objective.clip_low")), number(setting("objective.clip_high"))
    if low is None or high is None:
        return f"{kind} on {where}."
    if kind == "cispo":
        return f"cispo: {where} is a weight, held inside [{1 - low:g}, {1 + high:g}]; the gradient goes on outside."
    return f"{kind}: no further gradient where {where} leaves [{1 - low:g}, {1 + high:g}]."
