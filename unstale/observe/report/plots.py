"""Draw plots as SVG. Colours come from the page's style sheet by class.

A plot that spans a card is drawn twice, wide and narrow. The style sheet shows the one that
fits, so that text keeps its size on a phone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unstale.observe.report.markup import Markup, el, join
from unstale.observe.report.words import amount

FULL, MOST, HALF, SOME, NARROW = 990, 560, 452, 370, 340
"""Widths in CSS pixels: a whole card, parts of a row of two cards, a phone."""
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 12, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis: its range, label and number format."""

    label: str
    low: float
    high: float
    show: Callable[[float], str] = amount
    whole: bool = False
    """Place ticks only at whole numbers."""

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round numbers inside the range.

        >>> Axis(label="step", low=0, high=80).ticks(5)
        [0.0, 20.0, 40.0, 60.0, 80.0]
        """
        span = self.high - self.low
        if not span > 0:
            return [self.low]
        raw = span / max(count - 1, 1)
        size = 10.0 ** math.floor(math.log10(raw))
        size *= min((1, 2, 2.5, 5, 10), key=lambda factor: abs(factor * size - raw))
        if self.whole:
            size = float(max(1, math.ceil(size)))
        first = math.ceil(self.low / size - 1e-9)
        last = math.floor(self.high / size + 1e-9)
        return [round(index * size, 12) for index in range(first, last + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A series of points, with optional intervals. `dots` marks every point."""

    name: str
    colour: str
    """Name of a colour class of the style sheet."""
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()
    dots: bool = False
    faint: bool = False
    band: bool = False
    """Draw the intervals as an area instead of whiskers."""
    steps: bool = False
    """Draw each value as constant until the next point."""
    show: Callable[[float], str] = amount


@dataclass(frozen=True, slots=True)
class Frame:
    """The data area inside a drawing of this size."""

    x: Axis
    y: Axis
    width: float
    height: float

    def at_x(self, value: float) -> float:
        return LEFT + (value - self.x.low) / ((self.x.high - self.x.low) or 1) * (
            self.width - LEFT - RIGHT
        )

    def at_y(self, value: float) -> float:
        share = (value - self.y.low) / ((self.y.high - self.y.low) or 1)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def axes(self, *, x_ticks: bool = True) -> Markup:
        """Draw grid lines, their numbers and the two labels."""
        parts: list[Markup] = []
        base = self.height - BOTTOM
        for value in self.y.ticks(5):
            y = self.at_y(value)
            parts.append(el("line", class_="grid", x1=LEFT, x2=self.width - RIGHT, y1=y, y2=y))
            parts.append(
                el(
                    "text",
                    self.y.show(value),
                    class_="tick",
                    x=LEFT - 8,
                    y=y + 4,
                    text_anchor="end",
                )
            )
        if x_ticks:
            for value in self.x.ticks(max(4, int(self.width // 85))):
                x = self.at_x(value)
                parts.append(el("line", class_="axis", x1=x, x2=x, y1=base, y2=base + 4))
                parts.append(
                    el(
                        "text",
                        self.x.show(value),
                        class_="tick",
                        x=x,
                        y=base + 17,
                        text_anchor="middle",
                    )
                )
        parts.append(el("line", class_="axis", x1=LEFT, x2=self.width - RIGHT, y1=base, y2=base))
        middle = (LEFT + self.width - RIGHT) / 2
        parts.append(
            el(
                "text",
                self.x.label,
                class_="label",
                x=middle,
                y=self.height - 4,
                text_anchor="middle",
            )
        )
        return join(parts)

    def hit(self, x: float, width: float, text: str) -> Markup:
        """Return an invisible column that shows `text` on hover."""
        return el(
            "rect", el("title", text), class_="hit", data_tip=text,
            x=x - width / 2, y=TOP, width=width, height=self.height - TOP - BOTTOM,
        )  # fmt: skip


def svg(width: float, height: float, label: str, *children: Markup, class_: str = "") -> Markup:
    """Return a drawing of fixed proportions. `label` is its text alternative."""
    box = f"0 0 {width:g} {height:g}"
    return el(
        "svg", *children, class_=f"plot {class_}".strip(), viewBox=box, role="img", aria_label=label
    )


def both(draw: Callable[[float], Markup], width: float) -> Markup:
    """Return a plot twice, for a card of this width and for a phone."""
    return join(el("div", draw(width), class_="wide"), el("div", draw(NARROW), class_="narrow"))


def legend(*entries: tuple[str, str]) -> Markup:
    """Return the legend of `(colour, name)` pairs."""
    items = [el("span", el("i", class_=f"swatch {colour}"), name) for colour, name in entries]
    return el("div", items, class_="legend")


def thin(points: Sequence[tuple[float, float]], limit: int = 240) -> list[tuple[float, float]]:
    """Reduce to at most `limit` points by means of neighbours.

    >>> thin([(0, 1), (1, 3), (2, 5), (3, 7)], limit=2)
    [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= limit:
        return list(points)
    cuts = [round(i * len(points) / limit) for i in range(limit + 1)]
    buckets = [points[cuts[i] : cuts[i + 1]] for i in range(limit)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def smooth(points: Sequence[tuple[float, float]], window: int = 5) -> list[tuple[float, float]]:
    """Return the running mean over the last `window` points.

    >>> smooth([(0, 0.0), (1, 1.0), (2, 2.0)], window=2)
    [(0, 0.0), (1, 0.5), (2, 1.5)]
    """
    return [
        (x, sum(y for _, y in points[max(0, i - window + 1) : i + 1]) / min(i + 1, window))
        for i, (x, _) in enumerate(points)
    ]


def line_plot(
    lines: Sequence[Series], x: Axis, y: Axis, *, label: str, width: float = HALF
) -> Markup:
    """Draw series over a common axis, with a hover text per point."""
    height = 320.0 if width > MOST else 230.0

    def draw(width: float) -> Markup:
        frame = Frame(x, y, width, height)
        return svg(
            width,
            height,
            label,
            frame.axes(),
            *(_line(line, frame) for line in lines),
            _hits(lines, frame),
        )

    return both(draw, width)


def _line(line: Series, frame: Frame) -> Markup:
    spots = [(frame.at_x(x), frame.at_y(y)) for x, y in line.points]
    parts: list[Markup] = []
    path = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    if line.steps:
        path = f"M{spots[0][0]:.1f},{spots[0][1]:.1f}" + "".join(
            f"H{x:.1f}V{y:.1f}" for x, y in spots[1:]
        )
    if len(spots) > 1:
        parts.append(
            el("path", class_=f"line {line.colour}{' faint' if line.faint else ''}", d=path)
        )
    edges = [
        (x, frame.at_y(low), frame.at_y(high))
        for (x, _), (low, high) in zip(spots, line.intervals, strict=False)
    ]
    if line.band and len(edges) > 1:
        outline = [(x, high) for x, _, high in edges] + [(x, low) for x, low, _ in reversed(edges)]
        area = "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in outline) + "Z"
        parts.insert(0, el("path", class_=f"band {line.colour}", d=area))
        edges = []
    for x, bottom, top in edges:
        whisker = (
            f"M{x:.1f},{top:.1f}V{bottom:.1f}M{x - 4:.1f},{top:.1f}h8M{x - 4:.1f},{bottom:.1f}h8"
        )
        parts.append(el("path", class_=f"whisker {line.colour}", d=whisker))
    if line.dots or len(spots) == 1:
        parts += [
            el("circle", class_=f"dot {line.colour}", cx=round(x, 1), cy=round(y, 1), r=4)
            for x, y in spots
        ]
    return join(parts)


def _hits(lines: Sequence[Series], frame: Frame) -> Markup:
    readings: dict[float, list[str]] = {}
    for line in lines:
        for index, (x, y) in enumerate(line.points):
            between = ""
            if index < len(line.intervals):
                low, high = line.intervals[index]
                between = f" ({line.show(low)} to {line.show(high)})"
            readings.setdefault(x, []).append(f"{line.name} {line.show(y)}{between}")
    width = min(max((frame.width - LEFT - RIGHT) / max(len(readings), 1), 3), 40)
    name = frame.x.label.split(",")[0].removeprefix("optimizer ")
    return join(
        frame.hit(frame.at_x(x), width, "\n".join([f"{name} {frame.x.show(x)}", *readings[x]]))
        for x in sorted(readings)
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with its name below and its value above."""

    name: str
    value: float
    colour: str
    written: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarAxis:
    """The axis of the bars. `bound` draws a line behind the bar at that position."""

    label: str
    bound: float | None = None
    width: float = HALF


def bar_plot(bars: Sequence[Bar], y: Axis, x: BarAxis, *, label: str) -> Markup:
    """Draw bars side by side."""

    def draw(width: float) -> Markup:
        frame = Frame(
            Axis(label=x.label, low=-0.5, high=max(len(bars) - 0.5, 0.5)), y, width, 230.0
        )
        slot = (width - LEFT - RIGHT) / max(len(bars), 1)
        shapes = [_bar(bar, position, slot, frame) for position, bar in enumerate(bars)]
        hits = [
            frame.hit(frame.at_x(position), slot, f"{x.label} {bar.name}\n{bar.written}")
            for position, bar in enumerate(bars)
        ]
        bound = _bound(x.bound, frame) if x.bound is not None and x.bound < len(bars) else Markup()
        return svg(width, frame.height, label, frame.axes(x_ticks=False), *shapes, bound, *hits)

    return both(draw, x.width)


def _bar(bar: Bar, position: int, slot: float, frame: Frame) -> Markup:
    x, top, base = frame.at_x(position), frame.at_y(bar.value), frame.height - BOTTOM
    wide = min(slot * 0.6, 60)
    return join(
        el(
            "rect",
            class_=f"fill {bar.colour}",
            x=x - wide / 2,
            y=top,
            width=wide,
            height=max(base - top, 0),
            rx=2,
        ),
        el("text", bar.written, class_="value", x=x, y=top - 6, text_anchor="middle"),
        el("text", bar.name, class_="tick", x=x, y=base + 17, text_anchor="middle"),
    )


def _bound(bound: float, frame: Frame) -> Markup:
    x = min(frame.at_x(bound + 0.5), frame.width - RIGHT)
    return join(
        el("line", class_="bound", x1=x, x2=x, y1=TOP - 4, y2=frame.height - BOTTOM),
        el("text", f"bound {bound:g}", class_="bound-text", x=x - 6, y=TOP + 4, text_anchor="end"),
    )


def stack_plot(
    columns: Sequence[tuple[float, Sequence[float]]], x: Axis, *, names: Sequence[str], label: str
) -> Markup:
    """Draw shares that add up to 1 as stacked columns, one per step."""
    height = 250.0

    def draw(width: float) -> Markup:
        frame = Frame(
            x, Axis(label="", low=0, high=1, show=lambda v: f"{100 * v:.0f}%"), width, height
        )
        slot = (width - LEFT - RIGHT) / max(x.high - x.low, 1)
        parts = [frame.axes()]
        for at, shares in columns:
            below, left = 0.0, frame.at_x(at)
            for index, share in enumerate(shares):
                if share > 0:
                    top, bottom = frame.at_y(below + share), frame.at_y(below)
                    parts.append(
                        el(
                            "rect",
                            class_=f"fill lag-{min(index, 5)}",
                            x=round(left - slot / 2, 2),
                            y=round(top, 2),
                            width=round(slot * 0.96, 2),
                            height=round(bottom - top, 2),
                        )
                    )
                    below += share
            readings = [
                f"{name} {100 * share:.0f}%"
                for name, share in zip(names, shares, strict=True)
                if share > 0
            ]
            parts.append(frame.hit(left, slot, "\n".join([f"step {at:g}", *readings])))
        return svg(width, height, label, *parts)

    return both(draw, MOST)


@dataclass(frozen=True, slots=True)
class Mark:
    """A value on a track with its text."""

    value: float
    colour: str
    written: str


def track_plot(
    tracks: Sequence[tuple[str, Sequence[Mark]]], x: Axis, *, label: str, width: float = HALF
) -> Markup:
    """Draw one track per name, with a dot per mark, on a common axis."""
    side, step, height = 10.0, 36.0, 36.0 * len(tracks) + TOP + BOTTOM

    def draw(width: float) -> Markup:
        def at(value: float) -> float:
            return side + (value - x.low) / ((x.high - x.low) or 1) * (width - 2 * side)

        base = height - BOTTOM
        parts: list[Markup] = []
        for value in x.ticks(5):
            parts.append(el("line", class_="grid", x1=at(value), x2=at(value), y1=TOP, y2=base))
            parts.append(
                el(
                    "text",
                    x.show(value),
                    class_="tick",
                    x=at(value),
                    y=base + 17,
                    text_anchor="middle",
                )
            )
        for row, (name, marks) in enumerate(tracks):
            y = TOP + step * row + 26
            parts.append(el("text", name, class_="label", x=side, y=y - 11))
            parts.append(el("line", class_="axis", x1=side, x2=width - side, y1=y, y2=y))
            parts += [
                el("circle", class_=f"dot {m.colour}", cx=round(at(m.value), 1), cy=y, r=4)
                for m in marks
            ]
            tooltip = "\n".join([name, *(mark.written for mark in marks)])
            parts.append(
                el(
                    "rect",
                    el("title", tooltip),
                    class_="hit",
                    data_tip=tooltip,
                    x=0,
                    y=y - 24,
                    width=width,
                    height=step,
                )
            )
        parts.append(
            el("text", x.label, class_="label", x=width / 2, y=height - 4, text_anchor="middle")
        )
        return svg(width, height, label, *parts)

    return both(draw, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guides:
    """Thresholds to draw: vertical lines at x, horizontal lines at y."""

    x: Sequence[float] = ()
    y: Sequence[float] = ()


def hex_plot(
    points: Sequence[tuple[float, float]], x: Axis, y: Axis, *, label: str, guides: Guides
) -> Markup:
    """Draw the density of points in hexagons, in five shades on a log scale."""
    width, height, radius = 330.0, 260.0, 5.0
    frame = Frame(x, y, width, height)
    counts: dict[tuple[int, int], int] = {}
    across, down = radius * math.sqrt(3), radius * 1.5
    for a, b in points:
        if x.low <= a <= x.high and y.low <= b <= y.high:
            row = round((frame.at_y(b)) / down)
            column = round(frame.at_x(a) / across - (row % 2) / 2)
            counts[column, row] = counts.get((column, row), 0) + 1
    most = max(counts.values(), default=1)
    shades: list[list[str]] = [[] for _ in range(5)]
    corner = f"m0,{-radius:g}l{across / 2:.2f},{radius / 2:g}v{radius:g}"
    corner += f"l{-across / 2:.2f},{radius / 2:g}"
    corner += f"l{-across / 2:.2f},{-radius / 2:g}v{-radius:g}z"
    for (column, row), count in counts.items():
        shade = round(4 * math.log(count) / math.log(most)) if most > 1 else 4
        shades[shade].append(f"M{(column + (row % 2) / 2) * across:.1f},{row * down:.1f}{corner}")
    parts = [frame.axes()]
    parts += [
        el("path", class_=f"hex shade-{i}", d="".join(shade))
        for i, shade in enumerate(shades)
        if shade
    ]
    base = height - BOTTOM
    for value in guides.x:
        if x.low < value < x.high:
            at = frame.at_x(value)
            parts.append(el("line", class_="bound", x1=at, x2=at, y1=TOP, y2=base))
    for value in guides.y:
        if y.low < value < y.high:
            at = frame.at_y(value)
            parts.append(el("line", class_="clip-line", x1=LEFT, x2=width - RIGHT, y1=at, y2=at))
    parts.append(el("text", y.label, class_="label", x=LEFT + 6, y=TOP + 10))
    return svg(width, height, label, *parts)
