"""`old_logit_model`: score tokens by a second model, which follows the engine's version. Exact."""

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
from unstale.old_logps.scoring.queue import PieceKey, Pieces, key_of
from unstale.weights.child_process import Bytes, Child, ChildFrozen, Frames, Header, frame

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer, Weights
    from unstale.records import Batch, PendingPiece

_READ_BYTES = 1 << 20


class OldLogitModelDied(RuntimeError):
    """The process of the second model has ended or hangs. The message has its last output."""


class OldLogitModel(OldLogps):
    """A second model in its own process, which scores all tokens of a version, then loads the next.

    It needs the memory of one model. The trainer's thread sends it the weights of each version. If
    a batch contains tokens of the current version that the process has not scored yet, the trainer
    scores these itself. `publish_wait_s` is the time that publications waited until the process had
    loaded the previous version, and `score_wait_s` the time that batches waited for scores.

    One writer thread sends all messages in order, so that sending never blocks. The trainer's
    thread reads the replies. The process starts at the first publication.

    With `lockstep` no result depends on the speed of the process: pieces are sent together, in a
    fixed order, when the next version is published or a batch needs them, and all scores are
    awaited.
    """

    needs = Needs(resident_models=1, own_process=True, forwards="versions")

    def __init__(self, scorer: Scorer, *, lockstep: bool = False) -> None:
        from unstale.old_logps.scoring.cache import LogpCache

        self.cache = LogpCache(scorer)
        self.loaded = -1
        """The version that the process holds."""
        self._scorer = scorer
        self._lockstep = lockstep
        self._held: dict[PieceKey, Sequence[int]] = {}
        """Pieces that are not sent yet, with `lockstep`."""
        self._unscored: dict[PieceKey, None] = {}
        """Pieces that were sent and have no score yet, in order."""
        self._sent = -1
        """The version that was sent last."""
        self._child: Child | None = None
        self._started = threading.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="old-logit-writer")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._frames = Frames()
        self._wait_s = 0.0
        self._answer_wait_s = 0.0

    @property
    def pid(self) -> int:
        """The process id of the second model. RuntimeError before the first publication."""
        if self._child is None:
            raise RuntimeError("the old-logit process starts at the first publication")
        return self._child.pid

    def publishing(self) -> None:
        """Wait until the process has loaded the version published last.

        Then it has scored all pieces of earlier versions, because it does so before it loads.
        """
        self._wait_s += self._read_until(lambda: self.loaded == self._sent)

    def published(self, live: Collection[int]) -> None:
        """Send the current version. Waits only with `lockstep`."""
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
            self._held[key_of(piece)] = piece.tokens
        else:
            self._send_pieces({key_of(piece): piece.tokens})

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """Wait for the scores of the batch. LookupError if a token's piece never arrived."""
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
        """Wait until every piece of the versions published so far is scored."""
        self._score_all()
        return {"answers": self.cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.cache.restore(state["answers"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Score missing pieces in this process: the other one starts at the first publication."""
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
        self._send({"op": "pieces", "pieces": list(pieces.items())})

    def _score_all(self) -> float:
        """Send the held pieces and wait until all pieces are scored. Return the seconds."""
        due = {key: self._held.pop(key) for key in sorted(self._held) if key.version <= self._sent}
        if due:
            self._send_pieces(due)
        return self._read_until(lambda: not self._is_due(lambda key: True))

    def _send(self, header: Header, body: Sequence[Bytes] = ()) -> None:
        """Queue a message for the writer thread. `body` is copied before this returns."""
        self._writer.submit(self._write, b"".join(frame(header, body)))

    def _write(self, message: bytes) -> None:
        """Write a message in the writer thread. `_read` reports a broken connection."""
        self._started.wait()
        if self._child is not None:
            self._child.socket.sendall(message)

    def _is_due(self, wanted: Callable[[PieceKey], bool]) -> bool:
        """Return True if a piece that `wanted` selects was sent, and its score has not arrived.

        Pieces of versions that the process does not have yet are left out.
        """
        return any(key.version <= self._sent and wanted(key) for key in self._unscored.copy())

    def _read_until(self, done: Callable[[], bool]) -> float:
        """Read all replies, and wait for more until `done`. Return the seconds it took."""
        began = time.perf_counter()
        while self._child is not None and self._read(self._child, wait=not done()):
            pass
        return time.perf_counter() - began

    def _read(self, child: Child, *, wait: bool) -> bool:
        """Receive bytes once and handle complete replies. Return False if no byte had arrived.

        Raises `OldLogitModelDied`.
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


@register_route
@dataclass(frozen=True, kw_only=True)
class OldLogitModelSpec(ExactSpec):
    """A second model in its own process."""

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
            "a second model in a process of its own; a publication waits until it has loaded the "
            "version before"
        )

    def make(self, scorer: Scorer, *, lockstep: bool) -> OldLogitModel:
        return OldLogitModel(scorer, lockstep=lockstep)
