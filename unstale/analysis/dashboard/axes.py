"""Place steps on the x axis of a plot: steps, seconds of training, or sampled tokens."""

from collections.abc import Sequence
from itertools import accumulate

from unstale.analysis.dashboard.database import Database
from unstale.analysis.dashboard.table import BadQuestion
from unstale.analysis.report.compare import TOKENS, training_seconds

AXES = ("step", "seconds", "tokens")


def positions(database: Database, axis: str, steps: Sequence[int]) -> list[float | None]:
    """Return the place of each step on the x axis `axis`, one of `AXES`. None if it was not
    recorded.

    The place on the axis `seconds` is the time since the start of the first step, without
    evaluations. The place on `tokens` is the number of tokens sampled for the groups trained on up
    to the step, without replayed groups. Raises `BadQuestion` for another axis.
    """
    if axis not in AXES:
        raise BadQuestion(f"x must be one of {', '.join(AXES)}, got {axis!r}")
    if axis == "step":
        return list(steps)
    found = _seconds(database) if axis == "seconds" else _tokens(database)
    return [found.get(step) for step in steps]


def _seconds(database: Database) -> dict[int, float]:
    spans = database.rows("""SELECT lane, start, "end" FROM spans WHERE lane = 'eval'""")
    spans += database.rows(
        """SELECT lane, start, "end" FROM spans WHERE lane = 'wait' ORDER BY start LIMIT 1"""
    )
    return training_seconds(_values(database, "time_s"), spans)


def _tokens(database: Database) -> dict[int, float]:
    values = dict(_values(database, TOKENS))
    steps = sorted(values)
    return dict(zip(steps, accumulate(values[step] for step in steps), strict=True))


def _values(database: Database, name: str) -> list[tuple[int, float]]:
    return database.rows(
        "SELECT step, value FROM metrics WHERE name = (SELECT id FROM names WHERE name = ?) "
        "ORDER BY step",
        (name,),
    )
