"""A plausible run folder, generated from a seed, for tests and for work on the report."""

import asyncio
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from unstale.config import EvalConfig, OldLogpsConfig, RunConfig, ScheduleConfig
from unstale.durability.journal import JOURNAL, Journal
from unstale.durability.run_folder import TOKENIZER, RunLog
from unstale.observe.recorder import Outputs, Recorder
from unstale.records import ContextPiece, Group, GroupRequest, Piece, Sampled, Task, Trajectory
from unstale.token_values import TokenFlag, TokenValues

STEP_S = 6.0
PRODUCTS = ("green kettle", "oak desk", "desk lamp", "wool blanket", "steel bottle", "garden chair")
NAMES = ("Mia Costa", "Noah Silva", "Ada Brandt", "Liam Okafor")


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def fake_config(route: str = "snapshot_old", steps: int = 80, seed: int = 0) -> RunConfig:
    return RunConfig(
        recipe="retail",
        name="retail-demo-0",
        seed=seed,
        max_steps=steps,
        schedule=ScheduleConfig(max_staleness=2, groups_per_step=16, group_size=8),
        old_logps=OldLogpsConfig(route=route),  # type: ignore[arg-type]
        eval=EvalConfig(tasks=256, interval=20),
    )


def fake_metrics(
    step: int, total: int, rng: random.Random, *, exact: bool = True
) -> dict[str, Any]:
    """Return the metrics of a step: success rises, and staleness settles at its bound."""
    done = step / total
    success = 0.44 + 0.47 / (1 + math.exp(-8 * (done - 0.42)))
    tokens = {0: 900, 1: 0, 2: 0} if step == 1 else {0: 380, 1: 5400, 2: 0}
    if step > 2:
        tokens = {
            lag: round(rng.gauss(mean, mean / 9)) for lag, mean in ((0, 420), (1, 3900), (2, 2200))
        }
    total_tokens = sum(tokens.values())
    lags = {lag: count for lag, count in tokens.items() if count}
    log_s = {lag: abs(rng.gauss(0.003 + 0.021 * lag, 0.003)) for lag in lags}
    log_d = {lag: abs(rng.gauss(0.0052, 0.0003)) for lag in lags}
    wait = max(0.0, rng.gauss(1.3 + 0.6 * math.sin(step / 7), 0.4)) if step > 1 else 3.1
    return {
        "version": step,
        "rollout/success_rate": min(1.0, max(0.0, rng.gauss(success - 0.02, 0.03))),
        "reward/mean": min(1.0, max(0.0, rng.gauss(success - 0.01, 0.03))),
        "rollout/turns_mean": rng.gauss(4.4 - 0.5 * done, 0.1),
        "rollout/failed_episodes": 1 if step in (9, 31) else 0,
        "schedule/staleness_max": max(lags),
        "schedule/staleness_mean": sum(lag * count for lag, count in lags.items()) / total_tokens,
        "schedule/staleness_bound": 2,
        "schedule/staleness_histogram": lags,
        "schedule/mixed_version_share": 0.0
        if step == 1
        else min(1.0, max(0.0, rng.gauss(0.38, 0.05))),
        "schedule/wait_for_batch_s": wait,
        "schedule/wait_ticket_s": abs(rng.gauss(0.4, 0.2)),
        "rollout/sampled_tokens": float(total_tokens),
        "trainer/action_tokens": float(total_tokens),
        "correction/kept_share": 1 - abs(rng.gauss(0.0015, 0.0008)),
        "correction/log_d_abs_mean": sum(log_d[lag] * lags[lag] for lag in lags) / total_tokens,
        "objective/log_s_abs_mean": sum(log_s[lag] * lags[lag] for lag in lags) / total_tokens,
        "objective/clip_share": abs(rng.gauss(0.012 + 0.01 * math.sin(done * 3), 0.003)),
        "objective/loss": rng.gauss(-0.01, 0.02),
        "engine/sampled_tokens_per_s": rng.gauss(1950, 120),
        "engine/reprefill_tokens": round(rng.gauss(4200, 500)) if step > 1 else 0,
        "engine/reprefill_s": abs(rng.gauss(0.35, 0.05)),
        "engine/busy_share": min(1.0, rng.gauss(0.93, 0.03)),
        "trainer/tokens_per_s": rng.gauss(5200, 350),
        "trainer/grad_norm": abs(rng.gauss(0.5, 0.1)),
        "trainer/lr": 3e-4,
        "old_logps/prepare_s": abs(rng.gauss(0.8, 0.1)),
        "old_logps/exact_share": 1.0 if exact else 0.07,
        "publish/duration_s": abs(rng.gauss(0.15, 0.03)),
        **{f"correction/log_d_abs_mean/lag_{lag}": value for lag, value in log_d.items()},
        **{f"objective/log_s_abs_mean/lag_{lag}": value for lag, value in log_s.items()},
    }


class FakeEpisodes:
    """A writer of episodes and token samples into the journal of a run folder."""

    def __init__(self, path: Path, journal: Journal, prefix: str, *, route: str = "") -> None:
        """Record token values if `route` names the route that computed `old_logp`."""
        self._path = path
        self._journal = journal
        self._prefix = prefix
        self._route = route
        self._vocabulary: dict[str, int] = {}
        self._episodes = 0

    def step(self, step: int, success: float, rng: random.Random) -> None:
        """Record a consumed group of four episodes."""
        task = Task(f"{self._prefix}retail", "train", rng.randrange(10_000))
        self._journal.add_request(GroupRequest(step, task, seed=step, place=step))
        trajectories = []
        for sibling in range(4):
            self._episodes += 1
            episode = self._episodes
            seed = 100 * step + sibling
            writer = self._journal.begin(step, sibling, episode=episode, seed=seed)
            pieces = []
            won, turns = fake_turns(step, success, rng)
            for version, text in turns:
                pieces.append(self._piece(version, self._prefix + text))
                writer.write_piece(len(pieces) - 1, pieces[-1])
            reward = {"task": 1.0 if won else 0.0}
            trajectories.append(Trajectory(tuple(pieces), reward, "done", task, seed, episode))
            writer.write_outcome(trajectories[-1])
        group = Group(task, tuple(trajectories), number=step)
        asyncio.run(self._journal.finish(group))
        tokens = [fake_tokens(group, each, self._route, step) for each in range(4)]
        tokens = tokens if self._route else []
        self._journal.commit([group], step=step, version=step - 1, tokens=tokens)

    def close(self, steps: int) -> None:
        asyncio.run(self._journal.checkpoint("fake", step=steps, version=steps))
        tokenizer = Tokenizer(models.WordLevel(self._vocabulary, unk_token="?"))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(self._path / TOKENIZER))

    def _piece(self, version: int | None, text: str) -> Piece:
        tokens = tuple(self._token(text[at : at + 4]) for at in range(0, len(text), 4))
        if version is None:
            return ContextPiece(tokens)
        return Sampled(tokens, (-0.1,) * len(tokens), version)

    def _token(self, word: str) -> int:
        return self._vocabulary.setdefault(word, len(self._vocabulary))


def fake_tokens(group: Group, sibling: int, route: str, step: int) -> TokenValues:
    """Return the token values of a trained episode, with flags that fit the options of its run.

    All numbers are exact in float16, so the journal does not change them. The last sibling had no
    forward pass.
    """
    trajectory = group.trajectories[sibling]
    rng = np.random.default_rng([step, sibling])
    lag = np.concatenate(
        [np.full(len(each.tokens), step - 1 - each.version) for each in trajectory.sampled]
    )
    count = len(lag)

    def normal(size: Any) -> np.ndarray:
        return np.asarray(rng.normal(0, 1, count) * size, np.float16).astype(np.float32)

    log_d = normal(np.where(rng.random(count) < 0.05, 0.6, 0.005))
    log_s = normal(0.02 + 0.1 * lag)
    if route == "rollout":
        log_d = np.zeros_like(log_d)
    advantage = (1.0, -1.0, 0.5, 0.0)[sibling]
    masked = (log_d < math.log(0.5)) | (log_d > math.log(2))
    low, high = log_s < math.log(0.8), log_s > math.log(1.28)
    flags = np.where(masked, int(TokenFlag.MASKED), 0)
    is_run = sibling < 3
    if is_run and advantage < 0:
        flags |= np.where(low, int(TokenFlag.CLIPPED_LOW), 0)
    if is_run and advantage > 0:
        flags |= np.where(high, int(TokenFlag.CLIPPED_HIGH), 0)
    if route != "rollout":
        flags |= np.where(lag < 2, int(TokenFlag.EXACT), 0)
    unknown = np.full(count, np.nan, np.float32)
    return TokenValues(
        group=group.number,
        episode=trajectory.episode,
        route=route,
        minibatch=0 if is_run else None,
        log_d=log_d,
        log_s=log_s if is_run else unknown,
        weight=np.where(masked, 0, np.exp(log_d)).astype(np.float32),
        advantage=np.full(count, advantage, np.float32),
        entropy=unknown,
        flags=flags.astype(np.uint8),
    )


class NoDisplay:
    def update(self, metrics: Any) -> None: ...

    def phase(
        self, text: str, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None: ...

    def note(self, text: str) -> None: ...


def fake_run(  # noqa: PLR0913
    path: Path,
    *,
    steps: int = 80,
    seed: int = 0,
    route: str = "snapshot_old",
    planned: int = 0,
    prefix: str = "",
    with_values: bool = False,
) -> Path:
    """Write the folder of a run that took `steps` of its `planned` steps.

    Every text of an episode begins with `prefix`. With `with_values` the journal has the values of
    trained tokens.
    """
    rng, clock = random.Random(seed), FakeClock()
    planned = planned or steps
    with (
        RunLog.create(path, fake_config(route, planned, seed), clock=clock) as log,
        Journal(path / JOURNAL) as journal,
    ):
        recorder = Recorder(Outputs(log, NoDisplay()), journal=journal)
        episodes = FakeEpisodes(path, journal, prefix, route=route if with_values else "")
        log.event(
            "started", command=f"unstale train retail --seed {seed}", unstale="0.1.0", cores=2
        )
        with log.span("eval", "256 held-out tasks"):
            clock.now += 14
        log.event("eval", step=0, success=0.434, tasks=256)
        log.write(0, {"version": 0, "eval/success_rate": 0.434})
        for step in range(1, steps + 1):
            metrics = fake_metrics(step, planned, rng, exact=route == "snapshot_old")
            _spans(log, clock, step, metrics)
            if step % 20 == 0:
                with log.span("eval", "256 held-out tasks"):
                    clock.now += 9
                metrics["eval/success_rate"] = (
                    round(256 * (metrics["rollout/success_rate"] + 0.02)) / 256
                )
                log.event("eval", step=step, success=metrics["eval/success_rate"], tasks=256)
            if metrics["rollout/failed_episodes"]:
                log.event(
                    "episode_failed",
                    task="retail/train/771",
                    stage="step",
                    error="EnvError: tool timed out",
                )
            log.write(step, metrics)
            episodes.step(step, metrics["rollout/success_rate"], rng)
            points = _points(metrics["schedule/staleness_histogram"], rng)
            recorder.trained(step, points=points, events=())
        episodes.close(steps)
        if steps == planned:
            log.event("stopped", reason="all steps done")
    return path


def _spans(log: RunLog, clock: FakeClock, step: int, metrics: dict[str, Any]) -> None:
    """Record spans of waiting, scoring, training and publishing in turn."""
    phases = (
        ("wait", metrics["schedule/wait_for_batch_s"]),
        ("old_logps", metrics["old_logps/prepare_s"]),
        ("trainer", 3.4),
        ("publish", metrics["publish/duration_s"]),
    )
    for lane, seconds in phases:
        with log.span(lane, f"step {step}"):
            clock.now += seconds


def _points(lags: dict[int, int], rng: random.Random) -> list[dict[str, Any]]:
    points = []
    for lag in rng.choices(list(lags), weights=list(lags.values()), k=60):
        wide = rng.random() < 0.08
        points.append(
            {
                "lag": lag,
                "log_d": rng.gauss(0, 0.03 if wide else 0.005),
                "log_s": rng.gauss(0, (0.004 + 0.03 * lag) * (3 if wide else 1)),
            }
        )
    return points


def fake_turns(
    step: int, success: float, rng: random.Random
) -> tuple[bool, list[tuple[int | None, str]]]:
    """Return the success of a service-desk episode, and its text in pieces with their versions.

    Half of the episodes span a weight update.
    """
    won = rng.random() < success
    name, item = rng.choice(NAMES), rng.choice(PRODUCTS)
    order = f"#W{rng.randrange(1000, 9999)}"
    version = max(0, step - 1 - rng.choice((1, 1, 2)))
    turns: list[tuple[int | None, str]] = []

    def given(role: str, text: str) -> None:
        """Add text as the chat template writes it, up to the beginning of the next reply."""
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        text = f"<|im_start|>{role}\n{text}<|im_end|>\n"
        turns.append((None, text + ("<|im_start|>assistant\n" if role != "system" else "")))

    def says(text: str) -> None:
        nonlocal version
        cuts = [0, len(text)]
        if rng.random() < 0.35 and version < step - 1:
            cuts.insert(1, rng.randrange(5, len(text) - 5))
        for start, end in pairwise(cuts):
            version += bool(start)
            turns.append((version, text[start:end]))

    given(
        "system",
        "You are the desk of a shop. Pending orders may be cancelled; delivered ones may be "
        "returned.",
    )
    given("user", f"Hello, this is {name}. I want to send back the {item} from order {order}.")
    says(_call("find_user", {"name": name}))
    given("tool", json.dumps({"user": "u17", "orders": [order, "#W2210"], "payment": "card_3"}))
    says(_call("get_order", {"order": order}))
    given(
        "tool",
        json.dumps(
            {"order": order, "status": "delivered", "items": {item: "i42", "oak desk": "i77"}}
        ),
    )
    if rng.random() < 0.3:
        says(_call("return_items", {"order": order, "items": ["i24"]}))
        given("tool", json.dumps({"error": f"no item i24 in order {order}"}))
    says(
        f"You would like to return the {item} of order {order} to card_3. Shall I go "
        "ahead?<|im_end|>"
    )
    given("user", "Yes, please.")
    says(
        _call(
            "return_items",
            {"order": order, "items": ["i42" if won else "i77"], "refund_to": "card_3"},
        )
    )
    given("tool", json.dumps({"order": order, "status": "return requested"}))
    says("Done. You will have an e-mail with the label.<|im_end|>")
    return won, turns


def _call(name: str, arguments: dict[str, Any]) -> str:
    call = f'{{"name": "{name}", "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"
