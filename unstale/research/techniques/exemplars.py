"""`exemplars`: solved tasks in the prompts of further attempts at a task that always failed.

A group begins with plain attempts, whose prompt has no examples. If all of them failed, `number`
more have the `examples` most similar solved tasks of the run at the end of their prompt, each with
its replies. Similar tasks have many words in common. If a plain attempt succeeded, or no task was
solved yet, these attempts are plain, too.

For training, the examples are removed from the prompt. The attempt's replies are then REWRITTEN
text, which was sampled in another context. With `keep`, the examples stay. The baseline of an
attempt is the mean reward of the other plain attempts. From XRPO; `novelty` and `allocate` have its
other parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from statistics import fmean
from typing import TYPE_CHECKING, Any

from unstale.config.checks import Count, PositiveInt, Section
from unstale.config.techniques import Entry, refuse_slots, require_value
from unstale.records import Failure, Fork, Group, ScoredTrajectory, Trajectory, replies
from unstale.research.techniques.hints import check_number, complete_number
from unstale.research.techniques.retry import REFUSED
from unstale.research.techniques.tree import check_sequences, refuse_kept_sets
from unstale.rewriting import replace_prompt
from unstale.techniques.hooks import CreditContext, Outcome, Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig

EXAMPLES = "Similar tasks were solved as follows."
MAX_CHARACTERS = 2000
"""Largest number of characters of an example's task, and of its replies. Of longer texts, the end
is used.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExemplarsConfig(Section):
    """Solved tasks in the prompts of tasks that always failed (XRPO)."""

    number: Count = 0
    """Number of episodes of a group that may have examples; 0 is half of `schedule.group_size`."""
    examples: PositiveInt = 2
    """Number of solved tasks in a prompt."""
    size: PositiveInt = 256
    """Largest number of solved tasks that are stored. The oldest are removed."""
    keep: bool = False
    """Keep the examples in the prompt for training. The policy then learns to use examples."""


class Exemplars:
    """A technique that shows examples of solved tasks where all plain attempts failed."""

    def __init__(self, options: ExemplarsConfig) -> None:
        """Create the technique. `options.number` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self._store: dict[str, tuple[str, str]] = {}
        """Words and replies of solved tasks, by the task's identity. The newest are last."""
        self._prepared: dict[str, tuple[str, str]] = {}

    def roots(self, group_size: int) -> int:
        return max(1, group_size - self._options.number)

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork | None]:
        plain = [each for each in rounds[0] if isinstance(each, Trajectory)]
        if len(rounds) > 1 or not plain:
            return ()
        note = "" if any(each.success for each in plain) else self._note(plain[0], texts)
        fork = Fork(plain[0].episode, 0, note=note) if note else None
        return [fork] * self._options.number

    def _note(self, attempt: Trajectory, texts: Texts) -> str:
        """Return the solved tasks most similar to an attempt's task, as a text. Empty if there are
        none.
        """
        words = texts.words(attempt)
        wanted = set(words.split())

        def likeness(example: tuple[str, str]) -> float:
            found = set(example[0].split())
            return len(found & wanted) / max(1, len(found | wanted))

        others = [each for each in self._store.values() if each[0] != words]
        best = nlargest(self._options.examples, others[::-1], key=likeness)  # or else the newest
        return "\n\n".join([EXAMPLES, *map("\n".join, best)]) if best else ""

    def estimate(self, groups: Sequence[Group], context: CreditContext) -> list[ScoredTrajectory]:
        scored: list[ScoredTrajectory] = []
        seeded: list[float] = []
        for group in groups:
            plain = [each for each in group.finished if each.fork is None]
            for each in group.trajectories:
                others = [other.reward for other in plain if other is not each]
                advantage = each.reward - fmean(others) if others else 0.0
                shown = each if self._options.keep else _without_note(each, plain)
                scored.append(ScoredTrajectory(shown, (advantage,)))
                scored += [ScoredTrajectory(branch, (advantage,)) for branch in each.branches]
                if each.fork:
                    seeded.append(float(each.success))
            self._prepare(group, plain, context)
        rates = [
            float(each.success) for group in groups for each in group.finished if not each.fork
        ]
        context.metrics["exemplars/episode_share"] = len(seeded) / max(1, len(scored))
        context.metrics["exemplars/success_share"] = fmean(seeded) if seeded else 0.0
        context.metrics["exemplars/plain_success_share"] = fmean(rates) if rates else 0.0
        context.metrics["exemplars/stored"] = len(self._store)
        return scored

    def _prepare(self, group: Group, plain: Sequence[Trajectory], context: CreditContext) -> None:
        """Prepare the example that `observe` will store: the shortest success of `plain`, if any.

        `plain` are the attempts whose prompt had no examples.
        """
        solved = [each for each in plain if each.success]
        texts = context.texts
        if not solved or texts is None:
            return
        best = min(solved, key=len)
        said = "\n".join(texts.text(tokens) for _, tokens in replies(best.pieces))
        example = (texts.words(best)[-MAX_CHARACTERS:], said[-MAX_CHARACTERS:])
        self._prepared[context.identify(group.task)] = example

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if example := self._prepared.pop(outcome.task, None):
                self._store.pop(outcome.task, None)
                self._store[outcome.task] = example
        for task in list(self._store)[: -self._options.size]:
            del self._store[task]

    def state(self) -> dict[str, Any]:
        return {"tasks": [[task, *example] for task, example in self._store.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._store = {task: (words, said) for task, words, said in state["tasks"]}


def _without_note(episode: Trajectory, plain: Sequence[Trajectory]) -> Trajectory:
    """Return an episode with the prompt of a plain one, if its own prompt had examples."""
    if episode.fork is None:
        return episode
    prompt = plain[0].pieces[0].tokens
    return replace(episode, pieces=replace_prompt(episode.pieces, prompt))


def _check(options: ExemplarsConfig, config: RunConfig) -> None:
    check_number("exemplars", options.number, config)
    reason = "otherwise the attempts with examples have no loss. Or set exemplars.keep"
    if not options.keep:
        allowed = ["guided", "anchor"]
        require_value("exemplars", "objective.placed", config.objective.placed, allowed, reason)
        refuse_kept_sets("exemplars", config)
    others = {slot: reason for slot, reason in REFUSED.items() if slot != "allocator"}
    refuse_slots("exemplars", others, config)
    check_sequences(config, "exemplars")


def _describe(options: ExemplarsConfig) -> str:
    kept = "stay" if options.keep else "are removed before training"
    return (
        f"{options.number} episodes of a group have {options.examples} solved tasks in their "
        f"prompt if all others failed; the examples {kept}"
    )


_MEASURED = """
A choice of two answers, of which the right one has probability 0.02, and 0.6 with examples. The
mean gradient of `guided` over the attempts with examples is the exact one within three standard
errors; that of `anchor` is 30 times as long. In 300 steps of 8 groups the success without examples
rises above 0.99 with `anchor`, and above 0.5 with `guided` (`tests/techniques/test_exemplars.py`).
It has not been measured on the desks.
"""

ENTRY = Entry(
    name="exemplars",
    slot="strategy",
    rows=(7,),
    makes=Exemplars,
    options=ExemplarsConfig,
    changes=frozenset({"count", "advantage", "objective"}),
    describe=_describe,
    requires=frozenset({"siblings", "rewards"}),
    check=_check,
    complete=complete_number,
    use="Many tasks always fail, others are solved, and the policy can learn from examples in its "
    "prompt. `allocate` then adds plain episodes, by the rewards of plain ones. "
    "`exemplars/plain_success_share` is the success without examples.",
    measured=_MEASURED,
    exactness="With `objective.placed guided` the attempts with examples estimate the gradient of "
    "the plain prompt (docs/placed.md): the baseline has only other episodes, and whether there "
    "are examples depends on other episodes only. With anchor they are weighted imitation, with "
    "`keep` the gradient of success with examples. Similarity by words, the shortest success as "
    "the example and the baseline are our own reading.",
    evidence="notes",
)
