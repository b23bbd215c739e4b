"""Steps of denoising policies, and groups of objects that were drawn step by step.

A step draws an action in a state. Its log-probability is that of the action, so it can be computed
again with any weights from the recorded state, action and place (the number of the step). A `Tape`
records steps by number. The number of a step is its token in the `Trajectory` of an object, so
records, forks, advantages and batches are those of language models.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Protocol

import torch
from torch import Generator, Tensor, nn

from unstale.records import ContextPiece, Fork, Group, Provenance, Sampled, Task, Trajectory
from unstale.research.techniques.episode_filter import contrast
from unstale.rollout.seeds import derive_seed

Row = tuple[Tensor, ...]
"""One step: the fields of `Steps` without their first dimension."""


@dataclass(frozen=True, slots=True)
class Steps:
    """N steps of a policy. The first dimension of each tensor is N."""

    state: Tensor
    action: Tensor
    place: Tensor
    """The number of each step in its object, from 0, `[N]`."""
    context: Tensor
    """The condition for which the object is drawn, such as the number of a digit."""

    @classmethod
    def stack(cls, rows: Iterable[Row]) -> "Steps":
        return cls(*map(torch.stack, zip(*rows, strict=True)))

    def rows(self) -> Iterator[Row]:
        return zip(*(getattr(self, each.name) for each in fields(self)), strict=True)

    def __getitem__(self, part: slice) -> "Steps":
        return Steps(*(getattr(self, each.name)[part] for each in fields(self)))


def microbatches(count: int, size: int) -> list[slice]:
    """Return the slices that divide `count` rows into parts of at most `size`. With 0, one has
    all.
    """
    size = size or max(count, 1)
    return [slice(start, start + size) for start in range(0, count, size)]


def has_noise(place: int, noisy: Sequence[int] | None) -> bool:
    """Return True if the step of a place has noise: only those of `noisy` have it. Empty means all,
    and None that no step has it.
    """
    return noisy is not None and (not noisy or place in noisy)


class Denoiser(Protocol):
    """A policy that draws an object in `places` steps. Its methods get the network to use.

    Tensors that they get are on the device of the network's trained parameters. Generators are of
    the CPU, so `begin` and `noise` draw there, and what they return is moved.
    """

    places: int
    lr: float
    """The learning rate that is used unless another one is chosen."""

    def network(self, seed: int) -> nn.Module:
        """Return a network after its supervised start, on the device where it is to be trained.

        Only parameters that require a gradient are trained, such as those of LoRA adapters. They
        are float32 or float64, and others may have any type.
        """
        ...

    def contexts(self, tasks: Sequence[int], *, held_out: bool) -> Tensor:
        """Return the contexts of tasks by their numbers, `[N, ...]`."""
        ...

    def begin(self, random: Generator) -> Tensor:
        """Return the state before the first step."""
        ...

    def noise(self, random: Generator) -> Tensor:
        """Return the random numbers of one step."""
        ...

    def draw(self, network: nn.Module, steps: Steps, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return actions and their log-probabilities `[N]` in nats. `steps.action` is not read.

        Without `noise`, the policy draws without randomness, such as the most probable action.
        """
        ...

    def logp(self, network: nn.Module, steps: Steps) -> Tensor:
        """Return the log-probabilities of recorded actions, `[N]` in nats, with a gradient.

        They are float32 or float64. A constant that depends only on the place may be left out,
        because it cancels in every ratio.
        """
        ...

    def after(self, action: Tensor) -> Tensor:
        """Return the states after actions."""
        ...

    def rewards(self, path: Tensor, context: Tensor) -> Mapping[str, Tensor]:
        """Return the rewards of finished objects under the name `reward`, and other figures by
        name, `[N]` each.

        `path` has the states before all steps and at the end, `[places + 1, N, ...]`.
        """
        ...


class Tape:
    """The tensors of each drawn step until the trainer takes them.

    A trajectory has only the numbers of its steps, in the place of tokens.
    """

    def __init__(self) -> None:
        self._steps: dict[int, Row] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, steps: Steps) -> range:
        """Record steps, and return their numbers."""
        rows = list(steps.rows())
        numbers = range(self._added, self._added + len(rows))
        self._steps.update(zip(numbers, rows, strict=True))
        self._added += len(rows)
        return numbers

    def take(self, numbers: Sequence[int]) -> list[Row]:
        """Return steps in the order of their numbers, and remove them from the tape."""
        return [self._steps.pop(number) for number in numbers]


@dataclass(slots=True)
class Drawing:
    """An object that is being drawn."""

    number: int
    random: Generator
    path: list[Tensor]
    """The states so far."""
    seed: int
    fork: Fork | None = None
    shared: tuple[int, ...] = ()
    """Numbers of the steps that this object shares with the object from which it was forked."""
    own: list[tuple[int, float, int]] = field(default_factory=list)
    """For each step that is not shared: its number on the tape, its `behavior_logp`, and the
    version of the weights.
    """

    def trajectory(self, task: Task, rewards: Mapping[str, float]) -> Trajectory:
        pieces: list[ContextPiece | Sampled] = []
        if self.shared:
            pieces.append(ContextPiece(self.shared, Provenance.SHARED))
        for version, steps in groupby(self.own, key=lambda step: step[2]):
            tokens, logps, _ = zip(*steps, strict=True)
            pieces.append(Sampled(tokens, logps, version))
        reward = {"reward": rewards["reward"]}
        facts = {name: value for name, value in rewards.items() if name != "reward"}
        return Trajectory(
            tuple(pieces), reward, "done", task, self.seed, self.number, facts=facts, fork=self.fork
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The rules by which the objects of a group are drawn."""

    size: int
    """Number of objects with a beginning of their own that are trained on."""
    forks: Sequence[int] = ()
    """Places before which each object is continued twice."""
    noisy: Sequence[int] = ()
    """Places whose steps draw noise. Only these are trained on. Empty means all places."""
    explore: int = 0
    """Number of objects that the explorer draws. Those with the highest and the lowest rewards, in
    total `size`, are drawn again with the same random numbers by the engine, and only these are
    trained on. With 0, nothing is explored.
    """


class Sampler:
    """The engine: networks that draw objects while the trainer changes its own network.

    New weights also draw the remaining steps of unfinished objects. So the steps of an object may
    have different versions.
    """

    def __init__(self, model: Denoiser, plan: Plan, seed: int) -> None:
        self.tape = Tape()
        self.version = 0
        self.counts = {"engine": 0, "explorer": 0}
        """Number of steps that each network computed."""
        self._networks: dict[str, nn.Module] = {}
        self._model = model
        self._plan = plan
        self._seed = seed
        self._started = 0

    def load(self, version: int, engine: nn.Module, explorer: nn.Module) -> None:
        """Use new weights. `engine` draws the objects to train on, and `explorer` the others."""
        self.version = version
        self._networks = {"engine": engine, "explorer": explorer}

    async def group(self, number: int, index: int) -> Group:
        """Draw the objects of a task. Other coroutines run between any two steps."""
        task = Task("denoise", "train", index)
        context = self._model.contexts([index], held_out=False)
        seeds = [*range(self._plan.explore or self._plan.size)]
        if self._plan.explore:
            explored = [self._begin(number, seed) for seed in seeds]
            await self._finish(explored, context, "explorer")
            rewards = self._rewards(explored, context)["reward"].tolist()
            seeds = sorted(contrast(rewards, self._plan.size))
        drawn = [self._begin(number, seed) for seed in seeds]
        await self._finish(drawn, context, "engine", self._plan.forks)
        values = self._rewards(drawn, context)
        columns = {name: each.tolist() for name, each in values.items()}
        trajectories = tuple(
            each.trajectory(task, {name: column[i] for name, column in columns.items()})
            for i, each in enumerate(drawn)
        )
        return Group(task, trajectories, number=number)

    def _begin(self, group: int, sibling: int) -> Drawing:
        seed = derive_seed(self._seed, "object", group, sibling)
        random = Generator().manual_seed(seed)
        self._started += 1
        return Drawing(self._started, random, [self._model.begin(random)], seed)

    def _fork(self, parent: Drawing, place: int) -> Drawing:
        seed = derive_seed(parent.seed, "fork", place)
        shared = (*parent.shared, *(number for number, _, _ in parent.own))
        self._started += 1
        return Drawing(
            self._started,
            Generator().manual_seed(seed),
            list(parent.path),
            seed,
            Fork(parent.number, len(shared)),
            shared,
        )

    async def _finish(
        self, drawn: list[Drawing], context: Tensor, name: str, forks: Sequence[int] = ()
    ) -> None:
        """Draw all remaining steps of some objects. Objects that are forked from them are added to
        the list.
        """
        for place in range(self._model.places):
            if place in forks:
                drawn += [self._fork(each, place) for each in drawn]
            await asyncio.sleep(0)  # new weights may arrive here
            state = torch.stack([each.path[-1] for each in drawn])
            many = context.expand(len(drawn), *context.shape[1:])
            places = torch.full((len(drawn),), place, device=state.device)
            is_noisy = has_noise(place, self._plan.noisy)
            noise = torch.stack([self._model.noise(each.random) for each in drawn])
            with torch.no_grad():
                action, logp = self._model.draw(
                    self._networks[name],
                    Steps(state, state, places, many),
                    noise if is_noisy else None,
                )
            self.counts[name] += len(drawn)
            for each, after in zip(drawn, self._model.after(action), strict=True):
                each.path.append(after)
            if name == "engine" and is_noisy:
                numbers = self.tape.add(Steps(state, action, places, many))
                for each, step in zip(drawn, zip(numbers, logp.tolist(), strict=True), strict=True):
                    each.own.append((*step, self.version))

    def _rewards(self, drawn: Sequence[Drawing], context: Tensor) -> Mapping[str, Tensor]:
        path = torch.stack([torch.stack(each.path) for each in drawn], 1)
        return self._model.rewards(path, context.expand(len(drawn), *context.shape[1:]))
