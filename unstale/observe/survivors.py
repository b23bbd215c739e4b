"""Compare episodes that were trained on with those that were lost, as text and as a table.

An attempt is one run of an episode, which may have several. An attempt is lost if it failed, or if
a resumed run started the episode again. If long attempts are lost more often, training prefers
short episodes.
"""

from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from unstale.observe.words import amount, percent

FATES = {
    "trained": "trained on",
    "waiting": "waiting to be trained on",
    "failed": "failed, retried",
    "given_up": "failed, not retried",
    "restarted": "restarted on resume",
    "open": "open",
}
"""Possible ends of an attempt at an episode, each with its text in tables."""
LOST = frozenset({"failed", "given_up", "restarted"})

LOST_LEAST, LOST_ERRORS = 10, 3
"""Lost attempts count as longer or shorter than kept ones if there are at least `LOST_LEAST` of
them and the mean lengths differ by more than `LOST_ERRORS` standard errors.
"""


def survivorship(place: Mapping[str, Any]) -> tuple[str, bool]:
    """Compare the lengths of lost and of kept attempts at the episodes of an environment.

    `place` has the statistics of one environment: an item of the list "places" that
    `journal.survivors` returns. Return a sentence, and True if long attempts are lost more often,
    which biases training.

    >>> means = {"lost": 30, "kept": 970, "lost_mean": 412.0, "kept_mean": 196.0, "se": 20.0}
    >>> survivorship({"kinds": {"failed": {}}, "contrast": means})[0].split(" (")[0]
    'Lost attempts were 2.1 times as long as kept ones'
    """
    if not LOST & place["kinds"].keys():
        return "No attempt that ended was lost.", False
    means = place["contrast"]
    if means is None:
        too_few = "Lengths cannot be compared: fewer than two attempts were lost or kept."
        return too_few, False
    lost, kept, count = means["lost_mean"], means["kept_mean"], means["lost"]
    facts = f"{amount(lost)} sampled tokens against {amount(kept)}, {amount(count)} attempts"
    if count < LOST_LEAST or abs(lost - kept) <= LOST_ERRORS * means["se"]:
        return f"Lost and kept attempts do not differ measurably in length ({facts}).", False
    times = f"{lost / kept:.2g} times" if kept else "infinitely"
    if lost > kept:
        longer = f"Lost attempts were {times} as long as kept ones ({facts}): "
        return longer + "long ones are lost first.", True
    shorter = f"Lost attempts ended after {times} the length of kept ones ({facts}). "
    return shorter + "Their full length is not known.", False


HEAD = ("", "attempts", "tokens", "p10 · p50 · p90", "turns", "success")


def terminal_table(survivors: Mapping[str, Any]) -> RenderableType:
    """Return a table for a terminal with the statistics that `journal.survivors` returns.

    Each environment has a row for all attempts, then a row for each possible end of an attempt.
    """
    title = "Generated and trained-on episodes: mean tokens and turns"
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE)
    for column in HEAD:
        shown.add_column(column, justify="right" if column else "left", no_wrap=bool(column))
    sentences = []
    for place in survivors["places"]:
        name = f"{place['env']}/{place['split']}"[:80]
        shown.add_section()
        shown.add_row(f"[bold]{escape(name)}[/]")
        kinds = place["kinds"]
        for fate, words in {"generated": "generated", **FATES}.items():
            if fate in kinds:
                indent = "" if fate == "generated" else "  "
                shown.add_row(indent + words, *_figures(kinds[fate]))
        sentence, biased = survivorship(place)
        sentences.append(Text(f"{name}: {sentence}", style="bold red" if biased else ""))
    return Group(shown, *sentences)


def _figures(kind: Mapping[str, Any]) -> list[str]:
    tokens = kind["tokens"]
    return [
        amount(kind["count"]),
        amount(tokens["mean"]),
        " · ".join(amount(tokens[each]) for each in ("low", "middle", "high")),
        amount(kind["turns"]["mean"]),
        percent(kind["success"], 1),
    ]
