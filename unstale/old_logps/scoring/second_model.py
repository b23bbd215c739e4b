"""The exchange with a second model, which computes log-probabilities outside of the trainer.

The model is in another process or on separate ranks. It computes the log-probabilities of all
sampled tokens of a version, and then loads the next version.
"""

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from unstale.old_logps.scoring.queue import PieceKey, Pieces, key_of, text_of

if TYPE_CHECKING:
    from unstale.records import PendingPiece

Reply = dict[str, Any]
"""A message from the second model: `{"op": "loaded", "version": v}`, or `{"op": "answers",
"answers": rows, "forward_tokens": n}` with one row `[key, log-probabilities]` for each run of
tokens.
"""


class Link(Protocol):
    """A connection to a second model, which handles messages in the order of sending."""

    def load(self, version: int, weights: Any) -> None:
        """Send the weights of a version, without waiting until the model has loaded them."""
        ...

    def score(self, pieces: Pieces) -> None:
        """Ask the model for the log-probabilities of sampled tokens.

        Must not block, because the event loop calls it.
        """
        ...

    def receive(self, *, wait: bool) -> list[Reply] | None:
        """Return the replies that have arrived completely. None if nothing has arrived.

        With `wait`, wait until something arrives. Also returns None if the model has not been
        started. Raises an error if its process has ended.
        """
        ...


class SecondModel:
    """The trainer's side of a second model, which computes old log-probabilities elsewhere.

    This object records the versions and tokens that were sent, and the values that came back. With
    `lockstep` no result depends on the speed of the model: tokens are sent in a fixed order when
    the next version is published or when a batch needs their values. The caller then waits for all
    values.
    """

    def __init__(
        self, link: Link, add_scores: Callable[[Iterable[Any], int], None], *, lockstep: bool
    ) -> None:
        """Create the record of a second model to which nothing was sent yet. `link` is the
        connection.

        `add_scores` is called for each reply with log-probabilities. Its arguments are the rows of
        the reply, and the number of tokens in the forward passes that computed them.
        """
        self.loaded = -1
        """The version of the weights that the second model has. -1 before it has any."""
        self.sent = -1
        """The version of the weights that was sent last. -1 before any was sent."""
        self._link = link
        self._add_scores = add_scores
        self._lockstep = lockstep
        self._held: Pieces = {}
        """Tokens that `lockstep` holds back, to be sent later."""
        self._unscored: dict[PieceKey, None] = {}
        """Keys of runs of tokens that were sent and whose log-probabilities have not come back yet,
        in the order of sending.
        """

    def load(self, version: int, weights: Any) -> None:
        """Send the weights of a version to the second model."""
        self._link.load(version, weights)
        self.sent = version

    def on_piece(self, piece: "PendingPiece") -> None:
        """Send sampled tokens to the second model. With `lockstep`, keep them to be sent later.

        Does not block.
        """
        if self._lockstep:
            self._held[key_of(piece)] = text_of(piece)
        else:
            self._send({key_of(piece): text_of(piece)})

    def finish_version(self) -> float:
        """With `lockstep`, wait for the log-probabilities of all tokens. Otherwise, do nothing.

        Return the seconds waited.
        """
        return self.score_all() if self._lockstep else 0.0

    def score_all(self) -> float:
        """Send the tokens held back by `lockstep`. Wait for the log-probabilities of all tokens.

        Return the seconds waited.
        """
        due = {key: self._held.pop(key) for key in sorted(self._held) if key.version <= self.sent}
        if due:
            self._send(due)
        return self._receive_until(lambda: not self._is_due(lambda key: True))

    def wait_for(self, wanted: Callable[[PieceKey], bool]) -> float:
        """Wait for the log-probabilities of the tokens whose key satisfies `wanted`.

        With `lockstep`, wait for those of all tokens. Return the seconds waited.
        """
        if self._lockstep:
            return self.score_all()
        return self._receive_until(lambda: not self._is_due(wanted))

    def wait_until_loaded(self) -> float:
        """Wait until the model has loaded the version that was sent last.

        Return the seconds waited. By then it has computed the log-probabilities of all tokens of
        earlier versions, because it does so before it loads new weights.
        """
        return self._receive_until(lambda: self.loaded == self.sent)

    def _send(self, pieces: Pieces) -> None:
        self._unscored.update(dict.fromkeys(pieces))
        self._link.score(pieces)

    def _is_due(self, wanted: Callable[[PieceKey], bool]) -> bool:
        """Return True if the log-probabilities of a run of tokens with a `wanted` key have not come
        back.

        Only runs of versions that were sent count.
        """
        return any(key.version <= self.sent and wanted(key) for key in self._unscored.copy())

    def _receive_until(self, done: Callable[[], bool]) -> float:
        began = time.perf_counter()
        while (replies := self._link.receive(wait=not done())) is not None:
            for reply in replies:
                self._take(reply)
        return time.perf_counter() - began

    def _take(self, reply: Reply) -> None:
        if reply["op"] == "loaded":
            self.loaded = reply["version"]
            return
        self._add_scores(reply["answers"], reply["forward_tokens"])
        for key, _logps in reply["answers"]:
            del self._unscored[PieceKey(*key)]
