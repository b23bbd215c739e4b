"""Old log-probabilities and corrections of a batch: all inputs of the loss without a gradient.

    Scoring.old_logps(batch)   old log-probabilities (`old_logp`), and the correction of D
    Scoring.shape(batch)       advantages and weights as techniques change them
    Scoring.reference(batch)   log-probabilities of the reference policy
    Scoring.teachers           log-probabilities or distributions of teachers

D is the ratio of trainer to engine, pi_old / mu. All tensors are `[T]` on the CPU.
`unstale.trainer.loss` turns them into a loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstale.algorithms import corrections
from unstale.algorithms.corrections import CorrectionWeights
from unstale.config import RunConfig
from unstale.model.forward import Scored
from unstale.model.policy import Policy
from unstale.old_logps import OldLogps
from unstale.records import Batch, StoredLogps
from unstale.techniques.hooks import GradientPart, HiddenStates, Signals, StatesQuery
from unstale.trainer import bitwise
from unstale.trainer.hidden_states import last_tokens, statistics
from unstale.trainer.metrics import StepMetrics
from unstale.trainer.passes import pass_tokens
from unstale.trainer.placed import PlacedScores, guided
from unstale.trainer.records import FailedBatch, Minibatch
from unstale.trainer.rules import LossSpec
from unstale.trainer.teachers import Teachers

Audit = Callable[[Batch, Tensor], Mapping[str, float]]
"""A function from a batch and its `old_logp` `[T]` to metrics of the error of these values.
`old_logp` is empty if it is computed in every training pass.
"""


@dataclass(frozen=True, slots=True)
class OldScores:
    """The old log-probabilities of a batch, a mask of exact ones, and the correction, each `[T]`.

    If old log-probabilities are computed in every training pass, `old_logp` and `exact` are empty,
    and the correction changes nothing.
    """

    old_logp: Tensor
    exact: Tensor
    """True where `old_logp` is exact, False where it is an approximation or the token was not
    sampled.
    """
    correction: CorrectionWeights
    """The weights that correct the discrepancy between trainer and engine."""


class Scoring:
    """The computation of a loss's inputs: old log-probabilities, corrections and advantages."""

    def __init__(self, policy: Policy, config: RunConfig, old: OldLogps, rules: LossSpec) -> None:
        """Prepare the computation. `old` is the route: the method that computes `old_logp`.

        If the loss or a technique compares with the policy before training, a copy of `policy` is
        kept.
        """
        self._policy = policy
        self._old = old
        self.is_inline = old.needs.inline
        """True if old log-probabilities are computed in every training pass."""
        self._rules = rules
        self._techniques = rules.techniques
        self._temperature = config.engine.temperature
        self._max_tokens = pass_tokens(policy, config, trains=False)
        self._is_bitwise = config.engine.bitwise
        self._takes_engine_logps = config.old_logps.weight_of_now(config) == 0
        keeps_reference = config.objective.kl_coef or "reference" in rules.techniques.needs
        self.reference_policy = policy.twin() if keeps_reference else None
        """A copy of the policy before training. None if neither the loss nor a technique needs
        it.
        """
        distiller = rules.techniques.distiller
        self.teachers = Teachers(policy, config, distiller) if distiller else None
        """The teachers of a run with distillation. None without it."""
        self.num_compared = 0
        """Number of log-probabilities of the batch that were compared with the engine's
        (`engine.bitwise`).
        """
        self.failed_batch: FailedBatch | None = None
        """The data of the current step, which is saved if a number is not finite. None before the
        first step.
        """

    def old_logps(self, batch: Batch, lag: Tensor, metrics: StepMetrics) -> OldScores:
        """Return the old log-probabilities and the corrections of a batch.

        Metrics are added to `metrics`. `lag` `[T]` is the lag of each token in batches. Raises
        NonFinite if a log-probability is NaN or infinite.
        """
        if self._old.needs.inline or not batch.num_sequences:
            return OldScores(torch.empty(0), torch.empty(0), corrections.keep_all(batch.sampled))
        logp = torch.empty(0)
        if self._old.needs.now:
            scored = self._score(self._policy, batch)
            metrics.score_tokens += scored.forward_tokens
            logp = scored.logp
        return self.correct(batch, logp, lag, metrics)

    def correct(self, batch: Batch, logp: Tensor, lag: Tensor, metrics: StepMetrics) -> OldScores:
        """Return old log-probabilities, and the correction of their discrepancy.

        `logp` are the current log-probabilities `[T]`, or empty if the method that computes
        `old_logp` (`old_logps.route`) does not need them. `lag` `[T]` is the lag of each token in
        batches. Raises NonFinite if a log-probability is NaN or infinite.
        """
        if self.is_inline and batch.shared:  # its owners may be in another pass
            old_logp, exact = self._ask_route(self._rules.whole(batch), logp)
            exact = exact & batch.sampled
        else:
            old_logp, exact = self._ask_route(batch, logp)
            old_logp = batch.of_owners(old_logp) if self._rules.uses_sequences else old_logp
        if not self._old.needs.inline:
            ones = torch.ones_like(old_logp)
            minibatch = Minibatch(batch, old_logp, ones, ones, torch.empty(0), lag)
            self.failed_batch = FailedBatch("old_logps", minibatch)
        require_finite(batch, behavior_logp=batch.behavior_logp, old_logp=old_logp)
        if self._is_bitwise:
            self.require_equal(batch, "old_logp", old_logp, exact & batch.sampled)
            if self._takes_engine_logps:  # the engine's value is the trainer's own
                exact = batch.sampled
        correction = self._rules.correct(old_logp, batch)
        metrics.add_correction(batch, old_logp, correction, exact=exact, lag=lag)
        vetoed = self._rules.vetoed(old_logp, batch)
        metrics.tokens.add_correction(batch, old_logp, correction, exact=exact, vetoed=vetoed)
        return OldScores(old_logp, exact, correction)

    def require_equal(self, batch: Batch, name: str, logp: Tensor, where: Tensor) -> None:
        """Raise NotBitwise if a log-probability in the mask `where` differs from the engine's.

        `name` is what `logp` is called in the message.
        """
        self.num_compared += bitwise.require_equal(batch, name, logp, where)

    def reference(self, batch: Batch) -> Tensor:
        """Return the log-probabilities `[T]` under the reference policy.

        Empty if nothing needs them.
        """
        if self.reference_policy is None or not batch.num_sequences:
            return torch.empty(0)
        return self._score(self.reference_policy, batch).logp

    def shape(
        self,
        batch: Batch,
        old: OldScores,
        reference_logp: Tensor,
        metrics: StepMetrics,
        *,
        progress: float,
    ) -> tuple[Batch, Tensor]:
        """Apply the techniques that change advantages.

        Return the batch with new advantages, and the weight of each token, `[T]`. `progress` is the
        share of the run's optimizer steps that are done, 0 to 1.
        """
        factor = old.correction.factor
        if not self._techniques.shapers or not batch.num_sequences:
            return batch, factor
        with_entropy = "entropy" in self._techniques.needs
        scored = self._score(self._policy, batch, batch.trained, with_entropy=with_entropy)
        require_finite(batch, logp=scored.logp)
        if with_entropy:
            metrics.tokens.add_entropy(batch, scored.entropy, where=batch.sampled)

        def gradient_norms(sequences: Sequence[int], part: GradientPart) -> Tensor:
            parts = [batch.select([i])[0] for i in sequences]
            head = part == "head"
            norms = [
                self._policy.gradient_norm(
                    each, each.sampled, temperature=self._temperature, head_only=head
                )
                for each in parts
            ]
            return torch.tensor(norms, dtype=torch.float64)

        signals = Signals(
            old_logp=old.old_logp,
            logp=scored.logp,
            reference_logp=reference_logp,
            entropy=scored.entropy,
            gradient_norms=gradient_norms,
            progress=progress,
        )
        nowhere = torch.zeros_like(batch.sampled)
        for shaper in self._techniques.shapers:
            shaped = shaper.shape(batch, signals)
            require_finite(batch, advantage=shaped.advantage)
            batch = replace(batch, advantage=torch.where(batch.trained, shaped.advantage, 0.0))
            exempt = batch.placed.trained if batch.placed else nowhere
            factor = factor * (shaped.keep | exempt)
        metrics.tokens.add_shaped(batch, dropped=(old.correction.factor != 0) & (factor == 0))
        return batch, factor

    def with_placed(self, batch: Batch, old: OldScores, metrics: StepMetrics) -> OldScores:
        """Return `old` with old log-probabilities and weights for the placed text that has a loss.

        Placed text was not sampled in its context (`objective.placed`). If the token veto drops a
        sequence, it also drops the sequence's placed text.
        """
        placed = batch.placed
        if placed is None or not placed.trained.any():
            return old
        cap = self._rules.objective.placed_cap or torch.inf
        if self._rules.objective.placed == "guided":
            scores = guided(batch, placed, self._old, self._rules)
        else:
            scored = self._score(self._policy, batch, placed.trained)
            metrics.score_tokens += scored.forward_tokens
            log_gamma = torch.zeros(batch.num_sequences)
            scores = PlacedScores(scored.logp, torch.ones_like(scored.logp), log_gamma)
        gamma = corrections.bounded_exp(scores.log_gamma)
        values = scores.old_logp.where(placed.trained, old.old_logp)
        require_finite(batch, old_logp=values)
        vetoed = batch.sequence[self._rules.vetoed(old.old_logp, batch)]
        kept = placed.trained & (scores.factor > 0) & ~torch.isin(batch.sequence, vetoed)
        weight = scores.factor.where(placed.trained, old.correction.weight)
        rows = batch.sequences_with(placed.trained)
        metrics.add_placed(kept, scores.log_gamma[rows], gamma[rows] > cap)
        gamma[rows] = gamma[rows].clamp(max=cap)
        weight = weight * gamma[batch.sequence].to(weight.dtype)
        correction = replace(old.correction, weight=weight, keep=old.correction.keep | kept)
        return replace(old, old_logp=values, correction=correction)

    def offer(self, batch: Batch, index: Tensor, old: OldScores) -> None:
        """Pass a batch and its `old_logp` to the techniques that store groups for replay.

        `old` has the values of the tokens at `index`. A value that is not exact is replaced by
        `behavior_logp`.
        """
        if not self._techniques.sources:
            return
        known = torch.zeros_like(batch.sampled)
        values = batch.behavior_logp.to(old.old_logp.dtype, copy=True)
        if len(old.old_logp):
            known[index] = old.exact & batch.sampled[index]
            values[index] = torch.where(old.exact, old.old_logp, values[index])
        lag = torch.where(batch.sampled, self._policy.lag(batch.version), -1)
        self._techniques.prepared(replace(batch, stored=StoredLogps(values, known)), lag)

    def hidden_states(self, batch: Batch, query: StatesQuery) -> HiddenStates:
        """Return the hidden states of a batch, under the current weights, that `query` asks for."""
        found = self._policy.hidden_means(
            batch,
            last_tokens(batch, query.tokens),
            depth=query.depth,
            temperature=self._temperature,
            max_tokens_per_microbatch=self._max_tokens,
        )
        prompt, reply = found.means.float().unbind(1)
        return HiddenStates(
            prompt=prompt,
            reply=reply,
            entropy=statistics(found.entropy, batch).float(),
            forward_tokens=found.forward_tokens,
        )

    def _ask_route(self, batch: Batch, logp: Tensor) -> tuple[Tensor, Tensor]:
        """Return the old log-probabilities of a batch and a mask of exact ones, `[T]` each.

        The route computes them, except for replayed tokens, which were trained on in an earlier
        batch. Their values are stored in the batch.
        """
        if batch.stored is None:
            return self._old.logps(batch, logp)
        old_logp, exact = batch.stored.old_logp, batch.stored.exact
        fresh, index = batch.select_fresh()
        if not fresh.num_sequences:
            return old_logp, exact
        values, are_exact = self._old.logps(fresh, select(logp, index))
        old_logp = old_logp.to(values.dtype).index_put((index,), values)
        return old_logp, exact.index_put((index,), are_exact)

    def _score(
        self,
        policy: Policy,
        batch: Batch,
        where: Tensor | None = None,
        *,
        with_entropy: bool = False,
    ) -> Scored:
        return policy.score(
            batch,
            batch.sampled if where is None else where,
            temperature=self._temperature,
            max_tokens_per_microbatch=self._max_tokens,
            with_entropy=with_entropy,
        )


def select(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]`, or `values` if it is empty (the values are unknown)."""
    return values[index] if len(values) else values


def require_finite(batch: Batch, **logps: Tensor) -> None:
    """Raise NonFinite, with the episode and the token, if a log-probability is not finite.

    `logps` are tensors `[T]` by the name in the message. Only tokens with a loss are checked.
    """
    episode = torch.tensor(batch.episodes)[batch.sequence]
    corrections.check_finite(logps, batch.trained, sequence=episode, version=batch.version)
