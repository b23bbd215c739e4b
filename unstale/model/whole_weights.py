"""The weights of a whole model, read one at a time to save memory."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeWeights:
    """The weights of a whole model, read one after the other by iteration.

    If the model is divided among ranks, reading a weight gathers it from all ranks. All ranks must
    then iterate over all weights, or call `skip`.
    """

    layout: Mapping[str, Tensor]
    """For each weight, by name, a tensor of the same dtype and shape. It may be on the device
    `meta`.
    """
    read: Callable[[str], Tensor]
    """A function that returns the weight of a given name, in main memory."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.layout:
            yield name, self.read(name)

    def skip(self) -> None:
        """Read all weights without using them: other ranks need this rank's parts."""
        deque(self, maxlen=0)
