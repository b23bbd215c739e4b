"""`search`: a group is a search tree whose nodes are whole answers, by several agents.

A group begins with `first` answers. Each further node is a new answer to the task, or improves an
earlier answer: then its prompt ends with that answer and the request of a role. Thompson sampling
chooses: at each node, from the root on, each answer below it and each agent with each role that
could improve it draw a success rate from a Beta posterior of the rewards so far, and the largest
draw is followed.

The reward of an improvement is r + gamma (r - b), b = (1 - mix) r_parent + mix r_siblings. These
are the reward of the answer that it improves, and the mean of the other improvements of that one.

Without `folder` the agents are the roles of one policy. With it, several policies share one tree
per task. Each is trained in a run of its own, with the same tasks and roles, and writes all its
answers there with their places and rewards. Every run draws from the whole tree, and makes an
answer only if the draw names its own policy: a draw for another policy is left to that one's run,
which draws from the same tree. So a better policy makes more of the answers. With P policies a
group ends after P `number` draws, or `number` answers. Parents and siblings by other policies count
in the reward as their runs wrote it; it is not verified again. A policy whose run has ended keeps
its share of the draws until its files are removed. From MARS^2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from math import isfinite
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, Any

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
OTHER = "\n\nAnother answer was:\n"
"""Beginnings of the note with an answer to improve: one of this group, or one of the folder."""
KEPT = 32
"""Number of answers, and of groups with their draws, that a run keeps in the folder for each task.
A newer one replaces an older one, whose improvements are then at the top of the tree.
"""
CHARACTERS = 2000
"""Largest number of characters of an earlier answer in a prompt. Of a longer one,
the end is used.
"""
REFUSED = {
    "allocator": "which chooses the number of episodes of a group, too",
    "distiller": "which is not built with it, because a teacher scores sampled tokens only",
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
    """The requests with which the roles ask for an improvement, separated by `|`. Runs that share a
    `folder` have the same ones.
    """
    gamma: NonNegative = 0.5
    """Weight gamma of r - b in the reward of an improvement. r is the reward of the improved
    answer, and b that of its parent and siblings.
    """
    mix: Share = 0.5
    """Weight of the other improvements in the baseline of an improvement's reward."""
    folder: str = ""
    """A directory that several runs with the same tasks share: one tree per task. Empty: none."""
    node: str = ""
    """Only with `folder`: the name of this run in the folder. No other run may have it."""

    def check_combination(self) -> None:
        check_node("search", self.folder, self.node)

    @property
    def requests(self) -> list[str]:
        return [each.strip() for each in self.roles.split("|") if each.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """An answer in a tree."""

    name: str
    """`AGENT.EPISODE`."""
    agent: str
    """The name of the run whose policy gave it."""
    role: int
    """Index of the request that it follows. -1 for an answer that improves none."""
    above: str
    """Name of the answer that it improves. Empty at the top of the tree."""
    reward: float
    """The reward before the one of `search`."""
    text: str = ""


Message = tuple[str, str, Mapping[str, Any]]
"""A message of the folder: its run, name and content."""


class Search:
    """A technique that lets agents improve answers chosen by Thompson sampling."""

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
        ended = [each for each in results if isinstance(each, Trajectory)]
        if not ended:
            return ()
        if not self._options.folder:
            return self._draws(ended, len(results) - self._options.first, [], texts)[0]
        task = self._identify(ended[0].task)
        messages = await in_thread(self._shared.read, task)
        # The folder has the draws of each round: others change the tree before a repeated call.
        slot, key = f"draws{ended[0].episode % KEPT}", _digest(results)
        drawn = _stored(messages, self._options.node, slot, ended[0].episode)
        if key not in drawn:
            spent = drawn.get(_digest(results[: -len(rounds[-1])]), {"spent": 0})["spent"]
            shared = self._read(messages, ended)
            starts, spent = self._draws(
                ended, len(results) - self._options.first, shared, texts, spent
            )
            written = [each and {"parent": each.parent, "note": each.note} for each in starts]
            drawn = {**drawn, key: {"spent": spent, "starts": written}}
            newest = {each.episode for each in rounds[-1] if isinstance(each, Trajectory)}
            nodes = self._nodes([each for each in ended if each.episode in newest], shared, texts)
            own = {str(int(each.name.partition(".")[2]) % KEPT): asdict(each) for each in nodes}
            draws = {slot: {"group": ended[0].episode, "draws": drawn}}
            await in_thread(self._shared.write, task, {**own, **draws})
        return [
            each and Fork(each["parent"], 0, note=each["note"]) for each in drawn[key]["starts"]
        ]

    def _draws(
        self,
        ended: Sequence[Trajectory],
        begun: int,
        shared: Sequence[Node],
        texts: Texts,
        spent: int = 0,
    ) -> tuple[list[Fork | None], int]:
        """Return the starts of the next round, and the number of draws of the group so far.

        `begun` answers were added to the first ones, by `spent` draws. A start is an answer and a
        role, or None for a new beginning.
        """
        own = self._nodes(ended, shared, texts)
        names = {each.name for each in (*own, *shared)}
        tree = [
            each if each.above in names else replace(each, above="") for each in (*own, *shared)
        ]
        agents = sorted({self._options.node, *(each.agent for each in shared)})
        number = min(self._options.at_once, self._options.number - begun)
        random = Random(derive_seed(ended[0].seed, f"search{self._options.node}", begun))
        starts: list[Fork | None] = []
        while len(starts) < number and spent < self._options.number * len(agents):
            spent += 1
            agent, role, place = self._draw(tree, agents, random)
            if agent == self._options.node:
                starts.append(self._start(role, place, own))
        return starts, spent

    def _draw(
        self, tree: Sequence[Node], agents: Sequence[str], random: Random
    ) -> tuple[str, int, Node | None]:
        """Return an agent, its role and the answer that it improves. None for a new beginning."""
        place: Node | None = None
        while True:
            below = [each for each in tree if each.above == (place.name if place else "")]
            arms: list[tuple[float, str, int, Node | None]] = [
                (_sample(_rewards(each, tree), random), each.agent, -1, each) for each in below
            ]
            for agent in agents:
                for role in range(len(self._options.requests)) if place else (-1,):
                    made = [
                        each.reward for each in tree if (each.agent, each.role) == (agent, role)
                    ]
                    arms.append((_sample(made, random), agent, role, None))
            _, agent, role, chosen = max(arms, key=lambda arm: arm[0])
            if chosen is None:
                return agent, role, place
            place = chosen

    def _start(self, role: int, place: Node | None, own: Sequence[Node]) -> Fork | None:
        if place is None:
            return None
        is_own = any(each.name == place.name for each in own)
        parent, beginning = (place, EARLIER) if is_own else (own[0], OTHER)
        note = f"{beginning}{place.text}\n\n{self._options.requests[role]}"
        return Fork(int(parent.name.rpartition(".")[2]), 0, note=note)

    def _read(self, messages: Sequence[Message], ended: Sequence[Trajectory]) -> list[Node]:
        """Return the answers in the folder, without those of this group."""
        group = {f"{self._options.node}.{each.episode}" for each in ended}
        roles = range(-1, len(self._options.requests))
        found = []
        for run, _, message in messages:
            match message:
                case {
                    "name": str(name),
                    "role": int(role),
                    "above": str(above),
                    "reward": int() | float() as reward,
                    "text": str(text),
                } if role in roles and isfinite(reward) and 0 < len(text) <= CHARACTERS:
                    node = Node(
                        name=name, agent=run, role=role, above=above, reward=reward, text=text
                    )
                    found += [node] if name not in group else []
        return found

    def _nodes(
        self, ended: Sequence[Trajectory], shared: Sequence[Node], texts: Texts | None = None
    ) -> list[Node]:
        """Return the answers of this group as nodes; without `texts`, their texts are empty."""
        return [
            Node(
                name=f"{self._options.node}.{each.episode}",
                agent=self._options.node,
                role=role_of(each, self._options.requests),
                above=self._above(each, shared),
                reward=each.reward,
                text=_answer(each, texts) if texts else "",
            )
            for each in ended
        ]

    def _above(self, answer: Trajectory, shared: Sequence[Node]) -> str:
        """Return the name of the answer that an answer improves. Empty for one that improves none.

        Of equal answers in the folder it is the first. For one that the folder has no more it is
        the text.
        """
        if answer.fork is None:
            return ""
        note = answer.fork.note
        if not note.startswith(OTHER):
            return f"{self._options.node}.{answer.fork.parent}"
        request = self._options.requests[role_of(answer, self._options.requests)]
        text = note.removeprefix(OTHER).removesuffix(f"\n\n{request}")
        return next((each.name for each in shared if each.text == text), text)

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        changed, gains, others, improved = [], list[float](), 0, 0
        for group in groups:
            messages = self._shared.read(self._identify(group.task)) if self._options.folder else []
            shared = self._read(messages, group.finished)
            tree = [*self._nodes(group.finished, shared), *shared]
            rewards = {each.name: each.reward for each in tree}
            foreign = {each.name for each in shared if each.agent != self._options.node}
            new = []
            for each, node in zip(group.trajectories, tree, strict=False):  # the tree is longer
                more = self._advance(node, tree, rewards)
                if more is not None:
                    each = each.with_rewards({**each.rewards, "search": more}, {})
                new.append(each)
                improved += bool(node.above)
                others += node.above in foreign
                gains += [node.reward - rewards[node.above]] if node.above in rewards else []
            changed.append(replace(group, trajectories=tuple(new)))
        context.metrics["search/improvement_mean"] = fmean(gains) if gains else 0.0
        context.metrics["search/best_mean"] = _mean_best(groups)
        if self._options.folder:
            context.metrics["search/other_share"] = others / max(1, improved)
            context.metrics["search/lost"] = self._shared.lost
        return changed

    def _advance(
        self, node: Node, tree: Sequence[Node], rewards: Mapping[str, float]
    ) -> float | None:
        """Return gamma (r - b) of an improvement. None if there is nothing to compare with."""
        beside = [
            each.reward for each in tree if each.above == node.above and each.name != node.name
        ]
        mix = self._options.mix if beside else 0.0
        if not node.above or (node.above not in rewards and not beside):
            return None
        mean = fmean(beside) if beside else 0.0
        base = (1 - mix) * rewards[node.above] + mix * mean if node.above in rewards else mean
        return self._options.gamma * (node.reward - base)


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


def _digest(results: Sequence[Trajectory | Failure]) -> str:
    said = [
        (each.episode, each.reward, each.tokens) if isinstance(each, Trajectory) else None
        for each in results
    ]
    return blake2b(repr(said).encode(), digest_size=8).hexdigest()


def _stored(messages: Sequence[Message], node: str, slot: str, group: int) -> dict[str, Any]:
    """Return the draws of a group of this run, by the digest of the results before them."""
    for run, name, message in messages:
        if (run, name, message.get("group")) == (node, slot, group):
            return dict(message["draws"])
    return {}


def _rewards(node: Node, tree: Sequence[Node]) -> list[float]:
    """Return the rewards of an answer and of all that improve it."""
    below = [each for each in tree if each.above == node.name]
    return [node.reward, *(reward for each in below for reward in _rewards(each, tree))]


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
the even positions and the other one the odd ones, the best of three groups is 0.52 in a common tree
(`folder`), and 0.44 apart, with 22 and 24 answers. Of a policy that always succeeds and one that
never does, the first makes at least 10 times as many of the drawn answers. It has not been measured
on the desks.
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
    "they improve depends on the rewards before. Rewards of other runs are not verified again, and "
    "a directory with the newest 32 answers of each run is our own reading of the common tree.",
    evidence="abstract",
)
