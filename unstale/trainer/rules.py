"""The run's correction and objective, as functions of log-probabilities.

The trainer calls these functions in every step. The dashboard calls them on recorded tokens with
other options, so this module needs no model.
"""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from unstale.algorithms import corrections, objectives
from unstale.algorithms.corrections import CorrectionWeights
from unstale.algorithms.objectives import Surrogate
from unstale.config import CorrectionConfig, ObjectiveConfig, Unit
from unstale.config.declared import choices
from unstale.records import Batch
from unstale.techniques.hooks import NO_TECHNIQUES, Techniques


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The run's correction and objective, as functions of log-probabilities `[T]`.

    The correction acts on D = pi_old / mu, the ratio of trainer to engine. The objective acts on S
    = pi / pi_old, the ratio of the current to the old policy. Techniques may replace the second
    ratio and the objective.
    """

    correction: CorrectionConfig
    objective: ObjectiveConfig
    techniques: Techniques = NO_TECHNIQUES

    def correct(self, old_logp: Tensor, batch: Batch) -> CorrectionWeights:
        """Return the correction's weight of each token.

        First the token veto drops sequences in which a token's ratio D = pi_old / mu is below
        `correction.token_veto_threshold`. Then `correction.mode` drops or weights tokens by D,
        which may be aggregated over several tokens.
        """
        config = self.correction
        whole = self.whole(batch)
        log_d = corrections.log_discrepancy(old_logp, whole.behavior_logp, sampled=whole.sampled)
        correction = self._veto(log_d, batch)
        over_unit = partial(
            corrections.aggregate,
            unit=_unit_ids(config.unit, whole, whole.sampled),
            sampled=whole.sampled,
            how=config.aggregate,
        )
        divergences = {
            name: over_unit(divergence(log_d, whole.behavior_logp))
            for name, divergence in corrections.DIVERGENCES.items()
            if name in choices("corrections", "mode")[config.mode]
        }
        apply_mode = corrections.MODES[config.mode]
        options = config.selected_options()
        return apply_mode(over_unit(log_d), correction, **divergences, **options)

    def vetoed(self, old_logp: Tensor, batch: Batch) -> Tensor:
        """Return a mask `[T]` of the sampled tokens in sequences that the token veto drops."""
        whole = self.whole(batch)
        log_d = corrections.log_discrepancy(old_logp, whole.behavior_logp, sampled=whole.sampled)
        return batch.sampled & ~self._veto(log_d, batch).keep

    def _veto(self, log_d: Tensor, batch: Batch) -> CorrectionWeights:
        correction = corrections.keep_all(batch.sampled)
        below = self.correction.token_veto_threshold
        if not below:
            return correction
        return corrections.veto(log_d, correction, sequence=batch.sequence, below=below)

    def surrogate(self, logp: Tensor, old_logp: Tensor, batch: Batch) -> Surrogate:
        """Return the objective's loss of each token, as a function of the ratio S = pi / pi_old.

        The correction's weights are not applied. The ratio may be aggregated over several tokens.
        """
        config = self.objective
        batch = self.whole(batch)
        if self.techniques.ratio:
            log_s = self.techniques.ratio.log_ratio(logp, old_logp, batch)
        else:
            log_s = corrections.log_staleness(
                logp,
                old_logp,
                unit=_unit_ids(config.ratio_unit, batch, batch.trained),
                sampled=batch.trained,
                how=config.ratio_aggregate,
            )
        found = self._surrogate(log_s, old_logp, batch)
        if not config.opsm_threshold:
            return found
        return objectives.mask_sequences(
            found,
            logp,
            batch.behavior_logp,
            batch.advantage,
            sequence=batch.sequence,
            sampled=batch.sampled,
            threshold=config.opsm_threshold,
        )

    def _surrogate(self, log_s: Tensor, old_logp: Tensor, batch: Batch) -> Surrogate:
        config = self.objective
        if self.techniques.objective:
            return self.techniques.objective.surrogate(log_s, batch, config)
        known = {"old_logp": old_logp, "sequence": batch.sequence, "sampled": batch.trained}
        inputs = {name: known[name] for name in config.inputs}
        return config.surrogate(log_s, batch.advantage, **inputs)

    def cap(self, factor: Tensor, logp: Tensor, batch: Batch) -> Tensor:
        """Return the weights `factor` `[T]`, lowered where pi / mu exceeds `objective.ratio_cap`.

        pi is the current policy, with the log-probabilities `logp`, and mu the engine's.
        """
        high = self.objective.ratio_cap
        if not high:
            return factor
        return factor * corrections.cap_ratio(
            logp, batch.behavior_logp, sampled=batch.sampled, high=high
        )

    def norm(self, batch: Batch, keep: Tensor) -> Tensor:
        """Return the factor on each token's loss, `[T]`: 1 / the loss's divisor.

        `batch` has the step's sequences. `keep` `[T]` is False for tokens that the correction
        dropped.
        """
        return objectives.token_norm(
            batch.trained,
            keep,
            sequence=batch.sequence,
            how=self.objective.loss_aggregation,
            constant=self.objective.constant,
        )

    def divisor(self, batch: Batch, keep: Tensor) -> int:
        """Return what a batch contributes to the divisor of the loss, such as its number of tokens.

        The result of `norm` times this number does not depend on the other sequences of the step.
        `keep` `[T]` is False for tokens that the correction dropped.
        """
        return objectives.loss_divisor(
            batch.trained, keep, sequence=batch.sequence, how=self.objective.loss_aggregation
        )

    @property
    def uses_sequences(self) -> bool:
        """True if the loss needs whole sequences, with tokens that other episodes sampled.

        This is so for ratios over several tokens, for example.
        """
        correction, objective = self.correction, self.objective
        return bool(
            correction.token_veto_threshold
            or correction.unit != "token"
            or objective.ratio_unit != "token"
            or "sequence" in objective.inputs
            or objective.opsm_threshold
            or self.techniques.ratio
            or self.techniques.controllers
        )

    def whole(self, batch: Batch) -> Batch:
        """Return the batch with whole sequences if `uses_sequences`, otherwise the batch unchanged.

        A forked episode shares tokens with the episode from which it was forked. In whole sequences
        these tokens are marked as sampled.
        """
        return batch.whole_sequences() if self.uses_sequences else batch

    def scored(self, batch: Batch) -> Tensor:
        """Return a mask `[T]` of the tokens whose log-probability the loss needs."""
        return batch.trained | self.whole(batch).sampled

    @property
    def trains_zero_advantage(self) -> bool:
        """True if a token with advantage 0 can have a gradient under the configured objective."""
        config = self.objective
        return (
            config.trains_zero_advantage
            or config.loss_aggregation == "kept"
            or config.kl_coef > 0
            or config.entropy_coef > 0
            or self.techniques.distiller is not None
        )


def _unit_ids(unit: Unit, batch: Batch, where: Tensor) -> Tensor | None:
    """Return the number of each token's unit, `[T]`. None if each token is a unit of its own.

    A unit is what a ratio is aggregated over, such as a turn or a sequence.
    """
    if unit == "token":
        return None
    return corrections.unit_ids(
        unit, sequence=batch.sequence, turn=batch.turn, version=batch.version, sampled=where
    )
