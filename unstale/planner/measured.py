"""Costs and workload of a run that was run: what `unstale simulate --like` begins with."""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from unstale.config import ConfigError, ScheduleConfig
from unstale.durability.journal import Journal
from unstale.durability.run_folder import TRAJECTORIES, RunFolder
from unstale.old_logps import Needs
from unstale.planner.costs import LinearCosts
from unstale.planner.hardware import Device, Shares
from unstale.planner.models import Model
from unstale.planner.parts import needs
from unstale.planner.route_costs import ROUTES
from unstale.planner.simulate import Fleet
from unstale.planner.workload import Constant, EpisodeShape, LogNormal, TurnShape, Workload, seen_in
from unstale.records import Sampled, Trajectory

LEAST_STEPS = 4
"""Steps that a fit needs."""
_GIVEN = "SELECT count(t.episode), count(*) FROM pieces p LEFT JOIN trajectories t USING (episode)"
RESULTS = f"{_GIVEN} WHERE p.version IS NULL AND p.position > 0"
"""Of a journal: what tools and users said in finished episodes, and in all."""
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SimulationSetup:
    """What a simulation is made of."""

    workload: Workload
    fleet: Fleet
    schedule: ScheduleConfig
    costs: LinearCosts
    needs: Needs


def like(run: Path) -> SimulationSetup:
    """The setting of a run, its episodes as they were, and what things cost in it.

    The engine's busy time is fitted, without negative terms, to its steps, the replies in them, and the context tokens
    it computed; the trainer's scoring and training to the tokens of a batch. A tool's time is what all of them took
    over all calls, of unfinished episodes counted by the results that came, with the spread of `task.latency_sigma`.
    Raises `ConfigError` for a run that is too short, or pauses generation to score, for it does not record how long.
    """
    folder = RunFolder(run)
    config = folder.config()
    rows = [row for row in folder.metrics() if row["step"] > 0 and "engine/steps" in row]
    if len(rows) <= LEAST_STEPS:
        raise ConfigError(
            f"{run} has {len(rows)} steps with the engine's counters; a fit needs more than {LEAST_STEPS}"
        )
    route = config["old_logps"]["route"]
    holds = needs(ROUTES[config["old_logps"]["fallback"] if route == "eager" else route])
    if holds.closing:
        raise ConfigError(
            f"{run} pauses generation to score, and does not record for how long: use a run without"
        )
    engine, own = config["engine"], config["engine"].get("processes", 1)
    count = max(own, len(engine.get("urls", "").split()))
    fleet = Fleet(
        engines=count,
        max_running=engine["max_running"] // own,
        keep_cache=engine.get("keep_cache", False),
    )
    schedule = ScheduleConfig(**config["schedule"])
    costs = _costs(rows[1:], _spent(folder), _versions(folder), count)
    return SimulationSetup(_workload(run, config, rows), fleet, schedule, costs, holds)


def _costs(
    rows: Sequence[Row],
    spent: Mapping[int, Mapping[str, float]],
    versions: Mapping[int, float],
    engines: int,
) -> LinearCosts:
    """The first step is left out: programs warm up in it."""
    names = ("engine/busy_s", "engine/steps", "engine/batch_size_mean", "engine/prefill_tokens")
    busy_s, steps, replies, prefill = (np.array([row[name] for row in rows]) for name in names)
    decode, reply, token = fit(engines * busy_s, [steps, steps * replies, prefill])
    known = [row for row in rows if row["step"] in spent and row["step"] in versions]
    if len(known) < LEAST_STEPS - 1:
        raise ConfigError(
            "the run's events do not tell what its trainer did when: events.jsonl is not whole"
        )
    tokens = np.array([row["rollout/episodes"] * row["rollout/total_tokens_mean"] for row in known])
    further = tokens * np.array([max(0.0, versions[row["step"]] - 1) for row in known])
    lanes = {
        lane: np.array([spent[row["step"]][lane] for row in known])
        for lane in spent[known[0]["step"]]
    }
    train, train_token = fit(lanes["trainer"], [np.ones(len(known)), tokens])
    old, old_token, old_version_token = fit(
        lanes["old_logps"], [np.ones(len(known)), tokens, further]
    )
    return LinearCosts(
        decode=decode, decode_reply=reply, prefill_token=token, train=train, train_token=train_token, old=old,
        old_token=old_token, old_version_token=old_version_token, optimizer_s=median(lanes["optimizer"]),
        publish=median(lanes["publish"]), load=median(lanes["standstill"]),
    )  # fmt: skip


def fit(values: np.ndarray, terms: Sequence[np.ndarray]) -> list[float]:
    """Least squares of `values` on `terms`, of which none may be negative: the best of all choices of terms.

    >>> fit(np.array([2.0, 4.0, 6.0]), [np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0, 1.0])])
    [2.0, 0.0]
    """
    matrix, tried = np.stack(terms, axis=1), [np.zeros(len(terms))]
    for chosen in (
        list(each)
        for size in range(len(terms))
        for each in combinations(range(len(terms)), size + 1)
    ):
        tried.append(np.zeros(len(terms)))
        tried[-1][chosen] = np.linalg.lstsq(matrix[:, chosen], values, rcond=None)[0]

    def left(found: np.ndarray) -> float:  # of equal ones the first has the fewest terms
        return float(f"{((matrix @ found - values) ** 2).sum() + 1e-18:.9g}")

    best: list[float] = (
        min((found for found in tried if found.min() >= 0), key=left).round(12).tolist()
    )
    return best


def _spent(folder: RunFolder) -> dict[int, dict[str, float]]:
    """Seconds by step: of scoring, training and its optimizer, and of its version's publication by where it goes on.

    What of the trainer's spans waits for its thread, which has the version before at the time, is left out.
    """
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for event in folder.rows("events.jsonl"):
        number = event.get("label", "").rpartition(" ")[2]
        if event.get("kind") == "span" and number.isdigit():
            spans[event["lane"], int(number)].append((event["start"], event["end"]))
    thread = {
        step: (published[0][0], spans["standstill", step][0][0])
        for (lane, step), published in list(spans.items())
        if lane == "publish" and ("standstill", step) in spans
    }

    def work(lane: str, step: int, every: slice = slice(None)) -> float:
        start, end = thread.get(step - 1, (0.0, 0.0))
        worked = sorted(spans[lane, step])[every]
        return sum(
            until - since - max(0.0, min(until, end) - max(since, start)) for since, until in worked
        )

    return {
        step: {
            "old_logps": work("old_logps", step),
            "trainer": work("trainer", step),
            "optimizer": work("trainer", step, slice(1, None, 2)),
            "publish": end - start,
            "standstill": work("standstill", step),
        }
        for step, (start, end) in thread.items()
        if ("trainer", step) in spans
    }


def _versions(folder: RunFolder) -> dict[int, float]:
    """Versions in a trajectory, the mean by step."""
    found: dict[int, list[int]] = defaultdict(list)
    for row in folder.rows(TRAJECTORIES):
        found[row["step"]].append(max(1, len(row["versions"])))
    return {step: fmean(counts) for step, counts in found.items()}


def _workload(run: Path, config: Row, rows: Sequence[Row]) -> Workload:
    task, rollout = config["task"], config["rollout"]
    groups: dict[int, list[EpisodeShape]] = defaultdict(list)
    with Journal.read(run) as journal:
        for kept in journal.trajectories():
            groups[kept.group].append(shape(kept.trajectory))
        ((finished, results),) = journal.rows(RESULTS)
    if not groups:
        raise ConfigError(f"the journal of {run} has no finished episode")
    calls = sum(
        turn.waits for siblings in groups.values() for one in siblings for turn in one.turns
    )
    calls *= results / max(1, finished)
    mean = sum(row.get("rollout/tool_wait_s", 0.0) for row in rows) / max(1, calls)
    return Workload(
        recorded=tuple(tuple(shapes) for _, shapes in sorted(groups.items())),
        tool_s=LogNormal(mean, task["latency_sigma"]) if task.get("latency_s") else Constant(mean),
        timeout_s=rollout["timeout_s"],
        retries=rollout["retries"],
    )


def shape(trajectory: Trajectory) -> EpisodeShape:
    """What it cost: its tokens by turn. Its tool calls are spread evenly over its turns; uncounted, one a turn."""
    spoken = [
        (said, sum(len(piece.tokens) for piece in pieces))
        for said, pieces in groupby(trajectory.pieces, key=lambda piece: isinstance(piece, Sampled))
    ]
    prompt = spoken.pop(0)[1] if spoken and not spoken[0][0] else 0
    replies = [tokens for said, tokens in spoken if said]
    given = [*(tokens for said, tokens in spoken if not said), 0][: len(replies)]
    each, more = divmod(
        round(trajectory.facts.get("tool_calls", len(replies))), max(1, len(replies))
    )
    turns = zip(replies, given, strict=True)
    return EpisodeShape(
        prompt,
        tuple(TurnShape(reply, after, each + (n < more)) for n, (reply, after) in enumerate(turns)),
    )


def as_device(run: Path, model: Model) -> tuple[Device, Shares]:
    """A core of this machine, from what a run's trainer and engine took on it.

    What passes between processes passes through the main memory, whose rate is timed here. Raises `ConfigError`.
    """
    setting = like(run)
    costs, tokens = (
        setting.costs,
        [shape.tokens for group in setting.workload.recorded for shape in group],
    )
    seen = seen_in(tokens)
    if not costs.train_token:
        raise ConfigError(
            f"{run}: the batches of the run are too much alike to tell what a token costs"
        )
    train = 3 * model.forward_flops(seen) / costs.train_token
    decode = model.forward_flops(seen) / costs.decode_reply if costs.decode_reply else train
    most, copied = max(train, decode), _copy_rate()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(os.sched_getaffinity(0))
    links = dict.fromkeys(("bandwidth", "link", "host_link", "network"), copied)
    device = Device(name="core of this machine", flops=most, memory=memory, node=1 << 30, **links)
    reached = {"matmul": train / most, "decode": decode / most}
    return device, replace(Shares(), **reached, bandwidth=1.0, link=1.0, step_s=costs.decode)


def _copy_rate() -> float:
    """Bytes a second, read and written: the quickest of three, after one that brings the pages in."""
    source = torch.zeros(1 << 27, dtype=torch.uint8)
    target, found = torch.empty_like(source), []
    for _ in range(4):
        began = time.perf_counter()
        target.copy_(source)
        found.append(time.perf_counter() - began)
    return 2 * source.nbytes / min(found[1:])
