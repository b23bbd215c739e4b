"""The workload and the durations of a recorded run, for `unstale simulate --like`."""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from unstale.config import ConfigError, RunConfig, ScheduleConfig
from unstale.config.options import stored_config
from unstale.config.routes import Needs
from unstale.durability.journal import Journal, trained_episodes
from unstale.durability.run_folder import RunFolder
from unstale.planner.costs import LinearCosts
from unstale.planner.hardware import Device, Shares
from unstale.planner.models import Model
from unstale.planner.simulated_techniques import NO_TECHNIQUES, SimulatedTechniques, of_run
from unstale.planner.workload import (
    Constant,
    Distribution,
    EpisodeShape,
    Fleet,
    LogNormal,
    TurnShape,
    Workload,
    mean_attended,
)
from unstale.records import Sampled, Trajectory

MIN_STEPS = 4
"""Smallest number of steps that a fit of durations needs."""
_CONTEXT_PIECES = (
    "SELECT count(t.episode), count(*) FROM pieces p LEFT JOIN trajectories t USING (episode)"
)
RESULTS = f"{_CONTEXT_PIECES} WHERE p.version IS NULL AND p.position > 0"
"""SQL query that counts the answers of tools and users in finished episodes, and in all
episodes.
"""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """The arguments of `simulate` that are taken from a recorded run."""

    workload: Workload
    fleet: Fleet
    schedule: ScheduleConfig
    costs: LinearCosts
    needs: Needs
    techniques: SimulatedTechniques = NO_TECHNIQUES


def from_run(run: Path, techniques: SimulatedTechniques | None = None) -> SimulationSetup:
    """Return the arguments to simulate a recorded run: its episodes and its fitted durations.

    `techniques` take the place of those of the run. Its episodes were cut off by its own limits.

    The engine's busy time is fitted to its decoding steps, the replies in them and the context
    tokens that it computed. Training and scoring are fitted to the tokens of a batch. No
    coefficient is negative. A tool call takes the mean of all calls, with the spread of
    `task.latency_sigma`. Raises `ConfigError` for a run that is too short or has renamed options,
    whose route pauses generation for a time that is not recorded, that has `trainer.stream`, or
    with techniques that cannot be simulated.
    """
    folder = RunFolder(run)
    config = stored_config(folder.config(), f"{run}/config.json")
    rows = [row for row in folder.metrics() if row["step"] > 0 and "engine/steps" in row]
    if len(rows) <= MIN_STEPS:
        raise ConfigError(
            f"{run} has {len(rows)} steps with engine metrics; a fit needs more than {MIN_STEPS}"
        )
    if config.old_logps.needs.closing:
        raise ConfigError(
            f"{run} pauses generation to score, for a time that is not recorded; "
            "use a run with another route"
        )
    if config.trainer.stream:
        raise ConfigError(
            f"{run} has trainer.stream, so its times of scoring and training are mixed; use a run "
            "without it, and --set fleet.stream=true"
        )
    fleet = recorded_fleet(config)
    return SimulationSetup(
        workload=recorded_workload(run, config, rows),
        fleet=fleet,
        schedule=config.schedule,
        costs=fit_costs(rows[1:], span_seconds(folder), _versions(run), fleet.engines),
        needs=config.old_logps.needs,
        techniques=of_run(config, techniques),
    )


def recorded_fleet(config: RunConfig) -> Fleet:
    """Return the engines of a run, on all its hosts.

    With `cluster.engine_hosts`, a group has whole hosts: `engine.prefill_engines` counts these.
    """
    engine = config.engine
    hosts = config.cluster.engine_hosts
    return Fleet(
        engines=max(1, hosts) * engine.num_engines,
        max_running=engine.max_running // engine.processes,
        keep_cache=engine.keep_cache,
        load_tokens=engine.load_tokens,
        prefill_engines=engine.prefill_engines * (engine.num_engines if hosts else 1),
        prefill_ratio=engine.prefill_ratio,
    )


def fit_costs(
    rows: Sequence[Row],
    seconds: Mapping[int, Mapping[str, float]],
    versions: Mapping[int, float],
    engines: int,
) -> LinearCosts:
    """Return the durations that fit the metrics in `rows` best.

    `seconds` are the times of activities in each step. `versions` is the mean number of versions
    that sampled the step's trajectories.
    """
    names = ("engine/busy_s", "engine/steps", "engine/batch_size_mean", "engine/prefill_tokens")
    busy_s, steps, replies, prefill = (np.array([row[name] for row in rows]) for name in names)
    decode, decode_reply, prefill_token = fit(engines * busy_s, [steps, steps * replies, prefill])
    known = [row for row in rows if row["step"] in seconds and row["step"] in versions]
    if len(known) < MIN_STEPS - 1:
        raise ConfigError("events.jsonl of the run is incomplete: spans of the trainer are missing")
    tokens = np.array([row["rollout/episodes"] * row["rollout/total_tokens_mean"] for row in known])
    version_tokens = tokens * np.array([max(0.0, versions[row["step"]] - 1) for row in known])
    ones = np.ones(len(known))
    spans = {
        lane: np.array([seconds[row["step"]][lane] for row in known])
        for lane in seconds[known[0]["step"]]
    }
    replayed = np.array([row.get("replay/token_share", 0.0) for row in known])
    train, train_token = fit(spans["trainer"], [ones, tokens / (1 - replayed)])
    old, old_token, old_version_token = fit(spans["old_logps"], [ones, tokens, version_tokens])
    return LinearCosts(
        decode=decode,
        decode_reply=decode_reply,
        prefill_token=prefill_token,
        train=train,
        train_token=train_token,
        optimizer_s=median(spans["optimizer"]),
        old=old,
        old_token=old_token,
        old_version_token=old_version_token,
        publish=median(spans["publish"]),
        load=median(spans["standstill"]),
    )


def fit(values: np.ndarray, terms: Sequence[np.ndarray]) -> list[float]:
    """Return the non-negative coefficients of `terms` that fit `values` by least squares.

    Terms are scaled to norm 1 for the solver, because they differ by orders of magnitude.

    >>> fit(np.array([2.0, 4.0, 6.0]), [np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 1.0])])
    [2.0, 0.0]
    """
    matrix = np.stack(terms, axis=1)
    norms = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    coefficients: list[float] = (nnls(matrix / norms, values)[0] / norms).round(12).tolist()
    return coefficients


def span_seconds(folder: RunFolder) -> dict[int, dict[str, float]]:
    """Return the seconds of scoring, training, the optimizer, publishing and loading, by step.

    The recorded time of scoring or training begins when the work is queued. So the time in which
    the trainer's thread still publishes the previous version is subtracted.
    """
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in folder.rows("events.jsonl"):
        number = event.get("label", "").rpartition(" ")[2]
        if event.get("kind") == "span" and number.isdigit():
            spans[event["lane"], int(number)].append((event["start"], event["end"]))
    publications = {
        step: (published[0][0], spans["standstill", step][0][0])
        for (lane, step), published in list(spans.items())
        if lane == "publish" and ("standstill", step) in spans
    }

    def worked(lane: str, step: int, part: slice = slice(None)) -> float:
        taken_from, taken_until = publications.get(step - 1, (0.0, 0.0))
        total = 0.0
        for start, end in sorted(spans[lane, step])[part]:
            total += end - start - max(0.0, min(end, taken_until) - max(start, taken_from))
        return total

    return {
        step: {
            "old_logps": worked("old_logps", step),
            "trainer": worked("trainer", step),
            "optimizer": worked("trainer", step, slice(1, None, 2)),
            "publish": end - start,
            "standstill": worked("standstill", step),
        }
        for step, (start, end) in publications.items()
        if ("trainer", step) in spans
    }


def _versions(run: Path) -> dict[int, float]:
    """Return, by step, the mean number of versions that sampled a trajectory."""
    counts: dict[int, list[int]] = defaultdict(list)
    with Journal.read(run) as journal:
        for row in trained_episodes(journal):
            counts[row["step"]].append(max(1, len(row["versions"])))
    return {step: fmean(numbers) for step, numbers in counts.items()}


def recorded_workload(run: Path, config: RunConfig, rows: Sequence[Row]) -> Workload:
    """Return the episodes of a run's journal, with the mean time of a tool call."""
    groups: dict[int, list[EpisodeShape]] = defaultdict(list)
    with Journal.read(run) as journal:
        for record in journal.trajectories():
            groups[record.group].append(episode_shape(record.trajectory))
        ((finished, results),) = journal.rows(RESULTS)
    if not groups:
        raise ConfigError(f"the journal of {run} has no finished episode")
    episodes = [shape for siblings in groups.values() for shape in siblings]
    calls = sum(turn.calls for shape in episodes for turn in shape.turns)
    # the calls of unfinished episodes are estimated by their results
    calls *= results / max(1, finished)
    mean_s = sum(row.get("rollout/tool_wait_s", 0.0) for row in rows) / max(1, calls)
    tool_s: Distribution = Constant(mean_s)
    task: Any = config.task
    if getattr(task, "latency_s", 0.0):
        tool_s = LogNormal(mean_s, task.latency_sigma)
    return Workload(
        recorded=tuple(tuple(shapes) for _, shapes in sorted(groups.items())),
        tool_s=tool_s,
        timeout_s=config.rollout.timeout_s,
        retries=config.rollout.retries,
    )


def episode_shape(trajectory: Trajectory) -> EpisodeShape:
    """Return the numbers of tokens of a trajectory by turn.

    The recorded number of tool calls is divided evenly among the turns. If it was not recorded,
    each turn has one call.
    """
    runs = [
        (is_reply, sum(len(piece.tokens) for piece in pieces))
        for is_reply, pieces in groupby(trajectory.pieces, lambda piece: isinstance(piece, Sampled))
    ]
    prompt = runs.pop(0)[1] if runs and not runs[0][0] else 0
    replies = [tokens for is_reply, tokens in runs if is_reply]
    answers = [*(tokens for is_reply, tokens in runs if not is_reply), 0][: len(replies)]
    calls = round(trajectory.facts.get("tool_calls", len(replies)))
    per_turn, more = divmod(calls, max(1, len(replies)))
    turns = [
        TurnShape(reply, answer, per_turn + (number < more))
        for number, (reply, answer) in enumerate(zip(replies, answers, strict=True))
    ]
    return EpisodeShape(prompt, tuple(turns))


def core_of_run(run: Path, model: Model) -> tuple[Device, Shares]:
    """Return a processor core of this machine as a device, with the speed it reached in a run.

    The bandwidth of main memory, through which processes exchange data, is measured here. Raises
    `ConfigError` if the run cannot be used.
    """
    setup = from_run(run, NO_TECHNIQUES)
    costs = setup.costs
    tokens = [shape.tokens for group in setup.workload.recorded for shape in group]
    attended = mean_attended(tokens)
    if not costs.train_token:
        raise ConfigError(f"{run}: its batches are too similar in size to fit a cost per token")
    train = 3 * model.forward_flops(attended) / costs.train_token
    decode = train
    if costs.decode_reply:
        decode = model.forward_flops(attended) / costs.decode_reply
    peak = max(train, decode)
    copy_rate = _copy_rate()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(os.sched_getaffinity(0))
    device = Device(
        name="core of this machine",
        flops=peak,
        memory=memory,
        node=1 << 30,
        bandwidth=copy_rate,
        link=copy_rate,
        host_link=copy_rate,
        network=copy_rate,
    )
    shares = Shares(
        matmul=train / peak,
        decode=decode / peak,
        bandwidth=1.0,
        link=1.0,
        step_s=costs.decode,
    )
    return device, shares


def _copy_rate() -> float:
    """Return the bytes that a copy reads and writes per second: the best of three measurements."""
    source = torch.zeros(1 << 27, dtype=torch.uint8)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(seconds[1:])
