"""Show a suggested configuration as text, as a table and as JSON."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from unstale.analysis.planner.analytic import AnalyticCosts
from unstale.analysis.planner.candidates import Candidate, why_not_synchronous
from unstale.analysis.planner.route_costs import route_cost
from unstale.analysis.planner.suggest import (
    AVERAGE,
    NEAR,
    SimulatedCandidate,
    Suggestion,
    describe_schedule,
)
from unstale.config import SHIPPED_POLICIES
from unstale.config.routes import routes

_GB = 1e9
_LONG = 32_768
"""Number of tokens in a pass above which prompts should not be shared on GPUs. The attention mask
for shared prompts takes about as many bytes as the square of this number.
"""
_EXACT = "exact: the route gives each token its log-probability under the version that sampled it. "
_MEMORY = {
    "GPU": "GPU GB: memory that the route needs on all training GPUs together (or on its own "
    "GPUs); main GB: in main memory. ",
    "core": "model GB: memory of the route for models and averages; delta GB: for past versions. ",
}
_NOTES = (
    "extra s: seconds that it adds to the trainer's step. stop s: seconds "
    "that sampling pauses for a new version. tokens/s: simulated if marked by *, otherwise the "
    "suggestion's, scaled by a formula. eager adds only what does not fit into the time in which "
    "the trainer waits."
)
_ON_CORES = {
    "GPU GB": "model GB",
    "main GB": "delta GB",
    "train GPUs": "train cores",
    "sample GPUs": "sample cores",
    "score GPUs": "score cores",
}
"""Heading of the table of routes in a plan for GPUs -> heading in a plan for processor cores, whose
memory is main memory.
"""
Row = dict[str, float | int | str]


def page(suggestion: Suggestion) -> Group:
    """Return the suggestion for a terminal: its reasons, its command, and a table of the ways to
    get `old_logp`.
    """
    best = suggestion.best.candidate
    setup = best.request.setup
    head = f"{setup.model.name} on {setup.device.number(best.request.devices)}"
    above = [
        f"\n{head}: {describe(suggestion.best)}",
        *(f"  - {reason}" for reason in reasons(suggestion)),
    ]
    below = [*(f"  - {each}" for each in missing(best)), ""]
    title = "Routes to old log-probabilities (old_logps.route), with the same schedule"
    return Group(
        *map(Text, above),
        Text(f"\n{command(best)}", no_wrap=True, overflow="ignore"),  # to be copied as one line
        *map(Text, below),
        _table(title, route_rows(suggestion), setup.device.unit),
    )


def describe(rated: SimulatedCandidate) -> str:
    """Return a configuration and its simulated throughput in words."""
    candidate = rated.candidate
    schedule = candidate.schedule
    setup = candidate.costs.setup
    window = ""
    if schedule.lookahead_window > 1:
        window = f", taken from the {schedule.lookahead_window} oldest of the queue"
    checkpointing = "; gradient checkpointing" if setup.gradient_checkpointing else ""
    if setup.context > 1:
        checkpointing += f"; {setup.context} GPUs divide each pass"
    if setup.replicas > 1:
        checkpointing += f"; {setup.replicas} copies of the model"
    if setup.expert_parallel:
        checkpointing += "; whole experts on a GPU"
    if setup.offload:
        checkpointing += "; the optimizer's state in main memory"
    if setup.critic:
        checkpointing += f"; a critic ({setup.critic})"
    return (
        f"{candidate.place}{checkpointing}; route {candidate.name}; "
        f"{schedule.groups_per_step} groups of {schedule.group_size} a step{window}, at most "
        f"{schedule.staleness_bound} versions old. {rated.rate:,.0f} trained tokens/s "
        f"(+-{rated.spread:.0%}), a step in {rated.result.mean_step_s:.3g} s"
    )


def reasons(suggestion: Suggestion) -> Iterator[str]:
    """Yield sentences on why the configuration is suggested, with the figures behind them."""
    best = suggestion.best
    result = best.result
    costs = best.candidate.costs
    yield result.bottleneck
    others = "; ".join(
        f"{other.candidate.place}: {other.rate / best.rate - 1:+.0%}"
        for other in suggestion.splits
        if other.candidate.placement != costs.placement
    )
    busy = (
        f"Engines are busy {result.engine_busy_share:.0%} of the time and the trainer "
        f"{result.trainer_busy_share:.0%}"
    )
    yield f"{busy}. Other splits: {others}" if others else busy
    yield _engine_memory(best.candidate)
    yield from _trainer_memory(best.candidate)
    yield (
        f"Tokens are {result.staleness_mean:.2f} versions old on average. Synchronous training, "
        f"with all {costs.setup.device.unit}s sampling and training in turns, "
        f"{_synchronous(suggestion)}"
    )
    for choice in suggestion.choices:
        schedule = choice.candidate.schedule
        if schedule != best.candidate.schedule:
            yield (
                f"{describe_schedule(schedule)} (at most {schedule.staleness_bound} versions old): "
                f"{choice.rate / best.rate - 1:+z.0%} throughput. Less than {1 / NEAR - 1:.0%} "
                "more does not justify older tokens or larger batches"
            )
    yield from _cost_of_exactness(suggestion)
    yield _publication(costs, result.mean_step_s)


def _publication(costs: AnalyticCosts, step_s: float) -> str:
    """Return a sentence on how many seconds a new version takes of the trainer and the engines."""
    load_s = costs.load_s()
    share = f"({load_s / step_s:.0%} of a step)"
    stands = f"Engines stand still {load_s:.2g} s {share} to load a version"
    if costs.setup.device.is_core:
        return f"{stands}, and then compute their contexts again"
    return (
        f"A version takes the trainer {costs.publish_s():.2g} s, and then its hosts "
        f"{costs.stage_s():.2g} s while engines sample. {stands}, compute their contexts again, "
        f"and hold replies back for {costs.probe_s():.2g} s until the probe has passed"
    )


def _synchronous(suggestion: Suggestion) -> str:
    """Return words on the throughput of synchronous training, or on why it does not fit the
    devices.
    """
    best, synchronous = suggestion.best, suggestion.synchronous
    if synchronous is None:
        return f"is not possible: {why_not_synchronous(best.candidate.request)}"
    return (
        f"gives {synchronous.rate:,.0f} tokens/s (+-{synchronous.spread:.0%}). The suggestion is "
        f"{best.rate / synchronous.rate:.2f} times as fast"
    )


def _engine_memory(candidate: Candidate) -> str:
    costs = candidate.costs
    model = costs.setup.model
    running = candidate.max_running
    context = round(running * costs.setup.episodes.tokens / 2)
    shared = "" if costs.setup.device.is_core else " (a server's host as many in /dev/shm)"
    return (
        f"An engine holds {model.copy_bytes / _GB:.3g} GB of weights{shared} and {running} replies "
        f"({model.kv_bytes / 1e6:.3g} MB per token of context); a decoding step of all of them "
        f"takes {1e3 * costs.step_s(running, context):.3g} ms"
    )


def _trainer_memory(candidate: Candidate) -> Iterator[str]:
    """Yield sentences on the memory and the transfers of a trainer on several GPUs."""
    costs = candidate.costs
    setup = costs.setup
    devices = candidate.placement.trainers
    if scorers := candidate.placement.scorers:
        yield (
            f"A scoring {setup.device.unit} holds "
            f"{setup.model.copy_bytes / scorers / _GB:.3g} GB of weights, and "
            f"{setup.scorer_bytes(scorers) / _GB:.3g} GB with gathered layers and the activations "
            "of a layer"
        )
    if setup.offload:
        offloaded = setup.offloaded_bytes * setup.trained / setup.shards(devices)
        yield (
            f"With trainer.offload_optimizer, {offloaded / _GB:.3g} GB of float32 weights and "
            "moments for each training GPU are in main memory. An optimizer step takes "
            f"{costs.optimizer_s:.3g} s"
        )
    if not setup.is_sharded(devices):
        return
    shards = 1 if setup.lora_rank else setup.shards(devices)
    state = setup.state_bytes(devices) / shards
    kinds = "float32 weights and gradients"
    if not setup.offload:
        kinds = "float32 weights, gradients and moments"
    route = 0.0 if setup.lora_rank else costs.route.device_bytes(setup.model) / shards
    divided = f", divided by {setup.context} GPUs" if setup.context > 1 else ""
    yield (
        f"A training GPU holds {state / _GB:.3g} GB of {kinds}, "
        f"{setup.computed_bytes(devices) / _GB:.3g} GB of gathered layers, "
        f"{setup.activation_bytes / _GB:.3g} GB of activations (a pass of "
        f"{setup.pass_tokens:,} tokens{divided}) and {route / _GB:.3g} GB for the route"
    )
    copied = setup.checkpoint_bytes(devices)
    yield (
        f"While a checkpoint is written, its copy takes {copied / _GB:.3g} GB of main memory for "
        "each training GPU"
    )
    if "placement" in {option.name for option in fields(routes()[candidate.name])}:
        own = route_cost(candidate.name, placement="own")
        main = own.main_bytes(setup.model, live=costs.live, rate=setup.delta_rate) / shards
        yield (
            "With old_logps.placement own, the route takes no memory of a GPU and, for each GPU, "
            f"{main / _GB:.3g} GB of main memory"
        )
    batch = round(costs.batch)
    waits_s = costs.train_transfer_s(batch) - costs.train_compute_s(batch)
    if waits_s > 0:
        yield (
            f"Gathering weights and summing gradients takes {waits_s:.3g} s longer than the "
            "computation of a step. Longer microbatches (trainer.max_tokens_per_microbatch), or "
            "more groups a step, would hide it"
        )


def _cost_of_exactness(suggestion: Suggestion) -> Iterator[str]:
    """Yield a sentence that compares the suggested exact `old_logp` with the approximation
    `AVERAGE`.

    It compares memory, time and throughput. Nothing is yielded if the suggestion is not exact.
    """
    best = suggestion.best.candidate
    average = suggestion.simulated.get(AVERAGE)
    if average is None or not best.costs.route.exact:
        return
    exact_row = _route_row(suggestion, best)
    average_row = _route_row(suggestion, average.candidate)
    average_s = average.candidate.route_s
    ratio = suggestion.best.rate / average.rate
    times = ""
    if best.route_s and average_s:
        times = f"takes {best.route_s / average_s:.2f} times as long, and "
    throughput = f"changes the throughput by {ratio - 1:+.0%}"
    place = "for models" if best.costs.setup.device.is_core else "on GPUs"
    if abs(ratio - 1) < 1 - NEAR:
        throughput = "leaves the throughput the same within 5%"
    yield (
        f"{best.name} is exact: {exact_row['main GB']:.3g} GB of deltas and "
        f"{exact_row['GPU GB']:.3g} GB {place}, {best.route_s:.3g} s a step. {AVERAGE}, the best "
        f"approximation by an average, needs {average_row['GPU GB']:.3g} GB {place} and "
        f"{average_s:.3g} s a step. Exactness {times}{throughput}"
    )


def command(candidate: Candidate) -> str:
    """Return the command line that trains with the suggestion and the recipe `llm`."""
    schedule = candidate.schedule
    setup = candidate.costs.setup
    options: Row = {
        "schedule.max_staleness": schedule.max_staleness,
        "schedule.groups_per_step": schedule.groups_per_step,
        "schedule.group_size": schedule.group_size,
        "schedule.lookahead_window": schedule.lookahead_window,
        "old_logps.route": candidate.name,
        "engine.max_running": candidate.max_running,
        "engine.max_context": max(16, math.ceil(setup.episodes.longest)),
        "engine.max_completion_tokens": candidate.request.workload.longest_reply,
        "rollout.max_turns": candidate.request.workload.most_turns,
    }
    options["trainer.dtype"] = "float32" if setup.device.is_core else "bfloat16"
    options["trainer.lr"] = setup.lr
    options["trainer.gradient_checkpointing"] = str(setup.gradient_checkpointing).lower()
    if not setup.device.is_core:
        options["trainer.max_tokens_per_microbatch"] = setup.microbatch
        options["trainer.max_tokens_per_scoring_pass"] = setup.scoring_pass
    if setup.lora_rank:
        options["trainer.lora_rank"] = setup.lora_rank
    if setup.optimizer != "AdamW":
        options["trainer.optimizer"] = setup.optimizer
    if setup.offload:
        options["trainer.offload_optimizer"] = "true"
    if setup.critic:
        options |= {"advantage.estimator": "gae", "critic.model": setup.critic}
    placement = candidate.placement
    if setup.device.is_core:  # all engines are processes of the run, which share max_running
        options["engine.max_running"] = placement.engines * candidate.max_running
        options["engine.processes"] = placement.engines
        options["engine.threads"] = placement.tp
        options["trainer.threads"] = placement.trainers
    if setup.is_sharded(placement.trainers):
        options["cluster.trainers"] = placement.trainers
        if setup.context > 1:
            options["cluster.context"] = setup.context
        if setup.replicas > 1:
            options["cluster.replicas"] = setup.replicas
        if setup.expert_parallel:
            options["cluster.expert_parallel"] = "true"
        if placement.scorers:
            options["old_logps.ranks"] = placement.scorers
    if setup.pass_tokens > _LONG and not setup.device.is_core:
        options["trainer.share_prompts"] = "false"
    words = ["unstale", "train", "llm", "--model", _SHIPPED.get(setup.model.name, "FOLDER")]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return shlex.join(words)


_SHIPPED = {folder.name: name for name, folder in SHIPPED_POLICIES.items()}
"""Name of a small model's folder in the package -> name of the model for `--model`."""


def missing(candidate: Candidate) -> Iterator[str]:
    """Yield what the user must do or fill in before running the suggested command."""
    placement = candidate.placement
    setup = candidate.costs.setup
    if setup.model.name not in _SHIPPED:
        yield f"FOLDER is the folder of {setup.model.name}"
    yield "name your task by --task.env, and its reward by --reward (docs/your-own-data.md)"
    if not setup.device.is_core:
        servers = "1 server" if placement.engines == 1 else f"{placement.engines} servers"
        yield (
            f"start {servers} with tensor parallelism {placement.tp}, and name them by "
            '--engine.backend vllm --engine.urls "URL ..." (docs/engines.md). Otherwise the small '
            "embedded engine samples"
        )
    if setup.is_sharded(placement.trainers):
        yield ("several trainer ranks were tested on CPUs only (docs/trainer-ranks.md)")


def route_rows(suggestion: Suggestion) -> list[Row]:
    return [_route_row(suggestion, candidate) for candidate in suggestion.routes]


def _route_row(suggestion: Suggestion, candidate: Candidate) -> Row:
    """Return a row of the table: memory, time and throughput of one way to get `old_logp`."""
    costs = candidate.costs
    route = costs.route
    model = costs.setup.model
    placement = costs.placement
    own_model = model.copy_bytes * route.needs.resident_models * route.needs.own_process
    main = route.main_bytes(model, live=costs.live, rate=costs.setup.delta_rate)
    paused_s = (candidate.route_s + costs.optimizer_s) * route.needs.closing
    mark = "*" if candidate.name in suggestion.simulated else " "
    return {
        "route": candidate.name,
        "exact": "yes" if route.exact else "no",
        "GPU GB": (route.device_bytes(model) + own_model) / _GB,
        "main GB": main / _GB,
        "extra s": candidate.route_s,
        "stop s": costs.load_s() + paused_s,
        "train GPUs": placement.trainers,
        "sample GPUs": placement.engines * placement.tp,
        "score GPUs": placement.scorers,
        "tokens/s": f"{suggestion.rate(candidate):,.0f}{mark}",
    }


def _choice_row(rated: SimulatedCandidate) -> Row:
    schedule = rated.candidate.schedule
    placement = rated.candidate.placement
    result = rated.result
    return {
        "max_staleness": schedule.max_staleness,
        "groups": schedule.groups_per_step,
        "window": schedule.lookahead_window,
        "trainers": placement.trainers,
        "engines": placement.engines,
        "tp": placement.tp,
        "tokens_per_s": rated.rate,
        "spread": rated.spread,
        "step_s": result.mean_step_s,
        "engines_busy": result.engine_busy_share,
        "trainer_busy": result.trainer_busy_share,
        "age_mean": result.staleness_mean,
        "age_bound": result.staleness_bound,
    }


def as_json(suggestion: Suggestion) -> dict[str, Any]:
    """Return the whole suggestion as a dictionary of JSON values, for programs."""
    best = suggestion.best.candidate
    model = best.costs.setup.model
    return {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "active": model.active_parameters,
        },
        "suggestion": describe(suggestion.best),
        "place": {
            "trainers": best.placement.trainers,
            "engines": best.placement.engines,
            "tp": best.placement.tp,
            "scorers": best.placement.scorers,
            "context": best.costs.setup.context,
        },
        "expected": _choice_row(suggestion.best),
        "synchronous": _choice_row(suggestion.synchronous) if suggestion.synchronous else None,
        "reasons": list(reasons(suggestion)),
        "command": command(best),
        "missing": list(missing(best)),
        "routes": route_rows(suggestion),
        "choices": [_choice_row(rated) for rated in suggestion.choices],
    }


def _table(title: str, rows: Sequence[Row], unit: str) -> Table:
    notes = _EXACT + _MEMORY[unit] + _NOTES
    table = Table(title=title, caption=notes, box=SIMPLE_HEAD, padding=0, title_justify="left")
    table.caption_justify = "left"
    for name in rows[0]:
        justify = "left" if name in ("route", "exact") else "right"
        heading = _ON_CORES.get(name, name) if unit == "core" else name
        heading = heading.replace(" ", "\n", 1)
        table.add_column(heading, no_wrap=True, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(_short(value) for value in row.values()))
    return table


def _short(value: float | str) -> str:
    return f"{value:.{3 if value >= 1 else 2}g}" if isinstance(value, float) else str(value)
