"""The route `old_logit_model`: compute `old_logp` with a second copy of the model.

The second model runs the trainer's program in a process of its own. It has the same version of the
weights as the engine, so the values are exact.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from socket import MSG_DONTWAIT
from typing import TYPE_CHECKING, Any, ClassVar

from unstale.config.checks import PositiveInt
from unstale.config.routes import ExactSpec, Needs, RouteDocs
from unstale.old_logps import OldLogps, has_clean_behavior
from unstale.old_logps.scoring.cached_route import CachedRoute
from unstale.old_logps.scoring.queue import PieceKey, Pieces
from unstale.old_logps.scoring.second_model import Reply, SecondModel
from unstale.weights.child_process import Bytes, Child, ChildFrozen, Frames, frame
from unstale.weights.leftovers import locked_folder

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch, PendingPiece

_PREFIX = "unstale-old-logit-"
_READ_BYTES = 1 << 20


class OldLogitModelDied(RuntimeError):
    """Error: the process of the second model has ended or does not answer.

    The message contains the last output of the process.
    """


class SecondModelScores(CachedRoute):
    """Old log-probabilities that a second model has computed, kept until their batch needs them.

    The second model has the weights of the version that sampled the tokens. After a resume, the
    trainer's model computes missing values, because the second model gets weights only when the
    next version is published.

    With several trainer ranks, each rank has an object of this class. Only the main process of the
    run has the second model. It passes results and waiting times to the ranks with `add_scores` and
    `add_waits`.
    """

    needs = Needs(resident_models=1, own_process=True, forwards="versions")

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer)
        self._publish_wait_s = 0.0
        self._score_wait_s = 0.0

    def add_scores(self, rows: Iterable[Any], forward_tokens: int) -> None:
        """Add log-probabilities that the second model computed.

        Each row of `rows` is `[key, log-probabilities]` of a piece. The key is a `PieceKey`.
        `forward_tokens` is the number of tokens in the forward passes that computed the values.
        """
        self.cache.add_rows(rows)
        self._scorer.forward_tokens += forward_tokens

    def add_waits(self, publish_s: float, score_s: float) -> None:
        """Add the seconds for which a publication and a batch waited for the second model."""
        self._publish_wait_s += publish_s
        self._score_wait_s += score_s

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Return the old log-probabilities of a batch, and a mask of exact values, `[T]` each.

        Raises LookupError if a sampled token of the batch has no value.
        """
        why = "their pieces never arrived, or long before this batch"
        return self.cache.require(batch, why=why), has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._scorer.take_forward_tokens()),
            "publish_wait_s": self._publish_wait_s,
            "score_wait_s": self._score_wait_s,
            "model_bytes": float(self._scorer.model_bytes),
        }
        self._publish_wait_s = 0.0
        self._score_wait_s = 0.0
        return spent


class OldLogitModel(SecondModelScores):
    """A method that gets `old_logp` from a second model in another process.

    The process computes the values of all tokens of a version, then loads the next version. It
    needs the memory of one model, and starts when weights are published for the first time. The
    trainer's thread sends it the weights of each version. The trainer itself computes the values of
    tokens of the current version that the process has not computed.

    The metric `publish_wait_s` is the time for which publications waited until the process had
    loaded the previous version. `score_wait_s` is the time for which batches waited for values.
    With `lockstep`, no result depends on the speed of the process (`SecondModel`).
    """

    def __init__(self, scorer: Scorer, *, lockstep: bool = False) -> None:
        super().__init__(scorer)
        self._link = _ChildLink(scorer)
        self._model = SecondModel(self._link, self.add_scores, lockstep=lockstep)

    @property
    def pid(self) -> int:
        """The process id of the second model. Raises RuntimeError if it has not started yet."""
        return self._link.pid

    @property
    def loaded(self) -> int:
        """The version of the weights that the second model has. -1 before it has any."""
        return self._model.loaded

    def before_publish(self) -> None:
        """Wait until the second model has loaded the version that was published last.

        By then it has computed the log-probabilities of all tokens of earlier versions.
        """
        self.add_waits(self._model.wait_until_loaded(), 0.0)

    def on_published(self, live: Collection[int]) -> None:
        """Send the current weights to the second model.

        With `lockstep`, first wait for the log-probabilities of all tokens of the versions sent
        before. Values are dropped if the version that sampled their tokens is not in `live`.
        """
        from unstale.weights.codec import file_of

        version = self._scorer.version
        self.add_waits(self._model.finish_version(), 0.0)
        super().on_published(live)
        if version != self._model.sent:
            self._model.load(version, file_of(self._scorer.weights()))

    def on_piece(self, piece: PendingPiece) -> None:
        self._model.on_piece(piece)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for the old log-probabilities of a batch. Return them, and a mask of exact values.

        Both are `[T]`. Raises LookupError if a sampled token of the batch was never passed to
        `on_piece`.
        """
        current = self._scorer.version if self._scorer.weights_match_version else -1
        self.add_waits(0.0, self._model.wait_for(pieces_of(batch, current=current)))
        return super().logps(batch, now)

    def state(self) -> Mapping[str, Any]:
        """Wait until all sampled tokens of the published versions have a log-probability.

        Return all these values for a checkpoint.
        """
        self._model.score_all()
        return super().state()

    def close(self) -> None:
        self._link.close()


def pieces_of(batch: Batch, *, current: int) -> Callable[[PieceKey], bool]:
    """Return a function that selects the pieces whose values a batch needs from the second model.

    The function returns True for the `PieceKey` of a piece in an episode of the batch. It returns
    False for pieces of the version `current`, because the trainer's model scores them.
    """
    episodes = set(batch.episodes)
    return lambda key: key.episode in episodes and key.version != current


class _ChildLink:
    """The connection to a second model in a child process. The first `load` starts the process.

    A thread writes all messages in order, so no caller waits for the socket. The trainer's thread
    reads the replies.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._child: Child | None = None
        self._started = threading.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="old-logit-writer")
        self._folder = ExitStack()
        """A context with the temporary folder of the model, which the process reads at its start.
        The folder is removed when the context is closed.
        """
        self._frames = Frames()

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError("the old-logit process starts at the first publication")
        return self._child.pid

    def load(self, version: int, weights: Sequence[Bytes]) -> None:
        """Send weights in safetensors format. They are copied before this method returns."""
        if self._child is None:
            self._start()
        message = b"".join(frame({"op": "load", "version": version}, weights))
        self._writer.submit(self._write, message)

    def score(self, pieces: Pieces) -> None:
        self._writer.submit(lambda: self._write(_pieces_message(pieces)))

    def receive(self, *, wait: bool) -> list[Reply] | None:
        """Receive bytes once. Return the replies that are complete, or None if nothing has arrived.

        With `wait`, wait until something arrives. Also returns None if the process has not been
        started. Raises `OldLogitModelDied` if it has ended.
        """
        child = self._child
        if child is None:
            return None
        try:
            data = child.recv(_READ_BYTES) if wait else child.socket.recv(_READ_BYTES, MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ChildFrozen as error:
            raise OldLogitModelDied(str(error)) from error
        except ConnectionResetError:
            data = b""
        if not data:
            raise OldLogitModelDied(child.last_words())
        replies = [header for header, _ in self._frames.feed(data)]
        if any(reply["op"] == "loaded" for reply in replies):
            self._folder.close()
        return replies

    def close(self) -> None:
        self._started.set()
        if self._child is not None:
            self._child.kill()
        self._writer.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.wait()
        self._folder.close()

    def _start(self) -> None:
        parent = Path(tempfile.gettempdir())
        exported = self._scorer.export(self._folder.enter_context(locked_folder(parent, _PREFIX)))
        self._child = Child("old-logit", "unstale.old_logps.scoring.worker", exported, threads=1)
        self._started.set()

    def _write(self, message: bytes) -> None:
        """Write a message to the socket, in the writer thread.

        If the connection is broken, no error is raised here, but by `receive`.
        """
        self._started.wait()
        if self._child is not None:
            self._child.socket.sendall(message)


def _pieces_message(pieces: Pieces) -> bytes:
    """Return the message that asks the second model for the log-probabilities of pieces.

    The body of the message has the pieces' routed experts and kept sets, one after the other.
    """
    rows: list[tuple[PieceKey, Sequence[int], list[Any] | None, int | None]] = []
    body: list[Bytes] = []
    for key, (tokens, experts_of, kept_sets) in pieces.items():
        about: list[Any] | None = None
        size: int | None = None
        if experts_of is not None:
            experts = experts_of.rows(len(tokens))
            about = [str(experts.dtype), *experts.shape]
            body.append(experts.tobytes())
        if kept_sets is not None:
            body.append(kept_sets.tobytes())
            size = kept_sets.nbytes
        rows.append((key, tokens, about, size))
    return b"".join(frame({"op": "pieces", "pieces": rows}, body))


@dataclass(frozen=True, kw_only=True)
class OldLogitModelSpec(ExactSpec):
    """Options of the route `old_logit_model`, which computes `old_logp` in another process."""

    route: str = "old_logit_model"
    ranks: PositiveInt = 1
    """Number of ranks of the second model, each with one GPU if there are GPUs. Only with
    `cluster.trainers`.
    """
    makes: ClassVar[type[OldLogps]] = OldLogitModel

    docs: ClassVar = RouteDocs(
        policy="a second model in its own process, at the version that samples",
        exact="yes",
        holds="one more model, in that process",
        costs="almost no trainer time; may delay publication",
        choose="if a CPU or GPU is free",
    )

    def cost(self, run: RunConfig) -> str:
        return (
            "a second model in a separate process; a publication waits until it has loaded the "
            "version before"
        )

    @property
    def scoring_ranks(self) -> int:
        return self.ranks

    def make(self, scorer: Scorer, *, lockstep: bool) -> OldLogitModel:
        return OldLogitModel(scorer, lockstep=lockstep)

    def make_on_rank(self, scorer: Scorer, *, lockstep: bool) -> SecondModelScores:
        return SecondModelScores(scorer)
