"""The options of a run that differ from their defaults, and option values as text."""

from functools import cache
from typing import Any

from unstale.config import RunConfig
from unstale.config.options import options, section_of


def changed_options(config: RunConfig) -> set[str]:
    """Return the names of the options that differ from their defaults.

    Options of the run's route, objective, environment and techniques have their own defaults.

    >>> from unstale.config import OldLogpsConfig
    >>> old = OldLogpsConfig(route="ewma_prox", beta=0.5)
    >>> sorted(changed_options(RunConfig(recipe="", old_logps=old)))
    ['old_logps.beta', 'old_logps.route']
    """
    return {
        name
        for name, option in options().items()
        if option.is_in(config)
        and option.of(config) != _default(config, option.section, option.field)
    }


def _default(config: RunConfig, section: str, field: str) -> Any:
    own, usual = section_of(config, section), section_of(_usual(), section)
    if type(own) is type(usual) or field in ("route", "loss_type", "env"):
        return getattr(usual, field)
    return own.defaults()[field]


@cache
def _usual() -> RunConfig:
    return RunConfig(recipe="")


def written(value: Any) -> str:
    """Return the value of an option as text, from which a number can be read without a loss.

    >>> written(8.0), written(1e-06), written(0.123456789), written(None)
    ('8', '1e-06', '0.123456789', 'None')
    """
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
