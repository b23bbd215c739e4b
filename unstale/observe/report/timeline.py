"""Render the bottleneck, the time shares and the timeline of a run.

The timeline is drawn in seconds, so that the page zooms by moving a window over it.
"""

from collections.abc import Sequence

from unstale.observe.report.figures import figure, gap, throughput
from unstale.observe.report.gather import Gathered, Span, step_of
from unstale.observe.report.markup import Markup, el, join
from unstale.observe.report.plots import Axis, legend
from unstale.observe.report.sections import section
from unstale.observe.report.words import Waiting, duration, number, percent, waiting

LANES = (
    ("engine", "generation", "engine"),
    ("wait", "trainer waits", "wait"),
    ("old_logps", "scoring", "d"),
    ("trainer", "training", "trainer"),
    ("publish", "publishing", "s"),
    ("checkpoint", "checkpoints", "checkpoint"),
    ("eval", "evaluation", "good"),
)
"""Lane of a span, its name on the page and its colour."""

STANDSTILL = "standstill"
"""Lane of the engine's pauses. They are drawn inside their publication, which is paler then."""

FIRST_OF_ALL = ("trainer", "old_logps", "eval", "wait", "publish", "checkpoint")
"""Lanes by priority: where spans overlap, the time counts for the first of them."""

VIEW_STEPS = 8
ROW = 10


def pace(run: Gathered) -> Markup:
    """Render the bottleneck, the time shares, the throughput and the timeline."""
    wait = pace_of(run)
    return section(
        "pace",
        "What was the bottleneck?",
        f"{wait.sentence} {wait.advice}".strip(),
        el("div", _shares(run, wait), throughput(run), class_="grid-2"),
        _timeline(run),
    )


def pace_of(run: Gathered) -> Waiting:
    """Return the waiting shares of the run.

    With more than two steps, the first is left out, because it waits for the first groups.
    """
    return waiting(run.rows if len(run.rows) > 2 else [{"time_s": run.begin_s}, *run.rows])


def _shares(run: Gathered, wait: Waiting) -> Markup:
    title = "Where the time went"
    rows: list[Markup] = []
    parts = _trainer_shares(run)
    if parts:
        rows.append(_bar("trainer", parts))
    if wait.engine is not None:
        shares = [("generating", "engine", 1 - wait.engine), ("idle", "wait", wait.engine)]
        rows.append(_bar("engine", shares))
    if not rows:
        return gap(title, "Neither spans nor the engine's busy share were recorded.")
    about = "Shares of the time from the first step to the last."
    reprefill = sum(value for _, value in run.series("engine/reprefill_s"))
    if reprefill:
        tokens = sum(value for _, value in run.series("engine/reprefill_tokens"))
        about += f" After weight updates, {tokens:,.0f} context tokens were prefilled again"
        about += f" in {duration(reprefill)}."
    return figure(title, about, *rows)


def _trainer_shares(run: Gathered) -> list[tuple[str, str, float]]:
    """Return the trainer's activities as (name, colour, share of the time of all steps)."""
    begin = run.begin_s
    end = run.seconds or 0.0
    if run.spans_left_out:
        begin = max(begin, run.spans[0].start)
    inside = [span for span in run.spans if span.start >= begin - 1e-3 and span.end <= end + 1e-3]
    spent, total = _alone(inside), end - begin
    if total <= 0 or not any(spent.values()):
        return []
    shares = [
        (name, colour, spent[lane] / total)
        for lane, name, colour in LANES
        if spent.get(lane, 0.0) > 0
    ]
    other = 1 - sum(share for _, _, share in shares)
    return [*shares, ("other", "other", other)] if other > 0.005 else shares


def _alone(spans: Sequence[Span]) -> dict[str, float]:
    """Return the seconds of each lane of `FIRST_OF_ALL` outside the spans of earlier lanes.

    >>> spans = [Span("trainer", 0, 4, ""), Span("publish", 3, 6, ""), Span("publish", 5, 7, "")]
    >>> _alone(spans)["publish"]
    3.0
    """
    covered: list[tuple[float, float]] = []
    spent: dict[str, float] = {}
    covered_s = 0.0
    for lane in FIRST_OF_ALL:
        merged: list[tuple[float, float]] = []
        intervals = [(span.start, span.end) for span in spans if span.lane == lane]
        for start, end in sorted([*covered, *intervals]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        covered = merged
        total = sum(end - start for start, end in covered)
        spent[lane] = float(total - covered_s)
        covered_s = total
    return spent


def _bar(name: str, parts: Sequence[tuple[str, str, float]]) -> Markup:
    segments = [
        el(
            "i",
            class_=f"fill-{colour}",
            style=f"flex-grow:{max(share, 0.001):.4f}",
            data_tip=f"{activity} {percent(share)}",
        )
        for activity, colour, share in parts
    ]
    keys = legend(*((colour, f"{activity} {percent(share)}") for activity, colour, share in parts))
    return el("div", el("h4", name), el("div", segments, class_="share-bar"), keys, class_="side")


def _timeline(run: Gathered) -> Markup:
    title = "Timeline"
    spans = [*run.spans, *_generation(run)]
    known = {STANDSTILL, *(lane for lane, _, _ in LANES)}
    spans = [span for span in spans if span.lane in known]
    if not spans:
        return gap(title, "No spans were recorded, so there is no timeline.")
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    last = max(last, first + 1e-3)
    view = _view(run, first, last)
    lanes = [lane for lane in LANES if any(_drawn_in(span) == lane[0] for span in spans)]
    steps = [time for row in run.rows if (time := number(row.get("time_s"))) is not None]
    rows = [
        el(
            "div",
            el("span", name, class_="lane-name"),
            _lane([span for span in spans if _drawn_in(span) == lane], colour, steps, view),
            class_="lane",
        )
        for lane, name, colour in lanes
    ]
    about = "Seconds since the start of the run; thin lines mark the ends of steps. The last "
    about += f"{VIEW_STEPS} steps are shown first."
    if any(span.lane == STANDSTILL for span in spans):
        about += " The dark part of a publication is the engine's pause."
    if not any(span.lane == "engine" for span in run.spans):
        about += " Generation is drawn from the engine's busy share of each step; pale is idle."
    if run.spans_left_out:
        about += f" The first {run.spans_left_out:,} spans are left out."
    return figure(
        title,
        about,
        _controls(),
        el(
            "div",
            rows,
            _ruler(*view),
            el(
                "div",
                _overview(spans, lanes, first, last),
                el("i", class_="window"),
                class_="overview",
            ),
            class_="timeline",
            data_first=round(first, 3),
            data_last=round(last, 3),
            data_from=round(view[0], 3),
            data_to=round(view[1], 3),
        ),
        class_="full",
    )


def _generation(run: Gathered) -> list[Span]:
    """Return spans for the engine's lane from its busy shares, if the run recorded no spans."""
    if any(span.lane == "engine" for span in run.spans):
        return []
    spans = []
    start = run.begin_s
    for row in run.rows:
        end = number(row.get("time_s"))
        busy = number(row.get("engine/busy_share"))
        if end is None:
            continue
        if busy is not None and end > start:
            spans.append(Span("engine", start, end, f"step {step_of(row)}: busy {percent(busy)}"))
        start = end
    return spans


def _view(run: Gathered, first: float, last: float) -> tuple[float, float]:
    times = [time for row in run.rows if (time := number(row.get("time_s"))) is not None]
    if len(times) <= VIEW_STEPS:
        return first, last
    end = min(last, max(times))
    return max(first, times[-VIEW_STEPS - 1]), end if end > first else last


def _drawn_in(span: Span) -> str:
    return "publish" if span.lane == STANDSTILL else span.lane


def _lane(
    spans: Sequence[Span], colour: str, steps: Sequence[float], view: tuple[float, float]
) -> Markup:
    pale = any(span.lane == STANDSTILL for span in spans)
    rects = [
        el(
            "rect",
            el("title", _tooltip(span)),
            class_=f"fill {colour}",
            data_tip=_tooltip(span),
            x=round(span.start, 3),
            width=round(max(span.end - span.start, 1e-3), 3),
            y=0,
            height=ROW,
            opacity=_opacity(span)
            if span.lane == "engine"
            else 0.4
            if pale and span.lane == "publish"
            else None,
        )
        for span in sorted(spans, key=lambda span: span.lane == STANDSTILL)
    ]
    ends = "".join(f"M{time:.3f},0V{ROW}" for time in steps)
    box = f"{view[0]:.3f} 0 {view[1] - view[0]:.3f} {ROW}"
    return el(
        "svg", rects, el("path", class_="step-end", d=ends) if ends else None,
        viewBox=box, preserveAspectRatio="none", role="img", aria_label="spans of this lane",
    )  # fmt: skip


def _opacity(span: Span) -> float | None:
    share = span.label.rpartition("busy ")[2].removesuffix("%")
    if not share.replace(".", "", 1).isdigit():
        return None
    return round(0.15 + 0.85 * min(1.0, float(share) / 100), 3)


def _tooltip(span: Span) -> str:
    name = next((name for lane, name, _ in LANES if lane == span.lane), "engine paused")
    activity = f"{name}: {span.label}" if span.label else name
    return f"{activity}\n{span.end - span.start:.2f} s, from {span.start:.1f} s"


def _overview(
    spans: Sequence[Span], lanes: Sequence[tuple[str, str, str]], first: float, last: float
) -> Markup:
    paths = []
    for index, (lane, _, colour) in enumerate(lanes):
        widths = [
            (span.start, max(span.end - span.start, 0.01)) for span in spans if span.lane == lane
        ]
        shape = "".join(
            f"M{start:.2f},{index * 4}h{width:.2f}v3.4h{-width:.2f}z" for start, width in widths
        )
        paths.append(el("path", class_=f"fill {colour}", d=shape))
    box = f"{first:.3f} 0 {last - first:.3f} {4 * len(lanes)}"
    return el(
        "svg",
        paths,
        viewBox=box,
        preserveAspectRatio="none",
        role="img",
        aria_label="the whole run",
    )


def _ruler(start: float, end: float) -> Markup:
    ticks = Axis(label="", low=start, high=end).ticks(6)
    marks = [
        el("span", f"{tick:g} s", style=f"left:{100 * (tick - start) / (end - start):.2f}%")
        for tick in ticks
    ]
    return el(
        "div", el("span", class_="lane-name"), el("div", marks, class_="ticks"), class_="ruler"
    )


def _controls() -> Markup:
    names = (
        ("earlier", "◀"),
        ("later", "▶"),
        ("closer", "+"),
        ("farther", "\u2212"),
        ("all", "whole run"),
    )
    buttons = [
        el("button", sign, type="button", data_move=name, aria_label=name) for name, sign in names
    ]
    hint = el(
        "span",
        "drag in the lanes to zoom, in the strip to move; double-click for the whole run",
        class_="quiet",
    )
    return el("div", join(buttons), hint, class_="controls")
