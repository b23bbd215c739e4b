"""The weights of a whole model, read one at a time to save memory."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeWeights:
    """The weights of a whole model, to be read one after the other.

    If the model is divided among ranks, reading a weight gathers it from all ranks. All ranks must
    then iterate over all weights, or call `skip`.
    """

    layout: Mapping[str, Tensor]
    """A tensor of each weight's dtype and shape, by name. It may be on the device `meta`."""
    read: Callable[[str], Tensor]
    """A function that returns a weight, in main memory, by its name."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.layout:
            yield name, self.read(name)

    def skip(self) -> None:
        """Read all weights without using them.

        Other ranks, which use them, need this rank's parts.
        """
        deque(self, maxlen=0)
