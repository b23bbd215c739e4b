"""A plan in words, a table and JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from unstale.observe.report.words import KEEPS_PACE
from unstale.planner.suggest import (
    AVERAGE,
    NEAR,
    Candidate,
    SimulatedCandidate,
    Suggestion,
    sizes_of,
)

_GB = 1e9
_NOTES = (
    "exact: old logits are those of the policy that sampled. GPU GB: what a way adds to the memory of the training "
    "GPUs (or of its own), all together; main GB: to the main memory. extra s: seconds that it adds to the trainer's "
    "work in a step; stop s: seconds that sampling stops for a new version. *: simulated; the others follow from the "
    "suggestion by the formula. eager scores while the trainer waits, and is never slower than snapshot_old."
)


def page(plan: Suggestion) -> Group:
    """The suggestion, why, what runs it, and what it was compared with."""
    best = plan.best.candidate
    head = f"{best.request.setting.model.name} on {best.request.devices} {best.request.setting.device.name}"
    lines = [
        f"\n{head}: {told(plan.best)}",
        *(f"  - {reason}" for reason in reasons(plan)),
        f"\n{command(best)}",
    ]
    lines += [*(f"  - {each}" for each in missing(best)), ""]
    return Group(
        *(Text(line) for line in lines),
        _table("Ways to old logits (old_logps.route), on the same schedule", routes(plan)),
    )


def told(rated: SimulatedCandidate) -> str:
    """A configuration and its throughput."""
    candidate, schedule, place = rated.candidate, rated.candidate.schedule, rated.candidate.place
    window = (
        f", taken from the {schedule.lookahead_window} oldest in line"
        if schedule.lookahead_window > 1
        else ""
    )
    sharded = place.trainers > 1 and not candidate.costs.setting.device.name.startswith("core")
    later = (
        " once a trainer on several GPUs is there (today's is on one, and trains fewer)"
        if sharded
        else ""
    )
    again = (
        "; activations are computed again" if candidate.costs.setting.gradient_checkpointing else ""
    )
    return (
        f"{place.told}{again}; old logits by {candidate.name}; {schedule.groups_per_step} groups of "
        f"{schedule.group_size} a step{window}, at most {schedule.staleness_bound} versions old. {rated.rate:,.0f} "
        f"trained tokens/s{later} (+-{rated.spread:.0%}), a step in {rated.outcome.mean_step_s:.3g} s"
    )


def reasons(plan: Suggestion) -> Iterator[str]:
    """Why this and not another, each with its numbers."""
    best, outcome = plan.best, plan.best.outcome
    costs, schedule = best.candidate.costs, best.candidate.schedule
    model, place, running = costs.setting.model, costs.place, best.candidate.max_running
    yield outcome.bottleneck
    beside = [rated for rated in plan.splits if rated.candidate.place != place]
    others = "; ".join(
        f"{each.candidate.place.told}: {each.rate / best.rate - 1:+.0%}" for each in beside
    )
    yield (
        f"Engines work {outcome.engine_busy_share:.0%} of the time and the trainer {outcome.trainer_busy_share:.0%}"
        + (f". Other splits: {others}" if others else "")
    )
    context = round(running * costs.setting.episodes.tokens / 2)
    yield (
        f"An engine holds {model.copy_bytes / _GB:.3g} GB of weights and {running} replies "
        f"({model.kv_bytes / 1e6:.3g} MB a token of context); a decoding step of all of them takes "
        f"{1e3 * costs.step_s(running, context):.3g} ms"
    )
    yield (
        f"Tokens are {outcome.staleness_mean:.2f} versions old in the mean. Synchronous training, all GPUs sampling "
        f"and training in turns, gives {plan.synchronous.rate:,.0f} tokens/s (+-{plan.synchronous.spread:.0%}): this "
        f"is {best.rate / plan.synchronous.rate:.2f} times as much"
    )
    for each in plan.choices:
        other = each.candidate.schedule
        if other != schedule:
            yield (
                f"{sizes_of(other)} (at most {other.staleness_bound} versions old): {each.rate / best.rate - 1:+.0%}; "
                f"less than {1 / NEAR - 1:.0%} more is not worth older tokens or larger batches"
            )
    yield from _exactness(plan)
    if costs.load_s() > 0.5 * KEEPS_PACE * outcome.mean_step_s:
        yield f"Engines stop {costs.load_s():.3g} s to load a version; contexts are then computed again"


def _exactness(plan: Suggestion) -> Iterator[str]:
    """What the suggested route takes beside the best average."""
    best, average = plan.best.candidate, plan.rated.get(AVERAGE)
    if average is None or not best.costs.route.exact:
        return
    mine, theirs, ratio = (
        _route(plan, best),
        _route(plan, average.candidate),
        plan.best.rate / average.rate,
    )
    extra_s = average.candidate.extra_s
    times = f"{best.extra_s / extra_s:.2f} times its time" if extra_s else "against no time of its"
    beside = (
        "the same throughput within 5%"
        if abs(ratio - 1) < 1 - NEAR
        else f"{ratio - 1:+.0%} throughput"
    )
    yield (
        f"{best.name} is exact: {mine['main GB']:.3g} GB of deltas and {mine['GPU GB']:.3g} GB on GPUs, "
        f"{best.extra_s:.3g} s a step. {AVERAGE}, the best average, keeps {theirs['GPU GB']:.3g} GB and takes "
        f"{extra_s:.3g} s, and is not: exactness has {times} and {beside}"
    )


def command(candidate: Candidate) -> str:
    """What runs it, but for what is `missing`: `retail` stands for a recipe of one's own."""
    schedule, setting = candidate.schedule, candidate.costs.setting
    given = {
        "schedule.max_staleness": schedule.max_staleness, "schedule.groups_per_step": schedule.groups_per_step,
        "schedule.group_size": schedule.group_size, "schedule.lookahead_window": schedule.lookahead_window,
        "old_logps.route": candidate.name, "engine.max_running": candidate.max_running,
        "engine.max_context": max(16, round(setting.episodes.longest)),
        **({} if setting.device.name.startswith("core") else {"trainer.dtype": "bfloat16"}),
        "trainer.lr": setting.lr, "trainer.gradient_checkpointing": str(setting.gradient_checkpointing).lower(),
    }  # fmt: skip
    return "unstale train retail " + " ".join(f"--{name} {value}" for name, value in given.items())


def missing(candidate: Candidate) -> Iterator[str]:
    """What `command` leaves to whoever runs it."""
    place, model = candidate.place, candidate.costs.setting.model
    yield f"yours to give: a recipe in place of retail, and {model.name}'s folder (--policy FOLDER)"
    if candidate.costs.setting.device.name.startswith("core"):
        return
    yield (
        f"yours to start: {place.engines} server{'s' * (place.engines > 1)} with tensor parallelism {place.tp}, each "
        'told by --engine.backend vllm --engine.urls "URL ..." (docs/engines.md); without, a small engine samples'
    )


Row = dict[str, float | int | str]


def routes(plan: Suggestion) -> list[Row]:
    return [_route(plan, candidate) for candidate in plan.routes]


def _route(plan: Suggestion, candidate: Candidate) -> Row:
    """What a route keeps and takes, and what it leaves."""
    costs, model = candidate.costs, candidate.costs.setting.model
    route, place = costs.route, costs.place
    apart = model.copy_bytes * route.movable * route.apart
    scored = (candidate.extra_s + costs.optimizer_s) * route.closing
    return {
        "route": candidate.name, "exact": "yes" if route.exact else "no",
        "GPU GB": (route.device_bytes(model) + apart) / _GB,
        "main GB": route.chain_bytes(model, live=costs.live, rate=costs.setting.lr) / _GB,
        "extra s": candidate.extra_s, "stop s": costs.load_s() + scored,
        "train GPUs": place.trainers, "sample GPUs": place.engines * place.tp, "score GPUs": place.scorers,
        "tokens/s": f"{plan.rate(candidate):,.0f}{'*' if candidate.name in plan.rated else ' '}",
    }  # fmt: skip


def _choice(rated: SimulatedCandidate) -> Row:
    schedule, outcome, place = rated.candidate.schedule, rated.outcome, rated.candidate.place
    return {
        "max_staleness": schedule.max_staleness, "groups": schedule.groups_per_step, "lookahead_window": schedule.lookahead_window,
        "trainers": place.trainers, "engines": place.engines, "tp": place.tp,
        "tokens_per_s": rated.rate, "spread": rated.spread, "step_s": outcome.mean_step_s,
        "engines_busy": outcome.engine_busy_share, "trainer_busy": outcome.trainer_busy_share,
        "age_mean": outcome.staleness_mean, "age_bound": outcome.staleness_bound,
    }  # fmt: skip


def as_json(plan: Suggestion) -> dict[str, Any]:
    """All of it, for programs."""
    best, place = plan.best, plan.best.candidate.place
    model = best.candidate.costs.setting.model
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active": model.active_parameters,
        },
        "suggestion": told(best),
        "place": {
            "trainers": place.trainers,
            "engines": place.engines,
            "tp": place.tp,
            "scorers": place.scorers,
        },
        "expected": _choice(best),
        "synchronous": _choice(plan.synchronous),
        "reasons": list(reasons(plan)),
        "command": command(best.candidate),
        "missing": list(missing(best.candidate)),
        "routes": routes(plan),
        "choices": [_choice(rated) for rated in plan.choices],
    }


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, caption=_NOTES, box=SIMPLE_HEAD, padding=0, title_justify="left")
    table.caption_justify = "left"
    for name, value in rows[0].items():
        left = isinstance(value, str) and name != "tokens/s"
        table.add_column(
            name.replace(" ", "\n", 1), no_wrap=True, justify="left" if left else "right"
        )
    for row in rows:
        table.add_row(*(_short(each) for each in row.values()))
    return table


def _short(value: float | str) -> str:
    return f"{value:.{3 if value >= 1 else 2}g}" if isinstance(value, float) else str(value)
