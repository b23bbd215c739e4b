"""`search`: a group is a search tree whose nodes are whole answers, by several roles of the policy.

A group begins with `first` answers. Each further node is a new answer to the task, or improves an
earlier answer: then its prompt ends with that answer and the request of a role. Thompson sampling
chooses: at each node, from the root on, each answer below it and each role that could improve it
draws a success rate from a Beta posterior of the rewards so far, and the largest draw is followed.

The reward of an improvement is r + gamma (r - b), b = (1 - mix) r_parent + mix r_siblings. r_parent
is the reward of the answer that it improves, and r_siblings the mean reward of the other
improvements of that answer. From MARS^2, whose agents are several policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, Count, NonNegative, PositiveInt, Section, Share
from unstale.config.techniques import Entry, refuse_slots
from unstale.records import Failure, Fork, Group, Trajectory, replies
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import CreditContext, Texts

if TYPE_CHECKING:
    from unstale.config import RunConfig

EARLIER = """

An earlier answer was:
{answer}

{request}"""
CHARACTERS = 2000
"""Largest number of characters of an earlier answer in a prompt. Of a longer one,
the end is used.
"""
REFUSED = {
    "allocator": "which chooses the number of episodes of a group, too",
    "distiller": "whose teacher scores sampled tokens only",
    "filter": "which may leave out an answer that others improve",
    "source": "which stores single episodes",
}
"""Reasons why techniques of some slots (kinds of techniques) cannot be used with a search, by
slot.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig(Section):
    """Groups that are search trees over whole answers (MARS^2)."""

    first: PositiveInt = 2
    """Number of answers with which a group begins."""
    number: Count = 0
    """Number of answers that are added to the first ones; 0 is the rest of
    `schedule.group_size`.
    """
    at_once: PositiveInt = 2
    """Number of nodes that are chosen from the same results, and run concurrently."""
    roles: str = "Check it step by step and correct it.|Solve the task in another way."
    """The requests with which the roles ask for an improvement, separated by `|`."""
    gamma: NonNegative = 0.5
    """Weight gamma of r - b in the reward of an improvement: its reward r minus that of its parent
    and siblings.
    """
    mix: Share = 0.5
    """Weight of the siblings' mean reward in b, to which the reward of an improvement is compared.
    The parent's reward has the rest.
    """

    @property
    def requests(self) -> list[str]:
        return [each.strip() for each in self.roles.split("|") if each.strip()]


class Search:
    """A technique that lets roles of the policy improve answers chosen by Thompson sampling."""

    def __init__(self, options: SearchConfig) -> None:
        """Create the technique. `options.number` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options

    def roots(self, group_size: int) -> int:
        return self._options.first

    async def forks(
        self, rounds: Sequence[Sequence[Trajectory | Failure]], texts: Texts
    ) -> Sequence[Fork | None]:
        results = [each for results in rounds for each in results]
        nodes = [each for each in results if isinstance(each, Trajectory)]
        begun = len(results) - self._options.first
        number = min(self._options.at_once, self._options.number - begun)
        if number <= 0 or not nodes:
            return ()
        random = Random(derive_seed(nodes[0].seed, "search", begun))
        return [self._draw(nodes, texts, random) for _ in range(number)]

    def _draw(self, nodes: Sequence[Trajectory], texts: Texts, random: Random) -> Fork | None:
        """Return a fork in which a role improves an answer, or None for a new
        answer to the task.
        """
        requests = self._options.requests
        node: Trajectory | None = None
        while True:
            below = [each for each in nodes if _parent(each) == (node.episode if node else None)]
            arms: list[tuple[float, int, Trajectory | None]] = [
                (_sample(_rewards(each, nodes), random), -1, each) for each in below
            ]
            for role in range(len(requests)) if node else (-1,):
                rewards = [each.reward for each in nodes if role_of(each, requests) == role]
                arms.append((_sample(rewards, random), role, None))
            _, role, chosen = max(arms, key=lambda arm: arm[0])
            if chosen is None:
                return _improvement(node, requests[role], texts) if node else None
            node = chosen

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        changed = []
        for group in groups:
            new = self._improved(group.trajectories)
            changed.append(replace(group, trajectories=tuple(new)))
        improved = [each for group in groups for each in group.trajectories if each.fork]
        parents = {each.episode: each for group in groups for each in group.finished}
        gains = [
            each.reward - parents[each.fork.parent].reward
            for each in improved
            if each.fork and each.fork.parent in parents
        ]
        context.metrics["search/improvement_mean"] = fmean(gains) if gains else 0.0
        context.metrics["search/best_mean"] = _mean_best(groups)
        return changed

    def _improved(self, nodes: Sequence[Trajectory]) -> list[Trajectory]:
        by_episode = {each.episode: each for each in nodes}
        found = []
        for each in nodes:
            parent = by_episode.get(each.fork.parent) if each.fork else None
            if parent is not None:
                beside = [
                    other.reward
                    for other in nodes
                    if _parent(other) == parent.episode and other is not each
                ]
                mix = self._options.mix if beside else 0.0
                base = (1 - mix) * parent.reward + mix * (fmean(beside) if beside else 0.0)
                more = self._options.gamma * (each.reward - base)
                each = each.with_rewards({**each.rewards, "search": more}, {})
            found.append(each)
        return found


def role_of(node: Trajectory, requests: Sequence[str]) -> int:
    """Return the index of the role whose request ends the prompt of an answer. -1 if there is
    none.
    """
    note = node.fork.note if node.fork else ""
    return next((i for i, request in enumerate(requests) if note.endswith(request)), -1)


def _improvement(node: Trajectory, request: str, texts: Texts) -> Fork:
    said = replies(node.pieces)
    answer = texts.text(said[-1][1]).strip()[-CHARACTERS:] if said else ""
    return Fork(node.episode, 0, note=EARLIER.format(answer=answer, request=request))


def _parent(node: Trajectory) -> int | None:
    return node.fork.parent if node.fork else None


def _rewards(node: Trajectory, nodes: Sequence[Trajectory]) -> list[float]:
    """Return the rewards of an answer and of all answers below it in the tree."""
    below = [each for each in nodes if _parent(each) == node.episode]
    return [node.reward, *(reward for each in below for reward in _rewards(each, nodes))]


def _sample(rewards: Sequence[float], random: Random) -> float:
    """Return a draw from the Beta posterior of a success rate. Rewards count between 0 and 1."""
    total = sum(min(1.0, max(0.0, each)) for each in rewards)
    return random.betavariate(1 + total, 1 + len(rewards) - total)


def _mean_best(groups: Sequence[Group]) -> float:
    best = [max(each.reward for each in group.finished) for group in groups if group.finished]
    return fmean(best) if best else 0.0


def _check(options: SearchConfig, config: RunConfig) -> None:
    size = config.schedule.group_size
    if options.first + max(1, options.number) > size:
        raise ConfigError(
            f"search.first + search.number must be at most schedule.group_size ({size}), got "
            f"{options.first} and {options.number}"
        )
    if not options.requests:
        raise ConfigError("search.roles must have a request, such as 'Check it.', got none")
    refuse_slots("search", REFUSED, config)


def _complete(options: SearchConfig, config: RunConfig) -> SearchConfig:
    rest = config.schedule.group_size - options.first
    return replace(options, number=options.number or rest)


def _describe(options: SearchConfig) -> str:
    return (
        f"a group begins with {options.first} answers; the others are new ones or improve an "
        f"earlier one, as one of {len(options.requests)} roles, where Thompson sampling draws it"
    )


_MEASURED = """
A lock with 8 positions and 4 words, where an improvement keeps the right positions of an answer and
draws the others anew (`tests/techniques/test_search.py`): the mean best share of right positions in
groups of 8 is 0.67 with a search and 0.48 with 8 independent answers. An improvement by a
small policy may be none: `search/improvement_mean` shows it. It has not been measured on the desks.
"""

ENTRY = Entry(
    name="search",
    slot="strategy",
    rows=(56,),
    makes=Search,
    options=SearchConfig,
    changes=frozenset({"count", "reward"}),
    describe=_describe,
    requires=frozenset({"siblings", "rewards"}),
    check=_check,
    complete=_complete,
    use="Answers can be improved by reading them, and rewards say which to improve.",
    measured=_MEASURED,
    exactness="Every episode has the prompt in which it was sampled, so D and S do not change. The "
    "objective does: improvements count in it, with the reward of their advance, and which answers "
    "they improve depends on the rewards before. The roles are of one policy; the paper trains "
    "several.",
    evidence="abstract",
)
