"""The report's timeline of a run, and the bars of the shares of time.

A span is a recorded activity with start and end. A lane is a row of spans of one kind. The unit of
the SVG is a second, so the page zooms by changing the visible range.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from unstale.observe.report.gather import Gathered, step_of
from unstale.observe.report.markup import figure, gap, render
from unstale.observe.report.pace import LANES, Span
from unstale.observe.report.plots import Axis
from unstale.observe.report.words import duration, number, percent

STANDSTILL = "standstill"
"""Recorded name of the engine's pauses. They are drawn dark on top of pale publications."""

VIEW_STEPS = 8


def shares(run: Gathered) -> Markup:
    """Return the bars that show how trainer and engine spent their time."""
    title, pace = "Where the time went", run.pace
    bars = [(name, parts) for name in ("trainer", "engine") if (parts := getattr(pace, name))]
    if not bars:
        return gap(title, "Neither spans nor the engine's busy share were recorded.")
    about = f"Shares of the time from {duration(pace.begin)} to {duration(pace.end)} of the run."
    reprefill = sum(value for _, value in run.series("engine/reprefill_s"))
    if reprefill:
        tokens = sum(value for _, value in run.series("engine/reprefill_tokens"))
        about += f" After weight updates, {tokens:,.0f} context tokens were prefilled again"
        about += f" in {duration(reprefill)}."
    return figure(title, about, render("share_bars.html", bars=bars, percent=percent))


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of the timeline. `outline` is the SVG path of its spans in the overview."""

    name: str
    colour: str
    spans: Sequence[tuple[Span, float | None]]
    """Each span with its opacity. None means opaque."""
    outline: str


def timeline(run: Gathered) -> Markup:
    """Return the timeline: one row per activity, and controls to zoom and move."""
    title = "Timeline"
    pauses = [(span, None) for span in run.spans if span.lane == STANDSTILL]
    lanes: list[Lane] = []
    for lane, name, colour in LANES:
        pale = 0.4 if lane == "publish" and pauses else None
        own = [(span, pale) for span in run.spans if span.lane == lane]
        if lane == "engine":
            own = _generation(run)
        drawn = [*own, *pauses] if lane == "publish" else own
        if drawn:
            outline = _outline([span for span, _ in own], len(lanes))
            lanes.append(Lane(name, colour, drawn, outline))
    if not lanes:
        return gap(title, "No spans were recorded, so there is no timeline.")
    spans = [span for lane in lanes for span, _ in lane.spans]
    first = min(span.start for span in spans)
    last = max(first + 1e-3, *(span.end for span in spans))
    about = "Seconds since the start of the run; thin lines mark the ends of steps. The last "
    about += f"{VIEW_STEPS} steps are shown first. Generation is drawn from the engine's busy "
    about += "share of each step; pale is idle."
    if pauses:
        about += " The dark part of a publication is the engine's pause."
    if run.spans_left_out:
        about += f" The first {run.spans_left_out:,} spans are left out."
    ends = [time for row in run.rows if (time := number(row.get("time_s"))) is not None]
    start, end = _view(ends, first, last)
    plot = render(
        "timeline.html",
        lanes=lanes,
        ends=ends,
        first=first,
        last=last,
        start=start,
        end=end,
        ticks=Axis(label="", low=start, high=end).ticks(6),
        tooltip=_tooltip,
    )
    return figure(title, about, plot, class_="full")


def _generation(run: Gathered) -> list[tuple[Span, float | None]]:
    """Return one span per step for the engine. Its opacity shows the engine's busy share."""
    spans: list[tuple[Span, float | None]] = []
    start = run.begin_s
    for row in run.rows:
        end = number(row.get("time_s"))
        busy = number(row.get("engine/busy_share"))
        if end is None:
            continue
        if busy is not None and end > start:
            label = f"step {step_of(row)}: busy {percent(busy)}"
            opacity = round(0.15 + 0.85 * min(1.0, max(0.0, busy)), 3)
            spans.append((Span("engine", start, end, label), opacity))
        start = end
    return spans


def _view(ends: Sequence[float], first: float, last: float) -> tuple[float, float]:
    """Return the range that the page shows at first: the last `VIEW_STEPS` steps."""
    if len(ends) <= VIEW_STEPS:
        return first, last
    end = min(last, max(ends))
    return max(first, ends[-VIEW_STEPS - 1]), end if end > first else last


def _tooltip(span: Span) -> str:
    name = next((name for lane, name, _ in LANES if lane == span.lane), "engine paused")
    activity = f"{name}: {span.label}" if span.label else name
    return f"{activity}\n{span.end - span.start:.2f} s, from {span.start:.1f} s"


def _outline(spans: Sequence[Span], row: int) -> str:
    """Return the SVG path of the spans in one row of the overview below the timeline."""
    widths = [(span.start, max(span.end - span.start, 0.01)) for span in spans]
    return "".join(
        f"M{start:.2f},{row * 4}h{width:.2f}v3.4h{-width:.2f}z" for start, width in widths
    )
