"""Compare two runs on the groups that have the same number and the same task in both."""

from collections.abc import Sequence

from unstale.analysis.dashboard.database import Database
from unstale.durability.run_folder import Row
from unstale.observe.statistics import paired_difference

MAX_GROUPS = 50_000
"""Number of newest groups of each run that are compared."""

FIGURES = ("success", "reward", "sampled_tokens", "turns")


def pairs(a: Database, b: Database) -> Row:
    """Return the mean differences B - A of two runs over the groups that have the same number and
    task.

    `figures` has for each of `FIGURES` the means of A and B and their difference. Its `interval` is
    the 95% interval of the difference over groups by Student's t, or None for a single group and
    for equal differences. `late` has the same for the last quarter of the common groups, for which
    the runs have trained longest. `groups` is the number of common groups. `only` is the number of
    groups of both runs without a finished group of the same number and task in the other run.
    """
    left, right = _groups(a), _groups(b)
    common = sorted(left.keys() & right.keys())
    late = common[3 * len(common) // 4 :]
    return {
        "groups": len(common),
        "only": len(left.keys() | right.keys()) - len(common),
        "figures": _compare(left, right, common),
        "late_groups": len(late),
        "late": _compare(left, right, late),
    }


def _groups(database: Database) -> dict[tuple[int, str], tuple[float | None, ...]]:
    """Return the means of `FIGURES` over each finished group of a run, by group number and task.

    A group is finished if none of its episodes is still open. Branches (further conversations of an
    episode) are left out, because they have its reward.
    """
    means = ", ".join(f"avg({name})" for name in FIGURES)
    rows = database.rows(
        f"""SELECT group_number, task, {means} FROM episodes
        WHERE is_branch = 0 AND outcome IN ('trained', 'waiting') AND group_number > (
            SELECT coalesce(max(group_number), 0) - ? FROM episodes)
        AND group_number NOT IN (SELECT group_number FROM episodes WHERE outcome = 'open')
        GROUP BY group_number, task""",
        (MAX_GROUPS,),
    )
    return {(number, task): tuple(values) for number, task, *values in rows}


def _compare(
    left: dict[tuple[int, str], tuple[float | None, ...]],
    right: dict[tuple[int, str], tuple[float | None, ...]],
    common: Sequence[tuple[int, str]],
) -> list[Row]:
    found = []
    for column, name in enumerate(FIGURES):
        known = [
            (one, other)
            for key in common
            if (one := left[key][column]) is not None and (other := right[key][column]) is not None
        ]
        if not known:
            continue
        differences = [other - one for one, other in known]
        count = len(known)
        paired = paired_difference(differences)
        found.append(
            {
                "name": name,
                "a": sum(one for one, _ in known) / count,
                "b": sum(other for _, other in known) / count,
                "difference": sum(differences) / count,
                "interval": paired and list(paired.interval(0.05)),
                "groups": count,
            }
        )
    return found
