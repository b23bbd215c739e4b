"""`old_logit_model`: score tokens by a second model that has the same version as the engine.

The values are exact.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from socket import MSG_DONTWAIT
from typing import TYPE_CHECKING, Any, ClassVar

from unstale.config.routes import ExactSpec, Needs, RouteDocs, register_route
from unstale.old_logps import OldLogps, has_clean_behavior
from unstale.old_logps.scoring.queue import PieceKey, Pieces, key_of, text_of
from unstale.weights.child_process import Bytes, Child, ChildFrozen, Frames, Header, frame

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer, Weights
    from unstale.records import Batch, PendingPiece

_READ_BYTES = 1 << 20


class OldLogitModelDied(RuntimeError):
    """Error: the process of the second model has ended or does not answer.

    The message contains the last output of the process.
    """


class OldLogitModel(OldLogps):
    """A route with a second model in another process: it scores a version, then loads the next.

    The process needs the memory of one model. The trainer's thread sends it the weights of each
    version. If a batch contains tokens of the current version that the process has not scored, the
    trainer scores them. The metric `publish_wait_s` is the time that publications waited until the
    process had loaded the previous version. `score_wait_s` is the time that batches waited for
    scores.

    A writer thread sends all messages in order, so the trainer's thread never waits for the socket.
    The trainer's thread reads the replies. The process starts at the first publication.

    With `lockstep` no result depends on the speed of the process: pieces (runs of sampled tokens)
    are sent in a fixed order when the next version is published or a batch needs them. The trainer
    then waits for all scores.
    """

    needs = Needs(resident_models=1, own_process=True, forwards="versions")

    def __init__(self, scorer: Scorer, *, lockstep: bool = False) -> None:
        from unstale.old_logps.scoring.cache import LogpCache

        self.cache = LogpCache(scorer)
        self.loaded = -1
        """The version of the weights that the process has loaded. -1 before the first."""
        self._scorer = scorer
        self._lockstep = lockstep
        self._held: Pieces = {}
        """Pieces that have arrived but are sent later, because of `lockstep`."""
        self._unscored: dict[PieceKey, None] = {}
        """Pieces that were sent to the process and have no score yet, in the order of sending."""
        self._sent = -1
        """The version of the weights that was sent last. -1 before the first."""
        self._child: Child | None = None
        self._started = threading.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="old-logit-writer")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._frames = Frames()
        self._wait_s = 0.0
        self._answer_wait_s = 0.0

    @property
    def pid(self) -> int:
        """The process id of the second model. Raises RuntimeError before the first publication."""
        if self._child is None:
            raise RuntimeError("the old-logit process starts at the first publication")
        return self._child.pid

    def publishing(self) -> None:
        """Wait until the process has loaded the version that was published last.

        It has then scored all pieces of earlier versions, because it scores them before it loads
        new weights.
        """
        self._wait_s += self._read_until(lambda: self.loaded == self._sent)

    def published(self, live: Collection[int]) -> None:
        """Send the weights of the current version to the process.

        With `lockstep`, wait until it has them.
        """
        from unstale.weights.codec import file_of

        version = self._scorer.version
        if self._lockstep:
            self._wait_s += self._score_all()
        self.cache.keep({*live, version})
        if version == self._sent:
            return
        if self._child is None:
            self._start()
        self._send({"op": "load", "version": version}, file_of(self._scorer.weights()))
        self._sent = version

    def arrived(self, piece: PendingPiece) -> None:
        if self._lockstep:
            self._held[key_of(piece)] = text_of(piece)
        else:
            self._send_pieces({key_of(piece): text_of(piece)})

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for the scores of the batch and return them.

        Raises LookupError if a sampled token of the batch was never passed to `arrived`.
        """
        current = self._scorer.version if self._scorer.at_version else -1
        episodes = set(batch.episodes)

        def of_batch(key: PieceKey) -> bool:
            return key.episode in episodes and key.version != current

        if self._lockstep:
            self._answer_wait_s += self._score_all()
        else:
            self._answer_wait_s += self._read_until(lambda: not self._is_due(of_batch))
        why = "their pieces never arrived, or long before this batch"
        return self.cache.require(batch, why=why), has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._scorer.take_forward_tokens()),
            "publish_wait_s": self._wait_s,
            "score_wait_s": self._answer_wait_s,
            "model_bytes": float(self._scorer.model_bytes),
        }
        self._wait_s = 0.0
        self._answer_wait_s = 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        """Return the scores for a checkpoint.

        First wait until all pieces (runs of sampled tokens) of the published versions have scores.
        """
        self._score_all()
        return {"answers": self.cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cache.restore(state["answers"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Score pieces that have no score, in this process.

        The process of the second model starts only at the first publication.
        """
        self.cache.recover(past, weights)

    def close(self) -> None:
        self._started.set()
        if self._child is not None:
            self._child.kill()
        self._writer.shutdown(cancel_futures=True)
        if self._child is not None:
            self._child.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="old-logit-model-")
        exported = self._scorer.export(self._folder.name)
        self._child = Child("old-logit", "unstale.old_logps.scoring.worker", exported, threads=1)
        self._started.set()

    def _send_pieces(self, pieces: Pieces) -> None:
        self._unscored.update(dict.fromkeys(pieces))
        self._writer.submit(lambda: self._write(_pieces_message(pieces)))

    def _score_all(self) -> float:
        """Send the pieces held back by `lockstep` and wait for all scores.

        Return the seconds it took.
        """
        due = {key: self._held.pop(key) for key in sorted(self._held) if key.version <= self._sent}
        if due:
            self._send_pieces(due)
        return self._read_until(lambda: not self._is_due(lambda key: True))

    def _send(self, header: Header, body: Sequence[Bytes] = ()) -> None:
        """Pass a message to the writer thread. `body` is copied before this method returns."""
        self._writer.submit(self._write, b"".join(frame(header, body)))

    def _write(self, message: bytes) -> None:
        """Write a message to the process. Runs in the writer thread.

        If the connection is broken, `_read` raises the error later.
        """
        self._started.wait()
        if self._child is not None:
            self._child.socket.sendall(message)

    def _is_due(self, wanted: Callable[[PieceKey], bool]) -> bool:
        """Return True if a sent piece for which `wanted` is true has no score yet.

        Pieces of versions that the process has not loaded are not counted.
        """
        return any(key.version <= self._sent and wanted(key) for key in self._unscored.copy())

    def _read_until(self, done: Callable[[], bool]) -> float:
        """Read replies of the process until `done()` is true. Return the seconds it took."""
        began = time.perf_counter()
        while self._child is not None and self._read(self._child, wait=not done()):
            pass
        return time.perf_counter() - began

    def _read(self, child: Child, *, wait: bool) -> bool:
        """Receive bytes once and handle the replies that are complete.

        Return False if no byte had arrived. With `wait`, wait for bytes. Raises `OldLogitModelDied`
        if the process has ended.
        """
        try:
            data = child.recv(_READ_BYTES) if wait else child.socket.recv(_READ_BYTES, MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except ChildFrozen as error:
            raise OldLogitModelDied(str(error)) from error
        except ConnectionResetError:
            data = b""
        if not data:
            raise OldLogitModelDied(child.last_words())
        for header, _ in self._frames.feed(data):
            if header["op"] == "loaded":
                self.loaded = header["version"]
                continue
            self.cache.add_rows(header["answers"])
            self._scorer.forward_tokens += header["forward_tokens"]
            for key, _logps in header["answers"]:
                del self._unscored[PieceKey(*key)]
        return True


def _pieces_message(pieces: Pieces) -> bytes:
    """Return a message with pieces. Its body holds their expert routes end to end."""
    rows: list[tuple[PieceKey, Sequence[int], list[Any] | None]] = []
    body: list[Bytes] = []
    for key, (tokens, routes) in pieces.items():
        if routes is None:
            rows.append((key, tokens, None))
            continue
        experts = routes.rows(len(tokens))
        rows.append((key, tokens, [str(experts.dtype), *experts.shape]))
        body.append(experts.tobytes())
    return b"".join(frame({"op": "pieces", "pieces": rows}, body))


@register_route
@dataclass(frozen=True, kw_only=True)
class OldLogitModelSpec(ExactSpec):
    """Options of the route that scores with a second model in another process."""

    route: str = "old_logit_model"
    makes: ClassVar[type[OldLogps]] = OldLogitModel

    docs: ClassVar = RouteDocs(
        policy="a second model in its own process, at the version that samples",
        exact="yes",
        holds="one more model, in that process",
        costs="almost no trainer time; may delay publication",
        choose="if a CPU or GPU is free",
        report="Exact. A second model follows the sampling version and scores every turn before it "
        "moves on. D contains only numerics, and S only learning.",
    )

    def cost(self, run: RunConfig) -> str:
        return (
            "a second model in a separate process; a publication waits until it has loaded the "
            "version before"
        )

    def make(self, scorer: Scorer, *, lockstep: bool) -> OldLogitModel:
        return OldLogitModel(scorer, lockstep=lockstep)
