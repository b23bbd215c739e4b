"""One recipe per route: the same task at a staleness that hurts, and only the route differs."""

from dataclasses import replace
from typing import Any

from unstale.config import (
    AuditConfig,
    CorrectionConfig,
    EngineConfig,
    EvalConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.envs.retail import RetailConfig


def _stale_retail(old_logps: OldLogpsConfig, changes: dict[str, Any], **needed: Any) -> RunConfig:
    """The retail desk with tokens up to 6 versions old; `needed` is what the route cannot do without."""
    config = RunConfig(
        recipe=f"route_{old_logps.route}",
        steps=80,
        task=RetailConfig(level="1", latency_s=0.6),
        schedule=ScheduleConfig(max_staleness=6, groups_per_step=8, group_size=8),
        engine=EngineConfig(max_running=400, max_context=512),
        trainer=TrainerConfig(lr=5e-4, lr_schedule="constant", warmup_steps=5),
        audit=AuditConfig(share=0.05),
        eval=EvalConfig(tasks=256, every=20),
        old_logps=old_logps,
    )
    return replace(config, **needed | changes)


def route_rollout(**changes: Any) -> RunConfig:
    """Stale retail, no correction: the engine's log-probability is the anchor, and D is left out, being 1."""
    return _stale_retail(
        OldLogpsConfig(route="rollout"), changes, correction=CorrectionConfig(control="none")
    )


def route_current_recompute(**changes: Any) -> RunConfig:
    """Stale retail, anchored on the weights of the moment: a baseline, whose S is 1 and whose clip never acts."""
    return _stale_retail(OldLogpsConfig(route="current_recompute", baseline=True), changes)


def route_snapshot_old(**changes: Any) -> RunConfig:
    """Stale retail with exact old logits from kept versions."""
    return _stale_retail(OldLogpsConfig(route="snapshot_old"), changes)


def route_old_logit_model(**changes: Any) -> RunConfig:
    """Stale retail with exact old logits from a second model that follows the engine."""
    return _stale_retail(OldLogpsConfig(route="old_logit_model"), changes)


def route_interrupt_sync(**changes: Any) -> RunConfig:
    """Stale retail with exact old logits, scored while generation stands still."""
    return _stale_retail(OldLogpsConfig(route="interrupt_sync"), changes)


def route_eager(**changes: Any) -> RunConfig:
    """Stale retail with exact old logits, scored while the trainer waits; kept versions answer for the rest."""
    return _stale_retail(OldLogpsConfig(route="eager", fallback="snapshot_old"), changes)


def route_interp_prox_loglinear(**changes: Any) -> RunConfig:
    """Stale retail with a log-linear proxy between engine and trainer."""
    return _stale_retail(OldLogpsConfig(route="interp_prox_loglinear"), changes)


def route_interp_prox_linear(**changes: Any) -> RunConfig:
    """Stale retail with a linear proxy between engine and trainer."""
    return _stale_retail(OldLogpsConfig(route="interp_prox_linear"), changes)


def route_ewma_prox(**changes: Any) -> RunConfig:
    """Stale retail with a moving average of the weights, 3 versions old, as proxy."""
    return _stale_retail(OldLogpsConfig(route="ewma_prox", beta=0.75), changes)


def route_ppo_ewma_async(**changes: Any) -> RunConfig:
    """Stale retail with a moving average as proxy whose age follows the staleness of the data."""
    return _stale_retail(OldLogpsConfig(route="ppo_ewma_async"), changes)


RECIPES = (
    route_rollout,
    route_current_recompute,
    route_snapshot_old,
    route_old_logit_model,
    route_interrupt_sync,
    route_eager,
    route_interp_prox_loglinear,
    route_interp_prox_linear,
    route_ewma_prox,
    route_ppo_ewma_async,
)
