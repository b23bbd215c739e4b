"""The group of processes (ranks) among which a model is divided.

Every rank has a `RankGroup`. All ranks must call the same methods in the same order, each with its
own values.
"""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from unstale.model.context import ContextGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a process group, and this process's `rank` among its `count` ranks.

    By default, it is a single process without a group. Tensors given to the methods are on the CPU.
    """

    rank: int = 0
    count: int = 1
    context: ContextGroup | None = None
    """The ranks, this one included, that together run one forward pass by dividing its tokens. None
    if each pass runs on one rank.
    """
    replicas: int = 1
    """Number of copies of the model. Each copy is divided among `count // replicas` neighbouring
    ranks.
    """
    divides_experts: bool = False
    """True if each rank has whole experts of a layer, and tokens are sent to the ranks of their
    experts.
    """
    group: "ProcessGroup | None" = None
    """The process group that the methods use. None means torch's default process group."""

    @classmethod
    def of_group(cls) -> "RankGroup":
        """Return the ranks of torch's default process group, which this process has joined."""
        return cls(dist.get_rank(), dist.get_world_size())

    def in_context_groups(self, size: int) -> "RankGroup":
        """Return a copy in which groups of `size` ranks each divide the tokens of a pass.

        All ranks must call this. Raises ValueError unless `size` divides the number of ranks.
        """
        if self.count % size:
            raise ValueError(f"{self.count} ranks cannot be divided into groups of {size}")
        if size == 1:
            return self
        groups = _divided_groups(dist.group.WORLD, self.count, size)
        return replace(self, context=ContextGroup.of(groups[self.rank // size]))

    def in_replicas(self, count: int) -> "RankGroup":
        """Return a copy in which the ranks have `count` copies of the model.

        Raises ValueError unless `count` divides the number of ranks.

        >>> RankGroup(3, 4).in_replicas(2).is_first_replica
        False
        """
        if self.count % count:
            raise ValueError(f"{self.count} ranks cannot have {count} copies of a model")
        return replace(self, replicas=count)

    @property
    def is_first_replica(self) -> bool:
        """True if this rank has a part of the first copy of the model.

        Only the first copy's weights are published to engines.
        """
        return self.rank < self.count // self.replicas

    def for_another_thread(self) -> "RankGroup":
        """Return a copy with a second process group, which another thread can use at the same time.

        All ranks must call this. The second group exchanges only values in main memory.
        """
        if self.count == 1:
            return self
        return replace(self, group=_second_group(dist.group.WORLD))

    @property
    def reports(self) -> bool:
        """True if this rank reports the results of its passes.

        If several ranks divide the tokens of each pass, only one of them does.
        """
        return self.context is None or self.context.rank == 0

    def deal(self, costs: Sequence[int]) -> list[tuple[int, bool]]:
        """Distribute forward passes over the ranks by their costs.

        Return the passes that this rank runs. A pass is (index in `costs`, True if its result
        counts). All ranks run equally many passes, because they exchange weights in each. Every
        pass counts on one rank, or on all ranks that divide its tokens. A rank with too few passes
        runs the cheapest one again, which does not count.

        >>> RankGroup(0, 2).deal([5, 9, 1]), RankGroup(1, 2).deal([5, 9, 1])
        ([(1, True), (2, False)], [(0, True), (2, True)])
        """
        if self.count == 1:
            return [(i, True) for i in range(len(costs))]
        size = self.context.size if self.context else 1
        groups = self.count // size
        rounds = -(-len(costs) // groups)
        dealt: list[list[int]] = [[] for _ in range(groups)]
        open_groups = [(0, group) for group in range(groups)]  # a heap of costs
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            cost, group = heapq.heappop(open_groups)
            dealt[group].append(i)
            if len(dealt[group]) < rounds:
                heapq.heappush(open_groups, (cost + costs[i], group))
        mine = sorted(dealt[self.rank // size])
        cheapest = min(range(len(costs)), key=lambda i: costs[i], default=0)
        return [(i, True) for i in mine] + [(cheapest, False)] * (rounds - len(mine))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which must have equal shapes.

        `tensor` is overwritten.
        """
        if self.count > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, number: int) -> int:
        """Return the largest number that any rank has given."""
        largest = torch.tensor(number)
        if self.count > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        return int(largest)

    def gather(self, value: T) -> list[T]:
        """Return the values that all ranks have given, in the order of the ranks.

        They must be picklable.
        """
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_first(self, value: T) -> list[T]:
        """Return the values of all ranks on the first rank, and an empty list on the others.

        So only the first rank needs memory for all values. They must be picklable.
        """
        if self.count == 1:
            return [value]
        values: list[Any] | None = None if self.rank else [None] * self.count
        dist.gather_object(value, values, group=self.group)
        return values or []

    def from_first(self, value: T) -> T:
        """Return the first rank's value on all ranks, copied by pickle.

        Other ranks' values are ignored.
        """
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.group)
        return values[0]

    @contextmanager
    def fail_together(self, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
        """Return a context that raises an error on every rank if its body fails on one rank.

        `kinds` are the classes of such errors. Without this, the other ranks would wait for the
        failed rank forever. If the body has collectives, such as the passes of a divided model,
        errors of these kinds must be raised after the last collective, or on all ranks.
        """
        error: Exception | None = None
        try:
            yield
        except kinds as raised:
            if self.count == 1:
                raise
            error = raised
        if self.count > 1 and self.sum(torch.tensor(int(error is not None))):
            first = next(found for found in self.gather(error) if found is not None)
            raise first


SINGLE_PROCESS = RankGroup()
"""The `RankGroup` of a process that does not share its model with others."""


@cache
def _divided_groups(world: "ProcessGroup", count: int, size: int) -> "tuple[ProcessGroup, ...]":
    """Return the process groups of `size` successive ranks each.

    The first call creates them, so all ranks must call this.
    """
    starts = range(0, count, size)
    return tuple(dist.new_group(list(range(start, start + size))) for start in starts)


@cache
def _second_group(world: "ProcessGroup") -> "ProcessGroup":
    """Return a second process group of all ranks.

    The first call creates the group, so all ranks must call this.
    """
    return dist.new_group(backend="gloo")
