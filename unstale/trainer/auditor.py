"""The audit: measure the error of the run's old log-probabilities during training.

A route is the method by which a run obtains old log-probabilities. The auditor computes those of a
share of every batch again, with full copies of the weights that sampled the tokens. It has its own
copies, so that it also finds errors in the route's copies.
"""

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from unstale.algorithms import audit
from unstale.algorithms.audit import Estimate, Tokens
from unstale.model.forward import Scored
from unstale.model.versions import VersionGaps, lag_of
from unstale.old_logps import OldLogps, has_clean_behavior
from unstale.old_logps.scoring.scorer import Scorer, Weights
from unstale.records import Batch, PendingPiece
from unstale.trainer.bitwise import require_equal
from unstale.trainer.metrics import rows_of
from unstale.trainer.rules import LossSpec
from unstale.weights.recording import RecordedBatch, Recording

WINDOW = 4096
"""Number of recent audited tokens from which most metrics are estimated, because a single step has
too few tokens.
"""
MAX_POINTS = 64
"""Largest number of points (log D, log S) that one step stores for plots. They are evenly spaced
over its audited tokens. D is the ratio of trainer to engine under the same weights, S that of the
current to the old policy.
"""
NOISE_SEQUENCES = 4
"""Number of sequences whose log-probabilities are computed again in another packing, to measure
numerical noise.
"""
SHIFT = 0.6180339887
"""The audited sequences of a batch are evenly spaced. Each audit moves them by this share of their
distance, to audit others than the last time. This is the golden ratio minus 1: the fractional parts
of its multiples are evenly spread after any number of audits.
"""


@dataclass(frozen=True, slots=True)
class Audited:
    """N audited tokens, with the decisions of correction and objective for each of them."""

    tokens: Tokens
    dropped: Tensor
    """`[2, N]` bool: True for tokens that the correction drops. Row 0 is the result with the run's
    old log-probabilities, row 1 with the true ones.
    """
    clipped: Tensor
    """`[2, N]` bool: True for tokens that the objective clips. Row 0 is the result with the run's
    old log-probabilities, row 1 with the true ones.
    """


@dataclass(frozen=True, slots=True)
class Truth:
    """A batch with its true old log-probabilities: those under the weights that sampled each token.

    `version` and `logp` are the version and the log-probabilities of the policy before the first
    optimizer step on the batch.
    """

    batch: Batch
    version: int
    old_logp: Tensor
    logp: Tensor
    version_gaps: VersionGaps = ()

    def compare(self, prox: Tensor, rules: LossSpec) -> Audited:
        """Compare the run's old log-probabilities `prox` `[T]` with the true ones.

        Tokens without a true value are left out (those for which `has_clean_behavior` is False). If
        a ratio is aggregated over several tokens, the run's values replace missing true values in
        it. A token that several episodes share has the values of the episode that sampled it, which
        must be in the batch.
        """
        batch, where = self.batch, has_clean_behavior(self.batch)
        both = [prox, torch.where(where, self.old_logp, prox)]
        logp = self.logp
        if rules.uses_sequences:
            logp, *both = (batch.of_owners(each) for each in (logp, *both))
        dropped = [~rules.correct(old_logp, batch).keep for old_logp in both]
        clipped = [rules.surrogate(logp, old_logp, batch).clipped for old_logp in both]
        lag = lag_of(batch.version, at=self.version, version_gaps=self.version_gaps)
        tokens = Tokens(
            prox, self.old_logp, self.logp, batch.behavior_logp, lag, batch.sequence, where
        )
        return Audited(
            tokens.flat(), torch.stack(dropped)[:, where], torch.stack(clipped)[:, where]
        )


def join(parts: Sequence[Audited]) -> Audited:
    """Join the audited tokens of several batches."""
    return Audited(
        audit.join([part.tokens for part in parts]),
        torch.cat([part.dropped for part in parts], 1),
        torch.cat([part.clipped for part in parts], 1),
    )


def figures(audited: Audited, noise: float) -> dict[str, float | None]:
    """Return the audit's metrics by name, some with a standard error.

    They compare the run's old log-probabilities with the true ones: their mean error, how much of
    log S this error moves into log D and the reverse ("leaks"), and whether the same tokens are
    dropped and clipped. docs/metrics.md defines them. `noise` is the numerical noise of a
    log-probability, in nats. A metric is None if there are too few tokens to estimate it, or if the
    ratios vary too little.
    """
    tokens = audited.tokens
    leaks = audit.leaks(tokens, noise=noise)
    return {
        **with_error("logp_error_abs_mean", audit.decomposition_error(tokens)),
        **with_error("staleness_leak", leaks.staleness),
        **with_error("discrepancy_leak", leaks.discrepancy),
        "log_d_log_s_corr": audit.factor_correlation(tokens, noise=noise),
        "mask_f1": audit.agreement(*audited.dropped, sampled=tokens.sampled),
        "clip_f1": audit.agreement(*audited.clipped, sampled=tokens.sampled),
    }


def with_error(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return an estimate as the metric `name`, and its standard error as the metric `{name}_se`.

    Both are None if `estimate` is None.
    """
    return {
        name: estimate.value if estimate else None,
        f"{name}_se": estimate.se if estimate else None,
    }


def score_truth(scorer: Scorer, batch: Batch) -> Scored:
    """Return the log-probability `[T]` of each sampled token under the weights that sampled it.

    A token is left out if the engine's cache of its context came from older weights.
    """
    return scorer.score_versions(batch, has_clean_behavior(batch))


def packing_noise(scorer: Scorer, batch: Batch, logp: Tensor, version: int | None = None) -> float:
    """Return the numerical noise of log-probabilities, in nats.

    This is the root mean square of their change when sequences are packed differently. `logp` `[T]`
    are the scorer's values for the batch under `version` (None: the current one). Those of some
    sequences are computed again, each sequence in its own pass and only up to its middle. The
    result is at least the rounding error of the dtype.
    """
    errors = []
    for number in spread(batch.num_sequences, NOISE_SEQUENCES, shift=0.0):
        sequence, index = batch.select([number])
        where = sequence.sampled.clone()
        tokens = where.nonzero().squeeze(1)
        where[tokens[(len(tokens) + 1) // 2 :]] = False
        again = scorer.score(sequence, where, version).logp
        errors.append((again - logp[index])[where].double())
    error = torch.cat(errors) if errors else torch.empty(0)
    noise = error.square().mean().sqrt().item() if len(error) else 0.0
    return max(torch.finfo(logp.dtype).eps, noise)


def spread(count: int, wanted: int, *, shift: float) -> list[int]:
    """Return `wanted` evenly spaced indices below `count`, or all of them if there are fewer.

    `shift` (0 to 1) moves all indices by this share of their distance.

    >>> spread(10, 3, shift=0.0), spread(10, 3, shift=0.9), spread(2, 5, shift=0.5)
    ([0, 3, 6], [3, 6, 9], [0, 1])
    """
    wanted = min(wanted, count)
    return [int((i + shift) * count / wanted) for i in range(wanted)]


class Auditor:
    """An observer of training that measures the error of the run's old log-probabilities.

    It audits a share of each batch's sequences. If `recording` is set, it also writes every version
    and batch to disk for `unstale audit`.
    """

    def __init__(
        self,
        scorer: Scorer,
        old: OldLogps,
        rules: LossSpec,
        *,
        share: float,
        is_bitwise: bool = False,
    ) -> None:
        """Create the auditor of `old`, the route (method) that computes old log-probabilities.

        `scorer` must not be the scorer that the route uses. `share` is the share of a batch's
        sequences that are audited. With `is_bitwise`, `look` raises NotBitwise if a true
        log-probability differs from the engine's.
        """
        if share:
            scorer.keep_versions(Copies)
        self.recording: Recording | None = None
        self._scorer = scorer
        self._old = old
        self._rules = rules
        self._share = share
        self._is_bitwise = is_bitwise
        self._window: deque[Audited] = deque()
        self._steps = 0
        self._seconds = 0.0

    def on_published(self, live: Collection[int]) -> None:
        """Keep a copy of the current weights, and drop versions that are not in `live`.

        `live` are the versions whose sampled tokens are still to be trained on.
        """
        if self.recording:
            self.recording.version(self._scorer.version, self._scorer.whole_weights())
        if self._share:
            began = time.perf_counter()
            self._scorer.keep(live)
            self._scorer.put()
            self._seconds += time.perf_counter() - began

    def look(self, batch: Batch, old_logp: Tensor) -> dict[str, float]:
        """Return metrics of the error of the run's `old_logp` `[T]` for a batch.

        Called before the first optimizer step on the batch. `old_logp` is empty if the route (the
        method that computes it) does so in every training pass. The auditor then asks the route for
        the values. Metrics that cannot be estimated from the data are left out.
        """
        self._steps += 1
        scorer = self._scorer
        if self.recording:
            self.recording.batch(
                RecordedBatch(self._steps, scorer.version, batch, scorer.version_gaps)
            )
        if not self._share:
            return {}
        began = time.perf_counter()
        wanted = max(1, round(self._share * batch.num_sequences))
        chosen = spread(batch.num_sequences, wanted, shift=self._steps * SHIFT % 1)
        if self._rules.uses_sequences:
            chosen = batch.with_owners(chosen)
        some, index = batch.select(chosen)
        true = score_truth(scorer, some)
        if self._is_bitwise:
            require_equal(some, "the audit's log-probability", true.logp, has_clean_behavior(some))
        now = scorer.score(some, some.sampled)
        noise = packing_noise(scorer, some, now.logp)
        prox = old_logp[index] if len(old_logp) else self._old.logps(some, now.logp)[0]
        truth = Truth(some, scorer.version, true.logp, now.logp, scorer.version_gaps)
        audited = truth.compare(prox, self._rules)
        found = self._figures(audited, noise)
        costs = scorer.costs()
        seconds, self._seconds = self._seconds + time.perf_counter() - began, 0.0
        return found | {
            "audit/logp_noise_rms": noise,
            "audit/tokens": float(len(audited.tokens)),
            "audit/forward_tokens": float(true.forward_tokens + now.forward_tokens),
            "audit/memory_bytes": costs["memory_bytes"] + costs["model_bytes"],
            "audit/duration_s": seconds,
        }

    def scatter_sample(self) -> list[dict[str, float]]:
        """Return lag (in batches), log D and log S of some audited tokens, for plots.

        D is the ratio of trainer to engine under the same weights, S that of the current to the old
        policy. Both are given twice: with the run's old log-probabilities, and with the true ones.
        """
        if not self._window:
            return []
        tokens = self._window[-1].tokens
        chosen = torch.tensor(spread(len(tokens), MAX_POINTS, shift=0.0), dtype=torch.long)
        columns = {
            "log_d": tokens.log_d_hat, "log_s": tokens.log_s_hat,
            "true_log_d": tokens.log_d, "true_log_s": tokens.log_s, "lag": tokens.lag,
        }  # fmt: skip
        return rows_of(columns, chosen)

    def state(self) -> Mapping[str, Any]:
        return {
            "copies": self._scorer.state() if self._share else {},
            "steps": self._steps,
            "window": [
                {"tokens": _columns(part.tokens), "dropped": part.dropped, "clipped": part.clipped}
                for part in self._window
            ],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if self._share:
            self._scorer.restore(state["copies"])
        self._steps = state["steps"]
        self._window = deque(
            Audited(Tokens(**held["tokens"]), held["dropped"], held["clipped"])
            for held in state["window"]
        )

    def recover(self, past: Mapping[int, Sequence[PendingPiece]], weights: Weights) -> None:
        """Read weights of past versions from disk that the checkpoint does not have.

        `past` has, by version, the sampled tokens that no batch has contained yet.
        """
        if self._share:
            self._scorer.recover(past, weights)

    def _figures(self, audited: Audited, noise: float) -> dict[str, float]:
        """Return the audit's metrics: the mean error in this step, the others over recent steps."""
        self._window.append(audited)
        while (
            sum(len(part.tokens) for part in self._window) - len(self._window[0].tokens) >= WINDOW
        ):
            self._window.popleft()
        pooled = figures(join(self._window), noise)
        fresh = with_error("logp_error_abs_mean", audit.decomposition_error(audited.tokens))
        found = {
            f"audit/{name}": value
            for name, value in {**pooled, **fresh}.items()
            if value is not None
        }
        by_lag = audit.error_by_lag(audited.tokens)
        return found | {
            f"audit/logp_error_abs_mean/lag_{lag}": estimate.value
            for lag, estimate in by_lag.items()
        }


class Copies:
    """Full copies of the weights of past versions, kept by the auditor.

    It does not use the run's version store, so that it finds errors of that store.
    """

    encode_s = 0.0

    def __init__(self, movable: Mapping[str, Tensor]) -> None:
        self._movable = movable
        self._copies: dict[int, dict[str, Tensor]] = {}
        self._at = -1

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(sorted(self._copies))

    @property
    def at(self) -> int:
        return self._at

    @property
    def bytes(self) -> int:
        return sum(_num_bytes(copy) for copy in self._copies.values())

    @property
    def movable_bytes(self) -> int:
        return _num_bytes(self._movable)

    def put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._copies[version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def keep(self, live: Collection[int]) -> None:
        self._copies = {version: copy for version, copy in self._copies.items() if version in live}

    def move_to(self, version: int) -> None:
        if version not in self._copies:
            raise LookupError(
                f"the audit has no copy of version {version}, which was not kept after publication"
            )
        for name, tensor in self._movable.items():
            tensor.copy_(self._copies[version][name])
        self._at = version

    def state(self) -> Mapping[Any, Any]:
        return {version: dict(copy) for version, copy in self._copies.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._copies = {int(version): dict(copy) for version, copy in state.items()}

    def close(self) -> None:
        self._copies.clear()


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _columns(tokens: Tokens) -> dict[str, Tensor]:
    return {field.name: getattr(tokens, field.name) for field in fields(tokens)}
