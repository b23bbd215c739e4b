"""`balance`: how much of the policy's probability the episodes of a group have tried.

A group is seen as a softmax bandit, whose arms are replies: the different first replies of its N
episodes, with probabilities p_j, and all others, which were not sampled. A gradient step of size
eta changes the logits by dz_j = (eta / N) (c_j - S p_j), where c_j is the sum of the rewards of arm
j, and S the sum over all arms. Then the probability of right arms changes by dQ = sum_{j right} p_j
(dz_j - sum_l p_l dz_l). From BroRL (arXiv 2510.01180), which divides dQ into the parts of sampled
and unsampled arms: the part of unsampled ones, which can be negative, vanishes as N grows.

For the metrics, eta is 1, rewards are reduced by the mean of their group, and an arm is right if
the mean reward of its episodes is above that of the group. With such rewards S is 0, so unsampled
arms together lose at most (1 - sum_j p_j) sum_l p_l dz_l.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from unstale.config.checks import Section
from unstale.config.techniques import Entry
from unstale.records import Group, Sampled, Trajectory, walk
from unstale.techniques.hooks import CreditContext


@dataclass(frozen=True, slots=True)
class MassBalance:
    """The change of the probability of right arms (replies) by a gradient step.

    It is the sum of two parts: of the arms that were sampled, and of those that were not.
    """

    sampled: float
    """The change of the total probability of the right arms (replies) that were sampled."""
    unsampled: float
    """The change of the total probability of the right arms (replies) that were not sampled."""

    @property
    def total(self) -> float:
        return self.sampled + self.unsampled


def logit_changes(p: Sequence[float], c: Sequence[float], *, rate: float) -> list[float]:
    """Return the change of each arm's logit by one gradient step. An arm is a possible first reply.

    `p` has the probability of each arm, `c` the sum of its rewards. `rate` is the step size divided
    by N, the number of samples.
    """
    total = math.fsum(c)
    return [rate * (ci - total * pi) for pi, ci in zip(p, c, strict=True)]


def mass_balance(
    p: Sequence[float],
    c: Sequence[float],
    *,
    right: Sequence[bool],
    sampled: Sequence[bool],
    rate: float,
) -> MassBalance:
    """Return the change of the right arms' probability by one gradient step on the logits.

    An arm is a possible first reply. Arm j has the probability `p[j]` and the summed reward `c[j]`.
    `rate` is the step size divided by the number of samples.
    """
    changes = logit_changes(p, c, rate=rate)
    mean = math.fsum(pi * change for pi, change in zip(p, changes, strict=True))
    parts = {True: 0.0, False: 0.0}
    for pi, change, is_right, is_sampled in zip(p, changes, right, sampled, strict=True):
        if is_right:
            parts[is_sampled] += pi * (change - mean)
    return MassBalance(parts[True], parts[False])


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig(Section):
    """Metrics only: how much of the policy's probability a group's episodes have tried (BroRL)."""


class Balance:
    """A technique that measures the total probability of the first replies of a group."""

    def __init__(self, options: BalanceConfig) -> None: ...

    def measure(
        self, groups: Sequence[Group], graded: Sequence[Group], context: CreditContext
    ) -> Mapping[str, float]:
        """Return three metrics of the groups' first replies, as means over the groups that have
        one.

        The metrics are NaN if there is no such group.
        """
        answered = (
            # A forked episode did not sample its first reply itself.
            [each for each in group.trajectories if each.sampled and each.fork is None]
            for group in graded
        )
        rows = [_of_group(episodes) for episodes in answered if episodes]
        names = ("sampled_mass", "sampled_change", "unsampled_loss_max")
        columns = zip(*rows, strict=True) if rows else ((math.nan,),) * len(names)
        return {
            f"balance/{name}": fmean(values) for name, values in zip(names, columns, strict=True)
        }


def _of_group(episodes: Sequence[Trajectory]) -> tuple[float, float, float]:
    """Return three numbers about the different first replies of a group, which are called arms.

    They are the total probability of all arms, the change of the probability of right arms by a
    gradient step, and the largest loss of probability of all other replies.
    """
    mean = fmean(each.reward for each in episodes)
    p: dict[tuple[int, ...], float] = {}
    c: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for each in episodes:
        tokens, logp = _first_reply(each)
        p[tokens] = math.exp(logp)
        c[tokens] += each.reward - mean
    # Versions may differ, so the probabilities can add up to more than 1.
    mass = math.fsum(p.values())
    scale = 1 / max(1.0, mass)
    arms = list(p)
    shares = [scale * p[arm] for arm in arms]
    sums = [c[arm] for arm in arms]
    rate = 1 / len(episodes)
    balance = mass_balance(
        shares,
        sums,
        right=[value > 0 for value in sums],
        sampled=[True] * len(arms),
        rate=rate,
    )
    changes = logit_changes(shares, sums, rate=rate)
    drift = math.fsum(pi * change for pi, change in zip(shares, changes, strict=True))
    return min(1.0, mass), balance.sampled, max(0.0, (1 - min(1.0, mass)) * drift)


def _first_reply(episode: Trajectory) -> tuple[tuple[int, ...], float]:
    """Return the tokens of the first reply, and the sum of their `behavior_logp`."""
    pieces = [
        piece for _, piece, turn in walk(episode.pieces) if turn == 0 and isinstance(piece, Sampled)
    ]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return tokens, math.fsum(value for piece in pieces for value in piece.behavior_logp)


def _describe(options: BalanceConfig) -> str:
    return "measures how much probability the first replies of a group have; it changes nothing"


_MEASURED = """
A softmax over 100 arms of which 60 are right, with random logits, and rewards of 1 and -1 as in the
paper: the two parts of dQ for a step of size 1, as a mean over 200 draws. The unsampled part is
negative, and vanishes for large N, as the paper states. With 10 right arms it is positive.

| N | sampled part | unsampled part |
|---|---|---|
| 4 | 0.0144 | -0.0030 |
| 16 | 0.0123 | -0.0017 |
| 64 | 0.0120 | -0.0004 |
| 256 | 0.0116 | 0.0000 |

It has not been measured on the desks.
"""

ENTRY = Entry(
    name="balance",
    slot="diagnostic",
    rows=(13,),
    makes=Balance,
    options=BalanceConfig,
    changes=frozenset(),
    describe=_describe,
    use="To choose `schedule.group_size`: if `balance/unsampled_loss_max` is about as large as "
    "`balance/sampled_change`, larger groups keep more right answers.",
    measured=_MEASURED,
    exactness="It changes nothing. Replies as arms, and which of them are right, are our own "
    "reading: the paper has tokens as arms. The first replies of long texts have probabilities of "
    "about 0, and then the figures say only that.",
    requires=frozenset({"siblings"}),
    evidence="abstract",
)
