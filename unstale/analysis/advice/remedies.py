"""Options and commands that the advice on a run suggests.

Options are suggested only if the linter accepts the run with them.
"""

import math
import shlex
from collections.abc import Mapping
from typing import Any

from unstale.analysis.advice.evidence import Evidence, with_route
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.lint import check
from unstale.lint.finding import Fix, as_options, use_route
from unstale.observe.words import amount

OTHERS = {
    "old_logit_model": "needs a second process and no trainer time",
    "interrupt_sync": "needs no memory, but pauses generation",
}
"""Routes that compute exact `old_logp` -> their cost in words. A run with another route does not
measure these costs, so no time is predicted.
"""


MOST_TIMES = 10.0
"""Largest number of steps of a suggested run, as a multiple of the steps of the advised run. Ten
times as many steps make a confidence interval a third as wide.
"""


def band_options(low: float, high: float) -> Fix:
    """Return the options that limit D (pi_old / mu) to [`low`, `high`] in the correction, rounded
    by `outwards`.
    """
    low, high = outwards(low, high)
    return {"correction.low": low, "correction.high": high}


def outwards(low: float, high: float) -> tuple[float, float]:
    """Round the range from `low` to `high`, which contains 1, so that it becomes wider.

    Two significant digits are kept: of the distance of an end from 1, or of the end itself if that
    is smaller. So a very narrow range stays narrow.

    >>> outwards(0.99998, 1.00002003), outwards(0.0334, 29.9)
    ((0.99998, 1.000021), (0.033, 30.0))
    """

    def rounded(value: float, up: bool) -> float:
        size = min(value, abs(value - 1))
        digits = 1 - math.floor(math.log10(size)) if size > 0 else 0
        scaled = value * 10**digits
        scaled = math.ceil(scaled - 1e-6) if up else math.floor(scaled + 1e-6)
        return float(f"{scaled / 10**digits:.15g}")

    return rounded(low, up=False), rounded(high, up=True)


def select_route(config: RunConfig, route: str) -> Fix:
    """Return the options that select `route`, a way to get `old_logp`, with the mode of correction
    that it needs.
    """
    changed = with_route(config, route).correction
    fix = use_route(config, route)
    if changed.mode != config.correction.mode:
        fix = {**fix, "correction.mode": changed.mode}
    return fix


def accepted(config: RunConfig, fix: Fix) -> Fix:
    """Return the options `fix` if the linter accepts the run with them. Otherwise return {}."""
    try:
        refused = check(override(config, fix)).refusals
    except ConfigError:
        return {}
    return {} if refused else fix


def accepted_quietly(config: RunConfig, fix: Fix) -> Fix:
    """Return the options `fix` if the linter accepts the run with them, without a warning that
    `config` does not give. Otherwise return {}.
    """
    if not accepted(config, fix):
        return {}
    old, new = (check(each).warnings for each in (config, override(config, fix)))
    return {} if {each.wrong for each in new} - {each.wrong for each in old} else fix


def cheapest_exact(evidence: Evidence) -> tuple[Fix, str]:
    """Return the options of the route that computes exact `old_logp` at the least cost, and a
    reason.

    `eager` computes it while the trainer waits for episodes, so the wait must be long enough.
    Otherwise `snapshot_old` is chosen, which needs no process and does not pause generation. The
    options are empty if the run's own `old_logp` is exact and `eager` would not cost less.
    """
    config = evidence.config
    scoring, wait = evidence.get("scoring_s"), evidence.get("wait_s")
    if scoring is None or wait is None:
        return accepted(config, select_route(config, "snapshot_old")), ""
    cost = f"To score a batch exactly takes about {amount(scoring)} s"
    if wait >= scoring and config.old_logps.route != "eager":
        options = accepted(config, select_route(config, "eager"))
        if options:
            waiting = f"the trainer waits {amount(wait)} s for episodes"
            return options, f"{cost}, and {waiting}: `eager` scores in that time"
    others = "; ".join(
        f"`{name}` {words}" for name, words in OTHERS.items() if name != config.old_logps.route
    )
    if config.old_logps.exact:
        return {}, f"Of the other exact routes, {others}"
    options = accepted(config, select_route(config, "snapshot_old"))
    return options, f"{cost} with `snapshot_old`. Of the other exact routes, {others}"


def repeat_with_audit(evidence: Evidence) -> str:
    """Return a command that repeats the run for 12 steps with an audit of its `old_logp`."""
    return _again(evidence, {"max_steps": 12, "audit.share": 0.5})


def repeat_longer(evidence: Evidence, name: str, limit: float) -> str:
    """Return a command that repeats the run with more steps.

    The number of steps is chosen so that the confidence interval of the figure `name` excludes
    `limit`, but is at most `MOST_TIMES` the run's. The interval narrows with the square root of the
    steps.
    """
    share, low, high = (evidence.get(f"{name}{end}") or 0.0 for end in ("", "_low", "_high"))
    gap = max(abs(share - limit), 1e-9)
    times = min(MOST_TIMES, max(2.0, ((high - low) / 2 / gap) ** 2))
    values: dict[str, Any] = {"max_steps": math.ceil(times * (evidence.get("steps") or 1))}
    if not evidence.config.old_logps.exact:
        values["audit.share"] = 0.5
    return _again(evidence, values)


def _again(evidence: Evidence, values: Mapping[str, Any]) -> str:
    """Return a command that trains again with the options `values`, no time limit and no
    evaluations.
    """
    name = f"{evidence.config.name or evidence.run}-advise"
    options = as_options({**values, "minutes": 0.0, "eval.tasks": 0, "name": name})
    return f"unstale train {shlex.quote(f'{evidence.folder}/config.json')} {options}"
