"""Compare the generated episodes with those trained on, for a page and a terminal.

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

from unstale.observe.words import NONE, amount, mapping, number, percent, records

FATES = {
    "trained": "trained on",
    "waiting": "waiting to be trained on",
    "failed": "failed, retried",
    "given_up": "failed, not retried",
    "restarted": "restarted on resume",
    "open": "open",
}
"""The ways in which an attempt at an episode can end, each with a text for tables."""
LOST = frozenset({"failed", "given_up", "restarted"})

LOST_LEAST, LOST_ERRORS = 10, 3
"""A difference in length is reported only if there are at least `LOST_LEAST` lost attempts and it
exceeds `LOST_ERRORS` standard errors.
"""


def survivorship(place: Mapping[str, Any]) -> tuple[str, bool]:
    """Compare the lengths of lost and kept attempts at episodes of an environment.

    `place` is the environment's row in survivors.json. Return a sentence, and True if long attempts
    are lost more often, which biases training.

    >>> means = {"lost": 30, "kept": 970, "lost_mean": 412.0, "kept_mean": 196.0, "se": 20.0}
    >>> survivorship({"contrast": means})[0].split(" (")[0]
    'Lost attempts were 2.1 times as long as kept ones'
    """
    if isinstance(place.get("kinds"), Mapping) and not LOST & place["kinds"].keys():
        return "No attempt that ended was lost.", False
    means = mapping(place.get("contrast"))
    lost = number(means.get("lost_mean"))
    kept = number(means.get("kept_mean"))
    count = number(means.get("lost"))
    error = number(means.get("se"))
    if lost is None or kept is None or count is None or error is None:
        too_few = "Lengths cannot be compared: fewer than two attempts were lost or kept."
        return too_few, False
    facts = f"{amount(lost)} sampled tokens against {amount(kept)}, {amount(count)} attempts"
    if count < LOST_LEAST or abs(lost - kept) <= LOST_ERRORS * error:
        return f"Lost and kept attempts do not differ measurably in length ({facts}).", False
    times = f"{lost / kept:.2g} times" if kept else "infinitely"
    if lost > kept:
        longer = f"Lost attempts were {times} as long as kept ones ({facts}): "
        return longer + "long ones are lost first.", True
    shorter = f"Lost attempts ended after {times} the length of kept ones ({facts}). "
    return shorter + "Their full length is not known.", False


def censored(place: Mapping[str, Any]) -> str:
    """Return a note on attempts at episodes that have not ended yet. Empty if all have ended.

    `place` is an environment's row in survivors.json.
    """
    count = number(mapping(mapping(place.get("kinds")).get("open")).get("count"))
    if not count:
        return ""
    return (
        f"{count:,.0f} open: neither kept nor lost. Long episodes are over-represented among them, "
        "because they stay open longer."
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
    """Return the statistics of attempts at episodes by environment, in the form that a page shows.

    `survivors` is the content of survivors.json. In the result, `missing` is a text that explains
    why there are no attempts to show.
    """
    places = [_place(place) for place in records(survivors.get("places"), MAX_PLACES)]
    return {"places": places, "head": HEAD, "missing": _missing(survivors)}


def _missing(survivors: Mapping[str, Any]) -> str:
    if "missing" in survivors:
        return f"Not known: {survivors['missing']}"[:600]
    if "places" in survivors:
        return "No group was started."
    return "Not known: `unstale report` writes survivors.json for a run with a journal."


def terminal_table(survivors: Mapping[str, Any]) -> RenderableType:
    """Return the statistics of attempts at episodes of all environments as a table for a terminal.

    `survivors` is the content of survivors.json.
    """
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
    """Return an environment's table: a row for all attempts at episodes, then one for each end.

    `place` is the environment's row in survivors.json.
    """
    attempts = mapping(place.get("kinds"))
    names = {"generated": "generated", **{fate: f"  {words}" for fate, words in FATES.items()}}
    return [
        [words, *_figures(attempts[name])]
        for name, words in names.items()
        if isinstance(attempts.get(name), Mapping)
    ]


def _figures(kind: Mapping[str, Any]) -> list[str]:
    """Return, as texts, number, lengths, success and reward of the attempts that ended in one
    way.
    """
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
    """Yield a row for each quarter of the ended attempts, divided by their length in tokens.

    A row has the range of lengths, the numbers of attempts that ended, were trained on, wait for
    training and were lost, and the shares that were trained on and kept.
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
