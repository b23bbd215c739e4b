"""What stands behind the loop's Protocols in a simulated run: it takes time on the clock, and does nothing else."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

from torch import Tensor

from unstale.config import ScheduleConfig
from unstale.durability.checkpoint import Checkpoint, Progress
from unstale.loop import RunComponents
from unstale.old_logps import Needs
from unstale.planner.clock import SimulatedClock
from unstale.planner.costs import Costs
from unstale.planner.engines import SimulatedEnginePool
from unstale.planner.episodes import SimulatedRollout
from unstale.planner.route_costs import RouteCost
from unstale.records import Batch, PendingPiece
from unstale.rollout.staleness_queue import StalenessQueue


class SimulatedParts(RunComponents):
    """What the trainer's thread does costs what the trainer says it owes by then."""

    async def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        trainer = cast(Any, self.trainer)
        async with trainer.thread:
            result = function(*arguments)
            owed, trainer.owed = trainer.owed, defaultdict(float)
            await cast(Any, self.worker).sleep(sum(owed.values()))
            for what, seconds in owed.items():
                trainer.spent[what] += seconds
        return result

    async def aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class Counted:
    """Counts steps, of which `every` make a version."""

    version = 0

    def __init__(self, every: int) -> None:
        self._every = every

    def lag(self, version: Tensor) -> Tensor:
        return self.version // self._every - version


class Held(StalenessQueue):
    """A line whose tickets come back with a version, of `every` steps."""

    def __init__(self, schedule: ScheduleConfig, every: int) -> None:
        sizes = {
            name: getattr(schedule, name)
            for name in ("max_staleness", "groups_per_step", "lookahead_window")
        }
        super().__init__(**sizes)
        self.bound //= every
        self._every, self._calls = every, count()

    def release(self) -> None:
        for _ in range(self._every if next(self._calls) % self._every == 0 else 0):
            super().release()


async def _later(*_: Any, **__: Any) -> None: ...


def _nothing(*_: Any, **__: Any) -> Any:
    return ()


class Idle:
    """What takes no time here: the journal, checkpoints, the audit."""

    add_request = begin = consume = write = prune = points = events = published = trajectories = (
        learnt
    ) = _nothing
    start = finish = publishing = checkpoint = _later

    def hold(self, stand: Progress, policy: Any) -> Checkpoint:
        return Checkpoint(stand, policy.version, {}, {})


class SimulatedRoute(Idle):
    """A route that costs what `Costs.old_logps_s` says, and holds up generation and training as its `needs` do."""

    publishing: Any = _nothing

    def __init__(self, needs: Needs, trainer: "SimulatedTrainer") -> None:
        self.needs, self._trainer = needs, trainer

    def closing(self, waiting: Sequence[PendingPiece]) -> None:
        """One version of what is open: each of these episodes as far as it is."""
        self._trainer.score(
            self._trainer.rollout.length(number) for number in {piece.episode for piece in waiting}
        )


def needs(route: RouteCost) -> Needs:
    """What the loop reads of a route. Work in idle time is the planner's to count."""
    return Needs(closing=route.closing, snapshots=route.chain)


class SimulatedTrainer(Idle):
    """Takes `Costs.train_s` and `Costs.old_logps_s`. Where engines are its own devices, they stand while it works."""

    parts = (None,)

    def __init__(
        self,
        costs: Costs,
        rollout: SimulatedRollout,
        *,
        closing: bool,
        colocated: bool,
        every: int = 1,
    ) -> None:
        self.owed: dict[str, float] = defaultdict(float)
        """Seconds that have not passed on the clock yet, by what for."""
        self.spent: dict[str, float] = defaultdict(float)
        self.thread = asyncio.Lock()
        """There is one: what comes while it is taken waits its turn."""
        self.batches: list[tuple[int, int]] = []
        """Tokens of each, and how many of them were sampled."""
        self.ages: Counter[int] = Counter()
        self.rollout = rollout
        self.every = every
        """Steps of a version."""
        self._costs, self._closing, self._colocated = costs, closing, colocated

    def prepare(self, batch: Batch) -> "SimulatedTrainer":
        now, latest = self.rollout.clock.now, len(self.batches) // self.every
        if self._colocated:
            self.owed["stand"] += self.rollout.engines.interrupt() - now
        episodes = [self.rollout.episodes.pop(number) for number in batch.episodes]
        shapes, held = (
            [one.shape for one in episodes],
            [{version for version, _ in one.pieces} for one in episodes],
        )
        for episode in episodes:
            for version, sampled in episode.pieces:
                self.ages[latest - version] += sampled
            self.rollout.totals["ready_s"] += now - episode.ended
        tokens = sum(shape.tokens for shape in shapes)
        self.batches.append((tokens, sum(shape.sampled for shape in shapes)))
        if self._closing:  # what earlier versions sampled of it was scored when they were left
            self.score(
                shape.tokens
                for shape, versions in zip(shapes, held, strict=True)
                if latest in versions
            )
        else:
            self.owed["old_logps"] += self._costs.old_logps_s(
                tokens, sum(map(len, held)) / len(held)
            )
        return self

    def score(self, lengths: Iterable[int]) -> None:
        """Under one version."""
        if tokens := sum(lengths):
            self.owed["old_logps"] += self._costs.old_logps_s(tokens, 1.0)

    def backward(self, part: None) -> None:
        self.owed["train"] += self._costs.train_s(self.batches[-1][0]) - self._costs.optimizer_s

    def step(self) -> None:
        self.owed["train"] += self._costs.optimizer_s

    def metrics(self) -> Mapping[str, Any]:
        return {}


class SimulatedPublisher(Idle):
    """`Publisher` and `SimulatedEngine` of the loop: engines stand, load, and go on under the next version."""

    bytes = 0

    def __init__(
        self,
        costs: Costs,
        clock: SimulatedClock,
        engines: SimulatedEnginePool,
        *,
        trainer: SimulatedTrainer,
    ) -> None:
        self._costs, self._clock, self._engines, self._trainer = costs, clock, engines, trainer

    def prepare(self, policy: Any, live: Collection[int] = ()) -> None:
        self._due = policy.version % self._trainer.every == 0
        if policy.version and self._due:
            self._trainer.owed["publish"] += self._costs.publish_s()

    async def interrupt(self) -> None:
        await self._clock.sleep(self._engines.interrupt() - self._clock.now)

    async def publish(self) -> None:
        if not self._due:
            return
        await self.interrupt()
        if self._engines.version >= 0:  # what the run begins with is there already
            await self._clock.sleep(self._costs.load_s())
        self._engines.resume(self._engines.version + 1)

    def metrics(self) -> Mapping[str, float]:
        return {"sampled_tokens": 0.0, "busy_s": 0.0, "idle_s": 0.0}


class Lanes(Idle):
    """Keeps when steps end, and seconds by then: of the loop's waiting, of the trainer's thread, and of `engines`."""

    def __init__(
        self, clock: SimulatedClock, engines: SimulatedEnginePool, trainer: SimulatedTrainer
    ) -> None:
        self._clock, self._engines, self._trainer = clock, engines, trainer
        self.ends: list[float] = [0.0]
        self._waited = 0.0
        self._seconds: list[dict[str, float]] = [{}]

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        began = self._clock.now
        yield
        if lane == "wait":
            self._waited += self._clock.now - began

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.ends.append(self._clock.now)
        busy = sum(engine.busy_s for engine in self._engines.members)
        self._seconds.append({**self._trainer.spent, "wait": self._waited, "engines": busy})

    def share(self, lane: str, since: int) -> float:
        """Of the time from the end of a step on."""
        spent = self._seconds[-1].get(lane, 0.0) - self._seconds[since].get(lane, 0.0)
        return spent / (self.ends[-1] - self.ends[since])
