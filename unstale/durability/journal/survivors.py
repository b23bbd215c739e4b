"""Statistics of how groups and attempts at episodes ended, to detect biased losses.

Lengths come from the sizes and sources of pieces. No token is read, so 100,000 episodes take
seconds.
"""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from unstale.durability.journal.reader import JournalReader
from unstale.durability.journal.tables import ATTEMPTS, journal_error
from unstale.records import HAS_BEHAVIOR

KEPT = ("trained", "waiting")
LOST = ("failed", "given_up", "restarted")
FATES = (*KEPT, *LOST, "open")
"""Ends of an attempt.

"trained" and "waiting" attempts finished; only the first were trained on so far. "failed" ones were
retried, "given_up" ones were not, "restarted" ones could not be replayed. "open" ones have not
ended: neither kept nor lost.
"""

CURVE_POINTS = 40

GROUPS_BY_END = """
SELECT env, split, CASE WHEN finished.number IS NULL THEN 'open' WHEN done IS NULL THEN 'failed'
    WHEN consumed.number IS NULL THEN 'finished' ELSE 'consumed' END AS ended, count(*)
FROM groups LEFT JOIN finished USING (number) LEFT JOIN consumed USING (number)
LEFT JOIN (SELECT DISTINCT number, 1 AS done FROM episodes JOIN trajectories USING (episode)) USING
(number)
GROUP BY env, split, ended ORDER BY env, split"""

_SOURCES = ", ".join(str(int(source)) for source in sorted(HAS_BEHAVIOR))

ATTEMPTS_WITH_TOKENS = f"""
WITH marked AS (
    SELECT episode, num_tokens, provenance IN ({_SOURCES}) AS sampled,
        lag(provenance IN ({_SOURCES}), 1, 0) OVER (PARTITION BY episode ORDER BY position) AS
        continues
    FROM pieces WHERE num_tokens > 0),
lengths AS (
    SELECT episode, sum(sampled * num_tokens) AS tokens, sum(sampled AND NOT continues) AS turns
    FROM marked GROUP BY episode),
tried AS (SELECT episode, number, episode = max(episode) OVER (PARTITION BY number, sibling) AS last
    FROM {ATTEMPTS})
SELECT env, split, CASE
    WHEN trajectories.episode IS NOT NULL AND consumed.number IS NOT NULL THEN 'trained'
    WHEN trajectories.episode IS NOT NULL THEN 'waiting'
    WHEN failures.episode IS NOT NULL AND last THEN 'given_up'
    WHEN failures.episode IS NOT NULL THEN 'failed'
    WHEN last AND restarts.episode IS NULL THEN 'open' ELSE 'restarted' END, lengths.tokens,
    lengths.turns, rewards,
    facts
FROM lengths JOIN tried USING (episode) JOIN groups USING (number) LEFT JOIN consumed USING (number)
LEFT JOIN trajectories USING (episode) LEFT JOIN failures USING (episode) LEFT JOIN restarts USING
(episode)"""
"""One row per attempt that holds a token.

`provenance` precedes the blobs in a row, so blobs are not read.
"""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean and the quantiles 0.1, 0.5 and 0.9 of a number over attempts."""

    mean: float
    low: int
    middle: int
    high: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Statistics of attempts that ended in the same way."""

    count: int
    tokens: Spread
    """Sampled tokens until the end."""
    turns: Spread
    success: float | None
    """Mean over the finished attempts, None without any."""
    reward: float | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """The attempts that ended after `low` to `high` sampled tokens."""

    low: int
    high: int
    ended: int
    trained: int
    waiting: int

    @property
    def lost(self) -> int:
        return self.ended - self.trained - self.waiting


@dataclass(frozen=True, slots=True)
class Contrast:
    """Sampled tokens of lost and of kept attempts. Attempts are taken as independent."""

    lost: int
    kept: int
    lost_mean: float
    kept_mean: float
    se: float
    """Standard error of the difference of the means."""


@dataclass(frozen=True, slots=True)
class SplitSurvivors:
    """The groups and attempts of one split of an environment, by how they ended."""

    env: str
    split: str
    groups: dict[str, int]
    kinds: dict[str, Kind]
    """By fate. "generated" are all attempts, "ended" all but the open ones."""
    buckets: tuple[Bucket, ...]
    """Quartiles of the attempts that ended."""
    contrast: Contrast | None
    """None if fewer than two attempts were lost or kept."""
    curve: tuple[tuple[int, float, float], ...]
    """`(n, share of ended attempts with at most n sampled tokens, share of trained ones)`."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """The ends of all groups and attempts of a run, by environment and split."""

    places: tuple[SplitSurvivors, ...]

    def row(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return asdict(self)


class _Attempt(NamedTuple):
    fate: str
    tokens: int
    turns: int
    success: bool | None
    reward: float | None


def survivors(journal: JournalReader) -> Survivors:
    """Compute the statistics of a journal. Raises `JournalError`."""
    groups: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    attempts: dict[tuple[str, str], list[_Attempt]] = defaultdict(list)
    for env, split, ended, count in journal.rows(GROUPS_BY_END):
        groups[env, split][ended] = count
    try:
        for env, split, fate, tokens, turns, rewards, facts in journal.rows(ATTEMPTS_WITH_TOKENS):
            success, reward = _grade(rewards, facts)
            attempts[env, split].append(_Attempt(fate, tokens, turns, success, reward))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        cause = f"rewards or facts of a trajectory: {error}"
        raise journal_error(journal.path, cause) from error
    splits = []
    for (env, split), ends in groups.items():
        splits.append(_summarize(env, split, ends, attempts[env, split]))
    return Survivors(tuple(splits))


def _grade(rewards: str | None, facts: str | None) -> tuple[bool | None, float | None]:
    """Return success and reward, with the same rule as `Trajectory.success`."""
    if rewards is None or facts is None:
        return None, None
    reward = float(sum(json.loads(rewards).values()))
    return json.loads(facts).get("success", reward) >= 1, reward


def _summarize(
    env: str, split: str, groups: dict[str, int], attempts: Sequence[_Attempt]
) -> SplitSurvivors:
    by_fate = {fate: [each for each in attempts if each.fate == fate] for fate in FATES}
    ended = [attempt for attempt in attempts if attempt.fate != "open"]
    kinds = {}
    for name, members in {"generated": attempts, "ended": ended, **by_fate}.items():
        if members:
            kinds[name] = _summarize_kind(members)
    return SplitSurvivors(
        env=env,
        split=split,
        groups=groups,
        kinds=kinds,
        buckets=_buckets(ended),
        contrast=_contrast(ended),
        curve=_curve(_lengths(ended), _lengths(by_fate["trained"])),
    )


def _lengths(attempts: Sequence[_Attempt]) -> list[int]:
    return sorted(attempt.tokens for attempt in attempts)


def _summarize_kind(attempts: Sequence[_Attempt]) -> Kind:
    successes = [attempt.success for attempt in attempts if attempt.success is not None]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    return Kind(
        count=len(attempts),
        tokens=_spread(_lengths(attempts)),
        turns=_spread(sorted(attempt.turns for attempt in attempts)),
        success=fmean(successes) if successes else None,
        reward=fmean(rewards) if rewards else None,
    )


def _spread(values: Sequence[int]) -> Spread:
    low, middle, high = (quantile(values, share) for share in (0.1, 0.5, 0.9))
    return Spread(fmean(values), low, middle, high)


def quantile(values: Sequence[int], share: float) -> int:
    """Return the smallest sorted value that at least this share of the values does not exceed.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.51), quantile([7], 0.1)
    (2, 3, 7)
    """
    return values[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def _buckets(ended: Sequence[_Attempt]) -> tuple[Bucket, ...]:
    """Cut the attempts at the quartiles of their length. Equal quartiles give fewer buckets."""
    if not ended:
        return ()
    lengths = _lengths(ended)
    edges = sorted({quantile(lengths, share) for share in (0.25, 0.5, 0.75, 1.0)})
    buckets = []
    previous = -1
    for edge in edges:
        members = [attempt for attempt in ended if previous < attempt.tokens <= edge]
        bucket = Bucket(
            low=min(attempt.tokens for attempt in members),
            high=edge,
            ended=len(members),
            trained=sum(attempt.fate == "trained" for attempt in members),
            waiting=sum(attempt.fate == "waiting" for attempt in members),
        )
        buckets.append(bucket)
        previous = edge
    return tuple(buckets)


def _contrast(ended: Sequence[_Attempt]) -> Contrast | None:
    lost = [attempt.tokens for attempt in ended if attempt.fate in LOST]
    kept = [attempt.tokens for attempt in ended if attempt.fate in KEPT]
    if min(len(lost), len(kept)) < 2:
        return None
    errors = (stdev(lost) / math.sqrt(len(lost)), stdev(kept) / math.sqrt(len(kept)))
    return Contrast(len(lost), len(kept), fmean(lost), fmean(kept), math.hypot(*errors))


def _curve(ended: Sequence[int], trained: Sequence[int]) -> tuple[tuple[int, float, float], ...]:
    """Return both cumulative shares at evenly spaced quantiles of the ended attempts."""
    if not ended or not trained:
        return ()
    quantiles = {quantile(ended, point / CURVE_POINTS) for point in range(1, CURVE_POINTS + 1)}
    curve = []
    for tokens in sorted(quantiles):
        share_ended = bisect_right(ended, tokens) / len(ended)
        share_trained = bisect_right(trained, tokens) / len(trained)
        curve.append((tokens, share_ended, share_trained))
    return tuple(curve)
