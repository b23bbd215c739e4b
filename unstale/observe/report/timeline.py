"""Who did what when: lanes over time, drawn in seconds, so that the page can zoom by moving a window over them."""

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
"""The lane of an event, its name on the page, its colour."""

STANDSTILL = "standstill"
"""What the engine stands still for: drawn inside the publication that it belongs to, which is paler then."""

FIRST_OF_ALL = ("trainer", "old_logps", "eval", "wait", "publish", "checkpoint")
"""Of lanes that overlap, whose the trainer's time is."""

VIEW_STEPS = 8
ROW = 10


def pace(run: Gathered) -> Markup:
    """Who waits for whom: in a sentence, as shares, over the steps, and moment by moment."""
    wait = pace_of(run)
    return section(
        "pace",
        "Who waits for whom?",
        f"{wait.sentence} {wait.advice}".strip(),
        el("div", _shares(run, wait), throughput(run), class_="grid-2"),
        _timeline(run),
    )


def pace_of(run: Gathered) -> Waiting:
    """Over the steps that trained; of more than two, not the first, which waits for the line to fill."""
    return waiting(run.rows if len(run.rows) > 2 else [{"time_s": run.begin_s}, *run.rows])


def _shares(run: Gathered, wait: Waiting) -> Markup:
    title = "Where the time went"
    rows: list[Markup] = []
    parts = _trainer_shares(run)
    if parts:
        rows.append(_bar("the trainer's side", parts))
    if wait.engine is not None:
        rows.append(
            _bar(
                "the engine",
                [("generating", "engine", 1 - wait.engine), ("idle", "wait", wait.engine)],
            )
        )
    if not rows:
        return gap(title, "Neither spans nor the engine's busy share were recorded.")
    told = "Each bar is the time of one side, from the first step to the last."
    reprefill = sum(value for _, value in run.series("engine/reprefill_s"))
    if reprefill:
        tokens = sum(value for _, value in run.series("engine/reprefill_tokens"))
        told += f" After weight updates, contexts were computed anew: {tokens:,.0f} tokens in {duration(reprefill)}."
    return figure(title, told, *rows)


def _trainer_shares(run: Gathered) -> list[tuple[str, str, float]]:
    """What the trainer's side did, as shares of the time from the first step to the end of the last."""
    begin, end = run.begin_s, run.seconds or 0.0
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
    """Seconds of each lane of `FIRST_OF_ALL` in which none that comes before it had a span.

    >>> _alone([Span("trainer", 0, 4, ""), Span("publish", 3, 6, ""), Span("publish", 5, 7, "")])["publish"]
    3.0
    """
    covered: list[tuple[float, float]] = []
    spent, known = {}, 0.0
    for lane in FIRST_OF_ALL:
        merged: list[tuple[float, float]] = []
        own = [(span.start, span.end) for span in spans if span.lane == lane]
        for start, end in sorted([*covered, *own]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end))
            else:
                merged.append((start, end))
        covered = merged
        total = sum(end - start for start, end in covered)
        spent[lane], known = float(total - known), total
    return spent


def _bar(name: str, parts: Sequence[tuple[str, str, float]]) -> Markup:
    cells = [
        el(
            "i",
            class_=f"fill-{colour}",
            style=f"flex-grow:{max(share, 0.001):.4f}",
            data_tip=f"{what} {percent(share)}",
        )
        for what, colour, share in parts
    ]
    keys = legend(*((colour, f"{what} {percent(share)}") for what, colour, share in parts))
    return el("div", el("h4", name), el("div", cells, class_="share-bar"), keys, class_="side")


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
    told = f"Seconds since the run began; thin lines are the ends of steps. Shown at first: the last {VIEW_STEPS} steps."
    if any(span.lane == STANDSTILL for span in spans):
        told += " In a publication, what is dark is for how long the engine stands still."
    if not any(span.lane == "engine" for span in run.spans):
        told += " Generation is drawn from the engine's busy share of each step: the paler, the more it stood idle."
    if run.spans_left_out:
        told += f" The first {run.spans_left_out:,} spans are left out."
    return figure(
        title,
        told,
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
    """The engine's lane from its busy share per step, where it recorded no spans of its own."""
    if any(span.lane == "engine" for span in run.spans):
        return []
    spans, before = [], run.begin_s
    for row in run.rows:
        time, busy = number(row.get("time_s")), number(row.get("engine/busy_share"))
        if time is None:
            continue
        if busy is not None and time > before:
            spans.append(Span("engine", before, time, f"step {step_of(row)}: busy {percent(busy)}"))
        before = time
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
            el("title", _told(span)),
            class_=f"fill {colour}",
            data_tip=_told(span),
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


def _told(span: Span) -> str:
    name = next((name for lane, name, _ in LANES if lane == span.lane), "the engine stands still")
    return f"{name}{': ' if span.label else ''}{span.label}\n{span.end - span.start:.2f} s, from {span.start:.1f} s"


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
