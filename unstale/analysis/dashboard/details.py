"""Return the tables of a run's page, for example those of engines and of episode lengths.

All data come from the run's index, which is kept up to date. Each answer has a limited number of
rows.
"""

import re
from typing import Any

from unstale.analysis.dashboard.database import Database
from unstale.analysis.dashboard.timeline import shares
from unstale.durability.journal.survivors import KEPT, LOST, contrast, length_curve
from unstale.durability.run_folder import Row
from unstale.observe.survivors import FATES, survivorship

MAX_ENGINES = 64
MAX_REASONS = 20
MAX_LAGS = 12
MAX_EPISODES = 100_000
"""Number of newest attempts at episodes that statistics of attempts use."""

_GAUGE = re.compile(r"engine_([0-9]{1,4})/([a-z_]+)")


def details(database: Database) -> Row:
    """Return the tables on the page of a run, by name."""
    return {
        "shares": shares(database),
        "engines": engines(database),
        "ages": ages(database),
        "sizes": {ratio: size_by_lag(database, ratio) for ratio in ("D", "S")},
        "attempts": attempts(database),
        "examples": examples(database),
        "forks": forks(database),
    }


def engines(database: Database) -> list[Row]:
    """Return a row for each engine: its last metrics, and how often it was lost and restarted.

    Empty for old runs, which recorded no metrics by engine.
    """
    found: dict[int, Row] = {}
    rows = database.rows(
        """SELECT names.name, value, max(step), (
            SELECT sum(value) FROM metrics WHERE name = names.id AND names.name GLOB '*/restarts')
        FROM names JOIN metrics ON metrics.name = names.id
        WHERE names.name GLOB 'engine_[0-9]*/*' GROUP BY names.id"""
    )
    for name, value, _, restarts in rows:
        if match := _GAUGE.fullmatch(name):
            engine = found.setdefault(int(match[1]), {})
            engine[match[2]] = restarts if match[2] == "restarts" else value
    losses = database.rows(
        """SELECT json_extract(fields, '$.engine'), count(*), json_extract(fields, '$.cause'),
            max(id)
        FROM events WHERE kind = 'engine_lost' AND json_valid(fields) GROUP BY 1 LIMIT 1000"""
    )
    for number, count, cause, _ in losses:
        if number in found:
            found[number] |= {"lost": count, "cause": str(cause or "")[:300]}
    return [{"engine": number, **found[number]} for number in sorted(found)[:MAX_ENGINES]]


def ages(database: Database) -> list[Row]:
    """Return the staleness of trained tokens in each tenth of their episodes.

    A row has the `tenth` from 0, the `mean` and `max` staleness in versions, and the number of
    trained `tokens`.
    """
    rows = database.rows(
        "SELECT tenth, sum(lag * tokens), max(lag), sum(tokens) FROM ages "
        "GROUP BY tenth ORDER BY tenth"
    )
    return [
        {"tenth": tenth, "mean": total / tokens, "max": most, "tokens": tokens}
        for tenth, total, most, tokens in rows
        if tokens
    ]


def size_by_lag(database: Database, ratio: str) -> list[list[float]]:
    """Return the mean |log D| or |log S| in nats at each lag (staleness), as `[lag, mean]`.

    `ratio` is "D" or "S". The mean over steps is weighted by the number of tokens that each step
    measured, or by all its trained tokens of that lag if an old run did not record this number.
    """
    component = {"D": "correction", "S": "objective"}[ratio]
    prefix = f"{component}/log_{ratio.lower()}_abs_mean/lag_"
    measured = f"{component}/log_{ratio.lower()}_tokens/lag_"
    rows = database.rows(
        """WITH means AS (
            SELECT lags.lag AS lag, value, coalesce((
                SELECT counted.value FROM metrics AS counted JOIN names AS own
                ON counted.name = own.id
                WHERE own.name = ? || lags.lag AND counted.step = metrics.step), tokens) AS weight
            FROM names JOIN metrics ON metrics.name = names.id JOIN lags USING (step)
            WHERE names.name GLOB ? AND lags.lag = cast(substr(names.name, ?) AS INTEGER))
        SELECT lag, sum(value * weight) / sum(weight) FROM means
        GROUP BY lag HAVING sum(weight) > 0 ORDER BY lag LIMIT ?""",
        (measured, f"{prefix}[0-9]*", len(prefix) + 1, MAX_LAGS),
    )
    return [[lag, mean] for lag, mean in rows]


_ATTEMPTS = """SELECT sampled_tokens, turns, success, reward,
    CASE WHEN outcome = 'failed'
        AND episode = max(episode) OVER (PARTITION BY group_number, sibling)
    THEN 'given_up' ELSE outcome END AS outcome
    FROM (SELECT * FROM episodes WHERE is_branch = 0 ORDER BY episode DESC LIMIT ?)"""
"""SQL for the newest attempts at episodes, without branches (further conversations of an episode).
A failed attempt has the outcome `given_up` if it was the last attempt at its episode.
"""


def attempts(database: Database) -> Row:
    """Return statistics of attempts at episodes by their outcome (`kinds`), and a `curve` of
    lengths.

    Branches (further conversations of an episode) are left out, because they have its outcome and
    reward. A point of `curve` has a number of sampled tokens, the share of all ended attempts with
    at most that many, and the same share of the attempts that were trained on. `is_biased` is True
    if long attempts are lost more often, so that training prefers short episodes. `sentence`
    explains it.
    """
    rows = database.rows(
        f"""SELECT outcome, count(*), avg(sampled_tokens), avg(turns), avg(success), avg(reward)
        FROM ({_ATTEMPTS}) GROUP BY outcome""",
        (MAX_EPISODES,),
    )
    names = ("count", "sampled_tokens", "turns", "success", "reward")
    kinds = [
        {
            "outcome": outcome,
            "name": FATES.get(outcome, outcome),
            **dict(zip(names, rest, strict=True)),
        }
        for outcome, *rest in rows
    ]
    lengths = database.rows(
        f"""SELECT sampled_tokens, outcome FROM ({_ATTEMPTS})
        WHERE outcome NOT IN ('open', 'damaged') AND sampled_tokens IS NOT NULL""",
        (MAX_EPISODES,),
    )
    ended = sorted(length for length, _ in lengths)
    trained = sorted(length for length, outcome in lengths if outcome == "trained")
    lost, kept = (
        [length for length, outcome in lengths if outcome in fates] for fates in (LOST, KEPT)
    )
    place: Row = {
        "kinds": {kind["outcome"]: {} for kind in kinds},
        "contrast": contrast(lost, kept),
    }
    sentence, is_biased = survivorship(place) if lengths else ("", False)
    return {
        "kinds": kinds,
        "curve": length_curve(ended, trained),
        "sentence": sentence,
        "is_biased": is_biased,
    }


def examples(database: Database) -> list[Row]:
    """Return up to four episodes: one success and one failure from each of the first and the last
    quarter of the steps.

    Episodes that several versions sampled are preferred.
    """
    ((first, last),) = database.rows("SELECT min(step), max(step) FROM episodes")
    if first is None:
        return []
    quarter = (last - first) / 4
    found = []
    for when, low, high, order in (
        ("early", first, first + quarter, "ASC"),
        ("late", last - quarter, last, "DESC"),
    ):
        for success in (1, 0):
            rows = database.rows(
                "SELECT episode, step, reward, versions, task, role FROM episodes "
                "WHERE success = ? "
                f"AND step BETWEEN ? AND ? ORDER BY min(versions, 2) DESC, step {order} LIMIT 1",
                (success, low, high),
            )
            for episode, step, reward, versions, task, role in rows:
                found.append(
                    {
                        "why": f"{when} {'success' if success else 'failure'}",
                        "episode": episode,
                        "step": step,
                        "reward": reward,
                        "versions": versions,
                        "task": f"{task}, {role}" if role else task,
                    }
                )
    return found


def forks(database: Database) -> list[Row]:
    """Return the reasons why agents changed the history of a conversation, most frequent first.

    Each row has the `reason` and the `count` of such changes. The first of them was in `episode`,
    after token `at`.
    """
    rows: list[tuple[Any, ...]] = database.rows(
        """SELECT json_extract(fields, '$.reason'), count(*), json_extract(fields, '$.episode'),
            json_extract(fields, '$.at'), min(id)
        FROM events WHERE kind = 'forked' AND json_valid(fields)
        GROUP BY 1 ORDER BY 2 DESC LIMIT ?""",
        (MAX_REASONS,),
    )
    return [
        {"reason": str(reason)[:300], "count": count, "episode": episode, "at": at}
        for reason, count, episode, at, _ in rows
    ]
