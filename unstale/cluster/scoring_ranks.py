"""The second model of `old_logps.route = old_logit_model`, divided among ranks (processes).

The second model is loaded with the weights that sampled the tokens, and computes their
log-probabilities. The trainer ranks are other processes.

    ScoringRank          one rank of the second model
    RanksLink            the connection of the run's main process to these ranks
    RankedOldLogitModel  in the main process: passes log-probabilities on to the trainer ranks
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from unstale.cluster.ranked_trainer import RankedOldLogps, RankedTrainer
from unstale.cluster.ranks import Ranks
from unstale.cluster.weight_objects import FETCH_S, PostedStep, read_delta
from unstale.old_logps.old_logit_model import pieces_of
from unstale.old_logps.scoring.cache import answer
from unstale.old_logps.scoring.queue import Pieces, ScoringOrder
from unstale.old_logps.scoring.second_model import Reply, SecondModel
from unstale.weights.bits import words
from unstale.weights.codec import advance_overlap

if TYPE_CHECKING:
    from unstale.config.routes import Needs
    from unstale.model.policy import Policy
    from unstale.old_logps.scoring.scorer import Scorer
    from unstale.records import Batch, PendingPiece
    from unstale.weights.store import Delta


class ScoringRank:
    """One rank (process) of the second model, which computes old log-probabilities.

    All ranks receive the same calls in the same order.
    """

    def __init__(self, policy: Policy, scorer: Scorer) -> None:
        self._policy = policy
        self._scorer = scorer
        self._version = -1
        """The version of the weights that this rank has loaded. -1 before the first."""

    def load_version(self, step: PostedStep) -> None:
        """Load the weights of `step.version`, from deltas in Ray's object store."""
        import ray

        parts = (read_delta(ray.get(part, timeout=FETCH_S)) for part in step.deltas)
        self.advance(step.base, step.version, parts)

    def advance(self, base: int, version: int, parts: Iterable[Delta]) -> None:
        """Turn this rank's weights from version `base` into those of `version`.

        `parts` are the deltas (differences of versions) of the trainer ranks. This rank applies
        what belongs to its own weights. If `base` is -1, the weights are set to zeros first. Raises
        ValueError if it has another version than `base`, or if the deltas do not cover all its
        weights.
        """
        weights = self._policy.weights()
        starts = self._policy.part_starts() or dict.fromkeys(weights, 0)
        if base == -1:
            for tensor in weights.values():
                words(tensor).zero_()
        elif base != self._version:
            raise ValueError(
                f"the difference is from version {base}, but the model has version {self._version}"
            )
        given = sum(advance_overlap(weights, starts, part) for part in parts)
        wanted = sum(words(tensor).numel() for tensor in weights.values())
        if given != wanted:
            raise ValueError(
                f"the weight update from the trainer ranks has {given} weights for this scoring "
                f"rank, which holds {wanted}. Resume the run from its last checkpoint"
            )
        self._policy.weights_match_version = False
        self._version = version

    def score(self, pieces: Pieces) -> Reply:
        """Return the log-probabilities of sampled tokens (`pieces`) under the loaded weights."""
        return answer(self._scorer, pieces)

    def pid(self) -> int:
        return os.getpid()

    def close(self) -> None:
        """Do nothing. The memory is freed together with this object."""


class RanksLink:
    """The connection to a second model on ranks. A thread calls the ranks, in the order of
    requests.
    """

    def __init__(self, ranks: Ranks, *, max_tokens: int) -> None:
        """Use the second model on `ranks`.

        `max_tokens` is the largest number of tokens in a forward pass of one rank.
        """
        self._ranks = ranks
        self._order = ScoringOrder(max_tokens * ranks.count)
        """The order of the ranks' work. Only the thread that calls the ranks uses it."""
        self._messages: deque[Callable[[], None]] = deque()
        """Functions that add tokens and versions to `_order`. The thread that calls the ranks calls
        them.
        """
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="old-logit-ranks")
        self._calls: deque[Future[Reply | None]] = deque()
        self._submitting = Lock()
        """A lock that keeps the calls in `_calls` in the order in which the thread makes them."""

    def load(self, version: int, step: PostedStep) -> None:
        """Make the ranks load `version`, by the deltas `step` from the version that was sent
        before.
        """
        self._send(partial(self._order.add_version, version, step))

    def score(self, pieces: Pieces) -> None:
        self._send(partial(self._order.add_pieces, pieces))

    def receive(self, *, wait: bool) -> list[Reply] | None:
        """Return the replies that have arrived, or None if there are none.

        With `wait`, wait until one arrives, if any is expected. Raises `RanksDied` if a rank ended.
        """
        replies: list[Reply] = []
        while self._calls and (self._calls[0].done() or (wait and not replies)):
            reply = self._calls.popleft().result()
            if reply is not None:
                replies.append(reply)
        return replies or None

    def close(self) -> None:
        """Wait for the current call of the ranks. Make no further call."""
        self._thread.shutdown(cancel_futures=True)

    def _send(self, message: Callable[[], None]) -> None:
        self._messages.append(message)
        self._submit()

    def _submit(self) -> None:
        with self._submitting:
            self._calls.append(self._thread.submit(self._work))

    def _work(self) -> Reply | None:
        """Make the ranks compute log-probabilities in one forward pass, or load one version.

        If work is left, submit another call for it.
        """
        while self._messages:
            self._messages.popleft()()
        reply: Reply | None = None
        if pieces := self._order.take_pieces():
            reply = self._ranks.call("score", pieces)
        elif self._order:
            version, step = self._order.take_version()
            self._ranks.call("load_version", step)
            reply = {"op": "loaded", "version": version}
        if self._order:
            self._submit()
        return reply


class RankedOldLogitModel(RankedOldLogps):
    """The route (method to compute `old_logp`) `old_logit_model` with trainer ranks.

    The second model is on ranks of its own. The log-probabilities that it computes are sent to the
    trainer ranks with their next call, and kept there.
    """

    def __init__(
        self, trainer: RankedTrainer, needs: Needs, link: RanksLink, *, lockstep: bool
    ) -> None:
        super().__init__(trainer, needs)
        self._link = link
        self._model = SecondModel(link, self._add_scores, lockstep=lockstep)
        trainer.collect = self.collect

    def before_publish(self) -> None:
        """Wait until the second model has loaded the version that was published last."""
        self._add_waits(self._model.wait_until_loaded(), 0.0)

    def on_published(self, live: Collection[int]) -> None:
        """Load the current version into the second model, from the parts that each trainer rank
        provides.

        No rank gathers whole weights.
        """
        self._add_waits(self._model.finish_version(), 0.0)
        super().on_published(live)
        version = self._trainer.version
        if version != self._model.sent:
            self._model.load(version, self._trainer.step_from(self._model.sent))

    def on_piece(self, piece: PendingPiece) -> None:
        self._model.on_piece(piece)

    def collect(self, batch: Batch | None) -> None:
        """Wait for the old log-probabilities of a batch. With None, wait for those of all sent
        tokens.
        """
        if batch is None:
            self._model.score_all()
            return
        wanted = pieces_of(batch, current=self._trainer.version)
        self._add_waits(0.0, self._model.wait_for(wanted))

    def close(self) -> None:
        self._link.close()

    def _add_scores(self, rows: Iterable[Any], forward_tokens: int) -> None:
        self._trainer.ranks.later("add_scores", rows, forward_tokens)

    def _add_waits(self, publish_s: float, score_s: float) -> None:
        self._trainer.ranks.later("add_waits", publish_s, score_s)
