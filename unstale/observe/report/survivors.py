"""What was generated against what was trained on, for a page and for a terminal, from `survivors.json` or its like."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unstale.durability.run_folder import Row
from unstale.observe.report.figures import figure, gap
from unstale.observe.report.gather import Gathered
from unstale.observe.report.markup import Markup, el
from unstale.observe.report.plots import Axis, Series, legend, line_plot
from unstale.observe.report.sections import section
from unstale.observe.report.words import (
    FATES,
    NONE,
    amount,
    censored,
    number,
    percent,
    survivorship,
)

TITLE = "Who was trained on"
MAX_PLACES, MAX_ROWS = 12, 200
GROUPS = {
    "consumed": "trained on",
    "finished": "waiting to be trained on",
    "open": "open",
    "failed": "without a finished episode",
}
TERMINAL = (0, 1, 2, 3, 4, 6)
"""Columns for which a terminal has room."""
HEAD = ("", "attempts", "tokens", "10 · 50 · 90%", "turns", "10 · 50 · 90%", "success", "reward")


def trained_on(run: Gathered) -> Markup:
    """Every environment's attempts by how they ended, their lengths, and what the difference says."""
    places = _rows(run.survivors.get("places"))[:MAX_PLACES]
    if not places:
        return section("who", TITLE, None, el("p", _missing(run.survivors), class_="gap"))
    lead = (
        "Every attempt at an episode, by how it ended. Nothing is thrown away for being long or slow; where attempts "
        "are lost for another cause, and long ones more often, the policy is trained on the short ones that are left."
    )
    return section("who", TITLE, lead, *(card for place in places for card in _place(place)))


def _missing(survivors: Mapping[str, Any]) -> str:
    if "missing" in survivors:
        return f"Not known: {survivors['missing']}"[:600]
    if "places" in survivors:
        return "No group was handed out."
    return "Not known: a run with a journal writes survivors.json when it ends, and `unstale report` writes it again."


def table(survivors: Mapping[str, Any]) -> RenderableType:
    """For a terminal: the rows of the page's tables, and its sentences."""
    shown = Table(title="Who was trained on", title_justify="left", title_style="bold", box=SIMPLE)
    for column in TERMINAL:
        shown.add_column(HEAD[column], justify="right" if column else "left", no_wrap=True)
    told = []
    for place in _rows(survivors.get("places")):
        shown.add_section()
        shown.add_row(f"[bold]{escape(_name(place))}[/]")
        for cells in rows(place):
            shown.add_row(*(escape(cells[column]) for column in TERMINAL))
        words, alarm = survivorship(place)
        told.append(Text(f"{_name(place)}: {words}", style="bold red" if alarm else ""))
    return Group(shown, *told)


def _rows(value: Any) -> list[Row]:
    return (
        [row for row in value[:MAX_ROWS] if isinstance(row, dict)]
        if isinstance(value, list | tuple)
        else []
    )


def _name(place: Mapping[str, Any]) -> str:
    return f"{place.get('env', NONE)}/{place.get('split', NONE)}"[:80]


def rows(place: Mapping[str, Any]) -> list[list[str]]:
    """A row of `HEAD` for each way to end that there was, under one for all attempts."""
    kinds = place.get("kinds")
    held = kinds if isinstance(kinds, Mapping) else {}
    named = {"generated": "generated", **{fate: f"  {words}" for fate, words in FATES.items()}}
    return [
        [words, *_cells(held[name])]
        for name, words in named.items()
        if isinstance(held.get(name), Mapping)
    ]


def _cells(kind: Mapping[str, Any]) -> list[str]:
    cells = [amount(number(kind.get("count")))]
    for name in ("tokens", "turns"):
        of = kind.get(name)
        spread = of if isinstance(of, Mapping) else {}
        mean, *quantiles = (
            amount(number(spread.get(each))) for each in ("mean", "low", "middle", "high")
        )
        cells += [mean, " · ".join(quantiles)]
    success, reward = number(kind.get("success")), number(kind.get("reward"))
    return [*cells, percent(success, 1), amount(reward)]


def _place(place: Mapping[str, Any]) -> list[Markup]:
    words, alarm = survivorship(place)
    name, note = _name(place), censored(place)
    about = f"{_groups(place)} Tokens are sampled ones, turns are replies: means and quantiles. "
    about += "An attempt that was lost counts as far as it came."
    return [
        figure(
            f"{name}: every attempt", about, _table(HEAD, rows(place)),
            el("p", words, class_="warning" if alarm else "quiet"),
            el("p", note, class_="quiet") if note else None,
            class_="full",
        ),
        el("div", _lengths(place, name), _kept(place), class_="grid-2"),
    ]  # fmt: skip


def _groups(place: Mapping[str, Any]) -> str:
    held = place.get("groups")
    counts = (
        {name: number(held.get(name)) or 0.0 for name in GROUPS}
        if isinstance(held, Mapping)
        else {}
    )
    parts = [f"{count:,.0f} {GROUPS[name]}" for name, count in counts.items() if count]
    return f"{sum(counts.values()):,.0f} groups were handed out: {', '.join(parts) or 'none'}."


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> Markup:
    names = el("tr", [el("th", name) for name in head])
    written = [el("tr", [el("td", cell) for cell in cells]) for cells in body]
    return el("div", el("table", el("thead", names), el("tbody", written)), class_="scroll results")


def _lengths(place: Mapping[str, Any], name: str) -> Markup:
    title = "Length, generated and trained on"
    found = place.get("curve")
    spots = [
        (tokens, ended, trained)
        for point in (found[:MAX_ROWS] if isinstance(found, list | tuple) else ())
        if isinstance(point, list | tuple) and len(point) == 3
        for tokens, ended, trained in [[number(value) for value in point]]
        if tokens is not None and ended is not None and trained is not None and tokens >= 0
    ]
    if not spots:
        return gap(title, "Nothing was trained on yet.")
    spots = [(0.0, 0.0, 0.0), *sorted(spots)] if min(spots)[0] > 0 else sorted(spots)
    lines = [
        Series(
            name=words,
            colour=colour,
            points=[(s[0], s[at]) for s in spots],
            steps=True,
            show=percent,
        )
        for words, colour, at in (("all that ended", "engine", 1), ("trained on", "trainer", 2))
    ]
    x = Axis(label="sampled tokens, at most", low=0, high=max(spots[-1][0], 1.0), whole=True)
    y = Axis(label="", low=0, high=1, show=percent)
    keys = legend(("engine", "all that ended"), ("trainer", "trained on"))
    told = "Share of attempts with at most so many sampled tokens. One line to the left of the other: shorter ones."
    return figure(title, told, keys, line_plot(lines, x, y, label=f"{title}: {name}"))


def _kept(place: Mapping[str, Any]) -> Markup:
    title = "What became of each length"
    body = []
    for bucket in _rows(place.get("buckets")):
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
    told = "Quartiles of the attempts that ended. Kept: trained on or waiting; a share that falls with length is a bias."
    return figure(title, told, _table(head, body))
