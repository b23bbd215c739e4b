"""How every group and every attempt at an episode ended, and whether what was trained on is like what was generated.

Lengths come from the sizes and sources of pieces: no token is read, so a journal of 100,000 episodes takes seconds.
"""

import json
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from unstale.durability.journal.reader import JournalReader
from unstale.durability.journal.tables import TRIED, failed
from unstale.records import HAS_BEHAVIOR

KEPT, LOST = ("trained", "waiting"), ("failed", "given_up", "restarted")
FATES = (*KEPT, *LOST, "open")
"""How an attempt ended: finished, and trained on or not yet; broken, and begun again or given up; begun again because
it could not be gone on with; or not at all, and so neither kept nor lost."""

GROUPS = """
SELECT env, split, CASE WHEN finished.number IS NULL THEN 'open' WHEN told IS NULL THEN 'failed'
    WHEN consumed.number IS NULL THEN 'finished' ELSE 'consumed' END AS ended, count(*)
FROM groups LEFT JOIN finished USING (number) LEFT JOIN consumed USING (number)
LEFT JOIN (SELECT DISTINCT number, 1 AS told FROM episodes JOIN trajectories USING (episode)) USING (number)
GROUP BY env, split, ended ORDER BY env, split"""

_SOURCES = ", ".join(str(int(source)) for source in sorted(HAS_BEHAVIOR))

ATTEMPTS = f"""
WITH said AS (
    SELECT episode, num_tokens, provenance IN ({_SOURCES}) AS sampled,
        lag(provenance IN ({_SOURCES}), 1, 0) OVER (PARTITION BY episode ORDER BY position) AS went_on
    FROM pieces WHERE num_tokens > 0),
spoken AS (
    SELECT episode, sum(sampled * num_tokens) AS tokens, sum(sampled AND NOT went_on) AS turns
    FROM said GROUP BY episode),
tried AS (SELECT episode, number, episode = max(episode) OVER (PARTITION BY number, sibling) AS last FROM {TRIED})
SELECT env, split, CASE
    WHEN trajectories.episode IS NOT NULL AND consumed.number IS NOT NULL THEN 'trained'
    WHEN trajectories.episode IS NOT NULL THEN 'waiting'
    WHEN failures.episode IS NOT NULL AND last THEN 'given_up'
    WHEN failures.episode IS NOT NULL THEN 'failed'
    WHEN last AND restarts.episode IS NULL THEN 'open' ELSE 'restarted' END, spoken.tokens, spoken.turns, rewards, facts
FROM spoken JOIN tried USING (episode) JOIN groups USING (number) LEFT JOIN consumed USING (number)
LEFT JOIN trajectories USING (episode) LEFT JOIN failures USING (episode) LEFT JOIN restarts USING (episode)"""
"""One row an attempt that holds a token. `provenance` stands before the blobs in a row, so they are not read."""

STEPS = 40


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a number over attempts: its mean and the quantiles 0.1, 0.5 and 0.9."""

    mean: float
    low: int
    middle: int
    high: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Attempts that ended alike."""

    count: int
    tokens: Spread
    """Sampled ones, up to where the attempt came."""
    turns: Spread
    success: float | None
    """Mean over the finished ones, if there are any."""
    reward: float | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Attempts that ended after `low` to `high` sampled tokens."""

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
    """Sampled tokens of the attempts that were lost against those of the kept ones, attempts taken as independent."""

    lost: int
    kept: int
    lost_mean: float
    kept_mean: float
    se: float
    """Standard error of the difference of the means."""


@dataclass(frozen=True, slots=True)
class Place:
    """An environment's split: its groups by how they ended, its attempts by how they ended."""

    env: str
    split: str
    groups: dict[str, int]
    kinds: dict[str, Kind]
    """By fate; `generated` are all of them, `ended` all but the open ones."""
    buckets: tuple[Bucket, ...]
    """Quartiles of the attempts that ended."""
    contrast: Contrast | None
    """None when fewer than two were lost or kept."""
    curve: tuple[tuple[int, float, float], ...]
    """`(sampled tokens, share of the ended that have at most as many, the same of the trained)`."""


@dataclass(frozen=True, slots=True)
class Survivors:
    """What was generated and what was trained on, by environment."""

    places: tuple[Place, ...]

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Attempt(NamedTuple):
    fate: str
    tokens: int
    turns: int
    success: bool | None
    reward: float | None


def survivors(journal: JournalReader) -> Survivors:
    """Over the whole journal. Raises `JournalError`."""
    groups, attempts = (
        defaultdict[tuple[str, str], dict[str, int]](dict),
        defaultdict[Any, list[_Attempt]](list),
    )
    for env, split, ended, count in journal.rows(GROUPS):
        groups[env, split][ended] = count
    try:
        for env, split, fate, tokens, turns, rewards, facts in journal.rows(ATTEMPTS):
            attempts[env, split].append(_Attempt(fate, tokens, turns, *_graded(rewards, facts)))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise failed(journal.path, f"rewards or facts of a trajectory: {error}") from error
    return Survivors(
        tuple(_place(*place, ended, attempts[place]) for place, ended in groups.items())
    )


def _graded(rewards: str | None, facts: str | None) -> tuple[bool | None, float | None]:
    """As `Trajectory` has it: the environment's own word, or a reward of at least 1."""
    if rewards is None or facts is None:
        return None, None
    reward = float(sum(json.loads(rewards).values()))
    return json.loads(facts).get("success", reward) >= 1, reward


def _place(env: str, split: str, groups: dict[str, int], attempts: Sequence[_Attempt]) -> Place:
    ended = [attempt for attempt in attempts if attempt.fate != "open"]
    named = {"generated": attempts, "ended": ended}
    named |= {fate: [attempt for attempt in attempts if attempt.fate == fate] for fate in FATES}
    return Place(
        env=env,
        split=split,
        groups=groups,
        kinds={name: _kind(alike) for name, alike in named.items() if alike},
        buckets=tuple(_buckets(ended)),
        contrast=_contrast(ended),
        curve=tuple(_curve(_lengths(ended), _lengths(named["trained"]))),
    )


def _lengths(attempts: Iterable[_Attempt]) -> list[int]:
    return sorted(attempt.tokens for attempt in attempts)


def _kind(attempts: Sequence[_Attempt]) -> Kind:
    graded = [
        (attempt.success, attempt.reward) for attempt in attempts if attempt.reward is not None
    ]
    return Kind(
        count=len(attempts),
        tokens=_spread(_lengths(attempts)),
        turns=_spread(sorted(attempt.turns for attempt in attempts)),
        success=sum(bool(success) for success, _ in graded) / len(graded) if graded else None,
        reward=sum(reward or 0.0 for _, reward in graded) / len(graded) if graded else None,
    )


def _spread(values: Sequence[int]) -> Spread:
    return Spread(
        sum(values) / len(values), *(quantile(values, share) for share in (0.1, 0.5, 0.9))
    )


def quantile(values: Sequence[int], share: float) -> int:
    """The smallest of the sorted values that at least this share does not exceed.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.51), quantile([7], 0.1)
    (2, 3, 7)
    """
    return values[max(0, math.ceil(share * len(values) - 1e-9) - 1)]


def _buckets(ended: Sequence[_Attempt]) -> Iterable[Bucket]:
    lengths = _lengths(ended)
    above = -1
    for edge in (
        sorted({quantile(lengths, share) for share in (0.25, 0.5, 0.75, 1.0)}) if lengths else ()
    ):
        inside = [attempt for attempt in ended if above < attempt.tokens <= edge]
        trained, waiting = (sum(attempt.fate == fate for attempt in inside) for fate in KEPT)
        yield Bucket(min(attempt.tokens for attempt in inside), edge, len(inside), trained, waiting)
        above = edge


def _contrast(ended: Sequence[_Attempt]) -> Contrast | None:
    lost, kept = (
        _lengths(attempt for attempt in ended if attempt.fate in fates) for fates in (LOST, KEPT)
    )
    if min(len(lost), len(kept)) < 2:
        return None
    (lost_mean, lost_error), (kept_mean, kept_error) = map(_mean, (lost, kept))
    return Contrast(len(lost), len(kept), lost_mean, kept_mean, math.hypot(lost_error, kept_error))


def _mean(values: Sequence[int]) -> tuple[float, float]:
    """With its standard error."""
    count, mean = len(values), sum(values) / len(values)
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def _curve(ended: Sequence[int], trained: Sequence[int]) -> Iterable[tuple[int, float, float]]:
    """At even quantiles of the ended."""
    if ended and trained:
        for tokens in sorted({quantile(ended, step / STEPS) for step in range(1, STEPS + 1)}):
            yield (
                tokens,
                bisect_right(ended, tokens) / len(ended),
                bisect_right(trained, tokens) / len(trained),
            )
