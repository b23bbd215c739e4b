"""A conclusion about a run, and the type of the rules that draw one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from unstale.analysis.advice.evidence import Evidence
from unstale.lint.finding import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """A sentence about a run, with its reason and the figures that show it."""

    name: str
    text: str
    reason: str
    figures: tuple[str, ...] = ()
    """Names of the figures in `Evidence` that show the conclusion."""
    options: Fix = field(default_factory=dict)
    """Options to set, by full name such as `old_logps.route`. Empty if there is nothing to change.
    """
    command: str = ""
    """A command that measures what this run did not measure. Empty if none is needed."""


Rule = Callable[[Evidence], Conclusion | None]
