"""Compare the options of a stored run with their defaults, and write them as text."""

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from unstale.config import ConfigError, OldLogpsConfig, RunConfig, make_task
from unstale.config.routes import routes
from unstale.config.techniques import techniques
from unstale.durability.run_folder import plain
from unstale.observe.run_rows import flatten


def changed_options(options: Mapping[str, Any]) -> set[str]:
    """Return the names of the options that differ from their defaults.

    `options` has the values of a run's `config.json` by full name. Options of the run's route,
    environment and techniques have their own defaults. Unknown options are left out.

    >>> sorted(changed_options({"seed": 0, "old_logps.route": "ewma_prox", "old_logps.beta": 0.5}))
    ['old_logps.beta', 'old_logps.route']
    """
    defaults = {**_of_sections(options), **_of_every_run()}
    return {name for name, value in options.items() if name in defaults and defaults[name] != value}


@cache
def _of_every_run() -> dict[str, Any]:
    """Return the defaults of the options that every run has.

    Options that only the default environment or the default way to get `old_logp` has are left out,
    except `old_logps.route` and `task.env`.
    """
    known = flatten(plain(RunConfig(recipe="")))
    own = {**_of_section("old_logps", OldLogpsConfig()), **_of_section("task", make_task())}
    return {
        name: value
        for name, value in known.items()
        if name not in own or name in ("old_logps.route", "task.env")
    }


def _of_sections(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the options of a run's route (way to get `old_logp`), environment and
    techniques.
    """
    found: dict[str, Any] = {}
    route, env = (str(options.get(name)) for name in ("old_logps.route", "task.env"))
    if route in routes():
        found |= _of_section("old_logps", OldLogpsConfig(route=route))
    with suppress(ConfigError):  # an environment that this version does not have
        found |= _of_section("task", make_task(env))
    for name in str(options.get("techniques")).split():
        if entry := techniques().get(name):
            found |= _of_section(name, entry.options())
    return found


def _of_section(name: str, section: Any) -> dict[str, Any]:
    return flatten({name: plain(section)})


def written(value: Any) -> str:
    """Return the value of an option as text, from which a number can be read without a loss.

    >>> written(8.0), written(1e-06), written(0.123456789), written(None)
    ('8', '1e-06', '0.123456789', 'None')
    """
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
