"""Compare the episodes that were generated with those trained on, for page and terminal.

An attempt is one try at an episode. A lost attempt ended without being trained on: it failed, or a
resume started it again. If long attempts are lost more often, training prefers short episodes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unstale.observe.report.words import (
    FATES,
    NONE,
    amount,
    censored,
    mapping,
    number,
    percent,
    records,
    survivorship,
)

TITLE = "Generated and trained-on episodes"
MAX_PLACES, MAX_ROWS = 12, 200
GROUPS = {
    "consumed": "trained on",
    "finished": "waiting to be trained on",
    "open": "open",
    "failed": "without a finished episode",
}
TERMINAL = (0, 1, 2, 3, 4, 6)
"""Indices of the columns of `HEAD` that are shown on a terminal."""
QUANTILES = "p10 · p50 · p90"
HEAD = ("", "attempts", "mean tokens", QUANTILES, "mean turns", QUANTILES, "success", "reward")


def shown_places(survivors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attempts by environment as a page shows them, or why they are `missing`."""
    places = [_place(place) for place in records(survivors.get("places"), MAX_PLACES)]
    return {"places": places, "head": HEAD, "missing": _missing(survivors)}


def _missing(survivors: Mapping[str, Any]) -> str:
    if "missing" in survivors:
        return f"Not known: {survivors['missing']}"[:600]
    if "places" in survivors:
        return "No group was started."
    return "Not known: `unstale report` writes survivors.json for a run with a journal."


def terminal_table(survivors: Mapping[str, Any]) -> RenderableType:
    """Return the attempts of all environments as a table for a terminal."""
    shown = Table(title=TITLE, title_justify="left", title_style="bold", box=SIMPLE)
    for column in TERMINAL:
        shown.add_column(HEAD[column], justify="right" if column else "left", no_wrap=True)
    sentences = []
    for place in records(survivors.get("places"), MAX_ROWS):
        shown.add_section()
        shown.add_row(f"[bold]{escape(_name(place))}[/]")
        for row in rows(place):
            shown.add_row(*(escape(row[column]) for column in TERMINAL))
        sentence, biased = survivorship(place)
        sentences.append(Text(f"{_name(place)}: {sentence}", style="bold red" if biased else ""))
    return Group(shown, *sentences)


def _name(place: Mapping[str, Any]) -> str:
    return f"{place.get('env', NONE)}/{place.get('split', NONE)}"[:80]


def rows(place: Mapping[str, Any]) -> list[list[str]]:
    """Return the table of an environment: a row for all attempts, then one for each kind of end."""
    attempts = mapping(place.get("kinds"))
    names = {"generated": "generated", **{fate: f"  {words}" for fate, words in FATES.items()}}
    return [
        [words, *_figures(attempts[name])]
        for name, words in names.items()
        if isinstance(attempts.get(name), Mapping)
    ]


def _figures(kind: Mapping[str, Any]) -> list[str]:
    """Return number, lengths, success and reward of attempts that ended in one way, as text."""
    figures = [amount(number(kind.get("count")))]
    for name in ("tokens", "turns"):
        spread = mapping(kind.get(name))
        mean, *quantiles = (
            amount(number(spread.get(each))) for each in ("mean", "low", "middle", "high")
        )
        figures += [mean, " · ".join(quantiles)]
    success = number(kind.get("success"))
    return [*figures, percent(success, 1), amount(number(kind.get("reward")))]


def _place(place: Mapping[str, Any]) -> dict[str, Any]:
    sentence, is_biased = survivorship(place)
    return {
        "name": _name(place),
        "about": f"{_groups(place)} Means and quantiles of sampled tokens and of turns. Lost "
        "attempts count with the length that they reached.",
        "rows": rows(place),
        "sentence": sentence,
        "is_biased": is_biased,
        "note": censored(place),
        "by_length": list(_by_length(place)),
    }


def _groups(place: Mapping[str, Any]) -> str:
    groups = mapping(place.get("groups"))
    counts = {name: number(groups.get(name)) or 0.0 for name in GROUPS}
    parts = [f"{count:,.0f} {GROUPS[name]}" for name, count in counts.items() if count]
    return f"{sum(counts.values()):,.0f} groups were started: {', '.join(parts) or 'none'}."


def _by_length(place: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each quarter of the attempts that ended, by length.

    It has the lengths, the numbers of attempts that ended, were trained on, wait and were lost, and
    the shares that were trained on and kept.
    """
    for bucket in records(place.get("buckets"), MAX_ROWS):
        low, high, ended, trained, waiting = (
            number(bucket.get(name)) or 0.0
            for name in ("low", "high", "ended", "trained", "waiting")
        )
        length = f"{amount(low)} to {amount(high)}" if low < high else amount(low)
        counts = [amount(count) for count in (ended, trained, waiting, ended - trained - waiting)]
        shares = [
            percent(count / ended if ended else None) for count in (trained, trained + waiting)
        ]
        yield [length, *counts, *shares]
