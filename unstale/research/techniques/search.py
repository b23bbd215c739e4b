"""`search`: a group is a search tree whose nodes are whole answers, by several roles of the policy.

A group begins with `first` answers. Each further node is a new answer to the task, or improves an
earlier answer: then its prompt ends with that answer and the request of a role. Thompson sampling
chooses: at each node, from the root on, each answer below it and each role that could improve it
draws a success rate from a Beta posterior of the rewards so far, and the largest draw is followed.

The reward of an improvement is r + gamma (r - b), b = (1 - mix) r_parent + mix r_siblings. These
are the reward of the answer that it improves, and the mean of the other improvements of that one.

Several policies share a tree by the directory `folder`. Each is trained in a run of its own with
the same tasks, and writes its best answer of each round there. The answers of the others are places
at the top of the tree, too. Their rewards are not read: what improvements of them are worth here
says where to go on, and r_parent is left out. From MARS^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, Count, NonNegative, PositiveInt, Section, Share
from unstale.config.techniques import Entry, refuse_slots
from unstale.records import Failure, Fork, Group, Task, Trajectory, replies
from unstale.research.techniques.shared_texts import SharedTexts, check_node
from unstale.rollout.seeds import derive_seed
from unstale.techniques.hooks import CreditContext, Texts
from unstale.threads import in_thread

if TYPE_CHECKING:
    from unstale.config import RunConfig

EARLIER = "\n\nAn earlier answer was:\n"
OTHER = "\n\nAnother agent's answer was:\n"
"""Beginnings of the note with an answer to improve: one of this run, or of another one."""
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
    """Weight of the other improvements in the reward to which an improvement is compared."""
    folder: str = ""
    """A directory that several runs with the same tasks share, for a common tree. Empty: none."""
    node: str = ""
    """Only with `folder`: the name of this run there, which no other run has."""

    def check_combination(self) -> None:
        check_node("search", self.folder, self.node)

    @property
    def requests(self) -> list[str]:
        return [each.strip() for each in self.roles.split("|") if each.strip()]


Place = int | str | None
"""A place in a tree: the number of an episode, an answer of another run, or None for the top."""


class Search:
    """A technique that lets roles of the policy improve answers chosen by Thompson sampling."""

    def __init__(self, options: SearchConfig) -> None:
        """Create the technique. `options.number` must be above 0: `Entry.complete` replaces a 0."""
        self._options = options
        self._shared = SharedTexts(options.folder, options.node)
        self._identify: Callable[[Task], str] = lambda task: task.key

    def name_tasks(self, identify: Callable[[Task], str]) -> None:
        self._identify = identify

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
        newest = [each for each in rounds[-1] if isinstance(each, Trajectory)]
        best = sorted(newest, key=lambda each: each.reward)[-1:]
        own = {each.episode: _answer(each, texts) for each in best}
        task = self._identify(nodes[0].task)
        folder = self._options.folder
        read = await in_thread(self._shared.exchange, task, own) if folder else []
        others = [*dict.fromkeys(each[-CHARACTERS:] for each in read)]
        random = Random(derive_seed(nodes[0].seed, "search", begun))
        return [self._draw(nodes, others, texts, random) for _ in range(number)]

    def _draw(
        self, nodes: Sequence[Trajectory], others: Sequence[str], texts: Texts, random: Random
    ) -> Fork | None:
        """Return the start of a new node: an answer and a role, or None for a new beginning.

        `others` are answers of other runs.
        """
        requests = self._options.requests
        place: Place = None
        while True:
            below: list[Place] = [each.episode for each in nodes if self._place(each) == place]
            below += others if place is None else ()
            arms = [(_sample(self._rewards(each, nodes), random), -1, each) for each in below]
            for role in (-1,) if place is None else range(len(requests)):
                rewards = [each.reward for each in nodes if role_of(each, requests) == role]
                arms.append((_sample(rewards, random), role, None))
            _, role, chosen = max(arms, key=lambda arm: arm[0])
            if chosen is not None:
                place = chosen
            elif isinstance(place, str):
                note = f"{OTHER}{place}\n\n{requests[role]}"
                return Fork(nodes[0].episode, 0, note=note)
            elif place is not None:
                node = next(each for each in nodes if each.episode == place)
                note = f"{EARLIER}{_answer(node, texts)}\n\n{requests[role]}"
                return Fork(place, 0, note=note)
            else:
                return None

    def _place(self, node: Trajectory) -> Place:
        """Return the answer that an answer improves. None for one that improves none."""
        note = node.fork.note if node.fork else ""
        if not note.startswith(OTHER):
            return node.fork.parent if node.fork else None
        role = role_of(node, self._options.requests)
        return note.removeprefix(OTHER).removesuffix(f"\n\n{self._options.requests[role]}")

    def _rewards(self, place: Place, nodes: Sequence[Trajectory]) -> list[float]:
        """Return the rewards of an answer of this run and of all that improve it, or only these."""
        own = [each.reward for each in nodes if each.episode == place]
        below = [each.episode for each in nodes if self._place(each) == place]
        return [*own, *(reward for each in below for reward in self._rewards(each, nodes))]

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        changed = []
        for group in groups:
            new = self._improved(group.trajectories)
            changed.append(replace(group, trajectories=tuple(new)))
        improved = [each for group in groups for each in group.trajectories if each.fork]
        of_others = sum(isinstance(self._place(each), str) for each in improved)
        rewards = {each.episode: each.reward for group in groups for each in group.finished}
        gains = [
            each.reward - rewards[place]
            for each in improved
            if isinstance(place := self._place(each), int) and place in rewards
        ]
        context.metrics["search/improvement_mean"] = fmean(gains) if gains else 0.0
        context.metrics["search/best_mean"] = _mean_best(groups)
        if self._options.folder:
            context.metrics["search/other_share"] = of_others / max(1, len(improved))
            context.metrics["search/lost"] = self._shared.lost
        return changed

    def _improved(self, nodes: Sequence[Trajectory]) -> list[Trajectory]:
        rewards = {each.episode: each.reward for each in nodes}
        places = {each.episode: self._place(each) for each in nodes}
        found = []
        for each in nodes:
            place = places[each.episode]
            beside = [
                rewards[other]
                for other in rewards
                if places[other] == place and other != each.episode
            ]
            compared: list[tuple[float, float]] = []
            if isinstance(place, int) and place in rewards:
                compared.append((1 - self._options.mix if beside else 1.0, rewards[place]))
            if beside and (compared or isinstance(place, str)):
                compared.append((self._options.mix if compared else 1.0, fmean(beside)))
            if compared:
                base = sum(weight * reward for weight, reward in compared)
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


def _answer(node: Trajectory, texts: Texts) -> str:
    """Return the end of an answer's last reply, as text."""
    said = replies(node.pieces)
    return texts.text(said[-1][1]).strip()[-CHARACTERS:] if said else ""


def _sample(rewards: Sequence[float], random: Random) -> float:
    """Return a draw from the Beta posterior of a success rate.

    Each reward, clipped to 0..1, counts as this part of a success.
    """
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
    if options.folder and config.deterministic:
        raise ConfigError(
            "deterministic must be false with search.folder: other runs decide what is read, so a "
            "resumed run may read other answers"
        )


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
small policy may be none: `search/improvement_mean` shows it. Of two policies, one of which repairs
the even positions and the other one the odd ones, the best of three groups is 0.60 in a common tree
(`folder`), and 0.44 apart. It has not been measured on the desks.
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
    "they improve depends on the rewards before. Rewards of other runs are not read, and a "
    "directory instead of one process is our own reading.",
    evidence="abstract",
)
