"""The table of an audit, which measures the error of each method to compute `old_logp` (route).

The true `old_logp` is computed with a full copy of the weights that sampled the token.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from unstale.observe.words import NONE, amount, mapping, number, percent


class Column(NamedTuple):
    """A column of an audit's table: its name, and an explanation for a note below the table.

    The table has a row for each route (method to compute `old_logp`). A terminal shows only columns
    whose `brief` is True.
    """

    name: str
    about: str = ""
    brief: bool = True


COLUMNS = (
    Column("route"),
    Column(
        "error",
        "mean |prox - old_logp| over the action tokens, ± standard error (clustered by sequence)",
    ),
    Column(
        "of current", "the error divided by that of current_recompute on these tokens", brief=False
    ),
    Column("s", "staleness leak: share of log S that the approximation moves into log D"),
    Column("d", "discrepancy leak: share of log D that the approximation moves into log S"),
    Column(
        "correlation",
        "correlation of the approximate log D and log S; none if one of them is constant",
        brief=False,
    ),
    Column(
        "mask F1",
        "agreement on dropped tokens between the route and the true old_logp; none if neither "
        "drops a token, 0 if they drop no token in common",
    ),
    Column(
        "clip F1",
        "agreement on clipped tokens between the route and the true old_logp, as mask F1",
    ),
    Column("exact", "share of action tokens that the route marks as exact"),
    Column("worst exact", "largest error of a token that the route marks as exact", brief=False),
    Column("seconds", "time of the route, including the policy's forward pass where it is used"),
    Column("forward tokens", brief=False),
    Column("MB", "peak size of additional weights", brief=False),
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the texts of one row of an audit's table, one for each of `COLUMNS`.

    `row` has the figures of a route (way to get `old_logp`), as in `audit.json`.
    """
    costs = mapping(row.get("costs"))
    forward_tokens = number(costs.get("forward_tokens"))
    memory_bytes = number(costs.get("memory_bytes"))
    return [
        str(row.get("route", NONE))[:80],
        _with_error(row, "logp_error_abs_mean", amount),
        _with_error(row, "error_ratio", _places),
        _with_error(row, "staleness_leak", _places),
        _with_error(row, "discrepancy_leak", _places),
        _places(number(row.get("log_d_log_s_corr"))),
        _agreement(row, "mask_f1"),
        _agreement(row, "clip_f1"),
        percent(number(row.get("exact_fraction")), 1),
        amount(number(row.get("claimed_error_max"))),
        amount(number(row.get("seconds"))),
        amount(forward_tokens),
        amount(None if memory_bytes is None else memory_bytes / 1e6),
    ]


def _places(value: float | None) -> str:
    return NONE if value is None else f"{value:z.3f}"


def _agreement(row: Mapping[str, Any], name: str) -> str:
    """Return the F1 `row[name]` as text. None becomes "none": no token is stopped in either
    case.
    """
    return "none" if name in row and row[name] is None else _places(number(row.get(name)))


def _with_error(row: Mapping[str, Any], name: str, show: Any) -> str:
    value, se = number(row.get(name)), number(row.get(f"{name}_se"))
    return show(value) + (f" ± {show(se)}" if value is not None and se is not None else "")
