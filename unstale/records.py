"""Records of episodes and batches: the data that the components of a run exchange.

    ContextPiece, Sampled, Placed -> Trajectory -> Group -> ScoredTrajectory -> Batch

An episode is a sequence of pieces. A piece is a run of tokens with one source and, if sampled, one
version of the weights. Records are immutable: each stage returns a new record with more data.
"""

import math
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from unstale.kept_sets import KeptSets, join
from unstale.pictures import Picture
from unstale.routed_experts import ExpertTable, RoutedExperts, link
from unstale.signals import Signals

if TYPE_CHECKING:  # environments and the command line import this module without loading torch
    from numpy.typing import NDArray
    from torch import Tensor

    from unstale.config.algorithm import PlacedMode


class Provenance(IntEnum):
    """The origin of a token. It decides whether the token can have an importance ratio."""

    ENVIRONMENT = 0
    """Text from the environment, such as a prompt, a tool's answer or a user's message."""
    SAMPLED = 1
    """Sampled by the engine in exactly the recorded context."""
    FORCED = 2
    """Text put into the policy's reply instead of being sampled, such as a hint."""
    REWRITTEN = 3
    """Sampled by the policy, but the context before it was edited afterwards."""
    FOREIGN = 4
    """Text that another policy wrote."""
    REPLAYED = 5
    """Sampled by the policy, already trained on, and trained on again."""
    SHARED = 6
    """Text of a reply in the episode from which this one was forked. Only the other episode has the
    token's `behavior_logp`, version and loss.
    """


HAS_BEHAVIOR = frozenset({Provenance.SAMPLED, Provenance.REPLAYED})
"""Origins of tokens that have a `behavior_logp`: an engine sampled them in the recorded context."""

NO_VERSION = -1
"""The version number of tokens that no engine sampled, such as those of a prompt."""

Stop = Literal["done", "cut_reply", "max_turns", "max_tokens", "invalid_format", "pruned"]
"""The reason for the end of an episode. `done`: the environment ended it. `cut_reply`: the
environment ended it after a reply that a token limit had cut. `max_turns`: a limit of replies or
tool calls. `max_tokens`: a limit of tokens. `invalid_format`: no reply had the format that the
agent requested. `pruned`: a technique ended it, before it could have a reward.
"""
ENDED_BY_ENVIRONMENT: frozenset[Stop] = frozenset({"done", "cut_reply"})
CUT_OFF: frozenset[Stop] = frozenset({"cut_reply", "max_turns", "max_tokens"})
"""Reasons for the end of episodes that a limit ended, or whose last reply a limit cut."""
CUT_REPLIES = "cut_replies"
"""Name of the fact (a number for metrics) with the count of an episode's replies that a token limit
cut. The fact is missing if there are none.
"""


SURVIVAL = "survival_weight"
"""Name of the fact with the weight of an episode that a technique might have ended early by a
random draw: 1 / its probability to continue, or 0 if it was ended. The fact is missing without a
draw.
"""


@dataclass(frozen=True, slots=True)
class ContextPiece:
    """A run of tokens that the policy did not sample, such as a prompt or a tool's answer."""

    tokens: tuple[int, ...]
    provenance: Provenance = Provenance.ENVIRONMENT
    pictures: tuple[Picture, ...] = ()
    """The different pictures among the tokens. A picture's number stands for each of its tokens."""

    def __post_init__(self) -> None:
        if self.provenance in HAS_BEHAVIOR:
            raise ValueError(
                f"a ContextPiece cannot be {self.provenance.name}; "
                "use Sampled, which has behavior_logp"
            )


@dataclass(frozen=True, slots=True)
class Sampled:
    """A run of tokens that one version of the weights sampled.

    `version` is that of the weights that the engine had loaded. `behavior_logp` has the
    log-probability, in nats, of each token in the distribution from which the engine sampled. If a
    weight update interrupts a reply, the reply has one such piece for each version. `clean` is
    False if the engine used keys and values that it had cached with older weights. Then no single
    version sampled the tokens.

    If they were recorded, `routed_experts` has the experts that an MoE model used for each token,
    and `signals` has figures of each token's distribution. `kept_sets` has the tokens among which
    each token was drawn, over which `behavior_logp` is normalised. None means the whole vocabulary.

    >>> Sampled((7, 9), (-0.1, -0.7), version=3).version
    3
    """

    tokens: tuple[int, ...]
    behavior_logp: tuple[float, ...]
    version: int
    clean: bool = True
    provenance: Provenance = Provenance.SAMPLED
    routed_experts: RoutedExperts | None = field(default=None, compare=False, repr=False)
    kept_sets: KeptSets | None = field(default=None, compare=False, repr=False)
    signals: Signals | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.behavior_logp):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.behavior_logp)} behavior_logp")
        if self.kept_sets is not None and len(self.kept_sets) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.kept_sets)} kept sets")
        if self.signals is not None and len(self.signals) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.signals)} signals")
        if self.version < 0:
            raise ValueError(f"version must be >= 0, got {self.version}")
        if self.provenance not in HAS_BEHAVIOR:
            raise ValueError(f"a Sampled piece cannot be {self.provenance.name}; use ContextPiece")

    def first(self, count: int) -> "Sampled":
        """Return a copy with only the first `count` tokens."""
        return replace(
            self,
            tokens=self.tokens[:count],
            behavior_logp=self.behavior_logp[:count],
            kept_sets=self.kept_sets.at(slice(count)) if self.kept_sets else None,
            signals=self.signals.at(slice(count)) if self.signals else None,
        )


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a text's context, made after the text was sampled.

    The text was sampled with `tokens` in place of the recorded tokens `start` to `stop`. All other
    tokens before the text are equal in both contexts.

    >>> Edit(1, 1, (8, 9)).undo((5, 6, 7))  # a hint after the first token was removed
    (5, 8, 9, 6, 7)
    """

    start: int
    stop: int
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"an edit needs 0 <= start <= stop, got {self.start} and {self.stop}")

    def undo(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the context in which text was sampled, given the recorded one."""
        return (*tokens[: self.start], *self.tokens, *tokens[self.stop :])

    @property
    def shift(self) -> int:
        """The position of a later token when it was sampled, minus its recorded position."""
        return len(self.tokens) - (self.stop - self.start)


PLACED = frozenset({Provenance.FORCED, Provenance.REWRITTEN, Provenance.FOREIGN})
"""Origins of text in a reply that the policy did not sample in the recorded context."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A run of tokens in a reply that the policy did not sample in the recorded context.

    The option `objective.placed` decides whether it has a loss. Text that must never have one is a
    `ContextPiece`. If the policy sampled the text but its context was edited since (origin
    REWRITTEN), `version` sampled it in the context that `edit.undo` restores, and `source_logp` has
    the log-probability of each token there, in nats. Of FOREIGN text `source_logp` may be known,
    under the policy that wrote it in the recorded context. `version` is then that of this run whose
    policy it is compared with. Other placed text has none of the three. See docs/placed.md.
    """

    tokens: tuple[int, ...]
    provenance: Provenance
    version: int = NO_VERSION
    source_logp: tuple[float, ...] | None = None
    edit: Edit | None = None

    def __post_init__(self) -> None:
        if self.provenance not in PLACED:
            names = ", ".join(each.name for each in sorted(PLACED))
            raise ValueError(f"a Placed piece must be {names}, got {self.provenance.name}")
        known = (self.version >= 0, self.source_logp is not None, self.edit is not None)
        rewritten = self.provenance == Provenance.REWRITTEN
        foreign = self.provenance == Provenance.FOREIGN and known == (True, True, False)
        if set(known) != {rewritten} and not foreign:
            raise ValueError(
                "a Placed piece needs version, source_logp and edit if it is REWRITTEN, version "
                "and source_logp or none of them if it is FOREIGN, and none otherwise; got "
                f"{self.provenance.name} with version {self.version}"
            )
        if self.source_logp is not None and len(self.source_logp) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.source_logp)} source_logp")


Piece = ContextPiece | Sampled | Placed


def is_reply(piece: Piece) -> bool:
    """Return True if a piece is part of a reply: sampled, placed, or shared with a parent."""
    return not isinstance(piece, ContextPiece) or piece.provenance == Provenance.SHARED


def first_tokens(pieces: Sequence[Piece], count: int) -> tuple[Piece, ...]:
    """Return the pieces (runs of tokens) with an episode's first `count` tokens.

    The last piece is cut there, unless it is placed text, which was not sampled.
    """
    taken: list[Piece] = []
    for piece in pieces:
        if count <= 0:
            break
        if isinstance(piece, Sampled):
            taken.append(piece.first(count))
        elif isinstance(piece, ContextPiece):
            taken.append(replace(piece, tokens=piece.tokens[:count]))
        else:
            taken.append(piece)
        count -= len(piece.tokens)
    return tuple(each for each in taken if each.tokens)


def link_experts(piece: Sampled, before: "Sequence[Piece]") -> Sampled:
    """Return a copy of `piece` whose routed experts include those of earlier pieces of its version.

    `before` are all earlier pieces (runs of tokens) of the episode. If none has routed experts,
    return `piece`.
    """
    earlier = next(
        (
            other.routed_experts
            for other in reversed(before)
            if isinstance(other, Sampled) and other.version == piece.version
        ),
        None,
    )
    if piece.routed_experts is None and earlier is None:
        return piece
    stop = sum(len(other.tokens) for other in before) + len(piece.tokens)
    return replace(piece, routed_experts=link(piece.routed_experts, earlier, stop=stop))


@dataclass(frozen=True, slots=True)
class Task:
    """The name of a task: environment, split and index, from which the environment creates it.

    >>> Task("retail", "train", 17).key
    'retail/train/17'
    """

    env: str
    split: str
    index: int

    @property
    def key(self) -> str:
        return f"{self.env}/{self.split}/{self.index}"


ROUNDED = 1e-9
"""Tolerance for comparing a reward with 1, because sums of decimals are rounded."""


def nearest_rank(count: int, share: float) -> int:
    """Return the index of the percentile `share` (0 to 1) among `count` sorted values.

    This is the nearest-rank method: at least this share of the values is less than or equal to the
    value at the index.

    >>> nearest_rank(4, 0.5), nearest_rank(64, 0.99), nearest_rank(100, 0.07), nearest_rank(1, 0.0)
    (1, 63, 6, 0)
    """
    return max(0, math.ceil(share * count - 1e-9) - 1)


def total_reward(rewards: Mapping[str, float]) -> float:
    """Return the sum of an episode's named rewards, rounded only once (`math.fsum`)."""
    try:
        return math.fsum(rewards.values())
    except OverflowError:  # the sum is infinite
        return float(sum(rewards.values()))


def is_success(rewards: Mapping[str, float], facts: Mapping[str, float]) -> bool:
    """Return True if an episode succeeded: its fact `success` is at least 1.

    If it has no such fact, its total reward must be at least 1.

    >>> is_success({"answer": 0.7, "form": 0.2, "length": 0.1}, {}), is_success({"a": 0.9}, {})
    (True, False)
    """
    return facts.get("success", total_reward(rewards)) >= 1 - ROUNDED


@dataclass(frozen=True, slots=True)
class Fork:
    """The relation of an episode to an earlier one of its group, from which it was mostly forked.

    The forked episode begins with the first `at` tokens of the episode `parent`. It continues with
    other random numbers. With a `note` it has its own beginning, and `at` is 0. With nothing but a
    parent, it is the same episode again (`repeats`).
    """

    parent: int
    """The number of the earlier episode in the run."""
    at: int
    """Number of tokens that both episodes have in common, prompts and answers included."""
    text: tuple[ContextPiece | Placed, ...] = ()
    """Text that follows the common tokens: placed text, which is not sampled, and the environment's
    answers to it. The environment must answer in the same way again. The last piece is placed text.
    """
    note: str = ""
    """Text at the end of this episode's prompt. Other episodes of the task do not have it."""
    writes: bool = False
    """True if the policy only writes a text about `parent`: the note is the whole prompt, and the
    reply ends the episode, without a reward. The text is one of `Group.texts`.
    """

    def __post_init__(self) -> None:
        if (self.note and (self.at or self.text)) or (self.writes and not self.note):
            raise ValueError("a fork with a note needs at = 0 and no text; a written text, a note")
        if self.text and not isinstance(self.text[-1], Placed):
            raise ValueError("the text of a fork must end with a Placed piece")

    @property
    def repeats(self) -> bool:
        """True if the episode has the random numbers of `parent`, by an engine without rounding."""
        return not (self.at or self.text or self.note)

    def prefix_of(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Return the beginning of the forked episode, given the pieces of its parent.

        It has the parent's first `at` tokens, with replies as SHARED context, and then `text`.
        Raises ValueError if the parent has fewer tokens.
        """
        taken: list[Piece] = []
        left = self.at
        for piece in pieces:
            tokens = piece.tokens[:left]
            if tokens:
                source = Provenance.SHARED if is_reply(piece) else piece.provenance
                known = piece.pictures if isinstance(piece, ContextPiece) else ()
                pictures = tuple(each for each in known if each.number in tokens)
                taken.append(ContextPiece(tokens, source, pictures))
                left -= len(tokens)
        if left > 0:
            raise ValueError(
                f"episode {self.parent} has {self.at - left} tokens: it cannot be forked after "
                f"{self.at}"
            )
        return (*taken, *self.text)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished episode: its pieces, the reason for its end and its rewards by name.

    `turn_rewards` is empty, or has one reward per turn. A turn is one reply of the policy.
    """

    pieces: tuple[Piece, ...]
    rewards: Mapping[str, float]
    stop: Stop
    task: Task
    seed: int
    episode: int = 0
    """The number of the episode in its run, in the order of their start."""
    turn_rewards: tuple[float, ...] = ()
    facts: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Numbers from the environment for metrics, such as a count of tool errors. They do not affect
    the reward.
    """
    branches: tuple["Trajectory", ...] = ()
    """Further conversations of the episode, such as those of sub-agents. Each gets the episode's
    reward and advantage.
    """
    fork: Fork | None = None
    """Where the episode was forked from another one. None if it has its own beginning."""
    role: str = ""
    """The policy's role in this conversation, such as "planner". "" if the tasks have no roles."""

    @property
    def reward(self) -> float:
        return total_reward(self.rewards)

    @property
    def role_reward(self) -> float:
        """The sum of the rewards that count for this conversation's role.

        A reward named `<role>/<name>` counts only for the role in its name, and other rewards for
        all. Without a role, this is the episode's reward.
        """
        if not self.role:
            return self.reward
        own = f"{self.role}/"
        return total_reward(
            {
                name: reward
                for name, reward in self.rewards.items()
                if "/" not in name or name.startswith(own)
            }
        )

    @property
    def success(self) -> bool:
        """True if the fact `success` is at least 1.

        Without this fact, the reward must be at least 1.
        """
        return is_success(self.rewards, self.facts)

    def with_rewards(
        self, rewards: Mapping[str, float], facts: Mapping[str, float]
    ) -> "Trajectory":
        """Return a copy with new rewards and added facts. Branches receive the same."""
        main, *branches = (
            replace(each, rewards=rewards, facts={**each.facts, **facts})
            for each in self.conversations
        )
        return replace(main, branches=tuple(branches))

    def led(self) -> "Trajectory":
        """Return a trajectory whose main conversation has sampled tokens, if any branch has some.

        This is the trajectory itself if its main conversation has a sampled token. Otherwise the
        first branch becomes the main conversation, with the other branches.
        """
        if self.sampled or not self.branches:
            return self
        return replace(self.branches[0], branches=self.branches[1:])

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces for token in piece.tokens)

    @property
    def sampled(self) -> tuple[Sampled, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Sampled))

    @property
    def versions(self) -> frozenset[int]:
        """The versions of the weights that sampled at least one token of the trajectory."""
        return frozenset(piece.version for piece in self.sampled if piece.tokens)

    @property
    def num_sampled(self) -> int:
        return sum(len(piece.tokens) for piece in self.sampled)

    @property
    def conversations(self) -> tuple["Trajectory", ...]:
        """The main conversation of the episode, and its branches."""
        return (self, *self.branches)

    @property
    def num_sampled_in_all(self) -> int:
        """Number of tokens that the policy sampled in the episode, including branches."""
        return sum(conversation.num_sampled for conversation in self.conversations)

    @property
    def num_turns(self) -> int:
        return count_turns(self.pieces)

    def __len__(self) -> int:
        return sum(len(piece.tokens) for piece in self.pieces)


def walk(pieces: Sequence[Piece]) -> Iterator[tuple[int, Piece, int]]:
    """Yield `(start, piece, turn)` for every piece that has tokens.

    `start` is the offset of the piece's first token in the episode. `turn` is the number of the
    policy's reply, from 0, and -1 for a context piece. Adjacent sampled and placed pieces are one
    reply, which a weight update may have interrupted.

    >>> a, b = Sampled((5,), (-0.1,), 0), Sampled((6,), (-0.2,), 1)
    >>> pieces = [ContextPiece((1, 2)), a, b, ContextPiece((3,)), a]
    >>> [(start, turn) for start, _, turn in walk(pieces)]
    [(0, -1), (2, 0), (3, 0), (4, -1), (5, 1)]
    """
    start = 0
    turn = -1
    in_reply = False
    for piece in pieces:
        if not piece.tokens:
            continue
        own = not isinstance(piece, ContextPiece)
        turn += own and not in_reply
        in_reply = own
        yield start, piece, turn if own else -1
        start += len(piece.tokens)


def common_prefix(streams: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens at the beginning that all token sequences share.

    >>> common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]])
    2
    """
    pairs = zip(*streams, strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, pairs))


def replies(pieces: Sequence[Piece]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the offset and the tokens of each reply in an episode.

    Replies that a forked episode took over from its parent are included.

    >>> a, b = ContextPiece((5,), Provenance.SHARED), Sampled((6,), (-0.2,), 1)
    >>> replies([ContextPiece((1, 2)), a, b, ContextPiece((3,)), b])
    [(2, (5, 6)), (5, (6,))]
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    in_reply = False
    for start, piece, _ in walk(pieces):
        if is_reply(piece) and in_reply:
            first, tokens = found.pop()
            found.append((first, tokens + piece.tokens))
        elif is_reply(piece):
            found.append((start, piece.tokens))
        in_reply = is_reply(piece)
    return found


def count_cut_replies(pieces: Sequence[Piece], stop_tokens: Collection[int]) -> int:
    """Return the number of the policy's replies that do not end with one of `stop_tokens`.

    >>> whole, cut = Sampled((5, 1), (-0.1, -0.7), 0), Sampled((5,), (-0.1,), 0)
    >>> count_cut_replies([whole, ContextPiece((2,)), cut], stop_tokens=(1,))
    1
    """
    last = {turn: piece.tokens[-1] for _, piece, turn in walk(pieces) if turn >= 0}
    return sum(token not in stop_tokens for token in last.values())


def count_turns(pieces: Sequence[Piece]) -> int:
    """Return the number of the policy's replies in an episode, given its pieces (runs of tokens).

    A reply that a weight update cut into several pieces counts once.
    """
    return max((turn for _, _, turn in walk(pieces)), default=-1) + 1


@dataclass(frozen=True, slots=True)
class TurnLimit:
    """A limit on the turns of an episode, below `rollout.max_turns`, which the episode may extend.

    An episode that reaches the limit gets `extend` more turns if its last reply contains `request`.
    If `request` is empty, one of its turns since the last extension must have had a reward above 0
    instead. An episode gets at most `extensions` extensions.
    """

    turns: int
    remind: int = 0
    """When at most this many turns are left, each answer of the environment ends with a reminder of
    their number. 0 gives no reminders.
    """
    extend: int = 0
    extensions: int = 0
    request: str = ""


@dataclass(frozen=True, slots=True)
class EpisodeBudget:
    """Limits on each episode of a group, in addition to the run's limits. 0 sets no limit.

    With `segments` > 0, an episode runs in segments. A segment ends when it has `segment_tokens`
    sampled tokens or `segment_calls` tool calls. The episode may then wait for other episodes
    before it continues.
    """

    reply_tokens: int = 0
    """Largest number of tokens in a reply, like `engine.max_completion_tokens`."""
    context: int = 0
    """Largest number of tokens in an episode, with prompts and replies, like
    `engine.max_context`.
    """
    calls: int = 0
    """Number of tool calls after which an unfinished episode is cut off."""
    segments: int = 0
    """Number of segments after which an unfinished episode is cut off."""
    segment_tokens: int = 0
    segment_calls: int = 0


NO_BUDGET = EpisodeBudget()
"""The budget that sets no limits, so that only the options of the run do."""


UNREPEATED_TEXT = "TextNotRepeated:"
"""The beginning of `Failure.error` if an environment gave other answers than the text of a fork
has. The text is then wrong, not the environment: other episodes of the task do not fail by it.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """An episode that ended with an error of its environment. The run continues without it."""

    task: Task
    stage: str
    error: str
    turns: int = 0
    sampled_tokens: int = 0
    fork: Fork | None = None
    """Where the episode was forked from another one. None if it has its own beginning."""


def is_unrepeated(outcome: Trajectory | Failure) -> bool:
    """Return True for a failed attempt whose environment gave other answers than the text of its
    fork has.

    It is not tried again, and does not count as a failure of its task.
    """
    return isinstance(outcome, Failure) and outcome.error.startswith(UNREPEATED_TEXT)


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one task: finished trajectories and failed episodes."""

    task: Task
    trajectories: tuple[Trajectory, ...]
    failures: tuple[Failure, ...] = ()
    number: int = 0
    """The number of the group in its run, in the order of their start."""
    unused: tuple[Trajectory, ...] = ()
    """Finished trajectories that are not trained on, because a filter left them out."""
    turn_limit: TurnLimit | None = None
    """The limit on turns of the group's episodes. None if only `rollout.max_turns` limits them."""
    budget: EpisodeBudget = NO_BUDGET
    added: frozenset[int] = frozenset()
    """Numbers of the episodes that were added to the group after its first results."""
    texts: tuple[Trajectory, ...] = ()
    """Texts that the policy wrote about episodes of the group, such as reflections. They are not
    attempts at the task.
    """

    @property
    def finished(self) -> tuple[Trajectory, ...]:
        """All finished trajectories, also those that a filter left out of training."""
        return (*self.trajectories, *self.unused)

    @property
    def has_one_reward(self) -> bool:
        """True if all trajectories have the same reward. Trajectories that a technique ended early
        have no reward and do not count.
        """
        return len({each.reward for each in self.trajectories if each.stop != "pruned"}) <= 1

    @property
    def has_equal_rewards(self) -> bool:
        """True if all trajectories have the same reward, and the same rewards of single turns.

        False if all episodes failed. If episodes were forked, only their whole rewards are
        compared, because a forked episode has turn rewards only for the replies that it sampled.
        """
        if any(SURVIVAL in each.facts for each in self.trajectories):
            return not any(each.reward for each in self.trajectories)  # by weights that differ
        if any(each.fork or each.stop == "pruned" for each in self.trajectories):
            return self.has_one_reward
        outcomes = {
            (
                each.reward,
                each.turn_rewards,
                frozenset((one.role, one.role_reward) for one in each.conversations),
            )
            for each in self.trajectories
        }
        return len(outcomes) == 1

    @property
    def episodes(self) -> frozenset[int]:
        """The numbers of all finished episodes and their branches, also of those not trained on."""
        return frozenset(
            conversation.episode
            for trajectory in (*self.finished, *self.texts)
            for conversation in trajectory.conversations
        )


@dataclass(frozen=True, slots=True)
class ScoredTrajectory:
    """A trajectory and its advantages: one number, one number per turn, or one number per token."""

    trajectory: Trajectory
    advantage: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.advantage) not in (1, self.trajectory.num_turns, len(self.trajectory)):
            raise ValueError(
                f"{len(self.advantage)} advantages for {self.trajectory.num_turns} turns and "
                f"{len(self.trajectory)} tokens; give one, one per turn, or one per token"
            )


@dataclass(frozen=True, slots=True)
class PendingPiece:
    """A sampled run of tokens that no batch has contained yet, with the episode's earlier tokens.

    `tokens[start:]` are the run's own tokens. This is all that is needed to compute its `old_logp`.
    """

    episode: int
    text: Sequence[int]
    """The episode's tokens, at least up to the end of the piece. Several pieces may share this
    list.
    """
    start: int
    piece: Sampled

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.text[: self.start + len(self.piece.tokens)])


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """An episode of a run before a resume, as the journal recorded it.

    It has the last attempt at the episode, and the number of failed attempts.
    """

    episode: int
    pieces: tuple[Piece, ...]
    outcome: Trajectory | Failure | None
    """The result of the episode. None if it had not ended."""
    failures: int = 0
    snapshot: tuple[int, str] | None = None
    """The last saved state of the environment: the number of pieces before it, and the state. None
    if no state was saved.
    """
    branches: tuple["EpisodeRecord", ...] = ()
    """Further conversations of the last attempt, such as those of sub-agents."""
    role: str = ""
    """The policy's role in this conversation. "" if the tasks have no roles."""
    seed: int = 0
    """Seed of the random numbers for sampling, of a further conversation."""
    fork: Fork | None = None
    """Where the episode was forked from another one. None if it has its own beginning."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """A request to run the episodes of one task, which form a group.

    `number` is the number of the group in its run. `place` is the index of its task in the run's
    sequence of training tasks.
    """

    number: int
    task: Task
    seed: int
    place: int
    begun: bool = False
    """True if the group was started before a resume."""
    past: tuple[EpisodeRecord, ...] = ()
    """The group's episodes that were started before a resume, in the order of their start."""
    finished: bool = False
    sizes: tuple[int, ...] = ()
    """The number of episodes with which the group begins, then the number after each time that
    episodes were added. Empty if the group has `schedule.group_size` episodes.
    """
    turn_limit: TurnLimit | None = None
    """The limit on turns of the group's episodes. None if only `rollout.max_turns` limits them."""
    budget: EpisodeBudget = NO_BUDGET
    """Limits on each episode of the group, in addition to the run's limits."""
    rounds: tuple[Mapping[str, Any], ...] = ()
    """Recorded decisions of techniques about the group's running episodes, from before a resume."""

    def opens(self) -> Iterator[PendingPiece]:
        """Yield the runs of tokens that the group's episodes sampled before a resume.

        Failed episodes are left out.
        """
        for past in self.past:
            if isinstance(past.outcome, Failure):
                continue
            for record in (past, *past.branches):
                text: list[int] = []
                for piece in record.pieces:
                    start = len(text)
                    text += piece.tokens
                    if isinstance(piece, Sampled):
                        yield PendingPiece(record.episode, text, start, piece)


@dataclass(frozen=True, slots=True)
class StoredLogps:
    """Old log-probabilities of replayed tokens, stored when they were first trained on.

    Both tensors are `[T]`. Tokens that are not replayed have 0 and False.
    """

    old_logp: "Tensor"
    exact: "Tensor"
    """True where `old_logp` is exact. Elsewhere it is the engine's `behavior_logp`."""

    def select(self, index: "Tensor") -> "StoredLogps":
        return StoredLogps(self.old_logp[index], self.exact[index])


@dataclass(frozen=True, slots=True)
class Lesson:
    """The text that a sequence's teacher reads, and the teacher's index (technique `distil`)."""

    teacher: int = 0
    """The index of the teacher in the option `distil.teacher`."""
    start: int = 0
    """The offset in the sequence before which the teacher also reads `tokens`. The policy sampled
    no token before it.
    """
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedTokens:
    """Tokens of a batch's forked episodes that other episodes of the batch sampled.

    They count in a ratio over a whole sequence, but have no loss. Every tensor is `[T]`.
    """

    where: "Tensor"
    behavior_logp: "Tensor"
    version: "Tensor"
    episode: "Tensor"
    """The number of the episode that sampled the token."""
    at: "Tensor"
    """The token's position in the episode that sampled it."""
    reach: "Tensor"
    """For each token of the batch, shared or not: the product of 1 / branches over all forks before
    it. 1 without forks.
    """

    def select(self, index: "Tensor") -> "SharedTokens":
        return SharedTokens(*(getattr(self, each.name)[index] for each in fields(self)))


@dataclass(frozen=True, slots=True)
class PlacedTokens:
    """The placed text of a batch: text in replies that was not sampled in the recorded context.

    Every tensor is `[T]`. REWRITTEN text was sampled, but its context was edited since. The source
    of FOREIGN text, written by another policy, is known only if it has a version. `edits` has the
    places `(start, stop, edit)` of each sequence's REWRITTEN text with a loss, counted from the
    start of the sequence.
    """

    given: "Tensor"
    """True for all placed tokens, with a loss or without."""
    trained: "Tensor"
    """True for placed tokens that have a loss, as `objective.placed` decides."""
    version: "Tensor"
    """The version whose policy is compared with the source of a token with a loss: the one that
    sampled it, if it is REWRITTEN. -1 for tokens without a known source.
    """
    source_logp: "Tensor"
    """Log-probability of a token under the policy that wrote it, in nats: if it is REWRITTEN, in
    the context before the edit. 0 for tokens without a known source.
    """
    edits: tuple[tuple[tuple[int, int, Edit], ...], ...]

    def select(self, sequences: Sequence[int], index: "Tensor") -> "PlacedTokens":
        """Return the placed text of some sequences, whose tokens are at the indices `index`."""
        return PlacedTokens(
            self.given[index],
            self.trained[index],
            self.version[index],
            self.source_logp[index],
            tuple(self.edits[i] for i in sequences),
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one batch, packed end to end. Every tensor is `[T]`, for T tokens.

    Sequence `i` is `offsets[i]:offsets[i + 1]`. Values at `t` belong to `tokens[t]`. For example,
    `behavior_logp[t]` is the log-probability of `tokens[t]` given the earlier tokens of the
    sequence. Where `sampled` is False, `behavior_logp` is 0, and `version` and `turn` are -1. Where
    `trained` is False, `advantage` is 0.
    """

    tokens: "Tensor"
    offsets: tuple[int, ...]
    sampled: "Tensor"
    """True for tokens that the policy sampled (action tokens). Only these and `placed.trained` have
    a loss, unless a correction or a technique drops them. A token before a fork is marked only in
    the episode that sampled it, so it counts once.
    """
    behavior_logp: "Tensor"
    version: "Tensor"
    turn: "Tensor"
    provenance: "Tensor"
    clean: "Tensor"
    advantage: "Tensor"
    episodes: tuple[int, ...]
    routed_experts: ExpertTable | None = None
    """The experts that the engine used, which training uses again. None without routing replay."""
    group: tuple[int, ...] = ()
    """The group number of each sequence, -1 if unknown. Empty in a batch that the audit recorded on
    disk.
    """
    reward: tuple[float, ...] = ()
    """The reward of each sequence's episode. Empty in a batch that the audit recorded on disk."""
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """The rewards of each sequence's turns, as in `Trajectory.turn_rewards`. Empty in a batch that
    the audit recorded on disk.
    """
    stored: StoredLogps | None = None
    """The old log-probabilities of replayed tokens, from when they were first trained on. None if
    the batch has no replayed token.
    """
    kept_sets: KeptSets | None = None
    """The sets of tokens among which the T tokens were drawn, over which all their
    log-probabilities are normalised. None means the whole vocabulary.
    """
    engine_entropy: "Tensor | None" = None
    """The entropy of the distribution from which the engine drew each sampled token, in nats, NaN
    elsewhere. None if the engine returned none.
    """
    lessons: tuple[Lesson, ...] = ()
    """The teacher of each sequence, and what only it reads. Empty if there is one teacher that
    reads the sequences as they are.
    """
    placed: PlacedTokens | None = None
    """The text in replies that was not sampled in the recorded context. None if the batch has
    none.
    """
    shared: SharedTokens | None = None
    """The tokens that forked episodes share with other episodes. None if no token is shared."""

    @property
    def replayed(self) -> "Tensor":
        """A mask `[T]` of sampled tokens that were already trained on in an earlier batch."""
        return self.sampled & (self.provenance == int(Provenance.REPLAYED))

    @property
    def fresh(self) -> "Tensor":
        """A mask `[T]` of sampled tokens that were not trained on in an earlier batch."""
        return self.sampled & (self.provenance != int(Provenance.REPLAYED))

    @property
    def replayed_groups(self) -> tuple[int, ...]:
        """The numbers of the groups that have replayed tokens, in the order of the batch."""
        return tuple(dict.fromkeys(self.group[i] for i in self.sequences_with(self.replayed)))

    @property
    def trained(self) -> "Tensor":
        """A mask `[T]` of tokens that can have a loss: sampled ones, and placed ones with one."""
        return self.sampled | self.placed.trained if self.placed else self.sampled

    def whole_sequences(self) -> "Batch":
        """Return the batch with shared tokens marked as sampled, in each episode that has them.

        Shared tokens are those before a fork. The result is used for ratios over several tokens. A
        batch without shared tokens is returned unchanged.
        """
        import torch

        if (shared := self.shared) is None:
            return self
        sampled = self.sampled | shared.where
        begins = sampled & ~torch.cat([sampled.new_zeros(1), sampled[:-1]])
        starts = torch.tensor(self.offsets[:-1])
        begins[starts[starts < len(sampled)]] = True
        return replace(
            self,
            sampled=sampled,
            behavior_logp=shared.behavior_logp.where(shared.where, self.behavior_logp),
            version=shared.version.where(shared.where, self.version),
            turn=begins.cumsum(0).where(sampled, -1),
            provenance=self.provenance.masked_fill(shared.where, int(Provenance.SAMPLED)),
            shared=None,
        )

    def of_owners(self, values: "Tensor") -> "Tensor":
        """Return `values` `[T]` with the value of the sampling episode at each shared token.

        Shared tokens are those that a forked episode has from another one. Raises KeyError if the
        other episode is not in the batch.
        """
        import torch

        if (shared := self.shared) is None or not shared.where.any():
            return values
        starts = dict(zip(self.episodes, self.offsets, strict=False))
        found = shared.where.nonzero().squeeze(1)
        first = torch.tensor([starts[each] for each in shared.episode[found].tolist()])
        return values.index_put((found,), values[first + shared.at[found]])

    def with_owners(self, sequences: Sequence[int]) -> list[int]:
        """Return the indices `sequences`, and those that sampled their shared tokens.

        Shared tokens are those that a forked episode has from another one. Raises ValueError if the
        other episode is not in the batch.
        """
        import torch

        if self.shared is None:
            return list(sequences)
        chosen = torch.isin(self.sequence, torch.tensor(sequences, dtype=torch.long))
        owners = self.shared.episode[self.shared.where & chosen].unique().tolist()
        return sorted({*sequences, *(self.episodes.index(each) for each in owners)})

    def has_version(self, version: int) -> bool:
        """Return True if the version `version` sampled a token that has a loss."""
        placed = self.placed is not None and version in self.placed.version
        return placed or version in self.version

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def sequence(self) -> "Tensor":
        """The index of the sequence of each token, `[T]`."""
        import torch

        lengths = torch.tensor([end - start for start, end in self.spans()], dtype=torch.long)
        return torch.repeat_interleave(torch.arange(self.num_sequences), lengths)

    def spans(self) -> list[tuple[int, int]]:
        return list(zip(self.offsets[:-1], self.offsets[1:], strict=True))

    def count(self, where: "Tensor") -> list[int]:
        """Return for each sequence the number of its tokens in the mask `where` (`[T]` bool)."""
        return count_tokens(self.offsets, where)

    def sequences_with(self, where: "Tensor") -> list[int]:
        """Return the indices of the sequences with a token in the mask `where` (`[T]` bool)."""
        return [i for i, count in enumerate(self.count(where)) if count]

    def select(self, sequences: Sequence[int]) -> "tuple[Batch, Tensor]":
        """Return a batch of only the sequences with these indices, and where its tokens were.

        The second result `[T']` has the position in this batch of each of its T' tokens. If all
        sequences are chosen in their order, the batch itself is returned, without a copy.
        """
        import torch

        if list(sequences) == list(range(self.num_sequences)):
            return self, torch.arange(len(self.tokens))
        spans = self.spans()
        index = token_positions([spans[i] for i in sequences])
        offsets = [0]
        for i in sequences:
            offsets.append(offsets[-1] + spans[i][1] - spans[i][0])
        tensors = [field.name for field in fields(self) if field.type == "Tensor"]
        rows = {name: getattr(self, name)[index] for name in tensors}
        episodes = tuple(self.episodes[i] for i in sequences)
        chosen = Batch(
            offsets=tuple(offsets),
            episodes=episodes,
            routed_experts=self.routed_experts.select(sequences, index)
            if self.routed_experts
            else None,
            group=tuple(self.group[i] for i in sequences) if self.group else (),
            reward=tuple(self.reward[i] for i in sequences) if self.reward else (),
            turn_rewards=tuple(self.turn_rewards[i] for i in sequences)
            if self.turn_rewards
            else (),
            stored=self.stored.select(index) if self.stored else None,
            kept_sets=self.kept_sets.at(index) if self.kept_sets else None,
            engine_entropy=None if self.engine_entropy is None else self.engine_entropy[index],
            lessons=tuple(self.lessons[i] for i in sequences) if self.lessons else (),
            placed=self.placed.select(sequences, index) if self.placed else None,
            shared=self.shared.select(index) if self.shared else None,
            **rows,
        )
        return chosen, index

    def select_fresh(self) -> "tuple[Batch, Tensor]":
        """Return a batch of only the sequences without replayed tokens, and where its tokens were.

        The second result `[T']` has the position in this batch of each of its T' tokens.
        """
        counts = self.count(self.replayed)
        part, index = self.select([i for i, count in enumerate(counts) if not count])
        return replace(part, stored=None), index


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Join batches into one, in their order. A single batch is returned unchanged.

    Raises ValueError if there are several batches and one has routed experts or forked episodes.
    """
    import torch

    if len(batches) == 1:
        return batches[0]
    if any(batch.routed_experts for batch in batches):
        raise ValueError("batches with routed experts cannot be joined")
    if any(batch.shared for batch in batches):
        raise ValueError("batches with forked episodes cannot be joined")
    tensors = [each.name for each in fields(Batch) if each.type == "Tensor"]
    offsets = [0]
    for batch in batches:
        start = offsets[-1]
        offsets += [start + end for end in batch.offsets[1:]]
    columns: dict[str, Any] = {
        name: torch.cat([getattr(batch, name) for batch in batches]) for name in tensors
    }
    kept = [batch.stored or _nothing_stored(batch) for batch in batches]
    measured: Any = [batch.engine_entropy for batch in batches]
    return Batch(
        offsets=tuple(offsets),
        episodes=tuple(episode for batch in batches for episode in batch.episodes),
        group=tuple(number for batch in batches for number in batch.group),
        reward=tuple(reward for batch in batches for reward in batch.reward),
        stored=StoredLogps(
            torch.cat([each.old_logp for each in kept]), torch.cat([each.exact for each in kept])
        ),
        kept_sets=join([(len(batch.tokens), batch.kept_sets) for batch in batches]),
        engine_entropy=None if any(each is None for each in measured) else torch.cat(measured),
        placed=_join_placed(batches),
        **columns,
    )


def _join_placed(batches: Sequence[Batch]) -> PlacedTokens | None:
    import torch

    if not any(batch.placed for batch in batches):
        return None
    parts = [batch.placed or _nothing_placed(batch) for batch in batches]
    return PlacedTokens(
        torch.cat([each.given for each in parts]),
        torch.cat([each.trained for each in parts]),
        torch.cat([each.version for each in parts]),
        torch.cat([each.source_logp for each in parts]),
        tuple(edits for each in parts for edits in each.edits),
    )


def _nothing_placed(batch: Batch) -> PlacedTokens:
    import torch

    nowhere = torch.zeros_like(batch.sampled)
    version = torch.full_like(batch.version, NO_VERSION)
    source_logp = torch.zeros_like(batch.behavior_logp)
    return PlacedTokens(nowhere, nowhere, version, source_logp, ((),) * batch.num_sequences)


def _nothing_stored(batch: Batch) -> StoredLogps:
    import torch

    return StoredLogps(torch.zeros_like(batch.behavior_logp), torch.zeros_like(batch.sampled))


def group_of(batch: Batch) -> "Tensor":
    """Return the group of each of n sequences as a number from 0 within the batch, `[n]`.

    Raises ValueError if the batch does not say which groups its sequences belong to.
    """
    import torch

    numbers = torch.tensor(batch.group or (-1,))
    if (numbers < 0).any():
        raise ValueError("this batch does not say which sequences are of one group")
    return numbers.unique(return_inverse=True)[1]


def count_tokens(offsets: Sequence[int], where: "Tensor") -> list[int]:
    """Return for each packed sequence the number of its tokens in the mask `where` (`[T]` bool).

    Sequence `i` is `offsets[i]:offsets[i + 1]`.
    """
    import torch

    total = torch.cat([torch.zeros(1, dtype=torch.int), where.cumsum(0, dtype=torch.int)])
    return total[torch.tensor(offsets)].diff().tolist()


def token_positions(spans: Iterable[tuple[int, int]]) -> "Tensor":
    """Return the positions of all tokens in spans `(start, end)`, one span after another.

    >>> token_positions([(5, 7), (0, 2)]).tolist()
    [5, 6, 0, 1]
    """
    import numpy as np
    import torch

    # torch needs several times as long for each of many short spans.
    ranges = [np.arange(start, end) for start, end in spans]
    return torch.from_numpy(np.concatenate([np.arange(0), *ranges]))


def collate(
    credited: Sequence[ScoredTrajectory],
    *,
    groups: Sequence[Group] = (),
    replay_experts: bool = False,
    placed: "PlacedMode" = "mask",
) -> Batch:
    """Concatenate trajectories with advantages into one batch, without padding.

    `groups` are the groups of the trajectories, whose numbers become `Batch.group`. With
    `replay_experts` the batch has the routed experts that the engine recorded. `placed` is the
    option `objective.placed`: which text in replies has a loss although it was not sampled there.
    Raises ValueError if there is no trajectory.
    """
    import numpy as np
    import torch

    if not credited:
        raise ValueError("nothing to collate: no group of this step has a trajectory")
    # Numbers are converted piece by piece, because a conversion blocks all other threads. For
    # short pieces, `struct` takes a third of NumPy's time, and NumPy less than torch.
    tokens = [np.empty(0, np.int64)]
    behavior_logp = [np.empty(0, np.float32)]
    advantage = [np.empty(0, np.float32)]
    pieces: list[tuple[int, ...]] = []
    kept: list[tuple[int, KeptSets | None]] = []
    offsets = [0]
    for item in credited:
        for start, piece, turn in walk(item.trajectory.pieces):
            count = len(piece.tokens)
            provenance = int(piece.provenance)
            tokens.append(np.frombuffer(struct.pack(f"{count}q", *piece.tokens), np.int64))
            trained = isinstance(piece, Sampled) or has_loss(piece, placed)
            values = _advantages(item, start, count, turn if trained else -1)
            advantage.append(np.full(count, values, np.float32))
            kept.append((count, piece.kept_sets if isinstance(piece, Sampled) else None))
            if isinstance(piece, Sampled):
                packed = struct.pack(f"{count}f", *piece.behavior_logp)
                behavior_logp.append(np.frombuffer(packed, np.float32))
                pieces.append((count, True, piece.version, turn, provenance, piece.clean))
            else:
                behavior_logp.append(np.zeros(count, np.float32))
                pieces.append((count, False, NO_VERSION, -1, provenance, True))
        offsets.append(offsets[-1] + len(item.trajectory))
    counts, *columns = torch.tensor(pieces, dtype=torch.long).reshape(-1, 6).T
    sampled, version, turns, provenances, clean = (
        torch.repeat_interleave(column, counts) for column in columns
    )
    numbers = {episode: group.number for group in groups for episode in group.episodes}
    return Batch(
        tokens=torch.from_numpy(np.concatenate(tokens)),
        offsets=tuple(offsets),
        sampled=sampled.bool(),
        behavior_logp=torch.from_numpy(np.concatenate(behavior_logp)),
        version=version,
        turn=turns,
        provenance=provenances,
        clean=clean.bool(),
        advantage=torch.from_numpy(np.concatenate(advantage)),
        episodes=tuple(item.trajectory.episode for item in credited),
        routed_experts=_expert_table(credited) if replay_experts else None,
        group=tuple(numbers.get(item.trajectory.episode, -1) for item in credited),
        reward=tuple(item.trajectory.reward for item in credited),
        kept_sets=join(kept),
        engine_entropy=_engine_entropy(credited),
        turn_rewards=tuple(item.trajectory.turn_rewards for item in credited),
        placed=_placed_tokens(credited, placed),
        shared=_shared_tokens(credited),
    )


def _engine_entropy(credited: Sequence[ScoredTrajectory]) -> "Tensor | None":
    """Return the engine's entropy of each token, NaN where it measured none. None if of none."""
    import numpy as np
    import torch

    pieces = [piece for item in credited for piece in item.trajectory.pieces]
    found = [piece.signals if isinstance(piece, Sampled) else None for piece in pieces]
    if not any(found):
        return None
    parts = [
        np.full(len(piece.tokens), np.nan, np.float32) if own is None else own.entropy
        for piece, own in zip(pieces, found, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts))


def _shared_tokens(credited: Sequence[ScoredTrajectory]) -> SharedTokens | None:
    """Return the tokens that forked trajectories share with others. None if none shares a token.

    A fork after the prompt that begins with placed text shares none.
    """
    import numpy as np
    import torch

    trajectories = [item.trajectory for item in credited]
    if not any(each.fork for each in trajectories):
        return None
    by_episode = {each.episode: each for each in trajectories}
    known: "dict[int, NDArray[Any]]" = {}
    columns = np.concatenate([_owners(each, by_episode, known) for each in trajectories], 1)
    own = np.repeat([each.episode for each in trajectories], [len(each) for each in trajectories])
    where = (columns[2] >= 0) & (columns[0] != own)
    reach = np.concatenate(_reaches(trajectories, by_episode))
    if not where.any() and (reach == 1).all():
        return None
    episode, at, version = torch.from_numpy(columns[:3]).long()
    return SharedTokens(
        torch.from_numpy(where),
        torch.from_numpy(columns[3]).float(),
        version,
        episode,
        at,
        torch.from_numpy(reach),
    )


def _reaches(
    trajectories: Sequence[Trajectory], by_episode: Mapping[int, Trajectory]
) -> "list[NDArray[Any]]":
    """Return for each token the product of 1 / branches over the forks before it, `[T]` each.

    A fork that begins with placed text is not counted, because its samples have another context.
    """
    import numpy as np

    forks: dict[int, Counter[int]] = {}
    for each in trajectories:
        if each.fork and each.fork.at and not each.fork.text:
            parent, at = _fork_place(each.fork, by_episode)
            forks.setdefault(parent, Counter())[at] += 1
    found = []
    for each in trajectories:
        reach = np.ones(len(each), np.float32)
        owner, stop = each.episode, len(each)
        while True:
            for at, count in forks.get(owner, {}).items():
                reach[at:] /= count + 1 if at <= stop else 1
            fork = by_episode[owner].fork if owner in by_episode else None
            if fork is None:
                break
            owner, stop = _fork_place(fork, by_episode)
        found.append(reach)
    return found


def _fork_place(fork: Fork, by_episode: Mapping[int, Trajectory]) -> tuple[int, int]:
    """Return the episode that itself reached a fork's place, and the number of tokens before it."""
    parent = fork.parent
    while (before := by_episode.get(parent)) and before.fork and fork.at <= before.fork.at:
        parent = before.fork.parent
    return parent, fork.at


def _owners(
    trajectory: Trajectory,
    by_episode: Mapping[int, Trajectory],
    known: "dict[int, NDArray[Any]]",
) -> "NDArray[Any]":
    """Return four numbers for each token, `[4, T]`, about the episode that sampled it.

    They are the episode's number, the token's position there, its version and its `behavior_logp`.
    The version is -1 for a token that no episode of `by_episode` sampled. `known` caches results.
    """
    import numpy as np

    if trajectory.episode in known:
        return known[trajectory.episode]
    found = np.full((4, len(trajectory)), NO_VERSION, np.float64)
    fork = trajectory.fork
    if fork and fork.parent in by_episode:
        found[:, : fork.at] = _owners(by_episode[fork.parent], by_episode, known)[:, : fork.at]
    for start, piece, _ in walk(trajectory.pieces):
        if isinstance(piece, Sampled):
            stop = start + len(piece.tokens)
            found[0, start:stop] = trajectory.episode
            found[1, start:stop] = range(start, stop)
            found[2, start:stop] = piece.version
            found[3, start:stop] = piece.behavior_logp
    known[trajectory.episode] = found
    return found


def has_loss(piece: Piece, placed: "PlacedMode") -> bool:
    """Return True if a piece is placed text that has a loss. `placed` is `objective.placed`.

    Placed text is text in a reply that the policy did not sample in the recorded context.
    """
    if not isinstance(piece, Placed) or placed == "mask":
        return False
    return placed == "anchor" or piece.source_logp is not None


def _placed_tokens(
    credited: Sequence[ScoredTrajectory], placed: "PlacedMode"
) -> PlacedTokens | None:
    import torch

    if not any(isinstance(each, Placed) for item in credited for each in item.trajectory.pieces):
        return None
    counts: list[int] = []
    rows: list[tuple[bool, bool, int]] = []
    source_logp: list[float] = []
    edits = []
    for item in credited:
        places = []
        for start, piece, _ in walk(item.trajectory.pieces):
            count = len(piece.tokens)
            version, logps = NO_VERSION, (0.0,) * count
            if isinstance(piece, Placed) and piece.source_logp and has_loss(piece, placed):
                version, logps = piece.version, piece.source_logp
                places += [(start, start + count, piece.edit)] if piece.edit else []
            counts.append(count)
            rows.append((isinstance(piece, Placed), has_loss(piece, placed), version))
            source_logp += logps
        edits.append(tuple(places))
    columns = torch.tensor(rows).repeat_interleave(torch.tensor(counts), 0).T
    return PlacedTokens(
        columns[0].bool(), columns[1].bool(), columns[2], torch.tensor(source_logp), tuple(edits)
    )


def _expert_table(credited: Sequence[ScoredTrajectory]) -> ExpertTable:
    """Return the experts that the engine used for the tokens of some trajectories."""
    import torch

    sequences = []
    complete = [torch.empty(0, dtype=torch.bool)]
    for item in credited:
        versions: dict[int, RoutedExperts] = {}
        whole = torch.zeros(len(item.trajectory), dtype=torch.bool)
        for start, piece, _ in walk(item.trajectory.pieces):
            if isinstance(piece, Sampled) and piece.routed_experts:
                versions[piece.version] = piece.routed_experts
                # The row of a token predicts the next one.
                whole[start : min(start + len(piece.tokens), piece.routed_experts.covered + 1)] = (
                    True
                )
        sequences.append(versions)
        complete.append(whole)
    return ExpertTable(tuple(sequences), torch.cat(complete))


def _advantages(
    item: ScoredTrajectory, start: int, count: int, turn: int
) -> float | Sequence[float]:
    """Return the advantage of each of a piece's `count` tokens, or one number for all of them.

    `start` is the piece's offset in the episode. `turn` is the number of its reply, or -1 for a
    piece without a loss, whose advantage is 0.
    """
    if turn < 0:
        return 0.0
    if len(item.advantage) == 1:
        return item.advantage[0]
    if len(item.advantage) == item.trajectory.num_turns:
        return item.advantage[turn]
    return item.advantage[start : start + count]
