"""Simulated components of a run. They take time on the virtual clock and compute nothing.

Each implements the Protocol of the component that it replaces, so that the real training loop can
call it.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager
from itertools import count
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack

import torch
from torch import Tensor

from unstale.analysis.planner.clock import SimulatedClock
from unstale.analysis.planner.costs import NO_OVERHEADS, Costs, Overheads
from unstale.analysis.planner.engines import SimulatedEnginePool
from unstale.analysis.planner.episodes import SimulatedEpisode, SimulatedRollout
from unstale.analysis.planner.workload import Fleet
from unstale.config import ScheduleConfig
from unstale.durability.checkpoint import Checkpoint, Progress
from unstale.observe.trackers import RunOutcome
from unstale.old_logps import Needs, OldLogps
from unstale.records import Batch, Group, GroupRequest, PendingPiece, ScoredTrajectory, Task
from unstale.rollout.staleness_queue import StalenessQueue
from unstale.rollout.transcript import NullWriter
from unstale.token_values import TokenValues
from unstale.trainer.records import Minibatch
from unstale.weights.publish import VersionedWeights

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")
_EMPTY = torch.empty(0)


class SimulatedTrainer:
    """A trainer that only takes the seconds of `Costs`, and counts the staleness of tokens.

    The loop calls its methods in the trainer's thread, where they cannot wait. They add seconds to
    `owed` instead, and `SimulatedThread` waits for these after the call. Engines on the same
    devices pause while the trainer works.
    """

    def __init__(
        self,
        costs: Costs,
        rollout: SimulatedRollout,
        fleet: Fleet,
        *,
        closing: bool,
        overheads: Overheads = NO_OVERHEADS,
    ) -> None:
        self.version = 0
        """Number of steps so far. Only every `every`-th is published as a version."""
        self.owed: dict[str, float] = defaultdict(float)
        """Activity -> seconds for which the trainer's thread still has to wait."""
        self.spent: dict[str, float] = defaultdict(float)
        """Activity -> seconds for which the trainer's thread has waited so far."""
        self.batches: list[tuple[int, int]] = []
        """Number of tokens, and of sampled tokens, in each batch."""
        self.ages: Counter[int] = Counter()
        """Staleness in versions -> number of sampled tokens that were trained on."""
        self.num_versions: list[float] = []
        """Mean number of versions that sampled an episode, for each part of a batch that was
        scored.
        """
        self.rollout = rollout
        self.every = fleet.steps_per_version
        """Number of steps between two published versions."""
        self._costs = costs
        self._overheads = overheads
        self._closing = closing
        self._colocated = fleet.colocated
        self._added: set[int] = set()
        """Numbers of the episodes of the next batch that `add` has counted already."""
        self._counted = (0, 0)
        """Number of tokens of the next batch that are counted so far, and how many of them were
        sampled.
        """
        self._left = 0
        """Number of tokens of the batch that `add` had not counted before `prepare`."""

    def start_version(self) -> None:
        self.version += 1

    def lag(self, version: Tensor) -> Tensor:
        return self.version // self.every - version

    def weights(self) -> Mapping[str, Tensor]:
        return {}

    def add(self, part: Batch) -> None:
        """Count the tokens of a part of the next batch. Add the seconds of training on it to
        `owed`.
        """
        self._train(self._take(part))
        self._added |= set(part.episodes)

    def prepare(self, batch: Batch) -> Sequence[Minibatch]:
        """Count the tokens and the staleness of a batch. Add the seconds of scoring it to
        `owed`.
        """
        if self._colocated:
            now = self.rollout.clock.now
            self.owed["paused"] += self.rollout.engines.interrupt() - now
        self.owed["between"] += self._overheads.batch_s
        self.owed["audit"] += self._overheads.audit_s
        self._left = self._take(batch)
        self.batches.append(self._counted)
        self._counted = (0, 0)
        self._added = set()
        return [Minibatch(batch, _EMPTY, _EMPTY, _EMPTY, _EMPTY, _EMPTY)]

    def _take(self, part: Batch) -> int:
        """Count and score the episodes of `part` that `add` has not counted. Return their number of
        tokens.
        """
        newest = len(self.batches) // self.every
        numbers = [number for number in part.episodes if number not in self._added]
        episodes = [self.rollout.episodes.pop(number) for number in numbers]
        for episode in episodes:
            for version, sampled in episode.pieces:
                self.ages[newest - version] += sampled
            self.rollout.totals["ready_s"] += self.rollout.clock.now - episode.ended
        tokens = sum(episode.shape.tokens for episode in episodes)
        sampled = sum(episode.shape.sampled for episode in episodes)
        self._counted = (self._counted[0] + tokens, self._counted[1] + sampled)
        if episodes:
            self._owe_scoring(episodes, tokens, newest)
        return tokens

    def _train(self, tokens: int) -> None:
        seconds = self._costs.train_s(tokens) - self._costs.optimizer_s
        self.owed["train"] += seconds * self._overheads.pace(self.version).train

    def _owe_scoring(self, episodes: Sequence[SimulatedEpisode], tokens: int, newest: int) -> None:
        versions = [{version for version, _ in episode.pieces} for episode in episodes]
        # tokens of older versions were scored before those versions were replaced
        if self._closing:
            self.score(
                episode.shape.tokens
                for episode, seen in zip(episodes, versions, strict=True)
                if newest in seen
            )
        else:
            mean_versions = sum(map(len, versions)) / len(versions)
            self.num_versions.append(mean_versions)
            self._owe_old_logps(tokens, mean_versions)

    def score(self, lengths: Iterable[int]) -> None:
        """Add to `owed` the seconds of computing `old_logp` for sequences of these lengths, in
        tokens.
        """
        if tokens := sum(lengths):
            self._owe_old_logps(tokens, 1.0)

    def _owe_old_logps(self, tokens: int, versions: float) -> None:
        seconds = self._costs.old_logps_s(tokens, versions)
        self.owed["old_logps"] += seconds * self._overheads.pace(self.version).old

    def backward(self, minibatch: Minibatch) -> None:
        self._train(self._left)

    def step(self) -> None:
        self.owed["train"] += self._costs.optimizer_s

    def metrics(self) -> Mapping[str, float]:
        return {"old_logps/prepare_s": 0.0}  # the clock has it already

    def scatter_sample(self) -> list[dict[str, float]]:
        return []

    def tokens(self) -> list[TokenValues]:
        return []

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...


class SimulatedThread:
    """The trainer's thread. After a call it waits for the seconds that the trainer then owes."""

    def __init__(self, clock: SimulatedClock, trainer: SimulatedTrainer) -> None:
        self._clock = clock
        self._trainer = trainer
        self._busy = asyncio.Lock()

    async def run(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        async with self._busy:
            result = function(*arguments)
            owed = self._trainer.owed
            self._trainer.owed = defaultdict(float)
            await self._clock.sleep(sum(owed.values()))
            for activity, seconds in owed.items():
                self._trainer.spent[activity] += seconds
        return result

    def close(self) -> None: ...


class InstantThread:
    """A thread whose calls take no time, except writing a checkpoint, which takes `checkpoint_s`
    seconds.
    """

    def __init__(self, clock: SimulatedClock, checkpoint_s: float) -> None:
        self._clock = clock
        self._checkpoint_s = checkpoint_s

    async def run(self, function: Callable[[Unpack[_Args]], _T], *arguments: *_Args) -> _T:
        result = function(*arguments)
        if any(isinstance(each, Checkpoint) for each in arguments):
            await self._clock.sleep(self._checkpoint_s)
        return result

    def close(self) -> None: ...


class SimulatedQueue(StalenessQueue):
    """A staleness queue for a run that publishes a version only every `every` steps.

    A publication allows the episodes of `every` steps to start at once.
    """

    def __init__(self, schedule: ScheduleConfig, every: int) -> None:
        super().__init__(
            max_staleness=schedule.max_staleness,
            groups_per_step=schedule.groups_per_step,
            lookahead_window=schedule.lookahead_window,
            adaptive_window=schedule.adaptive_window,
        )
        self.bound //= every
        self._every = every
        self._calls = count()

    def release(self) -> None:
        if next(self._calls) % self._every == 0:
            for _ in range(self._every):
                super().release()


class SimulatedRoute(OldLogps):
    """A simulated way to get `old_logp` that takes the seconds of `Costs.old_logps_s`.

    Its values are never used.
    """

    def __init__(self, needs: Needs, trainer: SimulatedTrainer) -> None:
        self.needs = needs
        self._trainer = trainer

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        """Add the seconds of scoring the unfinished episodes, up to their present length."""
        episodes = {piece.episode for piece in unscored}
        self._trainer.score(self._trainer.rollout.length(number) for number in episodes)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the engine, and False for each token: its value is not
        exact.
        """
        return batch.behavior_logp, torch.zeros_like(batch.sampled)


class SimulatedPublisher:
    """The simulated publication of versions, for which all engines pause and then continue.

    Before the pause, hosts decode the version. After it, engines hold back complete replies until
    the new weights are checked.
    """

    bytes = 0

    def __init__(
        self,
        costs: Costs,
        clock: SimulatedClock,
        engines: SimulatedEnginePool,
        *,
        trainer: SimulatedTrainer,
    ) -> None:
        self._costs = costs
        self._clock = clock
        self._engines = engines
        self._trainer = trainer
        self._due = False

    def begin(self, source: VersionedWeights, live: Collection[int] = ()) -> None:
        self._due = source.version % self._trainer.every == 0
        if source.version and self._due:
            self._trainer.owed["publish"] += self._costs.publish_s()

    def finish(self) -> None: ...

    async def stage(self) -> None:
        if self._due and self._engines.version >= 0:  # the first is loaded before the run
            await self._clock.sleep(self._engines.held_until - self._clock.now)
            await self._clock.sleep(self._costs.stage_s())

    async def publish(self) -> None:
        if not self._due:
            return
        await self.interrupt()
        probe_s = 0.0
        if self._engines.version >= 0:
            await self._clock.sleep(self._costs.load_s())
            probe_s = self._costs.probe_s()
        self._engines.held_until = self._clock.now + probe_s
        self._engines.resume(self._engines.version + 1)

    async def start(self) -> None: ...

    async def interrupt(self) -> None:
        await self._clock.sleep(self._engines.interrupt() - self._clock.now)

    async def close(self) -> None: ...

    def metrics(self) -> Mapping[str, float]:
        return {"sampled_tokens": 0.0, "busy_s": 0.0, "idle_s": 0.0}


class NullJournal:
    """A journal that records nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object, /) -> None: ...

    async def watch(self) -> None: ...

    async def barrier(self) -> None: ...

    def add_request(self, request: GroupRequest) -> None: ...

    def resize(self, number: int, size: int) -> None: ...

    def begin(
        self, number: int, sibling: int, *, episode: int, seed: int, again: bool = False
    ) -> NullWriter:
        return NullWriter(number, sibling, episode=episode, seed=seed, again=again)

    async def finish(self, group: Group) -> None: ...

    async def publishing(self, version: int) -> None: ...

    def commit(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        version: int,
        replayed: Sequence[int] = (),
        tokens: Sequence[TokenValues] = (),
    ) -> None: ...

    async def checkpoint(self, name: str, *, step: int, version: int) -> None: ...


class NullTechniques:
    """The methods of `unstale.rollout.hooks.RunHooks`, which change nothing here. Advantages are
    0.
    """

    max_replay_age = 0
    reads_states = False

    async def requests(self) -> AsyncIterator[GroupRequest]:
        for number in count():
            yield GroupRequest(number, Task("simulated", "train", number), 0, number)

    async def more(self, request: GroupRequest, results: object) -> Sequence[None]:
        return ()

    def rounds(self, request: GroupRequest) -> None: ...

    def read_states(self, groups: Sequence[Group]) -> None: ...

    def credit(
        self, groups: Sequence[Group], *, progress: float, version: int, whole: bool
    ) -> tuple[list[ScoredTrajectory], dict[str, float]]:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        return [ScoredTrajectory(trajectory, (0.0,)) for trajectory in trajectories], {}

    def replayed(self, groups: Sequence[Group], step: int) -> Sequence[Batch]:
        return ()

    def prepared(self, batch: Batch, groups: Sequence[Group]) -> Batch:
        return batch

    def trained(self, groups: Sequence[Group], step: int) -> None: ...


class NullCheckpoints:
    """Checkpoints that take no time and are not written."""

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint:
        return Checkpoint(progress, source.version, {}, {})

    def write(self, checkpoint: Checkpoint) -> str:
        return ""

    def prune(self) -> Mapping[str, str]:
        return {}


class NullAudit:
    """An audit that measures nothing."""

    def on_published(self, live: Collection[int]) -> None: ...

    def scatter_sample(self) -> list[dict[str, float]]:
        return []


class SimulatedRecorder:
    """A log that keeps the time at the end of each step, and the seconds of activities up to it."""

    def __init__(
        self, clock: SimulatedClock, engines: SimulatedEnginePool, trainer: SimulatedTrainer
    ) -> None:
        self._clock = clock
        self._engines = engines
        self._trainer = trainer
        self.ends: list[float] = [0.0]
        """Simulated times, in seconds, at which the steps ended. The first entry is 0."""
        self._lanes: dict[str, float] = defaultdict(float)
        """Lane (row of the timeline) -> seconds of its recorded spans so far."""
        self._seconds: list[dict[str, float]] = [{}]
        self.rows: list[dict[str, float]] = [{"time_s": 0.0}]
        """The metrics of each step, named as in a real run."""

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        began = self._clock.now
        yield
        self._lanes[lane] += self._clock.now - began

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.ends.append(self._clock.now)
        busy = sum(engine.busy_s for engine in self._engines.members)
        prefill = sum(engine.busy_s for engine in self._engines.members if engine.prefills)
        totals = self._trainer.rollout.totals
        self._seconds.append(
            {
                **self._trainer.spent,
                "wait": self._lanes["wait"],
                "publishing": self._lanes["publish"],
                "checkpoint": self._lanes["checkpoint"],
                "engines": busy,
                "prefill_engines": prefill,
                "prefilled": float(sum(engine.prefilled for engine in self._engines.members)),
                "steps": float(sum(engine.steps for engine in self._engines.members)),
                "sampled": float(sum(engine.sampled for engine in self._engines.members)),
                "tools": totals["tool_s"],
                "generation": totals["engine_s"],
            }
        )
        self.rows.append(self._row(metrics))

    def _row(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics of the latest step from which the bottleneck follows."""
        before, after = self._seconds[-2:]
        spent = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        elapsed = self.ends[-1] - self.ends[-2]
        engines = len(self._engines.members)
        return {
            "time_s": self.ends[-1],
            "schedule/wait_for_batch_s": spent["wait"],
            "schedule/groups_in_flight": metrics["schedule/groups_in_flight"],
            "schedule/groups_waiting": metrics["schedule/groups_waiting"],
            "schedule/staleness_bound": metrics["schedule/staleness_bound"],
            "engine/busy_share": spent["engines"] / engines / (elapsed or 1.0),
            "trainer/update_s": spent.get("train", 0.0),
            "old_logps/prepare_s": spent.get("old_logps", 0.0),
            "publish/duration_s": spent["publishing"],
            "checkpoint/duration_s": spent["checkpoint"],
            "rollout/tool_wait_s": spent["tools"],
            "rollout/generation_wait_s": spent["generation"],
        }

    def total(self, name: str, since: int) -> float:
        """Return the amount of `name` after step `since`: seconds of an activity, or a number of
        tokens or decoding steps.
        """
        return self._seconds[-1].get(name, 0.0) - self._seconds[since].get(name, 0.0)

    def share(self, lane: str, since: int) -> float:
        """Return the share of the time after step `since` that the activity `lane` took.

        For activities of engines it is the sum over engines, so it can be above 1.
        """
        return self.total(lane, since) / (self.ends[-1] - self.ends[since])

    def sample(self, step: int, groups: Sequence[Group]) -> None: ...

    def event(self, kind: str, **fields: Any) -> None: ...

    def phase(
        self, text: str, *, done: int = 0, total: int = 0, detail: Callable[[], str] = str
    ) -> None: ...

    def trained(
        self, step: int, *, points: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]
    ) -> None: ...

    def close(self, outcome: RunOutcome) -> None: ...
