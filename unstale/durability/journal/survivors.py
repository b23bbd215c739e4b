"""Compare episodes that were trained on with lost ones, because losses may bias the training data.

Lengths are computed from stored numbers of tokens. No token is read, so 100,000 episodes take
seconds.
"""

import json
import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from unstale.durability.journal.reader import JournalReader
from unstale.durability.journal.tables import ATTEMPTS, grade
from unstale.durability.run_folder import Row
from unstale.records import HAS_BEHAVIOR, nearest_rank

KEPT = ("trained", "waiting")
LOST = ("failed", "given_up", "restarted")
FATES = (*KEPT, *LOST, "open")
"""The possible fates of an attempt at an episode. "trained": finished and trained on. "waiting":
finished and not trained on. "failed": failed and repeated. "given_up": failed and not repeated.
"restarted": could not be replayed after a resume. "open": has not ended, so neither kept nor lost.
"""

CURVE_POINTS = 40

_SOURCES = ", ".join(str(int(source)) for source in sorted(HAS_BEHAVIOR))

ATTEMPTS_WITH_TOKENS = f"""
WITH marked AS (
    SELECT episode, num_tokens, provenance IN ({_SOURCES}) AS sampled,
        lag(provenance IN ({_SOURCES}), 1, 0)
            OVER (PARTITION BY episode ORDER BY position) AS continues
    FROM pieces WHERE num_tokens > 0),
lengths AS (
    SELECT episode, sum(sampled * num_tokens) AS tokens, sum(sampled AND NOT continues) AS turns
    FROM marked GROUP BY episode),
tried AS (
    SELECT episode, number, episode = max(episode) OVER (PARTITION BY number, sibling) AS last
    FROM {ATTEMPTS})
SELECT env, split,
    CASE
        WHEN trajectories.episode IS NOT NULL AND consumed.number IS NOT NULL THEN 'trained'
        WHEN trajectories.episode IS NOT NULL THEN 'waiting'
        WHEN failures.episode IS NOT NULL AND last THEN 'given_up'
        WHEN failures.episode IS NOT NULL THEN 'failed'
        WHEN last AND restarts.episode IS NULL THEN 'open'
        ELSE 'restarted'
    END,
    lengths.tokens, lengths.turns, rewards, facts
FROM lengths JOIN tried USING (episode) JOIN groups USING (number)
LEFT JOIN consumed USING (number) LEFT JOIN trajectories USING (episode)
LEFT JOIN failures USING (episode) LEFT JOIN restarts USING (episode)
LEFT JOIN notes USING (episode)
WHERE coalesce(notes.writes, 0) = 0 AND stop IS NOT 'pruned'"""
"""SQL query with one row for each attempt at an episode that has tokens. Pruned attempts are left
out, and episodes in which the policy wrote a text about other episodes. SQLite reads no tokens for
it, because a row of `pieces` has `provenance` before the tokens.
"""


class _Attempt(NamedTuple):
    fate: str
    tokens: int
    turns: int
    success: bool | None
    reward: float | None


def survivors(journal: JournalReader) -> Row:
    """Return statistics of the attempts in a journal, by their end, as JSON values.

    "places" has an entry for each split of each environment:

        env, split  name of the environment and of the split
        groups      number of groups by `GroupRow.ended`
        kinds       statistics of the attempts by their end (`FATES`), of all ("generated"),
                    and of all that have ended ("ended")
        contrast    `contrast` of the sampled tokens of lost and of kept attempts

    Raises `JournalError` if the journal is damaged.
    """
    groups: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for group in journal.groups():
        groups[group.task.env, group.task.split][group.ended] += 1
    attempts: defaultdict[tuple[str, str], list[_Attempt]] = defaultdict(list)
    with journal.wrap_errors("rewards or facts of a trajectory"):
        for env, split, fate, tokens, turns, rewards, facts in journal.rows(ATTEMPTS_WITH_TOKENS):
            success, reward = (
                grade(json.loads(rewards), json.loads(facts)) if rewards and facts else (None, None)
            )
            attempts[env, split].append(_Attempt(fate, tokens, turns, success, reward))
    return {
        "places": [
            {"env": env, "split": split, "groups": dict(ends), **_summarize(attempts[env, split])}
            for (env, split), ends in sorted(groups.items())
        ]
    }


def _summarize(attempts: Sequence[_Attempt]) -> Row:
    by_fate = {fate: [each for each in attempts if each.fate == fate] for fate in FATES}
    ended = [attempt for attempt in attempts if attempt.fate != "open"]
    kinds = {"generated": attempts, "ended": ended, **by_fate}
    lost, kept = (
        [attempt.tokens for attempt in ended if attempt.fate in fates] for fates in (LOST, KEPT)
    )
    return {
        "kinds": {name: _statistics(members) for name, members in kinds.items() if members},
        "contrast": contrast(lost, kept),
    }


def _lengths(attempts: Sequence[_Attempt]) -> list[int]:
    return sorted(attempt.tokens for attempt in attempts)


def _statistics(attempts: Sequence[_Attempt]) -> Row:
    """Return the number of attempts, their sampled tokens and turns, mean success and mean reward.

    Success and reward are means over the finished attempts, and None if no attempt finished.
    """
    successes = [attempt.success for attempt in attempts if attempt.success is not None]
    rewards = [attempt.reward for attempt in attempts if attempt.reward is not None]
    return {
        "count": len(attempts),
        "tokens": _spread(_lengths(attempts)),
        "turns": _spread(sorted(attempt.turns for attempt in attempts)),
        "success": fmean(successes) if successes else None,
        "reward": fmean(rewards) if rewards else None,
    }


def _spread(values: Sequence[int]) -> Row:
    """Return the mean of the values, and their quantiles 0.1, 0.5 and 0.9."""
    shares = {"low": 0.1, "middle": 0.5, "high": 0.9}
    quantiles = {name: quantile(values, share) for name, share in shares.items()}
    return {"mean": fmean(values), **quantiles}


def quantile(values: Sequence[int], share: float) -> int:
    """Return the smallest v in `values` for which at least the share `share` of them are <= v.

    `values` must be sorted.

    >>> quantile([1, 2, 3, 4], 0.5), quantile([1, 2, 3, 4], 0.51), quantile([7], 0.1)
    (2, 3, 7)
    """
    return values[nearest_rank(len(values), share)]


def contrast(lost: Sequence[float], kept: Sequence[float]) -> Row | None:
    """Compare the mean lengths of lost and of kept attempts at episodes.

    `lost` and `kept` have the length of each attempt. `se` is the standard error of the difference
    of the means, if the attempts are independent. None if fewer than two are lost or fewer than two
    kept.

    >>> contrast([2, 4], [1, 1])
    {'lost': 2, 'kept': 2, 'lost_mean': 3.0, 'kept_mean': 1.0, 'se': 1.0}
    """
    if min(len(lost), len(kept)) < 2:
        return None
    errors = (stdev(lost) / math.sqrt(len(lost)), stdev(kept) / math.sqrt(len(kept)))
    return {
        "lost": len(lost),
        "kept": len(kept),
        "lost_mean": fmean(lost),
        "kept_mean": fmean(kept),
        "se": math.hypot(*errors),
    }


def length_curve(ended: Sequence[int], trained: Sequence[int]) -> list[list[Any]]:
    """Return points `[tokens, share of ended, share of trained]` of two cumulative distributions.

    `ended` and `trained` are the sorted lengths of the attempts that ended and that were trained
    on. A share is that of attempts with at most `tokens` sampled tokens. The values of `tokens` are
    quantiles of `ended`. Empty if an argument is empty.
    """
    if not ended or not trained:
        return []
    quantiles = {quantile(ended, point / CURVE_POINTS) for point in range(1, CURVE_POINTS + 1)}
    curve = []
    for tokens in sorted(quantiles):
        share_ended = bisect_right(ended, tokens) / len(ended)
        share_trained = bisect_right(trained, tokens) / len(trained)
        curve.append([tokens, share_ended, share_trained])
    return curve
