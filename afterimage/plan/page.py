"""A plan in words, tables and JSON."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from afterimage.plan.outcome import WAITS_LITTLE
from afterimage.plan.suggest import NEAR, Plan, Rated

_GB = 1e9
AVERAGE = "ppo_ewma_async"
"""The approximation that an exact route is held against: of those that keep weights the nearest (docs/old-logps.md)."""


def page(plan: Plan) -> Group:
    """The suggestion, why, what runs it, and what it was compared with."""
    best = plan.best.candidate
    head = f"{best.request.setting.model.name} on {best.request.devices} {best.request.setting.device.name}"
    lines = [f"\n{head}: {told(plan.best)}", *(f"  - {reason}" for reason in reasons(plan)), f"\n{flags(plan.best)}\n"]
    notes = (
        "error: 0 is exact, current_recompute's is 1; device: memory of the trainer's devices or its own; main: of "
        "deltas; extra: trainer's time a step; stand: engines' a version; split: training + engines x devices "
        "(+ scoring)."
    )
    return Group(
        *(Text(line) for line in lines),
        _table("Old-logit routes on the same schedule", [route_row(rated) for rated in plan.routes], caption=notes),
        _table("Lags, batches, windows and splits that were simulated", choices(plan)),
    )


def told(rated: Rated) -> str:
    """A configuration and its throughput, in a line."""
    candidate = rated.candidate
    schedule = candidate.schedule
    again = ", activations computed again," if candidate.costs.setting.recompute else ","
    return (
        f"{candidate.place.told}{again} {candidate.name}, max_staleness {schedule.max_staleness}, "
        f"{schedule.groups_per_step} groups of {schedule.group_size} a step, window {schedule.window}: "
        f"{rated.rate:,.0f} trained tokens/s, a step in {rated.outcome.mean_step_s:.3g} s"
    )


def reasons(plan: Plan) -> Iterator[str]:
    """Why this and not another, each with its numbers."""
    best, outcome = plan.best, plan.best.outcome
    costs, schedule = best.candidate.costs, best.candidate.schedule
    model, place, running = costs.setting.model, costs.place, best.candidate.max_running
    yield outcome.bottleneck
    beside = [rated for rated in plan.splits if rated.candidate.place != place]
    others = ", ".join(f"{each.candidate.place.told}: {each.rate / best.rate - 1:+.0%}" for each in beside)
    yield (
        f"Engines work {outcome.engine_busy_share:.0%} of the time and the trainer {outcome.trainer_busy_share:.0%}"
        + (f". Other splits: {others}" if others else "")
    )
    context = round(running * costs.setting.episode / 2)
    yield (
        f"An engine of {place.tp} has {model.copy_bytes / _GB:.3g} GB of weights and room for {running} replies "
        f"({model.kv_bytes / 1e6:.3g} MB a token of context); a decoding step of all of them takes "
        f"{1e3 * costs.step_s(running, context):.3g} ms"
    )
    yield (
        f"Tokens are {outcome.staleness_mean:.2f} versions old in the mean, {outcome.staleness_max} at the most seen "
        f"and {outcome.staleness_bound} by the schedule's bound; synchronous training gives "
        f"{plan.synchronous.rate:,.0f} tokens/s, {best.rate / plan.synchronous.rate:.2f} times less"
    )
    larger = [r for r in plan.choices if r.candidate.schedule.max_staleness > schedule.max_staleness]
    if larger and (most := max(larger, key=lambda rated: rated.rate)).rate > best.rate:
        more = most.candidate.schedule
        yield (
            f"max_staleness {more.max_staleness} with {more.groups_per_step} groups gives "
            f"{most.rate / best.rate - 1:.0%} more: under 5% is not worth older tokens"
        )
    yield from _exactness(plan)
    if costs.load_s() > 0.5 * WAITS_LITTLE * outcome.mean_step_s:
        yield (
            f"Engines stand still {costs.load_s():.3g} s a version"
            + (
                f", {costs.walk_s * place.trainers / place.tp:.3g} s of it to apply the delta"
                if costs.route.chain
                else ""
            )
            + (" and the rest to be scored before it is left" if costs.route.closing else "")
            + "; contexts are then computed again"
        )


def _exactness(plan: Plan) -> Iterator[str]:
    """What the suggested route takes beside the best average."""
    average = next((r for r in plan.routes if r.candidate.name == AVERAGE), None)
    best, mine = plan.best, route_row(plan.best)
    if average is None or not best.candidate.costs.route.exact:
        return
    theirs = route_row(average)
    ratio = f"{best.extra_s / average.extra_s:.2f} times its time" if average.extra_s else "against no time of its"
    yield (
        f"{best.candidate.name} is exact: {mine['main_gb']:.3g} GB of deltas and {mine['device_gb']:.3g} GB on the "
        f"trainer's devices, {best.extra_s:.3g} s a step. {AVERAGE}, the best average, keeps {theirs['device_gb']:.3g} "
        f"GB, takes {average.extra_s:.3g} s and errs by {average.candidate.costs.route.error:.2f} of what "
        f"current_recompute does: exactness has {ratio} and {_beside(best.rate / average.rate)}"
    )


def _beside(ratio: float) -> str:
    """Two throughputs, to the accuracy of a short simulation."""
    return "the same throughput within 5%" if abs(ratio - 1) < 1 - NEAR else f"{ratio - 1:+.0%} throughput"


def flags(rated: Rated) -> str:
    """What to say to `afterimage train`."""
    schedule, costs = rated.candidate.schedule, rated.candidate.costs
    setting = costs.setting
    given = {
        "schedule.max_staleness": schedule.max_staleness, "schedule.groups_per_step": schedule.groups_per_step,
        "schedule.group_size": schedule.group_size, "schedule.window": schedule.window,
        "old_logps.route": rated.candidate.name, "engine.max_running": rated.candidate.max_running,
        "engine.max_context": max(16, round(setting.longest)), "trainer.dtype": "bfloat16", "trainer.lr": setting.lr,
    }  # fmt: skip
    return " ".join(f"--{name} {value}" for name, value in given.items())


Row = dict[str, float | int | str]


def route_row(rated: Rated) -> Row:
    """What a route keeps (copies: deltas and averages, without movable models) and takes, and what it leaves."""
    costs, model = rated.candidate.costs, rated.candidate.costs.setting.model
    route = costs.route
    chain = route.chain_bytes(model, live=costs.live, rate=costs.setting.lr)
    apart = model.copy_bytes * route.movable * route.apart
    return {
        "route": rated.candidate.name,
        "error": route.error,
        "device_gb": (route.device_bytes(model) + apart) / _GB,
        "main_gb": chain / _GB,
        "copies": (chain + 4 * model.parameters * route.averages) / model.copy_bytes,
        "extra_s": rated.extra_s,
        "stand_s": costs.load_s(),
        "split": _split(rated),
        "tokens_/s": round(rated.rate),
    }


def choice_row(rated: Rated) -> Row:
    schedule, outcome = rated.candidate.schedule, rated.outcome
    return {
        "lag": schedule.max_staleness,
        "groups": schedule.groups_per_step,
        "window": schedule.window,
        "split": _split(rated),
        "tokens_/s": round(rated.rate),
        "step_s": outcome.mean_step_s,
        "engines_busy": outcome.engine_busy_share,
        "trainer_busy": outcome.trainer_busy_share,
        "age_mean": outcome.staleness_mean,
        "age_bound": outcome.staleness_bound,
    }


def choices(plan: Plan) -> list[Row]:
    """The schedules and splits that were simulated with the suggested route or the default one, the best first."""
    seen = {id(rated): rated for rated in (plan.synchronous, *plan.choices, *plan.splits, plan.best)}
    return [choice_row(rated) for rated in sorted(seen.values(), key=lambda rated: -rated.rate)]


def _split(rated: Rated) -> str:
    place = rated.candidate.place
    return f"{place.trainers}+{place.engines}x{place.tp}" + (f"+{place.scorers}" if place.scorers else "")


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it, for programs."""
    best, place = plan.best, plan.best.candidate.place
    model = best.candidate.costs.setting.model
    return {
        "model": {"name": model.name, "parameters": model.parameters, "active": model.active_parameters},
        "suggestion": told(best),
        "place": {"trainers": place.trainers, "engines": place.engines, "tp": place.tp, "scorers": place.scorers},
        "expected": choice_row(best),
        "reasons": list(reasons(plan)),
        "flags": flags(best),
        "routes": [route_row(rated) for rated in plan.routes],
        "choices": choices(plan),
    }


def _table(title: str, rows: Sequence[Row], *, caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, box=SIMPLE_HEAD, padding=0, title_justify="left")
    table.caption_justify = "left"
    for name, value in rows[0].items():
        table.add_column(name.replace("_", "\n"), no_wrap=True, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(_short(each) for each in row.values()))
    return table


def _short(value: float | str) -> str:
    return f"{value:.{3 if value >= 1 else 2}g}" if isinstance(value, float) else str(value)
