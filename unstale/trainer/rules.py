"""Build the learning rules of a configuration: advantages, the correction and the objective."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from unstale.algorithms import corrections, objectives
from unstale.algorithms.advantages import ESTIMATORS
from unstale.algorithms.corrections import CONTROLS, Control
from unstale.algorithms.objectives import OBJECTIVES, Surrogate
from unstale.config import AdvantageConfig, CorrectionConfig, ObjectiveConfig, Unit
from unstale.records import Batch, Group, ScoredTrajectory
from unstale.trainer.records import Correction, Objective


def build_advantage(config: AdvantageConfig) -> Callable[[Sequence[Group]], list[ScoredTrajectory]]:
    """Return the advantage estimator, a function of the groups of one batch."""
    return partial(ESTIMATORS[config.estimator], **config.selected_options())


def build_correction(config: CorrectionConfig) -> Correction:
    """Return the correction of D: the token veto, then the control on the aggregated ratio."""
    apply_control = partial(CONTROLS[config.control], **config.selected_options())

    def correct(old_logp: Tensor, batch: Batch) -> Control:
        log_d = corrections.log_discrepancy(old_logp, batch.behavior_logp, sampled=batch.sampled)
        control = corrections.keep_all(batch.sampled)
        if config.token_veto_threshold:
            control = corrections.veto(
                log_d, control, sequence=batch.sequence, below=config.token_veto_threshold
            )
        unit_log_d = corrections.aggregate(
            log_d, _unit_ids(config.unit, batch), sampled=batch.sampled, how=config.aggregate
        )
        return apply_control(unit_log_d, control)

    return correct


def build_objective(config: ObjectiveConfig) -> Objective:
    """Return the objective: the loss of S, its denominator, and KL and entropy coefficients."""
    spec = OBJECTIVES[config.kind]
    of_ratio = partial(spec.surrogate, **config.selected_options())
    unit: Unit = "sequence" if spec.per_sequence else config.unit
    how = "mean" if spec.per_sequence else config.aggregate

    def surrogate(logp: Tensor, old_logp: Tensor, batch: Batch) -> Surrogate:
        ids = _unit_ids(unit, batch)
        log_s = corrections.log_staleness(logp, old_logp, unit=ids, sampled=batch.sampled, how=how)
        return of_ratio(log_s, batch.advantage)

    def norm(sampled: Tensor, keep: Tensor, sequence: Tensor) -> Tensor:
        return objectives.token_norm(
            sampled, keep, sequence=sequence, how=config.loss_aggregation, constant=config.constant
        )

    trains_zero_advantage = (
        spec.trains_zero_advantage
        or config.loss_aggregation == "kept"
        or config.kl_coef > 0
        or config.entropy_coef > 0
    )
    return Objective(
        surrogate=surrogate,
        norm=norm,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
        idle_at_zero=not trains_zero_advantage,
    )


def _unit_ids(unit: Unit, batch: Batch) -> Tensor:
    return corrections.unit_ids(
        unit, sequence=batch.sequence, turn=batch.turn, version=batch.version, sampled=batch.sampled
    )
