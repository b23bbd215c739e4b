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

from unstale.config import ConfigError
from unstale.model.context import ContextGroup
from unstale.model.prefix_tree import ROUND

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks of the default process group. By default one process without a group.

    Tensors given to the methods are on the CPU.
    """

    rank: int = 0
    count: int = 1
    context: ContextGroup | None = None
    """The ranks that run each pass together with this one. None if every rank runs its passes."""

    @classmethod
    def of_group(cls, *, context: int = 1) -> "Peers":
        """Return the ranks of the process group that this process has joined.

        `context` is the number of ranks that run a pass together. ConfigError unless it divides
        the number of ranks and `ROUND`.
        """
        rank, count = dist.get_rank(), dist.get_world_size()
        if context < 1 or count % context or ROUND % context:
            raise ConfigError(
                f"cluster.context must divide the {count} trainer ranks and {ROUND}, got {context}"
            )
        if context == 1:
            return cls(rank, count)
        groups = [
            dist.new_group(list(range(first, first + context)))
            for first in range(0, count, context)
        ]
        return cls(rank, count, ContextGroup.of(groups[rank // context]))

    @property
    def reports(self) -> bool:
        """Whether the values of this rank's passes count. One rank of a context group reports."""
        return self.context is None or self.context.rank == 0

    def deal(self, costs: Sequence[int]) -> list[tuple[int, bool]]:
        """Return the passes that this rank runs: their positions in `costs`, and which count.

        All ranks run equally many passes, because each pass exchanges weights. Every pass counts on
        one rank, or on all ranks of one context group. A rank with too few runs the cheapest one
        again, and its result must not count.

        >>> Peers(0, 2).deal([5, 9, 1]), Peers(1, 2).deal([5, 9, 1])
        ([(1, True), (2, False)], [(0, True), (2, True)])
        """
        if self.count == 1:
            return [(i, True) for i in range(len(costs))]
        size = self.context.size if self.context else 1
        groups = self.count // size
        rounds = -(-len(costs) // groups)
        dealt: list[list[int]] = [[] for _ in range(groups)]
        for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
            open_groups = [group for group in dealt if len(group) < rounds]
            min(open_groups, key=lambda group: sum(costs[k] for k in group)).append(i)
        mine = sorted(dealt[self.rank // size])
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
