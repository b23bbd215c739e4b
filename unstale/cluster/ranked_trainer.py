"""Components in the run's main process whose work is divided among trainer ranks (processes).

    RankedTrainer        a `Trainer`
    RankedOldLogps       a route: a method to compute `old_logp`
    RankedAuditor        the audit: a test of the values of the route
    RankedCheckpoints    checkpoints that the ranks write

The training loop uses these classes if the trainer has ranks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstale.cluster.ranks import Ranks, RanksDied
from unstale.cluster.ranks_worker import PublishedPart, StepResults
from unstale.cluster.weight_objects import FETCH_S, PostedStep, read_delta
from unstale.config.routes import Needs
from unstale.durability.checkpoint import Checkpoint, Checkpoints, Progress
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.old_logps.scoring.queue import PieceKey, key_of
from unstale.old_logps.scoring.scorer import Weights
from unstale.records import Batch, PendingPiece
from unstale.token_values import TokenValues
from unstale.weights import codec
from unstale.weights.bits import words
from unstale.weights.publish import VersionedWeights
from unstale.weights.store import Delta


class RankedTrainer:
    """A `Trainer` whose model and optimizer are divided among trainer ranks (processes)."""

    def __init__(self, ranks: Ranks, policy: Policy) -> None:
        """Create the trainer. `policy` is in the run's main process.

        It counts the versions, and has the initial weights.
        """
        self.ranks = ranks
        self.policy = policy
        self.results = StepResults({}, [], [], [], [])
        """The results of the last batch, as the ranks returned them."""
        self.collect: Callable[[Batch | None], None] = lambda batch: None
        """A function that waits for old log-probabilities, called before the ranks need them. Its
        argument is a batch, or None to wait for all that were requested.
        """
        self._steps_left = 0
        self._posted: PostedStep | None = None
        """References to the parts of the weights that the ranks put into Ray's store last, for the
        ranks of a second model. None before the first time, and without a second model.
        """

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method on every rank. Return the first rank's answer.

        Before this, the version number of each rank's policy is set.
        """
        self._send_version()
        return self.ranks.call(name, *arguments)

    def post(self, name: str, *arguments: Any) -> PostedStep:
        """Call the method `name` on every rank, which puts its part of the current weights into
        Ray's store.

        Return references to the parts. Raises RuntimeError if the parts do not add up to all
        weights.
        """
        self._send_version()
        answers, objects = self.ranks.call_parts(name, *arguments)
        parts: list[PublishedPart] = answers
        given = sum(part.words for part in parts)
        wanted = sum(words(tensor).numel() for tensor in self.policy.weights().values())
        bases = {part.base for part in parts}
        if given != wanted or len(bases) != 1:
            raise RuntimeError(
                f"the trainer ranks returned {given} of {wanted} words, as differences from the "
                f"versions {sorted(bases)}"
            )
        size = sum(part.nbytes for part in parts)
        deltas = [each for each, part in zip(objects, parts, strict=True) if part.words]
        step = PostedStep(bases.pop(), self.version, size, deltas)
        if self.ranks.scorers:
            self._posted = step
        return step

    def step_from(self, base: int) -> PostedStep:
        """Return the deltas that lead from version `base`, or from zeros, to the current version.

        If the deltas that the ranks put into Ray's store last do so, return these. Otherwise all
        ranks put their parts of the weights there.
        """
        posted = self._posted
        if posted and posted.version == self.version and posted.base in (base, -1):
            return posted
        return self.post("weight_part")

    def parts(self, step: PostedStep) -> Iterator[Delta]:
        """Yield the delta of each rank's part of the weights. One is fetched at a time."""
        for part in step.deltas:
            yield read_delta(self.ranks.fetch(part, FETCH_S))

    def advance(self, weights: Mapping[str, Tensor], step: PostedStep) -> None:
        """Turn the weights of version `step.base` into those of `step.version`, in place.

        If `step.base` is -1, the weights are set to zeros first.
        """
        if step.base == -1:
            for tensor in weights.values():
                words(tensor).zero_()
        for part in self.parts(step):
            codec.advance(weights, part)

    def _send_version(self) -> None:
        self.ranks.later("follow_version", self.policy.version, self.policy.version_gaps)

    @property
    def version(self) -> int:
        return self.policy.version

    def start_version(self) -> None:
        self.policy.version += 1

    def lag(self, version: Tensor) -> Tensor:
        return self.policy.lag(version)

    def weights(self) -> Mapping[str, Tensor]:
        """Return a copy of the whole weights, in the main memory of this process."""
        weights = {name: torch.empty_like(t) for name, t in self.policy.weights().items()}
        self.advance(weights, self.post("weight_part"))
        return weights

    def update_policy(self) -> None:
        """Copy the weights of the ranks into the policy of this process."""
        self.advance(self.policy.weights(), self.post("weight_part"))

    def add(self, part: Batch) -> None:
        self.collect(part)
        self.call("add", part)

    def prepare(self, batch: Batch) -> Sequence[int]:
        """Prepare the minibatches of a batch on the ranks. Return the minibatches' numbers."""
        self.collect(batch)
        self._steps_left = self.call("prepare", batch)
        return range(self._steps_left)

    def backward(self, minibatch: int) -> None:
        self.call("backward", minibatch)

    def step(self) -> None:
        self.call("step")
        self._steps_left -= 1
        if not self._steps_left:
            self.results = self.call("results")

    def metrics(self) -> Mapping[str, float]:
        return self.results.metrics

    def scatter_sample(self) -> list[dict[str, float]]:
        return self.results.points

    def tokens(self) -> list[TokenValues]:
        return self.results.tokens

    def save_failed_batch(self, folder: Path) -> str:
        """Save the weights and the last batch, which training failed on. Return a message for the
        terminal.
        """
        try:
            return str(self.call("save_failed_batch", folder.absolute()))
        except RanksDied as error:
            return f"the batch could not be saved: {error}"


class RankedOldLogps(OldLogps):
    """A route (a method to compute `old_logp`) whose work is divided among trainer ranks."""

    def __init__(self, trainer: RankedTrainer, needs: Needs) -> None:
        self.needs = needs
        self._trainer = trainer
        self._sent: set[PieceKey] = set()
        """Keys of the pieces (sampled tokens of one version) that the ranks have received."""
        self._call: Callable[..., Any] = trainer.call

    def before_publish(self) -> None:
        self._call("before_publish")

    def on_published(self, live: Collection[int]) -> None:
        kept = {*live, self._trainer.version}
        self._sent = {key for key in self._sent if key.version in kept}
        self._call("on_published", tuple(live))

    def on_end(self, pieces: Sequence[PendingPiece]) -> None:
        version = self._trainer.version
        of_version = [piece for piece in pieces if piece.piece.version == version]
        if self.needs.idle:  # others have no use for it; routed experts are large
            self._send("on_end", of_version)

    def on_wait(self, past: Sequence[PendingPiece]) -> None:
        self._send("on_wait", past)

    def _send(self, name: str, pieces: Sequence[PendingPiece]) -> None:
        """Call a method on the ranks with those of the `pieces` that they have not received yet."""
        new = tuple(piece for piece in pieces if key_of(piece) not in self._sent)
        if new:
            self._trainer.ranks.later(name, new)
            self._sent.update(map(key_of, new))  # `before_update` may read it meanwhile

    def score_while_idle(self) -> bool:
        return bool(self._call("score_while_idle"))

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        if not self.needs.closing:
            unscored = [piece for piece in unscored if key_of(piece) not in self._sent]
        self._call("before_update", tuple(unscored))

    def events(self) -> list[dict[str, Any]]:
        return self._trainer.results.events

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Restore the route and the audit on the ranks when a run is resumed.

        `past` has the pending sampled tokens by version. The ranks read the weights of versions
        from disk themselves, so `weights` is not used.
        """
        self._call("recover", {version: tuple(pieces) for version, pieces in past.items()})


class RankedAuditor:
    """The audit of old log-probabilities (the comparison with true values), done by the ranks."""

    def __init__(self, trainer: RankedTrainer) -> None:
        self._trainer = trainer

    def on_published(self, live: Collection[int]) -> None:
        self._trainer.call("audit_published", tuple(live))

    def record(self, folder: Path) -> None:
        """Record every version and batch in `folder`, for `unstale audit`.

        All ranks must have access to the folder.
        """
        self._trainer.ranks.later("record", folder.absolute())

    def scatter_sample(self) -> list[dict[str, float]]:
        return self._trainer.results.audit_points

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Do nothing, because `RankedOldLogps.recover` also restores the audit on the ranks."""


class RankedCheckpoints(Checkpoints):
    """Checkpoints that the ranks write and read. All ranks must have access to the run folder.

    For a snapshot the ranks copy their state, and they continue while the copy is written.
    """

    def __init__(self, trainer: RankedTrainer, run: Path, *, keep: int = 2) -> None:
        super().__init__(run, {}, keep=keep)
        self._trainer = trainer
        trainer.ranks.later("open_run", run.absolute(), keep)

    def snapshot(self, progress: Progress, source: VersionedWeights) -> Checkpoint:
        self._trainer.collect(None)
        self._trainer.call("snapshot", progress)
        return Checkpoint(progress, source.version, {}, {})

    def write(self, checkpoint: Checkpoint) -> str:
        return str(self._trainer.ranks.call_beside("write"))

    def load(self, name: str) -> Checkpoint:
        progress, version = self._trainer.call("load", name)
        return Checkpoint(progress, version, {}, {})

    def restore(self, checkpoint: Checkpoint) -> None:
        policy = self._trainer.policy
        policy.version, policy.version_gaps = self._trainer.call("restore")
