"""`old_logit_model`: a second model, in a process of its own, follows the version that samples. Exact."""

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from socket import MSG_DONTWAIT
from typing import Any

import torch
from torch import Tensor

from unstale.old_logps import Needs, Passive, has_clean_behavior
from unstale.old_logps.scoring.cache import LogpCache, PieceKey, key_of, require_scored
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.records import Batch, PendingPiece
from unstale.weights.child_process import Bytes, Child, ChildFrozen, Frames, Header, frame
from unstale.weights.codec import file_of

_READ_BYTES = 1 << 20


class OldLogitModelDied(RuntimeError):
    """The process that scores is gone or frozen, and with it the answers it owed. The message has its last words."""


class OldLogitModel(Passive):
    """`old_logp` from a model that scores all tokens of a version before it loads the next (algorithm.md, section 2).

    Costs one model's memory, and of the trainer's time two things: weights travel whole, once per version, and are
    packed in the trainer's thread; tokens of the current version that the process has not got to when they are asked
    for, the trainer scores itself, being at that version. `wait_s` is what publication waited for the process to load
    the version before, `answer_wait_s` what batches waited for answers it owed.

    Everything to the process goes through one writer thread, in order, so that handing over never blocks; what it
    says is read when the trainer's thread calls. The process starts at the first publication.

    With `lockstep` nothing depends on how fast the process is: pieces are held back until their version is left or
    somebody asks, go out together in a fixed order, and every answer is waited for.
    """

    needs = Needs(resident_models=1)

    def __init__(self, scorer: Scorer, *, lockstep: bool = False) -> None:
        self._scorer = scorer
        self._cache = LogpCache(scorer)
        self._lockstep = lockstep
        self._held_back: dict[PieceKey, Sequence[int]] = {}
        self._owed: dict[PieceKey, None] = {}
        """Pieces that were handed over and are not answered, in order."""
        self._sent = self._loaded = -1
        self._child: Child | None = None
        self._started = threading.Event()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="old-logit-writer")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._frames = Frames()
        self._wait_s = self._answer_wait_s = 0.0

    @property
    def pid(self) -> int:
        """The process that scores."""
        if self._child is None:
            raise RuntimeError(
                "the old-logit process is not there: it starts at the first publication"
            )
        return self._child.pid

    def publishing(self) -> None:
        """Waits until the version last published is loaded, and so all before it is scored.

        What it waits for needs no publication: the pieces of a version have all arrived when the next is published.
        """
        self._wait_s += self._catch_up(lambda: self._loaded != self._sent)

    def published(self, live: Collection[int]) -> None:
        """Only tells the process, unless in lockstep."""
        version = self._scorer.version
        if self._lockstep:
            self._wait_s += self._settle()
        self._cache.keep({*live, version})
        if version == self._sent:
            return
        if self._child is None:
            self._start()
        self._tell({"op": "load", "version": version}, file_of(self._scorer.weights()))
        self._sent = version

    def arrived(self, piece: PendingPiece) -> None:
        if self._lockstep:
            self._held_back[key_of(piece)] = piece.tokens
        else:
            self._hand_over({key_of(piece): piece.tokens})

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        """LookupError if a token's piece never arrived."""
        own = self._scorer.version if self._scorer.at_version else -1
        episodes = set(batch.episodes)
        if self._lockstep:
            self._answer_wait_s += self._settle()
        else:
            due = partial(
                self._owes, lambda place: place.episode in episodes and place.version != own
            )
            self._answer_wait_s += self._catch_up(due)
        values, answered = self._cache.lookup(batch)
        require_scored(batch, answered, why="their pieces never arrived, or long before this batch")
        return values, has_clean_behavior(batch)

    def costs(self) -> Mapping[str, float]:
        spent = {
            "forward_tokens": float(self._cache.take_forward_tokens()),
            "publish_wait_s": self._wait_s,
            "score_wait_s": self._answer_wait_s,
            "model_bytes": float(self._scorer.model_bytes),
        }
        self._wait_s = self._answer_wait_s = 0.0
        return spent

    def state(self) -> Mapping[str, Any]:
        """Waits until every piece of the versions published so far is answered."""
        self._settle()
        return {"answers": self._cache.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cache.restore(state["answers"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """In this process: the other one follows the versions from the first publication on."""
        self._cache.recover(past, weights)

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

    def _hand_over(self, pieces: Mapping[PieceKey, Sequence[int]]) -> None:
        self._owed.update(dict.fromkeys(pieces))
        self._tell({"op": "pieces", "pieces": list(pieces.items())})

    def _settle(self) -> float:
        """Hand over what was held back, and wait for all answers that are owed. Seconds it took."""
        due = {
            place: self._held_back.pop(place)
            for place in sorted(self._held_back)
            if place.version <= self._sent
        }
        if due:
            self._hand_over(due)
        return self._catch_up(partial(self._owes, lambda place: True))

    def _tell(self, header: Header, body: Sequence[Bytes] = ()) -> None:
        """What is in `body` may change as soon as this returns."""
        self._writer.submit(self._write, b"".join(frame(header, body)))

    def _write(self, frame: bytes) -> None:
        """In the writer thread. A broken pipe stays here: that the process is gone shows where it is listened to."""
        self._started.wait()
        if self._child is not None:
            self._child.socket.sendall(frame)

    def _owes(self, wanted: Callable[[PieceKey], bool]) -> bool:
        """Whether answers to such pieces will come by themselves: not to those of a version still to be published."""
        return any(place.version <= self._sent and wanted(place) for place in self._owed.copy())

    def _catch_up(self, due: Callable[[], bool]) -> float:
        """Take in all that the process has said, and wait while something is due. Seconds it took."""
        began = time.perf_counter()
        while self._child is not None and self._hear(self._child, wait=due()):
            pass
        return time.perf_counter() - began

    def _hear(self, child: Child, *, wait: bool) -> bool:
        """Read once. False if there was nothing to read. Raises `OldLogitModelDied` when the process runs no more."""
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
                self._loaded = header["version"]
                continue
            answers = {
                PieceKey(*place): torch.tensor(values, dtype=self._scorer.dtype)
                for place, values in header["answers"]
            }
            self._cache.add(answers, header["forward_tokens"])
            for place in answers:
                del self._owed[place]
        return True
