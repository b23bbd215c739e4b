"""What stands behind the loop's Protocols in a simulated run: it takes time on the clock, and does nothing else."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from afterimage.checkpoint import Checkpoint, Stand
from afterimage.old_logps import Needs
from afterimage.parts import Parts
from afterimage.plan.engines import EngineCosts, Engines
from afterimage.plan.episodes import SimulatedRollout
from afterimage.plan.world import World
from afterimage.trajectory import Batch, Group, Handout, Open


class Costs(EngineCosts, Protocol):
    """Seconds that things take. Engine costs are of one engine, trainer costs of the whole trainer."""

    def step_s(self, replies: int, context: int) -> float:
        """One decoding step of an engine that runs so many replies, which hold so many tokens of context in all."""
        ...

    def prefill_s(self, tokens: int) -> float:
        """Computing so many context tokens."""
        ...

    def train_s(self, tokens: int) -> float:
        """Forward, backward and optimizer step of a batch of so many tokens, prompts included."""
        ...

    def old_logps_s(self, tokens: int, versions: float) -> float:
        """The route's share of the trainer's time, for a batch whose sequences hold so many versions on average."""
        ...

    def publish_s(self) -> float:
        """Trainer's time to make a version ready; engines go on."""
        ...

    def load_s(self) -> float:
        """Engines stand still for so long to take it."""
        ...


class SimulatedParts(Parts):
    """What the trainer's thread does costs what the trainer says it owes by then."""

    async def beside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        trainer = cast(Any, self.trainer)
        async with trainer.thread:
            result = function(*arguments)
            owed, trainer.owed_s = trainer.owed_s, 0.0
            await cast(Any, self.worker).sleep(owed)
        return result

    async def aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class Counted:
    """Counts versions."""

    version = 0

    def lag(self, version: Tensor) -> Tensor:
        return self.version - version


class Idle:
    """What takes no time here: the journal, checkpoints, the audit."""

    def hand_out(self, handout: Handout) -> None: ...

    def begin(self, *_: Any, **__: Any) -> None: ...

    async def finish(self, group: Group) -> None: ...

    def consume(self, groups: Sequence[Group], *, step: int, version: int) -> None: ...

    async def publishing(self, version: int) -> None: ...

    async def checkpoint(self, name: str, *, step: int, version: int) -> None: ...

    def hold(self, stand: Stand, policy: Any) -> Checkpoint:
        return Checkpoint(stand, policy.version, {}, {})

    def write(self, *_: Any) -> str:
        return ""

    def prune(self) -> None: ...

    def points(self) -> Iterator[Any]:
        return iter(())

    def published(self, *_: Any) -> None: ...


class SimulatedRoute:
    """A route that costs what `Costs.old_logps_s` says. `closing` makes the loop hold generation while it trains."""

    def __init__(self, *, closing: bool) -> None:
        self.needs = Needs(closing=closing, snapshots=not closing)

    def closing(self, policy: Any, waiting: Sequence[Open]) -> None: ...

    def publishing(self, policy: Any) -> None: ...

    def published(self, policy: Any, live: Collection[int]) -> None: ...

    def events(self) -> Iterator[Any]:
        return iter(())


@dataclass(slots=True)
class Consumed:
    """What there was to a batch."""

    tokens: int = 0
    sampled: int = 0


class SimulatedTrainer:
    """Takes `Costs.train_s` and `Costs.old_logps_s`; `owed_s` is what has not passed on the clock yet."""

    parts = (None,)

    def __init__(self, costs: Costs, rollout: SimulatedRollout, *, colocated: bool) -> None:
        self.owed_s = 0.0
        self.thread = asyncio.Lock()
        """There is one: what comes while it is taken waits its turn."""
        self.batches: list[Consumed] = []
        self.ages: Counter[int] = Counter()
        self.rollout = rollout
        self._costs, self._colocated = costs, colocated

    def prepare(self, batch: Batch) -> "SimulatedTrainer":
        consumed, versions, now = Consumed(), 0, self.rollout.world.now
        latest = len(self.batches)
        for number in batch.episodes:
            episode = self.rollout.finished.pop(number)
            consumed.tokens += episode.shape.tokens
            consumed.sampled += episode.shape.sampled
            versions += len({version for version, _ in episode.pieces})
            for version, tokens in episode.pieces:
                self.ages[latest - version] += tokens
            self.rollout.lives.ready_s += now - episode.ended
        self.batches.append(consumed)
        self.owed_s += self._costs.old_logps_s(consumed.tokens, versions / len(batch.episodes))
        return self

    def backward(self, part: None) -> None:
        if not self._colocated:
            self.owed_s += self._costs.train_s(self.batches[-1].tokens)

    def step(self) -> None:
        if self._colocated:
            self.owed_s += self._costs.train_s(self.batches[-1].tokens)

    def points(self) -> Iterator[Any]:
        return iter(())

    def metrics(self) -> Mapping[str, Any]:
        return {}


class SimulatedPublisher:
    """`Publisher` and `Engine` of the loop: engines stand, load, and go on under the next version."""

    bytes = 0

    def __init__(self, costs: Costs, world: World, engines: Engines, *, trainer: SimulatedTrainer) -> None:
        self._costs, self._world, self._engines, self._trainer = costs, world, engines, trainer

    async def start(self) -> None: ...

    def prepare(self, policy: Any, live: Collection[int] = ()) -> None:
        if policy.version:
            self._trainer.owed_s += self._costs.publish_s()

    async def interrupt(self) -> None:
        await self._world.sleep(self._engines.stand() - self._world.now)

    async def publish(self) -> None:
        await self.interrupt()
        if self._engines.version >= 0:  # what the run begins with is there already
            await self._world.sleep(self._costs.load_s())
        self._engines.resume(self._engines.version + 1)

    def metrics(self) -> Mapping[str, float]:
        return {"sampled_tokens": 0.0, "busy_s": 0.0, "idle_s": 0.0}


class Lanes:
    """Keeps when steps end, how long each lane of the loop took, and what the engines had done by then."""

    def __init__(self, world: World, engines: Engines) -> None:
        self._world, self._engines = world, engines
        self.ends: list[float] = [0.0]
        self.lanes: list[dict[str, float]] = []
        self.busy: list[float] = [0.0]
        self._lane: dict[str, float] = {}

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        began = self._world.now
        yield
        self._lane[lane] = self._lane.get(lane, 0.0) + self._world.now - began

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.ends.append(self._world.now)
        self.lanes.append(self._lane)
        self.busy.append(sum(engine.busy_s for engine in self._engines.members))
        self._lane = {}

    def share(self, lane: str, since: int) -> float:
        """Of the time from the end of a step on."""
        return sum(lanes.get(lane, 0.0) for lanes in self.lanes[since:]) / (self.ends[-1] - self.ends[since])

    def learnt(self, step: int, *, points: Any, events: Any) -> None: ...

    def trajectories(self, step: int, groups: Sequence[Group]) -> None: ...
