"""`beta_sampler`: the next task is one whose success rate is likely to be in the middle.

Each task of the pool has a Beta distribution of its success rate. For each candidate a rate p is
drawn from it (Thompson sampling), and the task with the largest p^solved (1 - p)^failed is next.
With the exponents `solved` = `failed` = 1, the score is largest at p = 1/2, and with 1 and 2 at p =
1/3. From VADE (the score as others describe it). With `read` = mean, `pick` = proportional and
exponents of 0.5, tasks are drawn with weights sqrt(p (1 - p)), as in MSSR (built on SPO, arXiv
2509.13232).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

from unstale.config.checks import NonNegative, Section
from unstale.config.techniques import Entry
from unstale.research.techniques.success import SuccessShare, SuccessTracker, VisitOptions
from unstale.techniques.hooks import Draw, DrawContext, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaSamplerConfig(Section, VisitOptions, SuccessShare):
    """The next task is one whose success rate is likely to be in the middle (VADE, MSSR)."""

    solved: NonNegative = 1.0
    """Exponent of p, the task's success rate, in the score p^solved (1 - p)^failed of a task."""
    failed: NonNegative = 2.0
    """Exponent of 1 - p in the score p^solved (1 - p)^failed of a task. A larger one favours harder
    tasks.
    """
    read: Literal["thompson", "mean"] = "thompson"
    """The success rate p in a task's score: a draw from the task's Beta distribution (`thompson`),
    or the mean of this distribution.
    """
    pick: Literal["best", "proportional"] = "best"
    """The next task: the candidate with the largest score, or a draw with the scores as weights."""


class BetaSampler:
    """A technique that draws tasks by a Beta distribution of each task's success rate."""

    def __init__(self, options: BetaSamplerConfig) -> None:
        self._options = options
        self._tracker = SuccessTracker(
            "beta_sampler",
            prior=options.prior,
            decay=options.decay,
            keep=options.keep,
            discount_prior=options.discount_prior,
            success_at=options.success_at,
        )

    def draw(self, tasks: Sequence[str], context: DrawContext) -> Draw:
        scores = [self.score(task, context.random) for task in tasks]
        if self._options.pick == "best" or not any(scores):
            return Draw(tasks[scores.index(max(scores))])
        return Draw(context.random.choices(tasks, weights=scores)[0])

    def score(self, task: str, random: Random) -> float:
        """Return the score of a task, p^solved (1 - p)^failed. The next task is chosen by its
        score.

        p is the task's expected success rate, or with `read = thompson` a draw from its
        distribution.
        """
        counts = self._tracker.counts(task)
        thompson = self._options.read == "thompson"
        p = random.betavariate(counts.a, counts.b) if thompson else counts.mean
        return float(p**self._options.solved * (1 - p) ** self._options.failed)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._tracker.observe(outcomes)

    def state(self) -> Mapping[str, Any]:
        return self._tracker.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._tracker.restore(state)


def _describe(options: BetaSamplerConfig) -> str:
    rate = "drawn from its Beta distribution" if options.read == "thompson" else "its mean"
    choice = "the largest" if options.pick == "best" else "a probability proportional to its"
    return (
        f"the next task is one with {choice} p^{options.solved:g} (1 - p)^{options.failed:g}, "
        f"where p is the success rate, {rate}; the objective is the expectation over these tasks"
    )


_MEASURED = """
A bandit with 64 tasks whose success rates drift, groups of 4, results known 2 steps later (20
seeds, steps 21 to 40; the standard error is at most 0.013). `tests/techniques/test_beta_sampler.py`
repeats two rows.

| tasks | groups with equal rewards |
|---|---|
| drawn uniformly | 0.54 |
| solved 1, failed 1 | 0.34 |
| solved 1, failed 2 (the default) | 0.38 |
| solved 1, failed 2, decay 1 | 0.35 |
| solved 1, failed 2, decay 0.9 | 0.46 |
| sqrt(p (1 - p)) as weights, of the mean (MSSR) | 0.50 |

It has not been measured on the desks.
"""

ENTRY = Entry(
    name="beta_sampler",
    slot="sampler",
    rows=(8, 53),
    makes=BetaSampler,
    options=BetaSamplerConfig,
    changes=frozenset({"tasks"}),
    describe=_describe,
    use="Many groups have equal rewards, because their tasks are too easy or too hard, and tasks "
    "can come several times. If each task is seen once or twice, there is nothing to learn from.",
    measured=_MEASURED,
    exactness="The objective becomes the expectation over the tasks that are drawn, not over the "
    "pool; no weight corrects it. D and S do not change. The decay per batch and its value are "
    "our own reading.",
    requires=frozenset({"pool"}),
    evidence="notes",
)
