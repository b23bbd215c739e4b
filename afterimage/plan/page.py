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
        "devices: what it keeps on the trainer's or its own; copies: deltas and averages, beside movable models; step: "
        "trainer's time for it; stand: engines' for a version. *: on a split of its own, for it does not fit that one."
    )
    return Group(
        *(Text(line) for line in lines),
        _table("Old-logit routes on the same schedule", routes(plan), caption=notes),
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
    best, mine = plan.best, memory(plan.best)
    if average is None or not best.candidate.costs.route.exact:
        return
    theirs = memory(average)
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


def memory(rated: Rated) -> dict[str, float]:
    """What a route keeps, in GB: in main memory, on the trainer's devices, elsewhere; and in copies of the model."""
    candidate = rated.candidate
    costs, model = candidate.costs, candidate.costs.setting.model
    route = costs.route
    chain = route.chain_bytes(model, live=costs.live, rate=costs.setting.lr)
    copies = (chain + 4 * model.parameters * route.averages) / model.copy_bytes
    apart = model.copy_bytes * route.movable * route.apart / _GB
    return {
        "main_gb": chain / _GB, "device_gb": route.device_bytes(model) / _GB, "apart_gb": apart, "copies": copies,
    }  # fmt: skip


def routes(plan: Plan) -> list[dict[str, str]]:
    """A row for each route."""
    rows = []
    for rated in plan.routes:
        costs, held = rated.candidate.costs, memory(rated)
        route = costs.route
        rows.append(
            {
                "route": rated.candidate.name + " *" * (rated.candidate.place != plan.best.candidate.place),
                "error": "exact" if route.exact else f"{route.error:.2f}",
                "devices\nGB": f"{held['device_gb'] + held['apart_gb']:.3g}",
                "deltas\nGB": f"{held['main_gb']:.3g}",
                "copies": f"{held['copies']:.2f}",
                "step\ns": f"{rated.extra_s:.3g}",
                "stand\ns": f"{costs.load_s():.2g}",
                "tokens/s": f"{rated.rate:,.0f}",
            }
        )
    return rows


def choices(plan: Plan) -> list[dict[str, str]]:
    """A row for each schedule and split that was simulated with the suggested route or the default one."""
    seen = {id(rated): rated for rated in (plan.synchronous, *plan.choices, *plan.splits, plan.best)}
    rows = []
    for rated in sorted(seen.values(), key=lambda rated: -rated.rate):
        schedule, outcome = rated.candidate.schedule, rated.outcome
        rows.append(
            {
                "lag": str(schedule.max_staleness),
                "groups": str(schedule.groups_per_step),
                "window": str(schedule.window),
                "split": _split(rated),
                "tokens/s": f"{rated.rate:,.0f}",
                "step\ns": f"{outcome.mean_step_s:.3g}",
                "engines\nbusy": f"{outcome.engine_busy_share:.0%}",
                "trainer\nbusy": f"{outcome.trainer_busy_share:.0%}",
                "age\nmean": f"{outcome.staleness_mean:.2f}",
                "age\nbound": str(outcome.staleness_bound),
            }
        )
    return rows


def _split(rated: Rated) -> str:
    place = rated.candidate.place
    return f"{place.trainers} + {place.engines}x{place.tp}" + (f" + {place.scorers}" if place.scorers else "")


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it, for programs."""
    best, place = plan.best, plan.best.candidate.place
    model = best.candidate.costs.setting.model
    return {
        "model": {"name": model.name, "parameters": model.parameters, "active": model.active_parameters},
        "suggestion": told(best),
        "place": {"trainers": place.trainers, "engines": place.engines, "tp": place.tp, "scorers": place.scorers},
        "tokens_per_s": best.rate,
        "step_s": best.outcome.mean_step_s,
        "staleness": {
            "mean": best.outcome.staleness_mean,
            "max": best.outcome.staleness_max,
            "bound": best.outcome.staleness_bound,
        },
        "reasons": list(reasons(plan)),
        "flags": flags(best),
        "routes": [
            {**row, **memory(rated), "route": rated.candidate.name}
            for row, rated in zip(routes(plan), plan.routes, strict=True)
        ],
        "choices": choices(plan),
    }


def _table(title: str, rows: Sequence[dict[str, str]], *, caption: str = "") -> Table:
    table = Table(title=title, caption=caption or None, box=SIMPLE_HEAD, padding=0, title_justify="left")
    table.caption_justify = "left"
    for name in rows[0]:
        table.add_column(name, no_wrap=True, justify="left" if name in ("route", "split") else "right")
    for row in rows:
        table.add_row(*row.values())
    return table
