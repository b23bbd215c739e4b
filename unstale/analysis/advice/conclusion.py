"""A conclusion about a run, and the type of the rules that draw one."""

from collections.abc import Callable
from dataclasses import dataclass, field

from unstale.analysis.advice.evidence import Evidence
from unstale.lint.finding import Fix


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """One sentence of advice on a run, with its reason and the figures that show it."""

    name: str
    text: str
    reason: str
    figures: tuple[str, ...] = ()
    """Names of figures of the run, keys of `Evidence.figures`, that show the conclusion."""
    options: Fix = field(default_factory=dict)
    """Options to set, by full name such as `old_logps.route`. Empty if there is nothing to change.
    """
    command: str = ""
    """A command that measures what the advice lacks. Empty if none is needed."""


Rule = Callable[[Evidence], Conclusion | None]
