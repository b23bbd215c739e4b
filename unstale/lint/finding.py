"""The problems that the linter finds, and the changes of options that remove them."""

import shlex
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from unstale.config import ConfigError, RunConfig
from unstale.config.options import override, section_of
from unstale.config.routes import routes

Fix = Mapping[str, Any]
"""A change of options that removes a problem: new values by the full name of the option."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of a configuration: an option that is wrong or has no effect."""

    wrong: str
    why: str
    fixes: tuple[Fix, ...]
    """Changes of options, each of which removes the problem, best first."""

    @property
    def fix(self) -> str:
        """`fixes` as options of the command line, separated by `, or`."""
        return ", or ".join(map(as_options, self.fixes))

    def __str__(self) -> str:
        return f"{self.wrong}: {self.why}. Fix: {self.fix}"


Rule = Callable[[RunConfig], Finding | None]


def find(
    config: RunConfig, refusals: Collection[Rule], warnings: Collection[Rule]
) -> dict[Rule, Finding]:
    """Return the problems that `refusals` and `warnings` find in a configuration, by rule.

    Each problem has only fixes that work: they give a valid configuration without the problem. Of
    these, only the fixes that make the fewest other `refusals` fire are kept. Those that cause new
    warnings come last.
    """
    found = {rule: finding for rule in (*refusals, *warnings) if (finding := rule(config))}
    severe = [rule for rule in refusals if rule not in found]
    mild = [rule for rule in warnings if rule not in found]
    tested = {}
    for rule, finding in found.items():
        working: list[tuple[tuple[int, int], Fix]] = []
        for fix in (_complete(config, each) for each in finding.fixes):
            changed = _apply(config, fix)
            if changed and not rule(changed):
                side_effects = tuple(sum(map(_fires(changed), rules)) for rules in (severe, mild))
                working.append(((side_effects[0], side_effects[1]), fix))
        working.sort(key=lambda each: each[0])
        fewest = working[0][0][0] if working else 0
        fixes = tuple(fix for (refused, _), fix in working if refused == fewest)
        tested[rule] = replace(finding, fixes=fixes)
    return tested


def use_route(config: RunConfig, route: str) -> Fix:
    """Return the change of options that selects a route, a method to get old log-probabilities.

    It also resets `old_logps.beta`, and other options that this route does not have.
    """
    defaults = {field.name: field.default for field in fields(config.old_logps)}
    reset = {f"old_logps.{name}": defaults[name] for name in config.old_logps.changed()}
    shared = {f"old_logps.{field.name}" for field in fields(routes()[route])} - {"old_logps.beta"}
    return {
        **{name: value for name, value in reset.items() if name not in shared},
        "old_logps.route": route,
    }


def _complete(config: RunConfig, fix: Fix) -> Fix:
    """Return the fix with further changes: options that it makes unused are set to their
    defaults.
    """
    resets = {}
    for name, choice in fix.items():
        section, _, option = name.partition(".")
        options = section_of(config, section if option else "")
        if options is None:  # of a technique that is not chosen
            continue
        if option != options.selector or section == "old_logps":
            continue
        for field in fields(options):
            readers = options.readers(field.name)
            is_default = getattr(options, field.name) == field.default
            if readers and choice not in readers and not is_default:
                resets[f"{section}.{field.name}"] = field.default
    return {**resets, **fix}


def _apply(config: RunConfig, fix: Fix) -> RunConfig | None:
    """Return the configuration with a fix applied. None if the result is not valid."""
    try:
        return override(config, fix)
    except ConfigError:
        return None


def _fires(config: RunConfig) -> Callable[[Rule], bool]:
    return lambda rule: rule(config) is not None


def as_options(fix: Fix) -> str:
    """Return a fix as options of the command line.

    >>> as_options({"trainer.lr": 3e-4, "old_logps.baseline": True})
    '--trainer.lr 0.0003 --old_logps.baseline true'
    >>> as_options({"engine.args": ""})
    "--engine.args ''"
    """
    return " ".join(f"--{name} {_word(value)}" for name, value in fix.items())


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float):
        return f"{value!r}".removesuffix(".0")
    return shlex.quote(str(value))
