"""The reach of a clip: the value of pi / mu at which it clips the tokens with the largest lag.

Some routes leave a part of the staleness in D = pi_old / mu. Then a clip on S = pi / pi_old acts
only at a larger pi / mu. Numerical differences of engine and trainer are ignored.
"""

from unstale.config import ConfigError, RunConfig
from unstale.lint.finding import Fix
from unstale.objectives.clips import ClippedObjective


def equal_reach(config: RunConfig, reference: RunConfig) -> Fix:
    """Return options with which the clip of `config` acts at the same pi / mu as that of
    `reference`.

    All staleness of `reference` must be in S, so its clip is on pi / mu. If the route of `config`
    leaves a part of the staleness in D, its clip becomes narrower, and limits on D that would act
    before the clip become wider. If all of it is in D, the limits on D become those of the clip,
    which then acts only on changes between the minibatches of a batch. Raises `ConfigError` if
    `reference` has no such clip, or if the part in D is not known before a run.
    """
    rule = reference.objective
    if not isinstance(rule, ClippedObjective):
        raise ConfigError(
            f"the objective {rule.loss_type} of the reference has no clip; equal reach needs one, "
            "such as ppo_clip"
        )
    ends = low, high = rule.low, rule.high
    if not all_in_s(reference):
        raise ConfigError(
            f"the route {reference.old_logps.route} leaves staleness in D, so its clip is not on "
            "pi / mu; equal reach needs a reference such as snapshot_old"
        )
    if all_in_d(config):
        return {
            "correction.low": low,
            "correction.high": high,
            "correction.unit": rule.unit,
            "correction.aggregate": rule.aggregate,
        }
    s_low, s_high = (config.old_logps.s_of(end, config) for end in ends)
    if (s_low, s_high) == ends:
        if not all_in_s(config):
            raise ConfigError(
                f"{config.old_logps.route} leaves a part of the staleness in D that is not known "
                'before a run, so its reach cannot be made equal; leave out `reach = "equal"`'
            )
        return {"objective.clip_low": rule.clip_low, "objective.clip_high": rule.clip_high}
    band = {
        "low": min(config.correction.low, low / s_low),
        "high": max(config.correction.high, high / s_high),
    }
    return {
        "objective.clip_low": 1 - s_low,
        "objective.clip_high": s_high - 1,
        **{
            f"correction.{name}": limit
            for name, limit in band.items()
            if config.correction.applies(name)
        },
    }


def all_in_s(config: RunConfig) -> bool:
    """Return True if S has all staleness, because the old policy is the one that sampled the
    token.
    """
    old = config.old_logps
    return old.exact or old.weight_of_now(config) == 0


def all_in_d(config: RunConfig) -> bool:
    """Return True if D has all staleness, because the old policy is the one at the start of the
    step.
    """
    return config.old_logps.weight_of_now(config) == 1
