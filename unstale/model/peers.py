"""The ranks that share one model, as one of them sees the others.

Every rank calls the same methods in the same order, each with values of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of the default process group. By default one process without a group.

    Tensors given to the methods are on the CPU.
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def of_group(cls) -> "Peers":
        """Return the ranks of the process group that this process has joined."""
        return cls(dist.get_rank(), dist.get_world_size())

    def deal(self, costs: Sequence[int]) -> list[tuple[int, bool]]:
        """Return the passes that this rank runs: their positions in `costs`, and which count.

        All ranks run equally many passes, because each pass exchanges weights. Every pass counts on
        one rank. A rank with too few runs the cheapest one again, and its result must not count.

        >>> Peers(0, 2).deal([5, 9, 1]), Peers(1, 2).deal([5, 9, 1])
        ([(1, True), (2, False)], [(0, True), (2, True)])
        """
        if self.count == 1:
            return [(i, True) for i in range(len(costs))]
        rounds = -(-len(costs) // self.count)
        dealt: list[list[int]] = [[] for _ in range(self.count)]
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            open_ranks = [rank for rank in dealt if len(rank) < rounds]
            min(open_ranks, key=lambda rank: sum(costs[k] for k in rank)).append(i)
        mine = sorted(dealt[self.rank])
        cheapest = min(range(len(costs)), key=lambda i: costs[i], default=0)
        return [(i, True) for i in mine] + [(cheapest, False)] * (rounds - len(mine))

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks of tensors of one shape."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of the ranks. They are copied by pickle."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    @contextmanager
    def fail_together(self, kinds: tuple[type[Exception], ...]) -> Iterator[None]:
        """Raise on every rank an error of one of these kinds that any rank raises in the block.

        Without this the other ranks would wait for that rank. The block must not wait for others.
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


ALONE = Peers()
"""A process that shares its model with no other."""
