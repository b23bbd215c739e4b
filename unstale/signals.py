"""Signals: numbers that describe the distribution from which an engine drew each token of a reply.

They belong to the distribution before the token was drawn. So a rule that reads the signals of a
token uses only the tokens before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environments and the command line import records without torch and numpy
    import numpy as np
    from numpy.typing import NDArray

WIDTH = 20
"""Number of bytes of one token's signals: an entropy, two tokens and two log-probabilities."""


@dataclass(frozen=True, slots=True, eq=False)
class Signals:
    """The signals of n tokens of a reply."""

    entropy: "NDArray[np.float32]"
    """`[n]`: the entropy of each token's distribution, in nats."""
    likeliest: "NDArray[np.int32]"
    """`[n, 2]`: the ids of the two most probable tokens, the most probable one first."""
    logp: "NDArray[np.float32]"
    """`[n, 2]`: the log-probabilities of these two tokens, in nats."""

    def __len__(self) -> int:
        return len(self.entropy)

    def at(self, index: Any) -> "Signals":
        """Return the signals of the tokens in a slice."""
        return Signals(self.entropy[index], self.likeliest[index], self.logp[index])

    def tobytes(self) -> bytes:
        return self.entropy.tobytes() + self.likeliest.tobytes() + self.logp.tobytes()

    @classmethod
    def frombuffer(cls, data: "bytes | bytearray") -> "Signals":
        """Return the signals, given the bytes from `tobytes`.

        Raises ValueError if the number of bytes is not a multiple of `WIDTH`.
        """
        import numpy as np

        if len(data) % WIDTH:
            raise ValueError(f"{len(data)} bytes are no signals, which have {WIDTH} a token")
        count = len(data) // WIDTH
        likeliest = np.frombuffer(data, np.int32, 2 * count, 4 * count)
        logp = np.frombuffer(data, np.float32, 2 * count, 12 * count)
        entropy = np.frombuffer(data, np.float32, count)
        return cls(entropy, likeliest.reshape(-1, 2), logp.reshape(-1, 2))

    @classmethod
    def join(cls, parts: "Sequence[Signals]") -> "Signals":
        """Join the signals of successive runs of tokens. `parts` must not be empty."""
        import numpy as np

        columns = zip(*((each.entropy, each.likeliest, each.logp) for each in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))
