"""`majority`: the answer that most episodes of a group give takes the place of a label.

The reward of an episode is 1 if its answer is the most frequent one of its group, else 0. Groups
whose most frequent answer has less than the share `least` of the votes get 0 for all episodes, so
they are not trained on. Forked episodes share one vote: at each fork, the vote is divided equally
among the branches. The rewards of the environment are not used, and techniques that would use them
are refused. From TTRL (arXiv 2504.16084), where `least` is 0, and ETTRL (arXiv 2508.11356).

With `selection.test_time` the tasks are the held-out tasks themselves: test-time training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, Section, Share
from unstale.config.techniques import Entry, chosen
from unstale.records import Group
from unstale.research.techniques.tree_advantage import leaf_weights
from unstale.techniques.hooks import CreditContext, EpisodeBudgeter, Observer

if TYPE_CHECKING:
    from unstale.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MajorityConfig(Section):
    """The answer that most episodes of a group give, as a label (TTRL)."""

    least: Share = 0.5
    """Smallest share of the votes with which the most frequent answer becomes the label."""


class Majority:
    """A technique that rewards the answer that most episodes of a group give."""

    def __init__(self, options: MajorityConfig) -> None:
        self._options = options

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        graded: list[Group] = []
        shares: list[float] = []
        right: list[float] = []
        num_answers: list[int] = []
        for group in groups:
            answers = {each.episode: context.answer(each) for each in group.trajectories}
            label, share = _elect(answers, leaf_weights(group), Random(group.number))
            shares.append(share)
            num_answers.append(len({answer for answer in answers.values() if answer}))
            if label:
                of_label = (each for each in group.trajectories if answers[each.episode] == label)
                right.append(fmean(each.success for each in of_label))
            graded.append(_rewarded(group, answers, label if share >= self._options.least else ""))
        context.metrics.update(
            {
                "majority/share_mean": fmean(shares),
                "majority/used_share": fmean(share >= self._options.least for share in shares),
                "majority/one_answer_share": fmean(number == 1 for number in num_answers),
                "majority/label_success_mean": fmean(right) if right else 0.0,
            }
        )
        return graded


def _elect(
    answers: Mapping[int, str], weights: Mapping[int, float], random: Random
) -> tuple[str, float]:
    """Return the answer with the most votes, and its share of the votes of all episodes.

    Ties are broken at random. `answers` has the answer of each episode, "" for none, and `weights`
    the episode's vote. If no episode has an answer, the result is ("", 0).
    """
    votes: dict[str, float] = {}
    for episode, answer in answers.items():
        if answer and weights[episode]:
            votes[answer] = votes.get(answer, 0.0) + weights[episode]
    if not votes:
        return "", 0.0
    most = max(votes.values())
    winner = random.choice(sorted(answer for answer, count in votes.items() if count > most - 1e-9))
    return winner, votes[winner] / sum(weights[episode] for episode in answers)


def _rewarded(group: Group, answers: Mapping[int, str], label: str) -> Group:
    """Return the group with the reward 1 for episodes whose answer is the label, and 0 for others.

    Later techniques see the episodes with reward 1 as successes.
    """
    return replace(
        group,
        trajectories=tuple(
            each.with_rewards(
                {"majority": float(bool(label) and answers[each.episode] == label)},
                {"success": float(bool(label) and answers[each.episode] == label)},
            )
            for each in group.trajectories
        ),
    )


def _check(options: MajorityConfig, config: RunConfig) -> None:
    """Raise `ConfigError` if a technique or option uses rewards that depend on the true labels."""
    entries = chosen(config.techniques)
    for entry in entries:
        if _uses_labels(entry, config):
            raise ConfigError(
                f"the technique majority cannot be used with {entry.name}, which uses the "
                "environment's rewards, so labels: remove one of them from --techniques"
            )
    if config.schedule.resampled_groups:
        raise ConfigError(
            "schedule.resampled_groups must be 0 with the technique majority, got "
            f"{config.schedule.resampled_groups}: the environment's rewards, so labels, would "
            "choose the groups"
        )
    names = [entry.name for entry in entries if entry.slot == "reward"]
    if names[0] != "majority":
        raise ConfigError(
            f"the technique majority must come before {names[0]}, whose reward it would replace: "
            f"set --techniques 'majority {' '.join(each for each in names if each != 'majority')}'"
        )


def _uses_labels(entry: Entry, config: RunConfig) -> bool:
    """Return True if a technique uses rewards of the environment before `majority`
    replaces them.
    """
    if entry.slot in ("sampler", "allocator", "source") or "rewards" in entry.requires:
        return True
    made = entry.makes(entry.complete(config.technique_options[entry.name], config))
    knows_rewards = entry.slot != "controller" and not isinstance(made, EpisodeBudgeter)
    return isinstance(made, Observer) and knows_rewards


def _describe(options: MajorityConfig) -> str:
    return (
        "the reward is 1 for the most frequent answer of a group, if it has "
        f"{options.least:.0%} of the votes, and 0 for others; the environment's reward is not used"
    )


_MEASURED = """
60 tasks with 6 answers each, groups of 16, 100 steps (`tests/techniques/test_majority.py`). The
likeliest answer of the first policy is right on 48% of the tasks, which limits what its votes can
teach. The mean success, and two shares at the end:

| | at first | at the end | tasks below 0.01 | groups with one answer |
|---|---|---|---|---|
| labels | 0.31 | 1.00 | 0% | |
| `least` 0, as in TTRL | 0.31 | 0.42 | 58% | 97% |
| `least` 0.5 (the default) | 0.31 | 0.47 | 53% | 97% |

**The policy collapses**: on every task it ends with one answer, right or wrong, and its entropy
falls from 1.5 nats to 0.02. A wrong majority makes a task worse for good: later steps do not repair
it. `majority/share_mean` and `majority/one_answer_share` rise all the same, so they are no sign of
success. In a study on SmolLM2 they rose in all three runs, while one run lost most of its success,
and the others gained none ([study](../benchmarks/results/recipes-study.md)).
"""

ENTRY = Entry(
    name="majority",
    slot="reward",
    rows=(5, 43),
    makes=Majority,
    options=MajorityConfig,
    changes=frozenset({"reward"}),
    describe=_describe,
    requires=frozenset({"siblings"}),
    task_methods=lambda options: ("answer_of",),
    by_group=lambda options: True,
    check=_check,
    without_labels=True,
    use="Tasks have no labels, and the policy is right more often than any other answer is given. "
    "With `selection.test_time`, on the very tasks that count.",
    measured=_MEASURED,
    exactness="The objective is agreement with the group, not the expected reward: the vote of an "
    "episode counts for its own label, which biases the gradient towards the policy's own answers. "
    "D and S do not change. `least` is our own reading.",
    evidence="notes",
)
