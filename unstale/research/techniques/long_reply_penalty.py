"""`long_reply_penalty`: a lower reward for replies near the limit of their length.

The longest reply of an episode has n tokens. Up to `start` tokens nothing changes. Above `start`,
the reward is lower by `penalty` (n - start) / (limit - start), where the limit by default is
`engine.max_completion_tokens`. So a reply that is cut off at the limit costs the whole penalty.
From DAPO (arXiv 2503.14476, equation 13), where an episode has one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from unstale.config.checks import ConfigError, Count, Positive, Section
from unstale.config.techniques import Entry
from unstale.records import Group, Piece, Trajectory, is_reply
from unstale.research.techniques.rewards import add_reward
from unstale.techniques.hooks import CreditContext

if TYPE_CHECKING:
    from unstale.config import RunConfig

FREE_SHARE = 0.8
"""Share of the length limit up to which a reply costs nothing: 16384 of 20480 tokens in DAPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongReplyPenaltyConfig(Section):
    """A lower reward for replies near the limit of their length (DAPO)."""

    penalty: Positive = 1.0
    """Amount by which the reward is lower if the longest reply has the largest allowed length."""
    start: Count = 0
    """Number of tokens of a reply above which the reward falls; 0 is 80% of
    `engine.max_completion_tokens`.
    """
    limit: Count = 0
    """Number of tokens at which the whole penalty is paid; 0 is `engine.max_completion_tokens`."""


class LongReplyPenalty:
    """A technique that lowers the reward of episodes with a long reply."""

    def __init__(self, options: LongReplyPenaltyConfig) -> None:
        self._options = options

    def reward(self, groups: Sequence[Group], context: CreditContext) -> Sequence[Group]:
        items = [item for group in groups for item in group.trajectories]
        long = sum(longest_reply(item) > self._options.start for item in items)
        context.metrics["long_reply_penalty/share"] = long / len(items) if items else 0.0
        return add_reward(groups, "long_reply_penalty", self._term, context)

    def _term(self, item: Trajectory) -> float:
        start, limit = self._options.start, self._options.limit
        excess = (longest_reply(item) - start) / (limit - start)
        return -self._options.penalty * min(1.0, max(0.0, excess))


def longest_reply(item: Trajectory) -> int:
    """Return the number of tokens of an episode's longest reply, in all of its conversations.

    Replies before a fork count, too, so that the fork and its parent are penalised alike for them.
    """
    lengths = [
        sum(len(piece.tokens) for piece in run)
        for conversation in item.conversations
        for sampled, run in groupby(filter(_has_tokens, conversation.pieces), is_reply)
        if sampled
    ]
    return max(lengths, default=0)


def _has_tokens(piece: Piece) -> bool:
    return bool(piece.tokens)


def _complete(options: LongReplyPenaltyConfig, config: RunConfig) -> LongReplyPenaltyConfig:
    limit = options.limit or config.engine.max_completion_tokens
    return replace(options, limit=limit, start=options.start or int(FREE_SHARE * limit))


def _check(options: LongReplyPenaltyConfig, config: RunConfig) -> None:
    whole = _complete(options, config)
    if whole.start >= whole.limit:
        raise ConfigError(
            f"long_reply_penalty.start must be below {whole.limit} (the length of a reply with the "
            f"whole penalty), got {whole.start}"
        )


def _describe(options: LongReplyPenaltyConfig) -> str:
    return (
        f"an episode gets up to {options.penalty:g} less if its longest reply has more than "
        f"{options.start} tokens, all of it from {options.limit} on"
    )


_MEASURED = """
A policy of three answers that are all right: of 8, 9 and 10 tokens, with `start` 8 and `limit` 10.
At first each has the probability 1/3. After 20 steps of 2 groups of 8, mean over 24 seeds:

| penalty | 8 tokens | 9 tokens | 10 tokens |
|---|---|---|---|
| none | 0.33 | 0.33 | 0.33 |
| 1 | 0.98 | 0.01 | 0.01 |

It has not been measured on a language model.
"""

ENTRY = Entry(
    name="long_reply_penalty",
    slot="reward",
    rows=(59,),
    makes=LongReplyPenalty,
    options=LongReplyPenaltyConfig,
    changes=frozenset({"reward"}),
    describe=_describe,
    by_group=lambda options: True,
    check=_check,
    complete=_complete,
    use="Many replies reach the limit of their length "
    "(`completion/cut_reply_share`), and a sudden failure at the limit is too noisy a signal.",
    measured=_MEASURED,
    exactness="The objective is the reward with the penalty. If the advantages are divided by the "
    "standard deviation, a group of equal rewards is trained on for its lengths only. D and S do "
    "not change.",
)
