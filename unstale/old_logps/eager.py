"""The route `eager`: compute `old_logp` while the trainer waits for episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unstale.config.checks import ConfigError
from unstale.config.routes import Meaning, Needs, OldLogpsConfig, RouteDocs
from unstale.old_logps import OldLogps, has_clean_behavior
from unstale.old_logps.ewma_prox import EwmaProxSpec
from unstale.old_logps.scoring.queue import ScoreQueue, by_key, key_of, text_of
from unstale.old_logps.snapshot_old import SnapshotOldSpec

if TYPE_CHECKING:
    from torch import Tensor

    from unstale.config import RunConfig
    from unstale.old_logps.scoring.scorer import Scorer, Weights
    from unstale.records import Batch, PendingPiece


class Eager(OldLogps):
    """A method that computes `old_logp` of each token once, while the trainer waits for episodes.

    When an episode has ended, the trainer's model computes the values of its tokens of the current
    version. Values of tokens of unfinished episodes are computed with kept weights, if the second
    method (`fallback`) keeps past weights, as soon as no further token of their version can arrive.
    Otherwise they are computed before the optimizer step. `fallback` computes all remaining values
    together with their batch. The metric `old_logps/scored_in_time_share` is the share of sampled
    tokens that got an exact value without `fallback`.
    """

    def __init__(self, scorer: Scorer, *, fallback: OldLogps) -> None:
        from unstale.old_logps.scoring.cache import LogpCache

        self.fallback = fallback
        self.needs = replace(fallback.needs, idle=True, forwards="versions")
        self._scorer = scorer
        self._cache = LogpCache(scorer)
        self._arrived: deque[tuple[Sequence[PendingPiece], bool]] = deque()
        """Sampled pieces that are in no queue yet, each entry with True if the episode has ended.
        """
        self._ended: dict[int, ScoreQueue] = {}
        """Tokens of ended episodes that still need an old log-probability, by version."""
        self._open: dict[int, ScoreQueue] = {}
        """Tokens of unfinished episodes that still need an old log-probability, by the version that
        sampled them. These versions sample no more tokens.
        """
        self._num_tokens = 0
        self._num_covered = 0

    def before_publish(self) -> None:
        self.fallback.before_publish()

    def on_published(self, live: Collection[int]) -> None:
        current = self._scorer.version
        self._cache.keep({*live, current})
        self._sort()
        kept = {*live, current} if self.needs.snapshots else {current}
        for queues in (self._ended, self._open):
            for version in queues.keys() - kept:
                del queues[version]
        self.fallback.on_published(live)

    def on_piece(self, piece: PendingPiece) -> None:
        self.fallback.on_piece(piece)

    def on_end(self, pieces: Sequence[PendingPiece]) -> None:
        self._arrived.append((pieces, True))
        self.fallback.on_end(pieces)

    def on_wait(self, past: Sequence[PendingPiece]) -> None:
        self._arrived.append((past, False))
        self.fallback.on_wait(past)

    def score_while_idle(self) -> bool:
        self._sort()
        version = self._version_to_score()
        if version is None:
            return self.fallback.score_while_idle()
        queue = self._ended.get(version) or self._open[version]
        is_current = version == self._scorer.version
        self._cache.score(queue.take(self._scorer.max_tokens), None if is_current else version)
        return True

    def before_update(self, unscored: Sequence[PendingPiece]) -> None:
        self._sort()
        if self.needs.scores_before_update and not self.needs.closing:
            waiting = self._ended.pop(self._scorer.version, ScoreQueue()).take_all()
            self._cache.score(waiting | by_key(self._cache.missing(unscored)))
        self.fallback.before_update(self._cache.missing(unscored))

    def trained(self, kept: float) -> None:
        self.fallback.trained(kept)

    def logps(self, batch: Batch, now: Tensor) -> tuple[Tensor, Tensor]:
        self._sort()
        for queue in (*self._ended.values(), *self._open.values()):
            queue.discard(batch.episodes)
        values, covered = self._cache.lookup(batch)
        exact = covered & has_clean_behavior(batch)
        missing = batch.sampled & ~covered
        self._num_tokens += int(batch.sampled.sum())
        self._num_covered += int(exact.sum())
        spans = batch.spans()
        sequences = [i for i, (start, end) in enumerate(spans) if missing[start:end].any()]
        if sequences:
            part, index = replace(batch, sampled=missing).select(sequences)
            logp, claims = self.fallback.logps(part, now[index] if len(now) else now)
            values = values.index_put((index,), logp.where(part.sampled, values[index]))
            exact = exact.index_put((index,), claims.where(part.sampled, exact[index]))
        return values, exact

    def costs(self) -> Mapping[str, float]:
        forward_tokens = float(self._scorer.take_forward_tokens())
        scored_share = self._num_covered / max(1, self._num_tokens)
        self._num_tokens = 0
        self._num_covered = 0
        return {
            **self.fallback.costs(),
            "forward_tokens": forward_tokens,
            "scored_in_time_share": scored_share,
        }

    def events(self) -> list[dict[str, Any]]:
        return self.fallback.events()

    def state(self) -> Mapping[str, Any]:
        return {"answers": self._cache.state(), "fallback": self.fallback.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cache.restore(state["answers"])
        self.fallback.restore(state["fallback"])

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Let the second route, `fallback`, recover tokens without a value in the checkpoint."""
        missing = {version: self._cache.missing(pieces) for version, pieces in past.items()}
        self.fallback.recover(
            {version: pieces for version, pieces in missing.items() if pieces}, weights
        )

    def close(self) -> None:
        self.fallback.close()

    def _sort(self) -> None:
        """Put newly sampled pieces without an `old_logp` into the queue of their version.

        Pieces whose `old_logp` only `fallback` can compute are left out.
        """
        while self._arrived:
            pieces, has_ended = self._arrived.popleft()
            for piece in self._cache.missing(pieces):
                version = piece.piece.version
                if version != self._scorer.version and not self.needs.snapshots:
                    continue
                ended, still_open = (
                    queues.setdefault(version, ScoreQueue()) for queues in (self._ended, self._open)
                )
                if has_ended:
                    still_open.discard([piece.episode])
                if has_ended or piece.episode in ended:
                    ended.put(key_of(piece), text_of(piece))
                else:
                    still_open.put(key_of(piece), text_of(piece))

    def _version_to_score(self) -> int | None:
        """Return the version for whose tokens `old_logp` is computed next. None if no token waits.

        Versions with tokens of ended episodes come first, because the next batch may contain these.
        Among them, the newest version comes first, because the model of `fallback` has similar
        weights.
        """
        for queues in (self._ended, self._open):
            for version in sorted(queues, reverse=True):
                is_current = version == self._scorer.version
                if queues[version] and (self._scorer.weights_match_version or not is_current):
                    return version
        return None


@dataclass(frozen=True, kw_only=True)
class EagerSpec(SnapshotOldSpec, EwmaProxSpec):
    """Options of the route `eager`, which computes `old_logp` while the trainer waits for episodes.

    A second route computes the values for which there was no time.
    """

    route: str = "eager"
    makes: ClassVar[type[OldLogps]] = Eager
    fallback: Literal["snapshot_old", "interrupt_sync", "ewma_prox"] = "snapshot_old"
    """Only for `eager`: the route (method to compute `old_logp`) that scores the remaining tokens
    with their batch. With `snapshot_old`, unfinished episodes are also scored while the trainer
    waits.
    """

    exactness: ClassVar = "where scored in time (old_logps/exact_share)"
    fixed: ClassVar = {
        **SnapshotOldSpec.fixed,
        "fallback": "the checkpoint holds the state of that fallback",
    }
    recipe: ClassVar = {}
    docs: ClassVar = RouteDocs(
        policy="the trainer, or the kept weights of the version that sampled the token",
        exact="for its own share; otherwise as its fallback",
        holds="as its fallback",
        costs="one forward pass of each trajectory per version in it, mostly in idle time",
        choose="if the trainer waits for episodes",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        own = {"route", "baseline", "fallback"}
        for name in self.changed().keys() - own:
            readers = [
                spec.route
                for spec in (SnapshotOldSpec, EwmaProxSpec)
                if name in {option.name for option in fields(spec)}
            ]
            if self.fallback not in readers:
                raise ConfigError(
                    f"old_logps.{name} is an option of {', '.join(readers)}; "
                    f"old_logps.route is eager with the fallback {self.fallback}"
                )

    def applies(self, option: str) -> bool:
        return option == "fallback" or self.fallback_spec.applies(option)

    @property
    def fallback_spec(self) -> OldLogpsConfig:
        options = {name: value for name, value in self.changed().items() if name != "fallback"}
        return OldLogpsConfig(**{**options, "route": self.fallback})

    @property
    def needs(self) -> Needs:
        return replace(self.fallback_spec.needs, idle=True, forwards="versions")

    @property
    def exact(self) -> bool:
        return self.fallback_spec.exact

    @property
    def partly_exact(self) -> bool:
        return True

    @property
    def decay(self) -> float | None:  # type: ignore[override]
        return self.fallback_spec.decay

    def updates_per_version(self, run: RunConfig) -> int:
        return self.fallback_spec.updates_per_version(run)

    @property
    def shares_deltas(self) -> bool:
        return self.fallback_spec.shares_deltas

    def cost(self, run: RunConfig) -> str:
        rest = self.fallback_spec.meaning(run).cost
        return (
            f"a forward pass for every version in a trajectory, mostly in idle time; later {rest}"
        )

    def meaning(self, run: RunConfig) -> Meaning:
        meaning = self.fallback_spec.meaning(run)
        if self.exact:
            return replace(meaning, cost=self.cost(run))
        return Meaning(
            symbol=f"pi_old or {meaning.symbol}",
            policy="the weights that sampled the token where scored in time, their moving average "
            "elsewhere",
            d="numerics where scored in time; elsewhere staleness too, as far as the average "
            "misses the token's age",
            s="learning where scored in time; elsewhere since the average",
            cost="the trainer's idle time; an average, one scoring copy and a forward pass for the "
            "rest",
        )

    def make(self, scorer: Scorer, *, lockstep: bool) -> Eager:  # type: ignore[override]
        fallback = self.fallback_spec.make(scorer, lockstep=lockstep)
        return Eager(scorer, fallback=fallback)
