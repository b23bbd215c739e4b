"""Compare the episodes that were generated with those trained on, for page and terminal.

An attempt is one try at an episode. A lost attempt ended without being trained on: it failed, or a
resume started it again. If long attempts are lost more often, training prefers short episodes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unstale.observe.report.gather import Gathered
from unstale.observe.report.markup import figure, gap, render, table
from unstale.observe.report.plots import Axis, Series, line_plot
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


def trained_on(run: Gathered) -> Markup:
    """Return the section of the report on attempts, by how they ended and by length."""
    places = [_place(place) for place in records(run.survivors.get("places"), MAX_PLACES)]
    return render("survivors.html", title=TITLE, places=places, missing=_missing(run.survivors))


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
    name = _name(place)
    sentence, biased = survivorship(place)
    return {
        "name": name,
        "about": f"{_groups(place)} Means and quantiles of sampled tokens and of turns. Lost "
        "attempts count with the length that they reached.",
        "table": table(HEAD, rows(place), "results"),
        "sentence": sentence,
        "biased": biased,
        "note": censored(place),
        "lengths": _lengths(place, name),
        "kept": _kept(place),
    }


def _groups(place: Mapping[str, Any]) -> str:
    groups = mapping(place.get("groups"))
    counts = {name: number(groups.get(name)) or 0.0 for name in GROUPS}
    parts = [f"{count:,.0f} {GROUPS[name]}" for name, count in counts.items() if count]
    return f"{sum(counts.values()):,.0f} groups were started: {', '.join(parts) or 'none'}."


def _lengths(place: Mapping[str, Any], name: str) -> Markup:
    title = "Length, generated and trained on"
    points = sorted(_curve_points(place.get("curve")))
    if not points:
        return gap(title, "Nothing was trained on yet.")
    if points[0][0] > 0:
        points.insert(0, (0.0, 0.0, 0.0))
    lines = [
        Series(
            name=words,
            colour=colour,
            points=[(point[0], point[column]) for point in points],
            steps=True,
            show=percent,
        )
        for words, colour, column in (("all finished", "engine", 1), ("trained on", "trainer", 2))
    ]
    x = Axis(label="sampled tokens, at most", low=0, high=max(points[-1][0], 1.0), whole=True)
    y = Axis(label="", low=0, high=1, show=percent)
    about = "Share of attempts up to each length. If the trained-on line lies to the left, "
    about += "training is biased towards short attempts."
    keys = [(line.colour, line.name) for line in lines]
    return figure(title, about, line_plot(lines, x, y, label=f"{title}: {name}"), keys=keys)


def _curve_points(curve: Any) -> Iterator[tuple[float, float, float]]:
    """Yield points of the curve of lengths: tokens, share of all attempts, share of trained ones.

    The shares are of attempts with at most that many tokens. Invalid points are left out.
    """
    if not isinstance(curve, list | tuple):
        return
    for point in curve[:MAX_ROWS]:
        if not isinstance(point, list | tuple) or len(point) != 3:
            continue
        tokens, ended, trained = (number(value) for value in point)
        if tokens is not None and ended is not None and trained is not None and tokens >= 0:
            yield tokens, ended, trained


def _kept(place: Mapping[str, Any]) -> Markup:
    title = "Outcome by length"
    body = []
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
        body.append([length, *counts, *shares])
    if not body:
        return gap(title, "No attempt has ended.")
    head = ("tokens", "ended", "trained on", "waiting", "lost", "trained", "kept")
    about = "Quartiles of the finished attempts by length. Kept: trained on or waiting. A kept "
    about += "share that falls with length is a bias."
    return figure(title, about, table(head, body, "results"))
