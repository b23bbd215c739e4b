"""One trainer rank (a process that shares the trainer's work): the components that are called in
it.

The run's main process sends the same calls to all ranks, in the same order. It uses only the first
rank's answers.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unstale.cluster.weight_objects import Part, arrays
from unstale.durability.checkpoint import Checkpoint, Checkpoints, Progress, Stateful
from unstale.model.peers import RankGroup
from unstale.model.policy import Policy
from unstale.model.versions import VersionGaps
from unstale.old_logps import OldLogps
from unstale.old_logps.old_logit_model import SecondModelScores
from unstale.records import Batch, PendingPiece
from unstale.token_values import TokenValues
from unstale.trainer.auditor import Auditor
from unstale.trainer.failed_batch import save_failed_batch
from unstale.trainer.local import LocalTrainer
from unstale.trainer.records import Minibatch
from unstale.weights.codec import all_of, file_parts
from unstale.weights.recording import Recording
from unstale.weights.store import Delta, VersionStore


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of a batch, which the main process requests after the batch's last optimizer
    step.
    """

    metrics: Mapping[str, float]
    points: list[dict[str, float]]
    audit_points: list[dict[str, float]]
    events: list[dict[str, Any]]
    tokens: list[TokenValues]


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """The size of one rank's part of a published version.

    `words` is the number of weights in it, and `nbytes` the number of bytes that are sent.
    """

    base: int
    """The version from which the part is a difference.

    -1 if the part has the weights themselves.
    """
    words: int
    nbytes: int


@dataclass(slots=True)
class Rank:
    """The components of a trainer rank: trainer, method to compute `old_logp`, audit,
    checkpoints.
    """

    policy: Policy
    trainer: LocalTrainer
    auditor: Auditor
    store: VersionStore | None = None
    """The store of past versions, if the method to compute `old_logp` needs one. Otherwise None."""
    _published: VersionStore = field(default_factory=VersionStore, init=False)
    """A store with the version that was published last, used if `store` is None."""
    _checkpoints: Checkpoints | None = field(default=None, init=False)
    _minibatches: Sequence[Minibatch] = field(default=(), init=False)
    _snapshot: Checkpoint | None = field(default=None, init=False)
    """The checkpoint that `write` will write or `restore` will restore. None if there is none."""

    @property
    def _old(self) -> OldLogps:
        return self.trainer.old

    @property
    def _scores(self) -> SecondModelScores:
        assert isinstance(self._old, SecondModelScores)
        return self._old

    def pid(self) -> int:
        return os.getpid()

    def follow_version(self, version: int, version_gaps: VersionGaps) -> None:
        self.policy.follow_version(version, version_gaps)

    def open_run(self, run: Path, keep: int) -> None:
        """Open the run folder `run`, in which checkpoints and versions are written and read.

        The last `keep` checkpoints are kept.
        """
        parts: dict[str, Stateful] = {
            "trainer": self.trainer,
            "old": self._old,
            "auditor": self.auditor,
        }
        peers = self.policy.peers.for_another_thread()
        self._checkpoints = Checkpoints(run, parts, keep=keep, peers=peers, copies=True)

    @property
    def checkpoints(self) -> Checkpoints:
        assert self._checkpoints is not None, "call open_run first"
        return self._checkpoints

    def add(self, part: Batch) -> None:
        self.trainer.add(part)

    def prepare(self, batch: Batch) -> int:
        """Compute old log-probabilities and corrections of a batch. Return its number of optimizer
        steps.
        """
        self._minibatches = self.trainer.prepare(batch)
        return len(self._minibatches)

    def backward(self, number: int) -> None:
        self.trainer.backward(self._minibatches[number])

    def step(self) -> None:
        self.trainer.step()

    def results(self) -> StepResults:
        self._minibatches = ()
        return StepResults(
            self.trainer.metrics(),
            self.trainer.scatter_sample(),
            self.auditor.scatter_sample(),
            self._old.events(),
            self.trainer.tokens() if self.policy.peers.rank == 0 else [],
        )

    def record(self, folder: Path) -> None:
        """Record every version and batch for `unstale audit`. Only the first rank writes files."""
        peers = self.policy.peers
        self.auditor.recording = Recording(folder, base=self.policy.base, writes=peers.rank == 0)

    def save_failed_batch(self, folder: Path) -> str:
        return save_failed_batch(self.trainer, folder)

    def publish(self, live: Collection[int], base: int) -> tuple[PublishedPart, list[Part]]:
        """Write this rank's part of the current version to disk. Return its size and its data.

        The part is the difference from version `base` if the store has that version, otherwise the
        weights themselves. `live` are older versions that must be kept. The result may share memory
        with the weights.
        """
        weights = self.policy.weights()
        version = self.policy.version
        store = self.store or self._published
        # versions that are no longer needed must not count against the memory limit
        store.keep(live if self.store else ())
        store.put(version, weights)
        delta = _delta_from(store, base, version) or all_of(version, weights)
        delta = replace(delta, starts=self.policy.part_starts())
        self.checkpoints.write_delta(delta)
        return self._returned(delta)

    def weight_part(self) -> tuple[PublishedPart, list[Part]]:
        """Return the size and the data of this rank's part of the current weights. Nothing is
        copied.
        """
        delta = all_of(self.policy.version, self.policy.weights())
        return self._returned(replace(delta, starts=self.policy.part_starts()))

    def _returned(self, delta: Delta) -> tuple[PublishedPart, list[Part]]:
        peers = self.policy.peers
        is_whole = delta.starts is None and peers.rank  # the first rank returns the whole
        if is_whole or not peers.is_first_replica:
            return PublishedPart(delta.base, 0, 0), []
        words = sum(encoded.words for encoded in delta.tensors.values())
        return PublishedPart(delta.base, words, delta.nbytes), arrays(file_parts(delta))

    def before_publish(self) -> None:
        self._old.before_publish()

    def on_published(self, live: Collection[int]) -> None:
        self._old.on_published(live)

    def audit_published(self, live: Collection[int]) -> None:
        self.auditor.on_published(live)

    def on_end(self, pieces: Sequence[PendingPiece]) -> None:
        self._old.on_end(pieces)

    def on_wait(self, past: Sequence[PendingPiece]) -> None:
        self._old.on_wait(past)

    def add_scores(self, rows: Iterable[Any], forward_tokens: int) -> None:
        self._scores.add_scores(rows, forward_tokens)

    def add_waits(self, publish_s: float, score_s: float) -> None:
        self._scores.add_waits(publish_s, score_s)

    def score_while_idle(self) -> bool:
        return self._old.score_while_idle()

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        self._old.before_update(unscored)

    def snapshot(self, progress: Progress) -> None:
        self._snapshot = self.checkpoints.snapshot(progress, self.trainer)

    def write(self) -> str:
        """Write the checkpoint of the last `snapshot`. Return its name.

        Meanwhile another thread may train and compute log-probabilities. It must not call
        `snapshot` or `publish`, which use the same tensors and process group.
        """
        assert self._snapshot is not None
        name = self.checkpoints.write(self._snapshot)
        self._snapshot = None
        return name

    def load(self, name: str) -> tuple[Progress, int]:
        """Read this rank's part of the checkpoint `name`. Return the checkpoint's progress and
        version.
        """
        self._snapshot = self.checkpoints.load(name)
        return self._snapshot.progress, self._snapshot.version

    def restore(self) -> tuple[int, VersionGaps]:
        """Restore the checkpoint that `load` read. Return the policy's version and its version
        gaps.

        Version gaps are numbers that the run skipped when it was resumed.
        """
        assert self._snapshot is not None
        self.checkpoints.restore(self._snapshot)
        self._snapshot = None
        return self.policy.version, self.policy.version_gaps

    def recover(self, past: Mapping[int, Sequence[PendingPiece]]) -> None:
        self._old.recover(past, self.checkpoints.weights)
        self.auditor.recover(past, self.checkpoints.weights)

    def close(self) -> None:
        self._old.close()


def _delta_from(store: VersionStore, base: int, version: int) -> Delta | None:
    """Return the difference between two versions, or None if they are not adjacent in the store."""
    if version not in store.versions[1:]:
        return None
    delta = store.delta(version)
    return delta if delta.base == base else None


MakeRank = Callable[[RankGroup], Any]
"""A function that creates the object of one rank, such as a `Rank`, whose methods the run's main
process calls. The function must be picklable. It runs after the rank has joined its process group.
"""
