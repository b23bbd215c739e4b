"""Routed experts of replies, exchanged in files: messages of megabytes would block the event loop.

Routed experts are the experts that an MoE model chose for each token. The engine's process writes a
file of them for each reply. The run's process reads and removes the file.
"""

import math
import tempfile
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unstale.routed_experts import RoutedExperts
from unstale.weights.leftovers import hold_lock, remove_leftovers

if TYPE_CHECKING:
    from unstale.routed_experts import Experts

_PREFIX = "unstale-routes-"


class PostedExperts:
    """A temporary folder with the files of routed experts that the run's process has not read yet.

    If this process is killed, the next process of the same user removes the folder.
    """

    def __init__(self) -> None:
        self._resources = ExitStack()
        parent = Path(tempfile.gettempdir())
        remove_leftovers(parent, _PREFIX)
        folder = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent)
        self.folder = Path(self._resources.enter_context(folder))
        self._resources.enter_context(hold_lock(self.folder))

    def take(self, reply: int, about: Sequence[Any], first: int) -> RoutedExperts:
        """Return a reply's routed experts from the token `first` on, and remove their file.

        `reply` is the reply's number, and `about` the list that `post` returned for it. The call
        takes milliseconds, so it must be made in a thread. Raises OSError if the file is missing or
        incomplete.
        """
        dtype, rows, *shape = about
        row = math.prod(shape)
        wanted = max(0, rows - first) * row
        path = _file(self.folder, reply)
        experts = np.fromfile(path, dtype, wanted, offset=first * row * np.dtype(dtype).itemsize)
        if experts.size != wanted:
            raise OSError(f"{path} has {experts.size} expert numbers of {wanted}")
        self.drop(reply)
        return RoutedExperts(first, experts.reshape(-1, *shape))

    def drop(self, reply: int) -> None:
        """Remove the file of the reply with this number, if there is one."""
        _file(self.folder, reply).unlink(missing_ok=True)

    def clear(self, arrived: Collection[int]) -> None:
        """Remove all files, except those of the replies whose numbers are in `arrived`.

        Call this after the engine's process has ended, because messages about the other replies
        cannot arrive.
        """
        kept = {_file(self.folder, reply) for reply in arrived}
        for path in self.folder.iterdir():
            if path.name.isdigit() and path not in kept:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        self._resources.close()


def post(folder: str, reply: int, experts: "Experts") -> list[Any]:
    """Write the routed experts of a reply to a file. Return the name of their dtype, and their
    sizes.

    The engine's process sends this list in the reply's message.
    """
    experts.tofile(_file(Path(folder), reply))
    return [str(experts.dtype), *experts.shape]


def _file(folder: Path, reply: int) -> Path:
    return folder / str(reply)
