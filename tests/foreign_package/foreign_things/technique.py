"""`gentle`: a lower learning rate.

The learning rate is multiplied by a constant factor. This shows what a technique declares.
"""

from dataclasses import dataclass

from unstale.config.checks import Section, Share
from unstale.config.techniques import Entry
from unstale.techniques.hooks import StepPlan, StepSeen


@dataclass(frozen=True, slots=True, kw_only=True)
class GentleConfig(Section):
    """A lower learning rate."""

    factor: Share = 0.5
    """The factor of the learning rate."""


class Gentle:
    """A controller that lowers the learning rate."""

    def __init__(self, options: GentleConfig) -> None:
        self.factor = options.factor

    def plan(self, seen: StepSeen) -> StepPlan:
        return StepPlan(lr_factor=self.factor, metrics={"gentle/factor": self.factor})


ENTRY = Entry(
    name="gentle",
    slot="controller",
    makes=Gentle,
    options=GentleConfig,
    changes=frozenset({"step"}),
    describe=lambda options: f"the learning rate times {options.factor:g}",
    use="Never.",
    measured="Nothing.",
    exactness="The size of a step changes, not its direction.",
)
