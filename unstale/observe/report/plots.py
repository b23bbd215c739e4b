"""Draw plots as SVG. This module computes coordinates, and `templates/plots.html` draws them.

Most plots are drawn twice, wide and narrow. The style sheet shows the one that fits the screen, so
that text has the same size on a phone.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from markupsafe import Markup

from unstale.observe.report.markup import macros
from unstale.observe.report.words import amount

Point = tuple[float, float]

_PLOTS = macros("plots.html")

FULL, MOST, HALF, SOME, NARROW = 990, 560, 452, 370, 340
"""Widths of a plot in CSS pixels, from the full width of the page down to a phone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a plot: its range, label and number format."""

    label: str
    low: float
    high: float
    show: Callable[[float], str] = amount
    whole: bool = False
    """True for ticks at whole numbers only."""

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round numbers inside the range.

        >>> Axis(label="step", low=0, high=80).ticks(5)
        [0.0, 20.0, 40.0, 60.0, 80.0]
        """
        span = self.high - self.low
        if not 0 < span < math.inf:
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
    """A line of a plot. With `dots`, a circle is drawn at every point."""

    name: str
    colour: str
    """Name of a colour in the style sheet. With ` faint` after it, the line is thin and pale."""
    points: Sequence[Point]
    intervals: Sequence[Point] = ()
    """Confidence interval (low, high) of each point. Empty if there are none."""
    dots: bool = False
    band: bool = False
    """True to draw the intervals as an area, False for a short line at each point."""
    steps: bool = False
    """True to draw each value as constant until the next point."""
    show: Callable[[float], str] = amount
    key: str = ""
    """Text in the legend, if it differs from the name."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The SVG paths of a line, and the pixel positions of its dots. Unused paths are empty."""

    line: str
    band: str
    whiskers: list[str]
    dots: list[Point]


@dataclass(frozen=True, slots=True)
class Frame:
    """A drawing of `width` by `height` pixels. It converts values of the axes to pixels."""

    x: Axis
    y: Axis
    width: float
    height: float
    left: float = 48
    margin: float = 14
    """Space to the right of the data in pixels."""

    top: ClassVar = 12
    bottom: ClassVar = 40
    """Space below the data in pixels."""

    @property
    def right(self) -> float:
        return self.width - self.margin

    @property
    def base(self) -> float:
        return self.height - self.bottom

    def at_x(self, value: float) -> float:
        share = (value - self.x.low) / ((self.x.high - self.x.low) or 1)
        return self.left + share * (self.right - self.left)

    def at_y(self, value: float) -> float:
        share = (value - self.y.low) / ((self.y.high - self.y.low) or 1)
        return self.base - share * (self.base - self.top)

    def x_ticks(self) -> list[float]:
        return self.x.ticks(max(4, int(self.width // 85)))

    def hit_width(self, columns: int) -> float:
        """Return the width of the invisible columns that show values under the mouse pointer."""
        return min(max((self.right - self.left) / max(columns, 1), 3), 40)

    def shape(self, series: Series) -> Shape:
        """Return the SVG paths that draw a line inside this drawing."""
        spots = [(self.at_x(x), self.at_y(y)) for x, y in series.points]
        edges = [
            (x, self.at_y(low), self.at_y(high))
            for (x, _), (low, high) in zip(spots, series.intervals, strict=False)
        ]
        band = ""
        if series.band and len(edges) > 1:
            lower = [(x, low) for x, low, _ in reversed(edges)]
            band = _polyline([(x, high) for x, _, high in edges] + lower) + "Z"
            edges = []
        line = _staircase(spots) if series.steps else _polyline(spots)
        return Shape(
            line=line if len(spots) > 1 else "",
            band=band,
            whiskers=[
                f"M{x:.1f},{high:.1f}V{low:.1f}M{x - 4:.1f},{high:.1f}h8M{x - 4:.1f},{low:.1f}h8"
                for x, low, high in edges
            ],
            dots=spots if series.dots or len(spots) == 1 else [],
        )


def _polyline(spots: Iterable[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in spots)


def _staircase(spots: Sequence[Point]) -> str:
    x, y = spots[0]
    return f"M{x:.1f},{y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in spots[1:])


def _frames(x: Axis, y: Axis, width: float, height: float) -> tuple[Frame, Frame]:
    """Return two drawings: one for this width, one for a phone."""
    return Frame(x, y, width, height), Frame(x, y, NARROW, height)


def thin(points: Sequence[Point], limit: int = 240) -> list[Point]:
    """Average neighbouring points until at most `limit` are left.

    >>> thin([(0, 1), (1, 3), (2, 5), (3, 7)], limit=2)
    [(0.5, 2.0), (2.5, 6.0)]
    """
    if len(points) <= limit:
        return list(points)
    cuts = [round(i * len(points) / limit) for i in range(limit + 1)]
    buckets = [points[cuts[i] : cuts[i + 1]] for i in range(limit)]
    return [(sum(x for x, _ in b) / len(b), sum(y for _, y in b) / len(b)) for b in buckets]


def smooth(points: Sequence[Point], window: int = 5) -> list[Point]:
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
    """Draw lines over a common axis. The values at a step appear under the mouse pointer."""
    frames = _frames(x, y, width, 320 if width > MOST else 230)
    return _PLOTS.line_plot(frames, lines, _readings(lines, x), label)


def _readings(lines: Sequence[Series], axis: Axis) -> list[tuple[float, str]]:
    """Return, for each x, a text with the values of all lines there."""
    readings: dict[float, list[str]] = {}
    for line in lines:
        for index, (x, y) in enumerate(line.points):
            between = ""
            if index < len(line.intervals):
                low, high = line.intervals[index]
                between = f" ({line.show(low)} to {line.show(high)})"
            readings.setdefault(x, []).append(f"{line.name} {line.show(y)}{between}")
    name = axis.label.split(",")[0].removeprefix("optimizer ")
    return [(x, "\n".join([f"{name} {axis.show(x)}", *readings[x]])) for x in sorted(readings)]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a bar plot, with its name below and the text `written` above."""

    name: str
    value: float
    colour: str
    written: str


def bar_plot(
    bars: Sequence[Bar], y: Axis, *, label: str, bound: float | None = None, width: float = HALF
) -> Markup:
    """Draw one bar per lag, and a vertical line after the largest allowed lag, `bound`."""
    x = Axis(label="lag", low=-0.5, high=max(len(bars) - 0.5, 0.5))
    return _PLOTS.bar_plot(_frames(x, y, width, 230), bars, bound, label)


def stack_plot(
    columns: Sequence[tuple[int, int, Sequence[float]]],
    x: Axis,
    *,
    names: Sequence[str],
    label: str,
) -> Markup:
    """Draw a stacked column for each step, or for some steps in a row.

    `columns` has the first and the last step, and shares that add up to 1.
    """
    stacks = []
    for first, last, shares in columns:
        ends = list(accumulate(shares, initial=0.0))
        words = [
            f"{name} {100 * share:.0f}%"
            for name, share in zip(names, shares, strict=True)
            if share > 0
        ]
        stacks.append(
            {
                "x": (first + last) / 2,
                "steps": last - first + 1,
                "parts": [
                    (index, ends[index], ends[index + 1])
                    for index, share in enumerate(shares)
                    if share > 0
                ],
                "words": "\n".join(
                    [f"step {first}" if first == last else f"steps {first} to {last}", *words]
                ),
            }
        )
    y = Axis(label="", low=0, high=1, show="{:.0%}".format)
    return _PLOTS.stack_plot(_frames(x, y, MOST, 250), stacks, label)


@dataclass(frozen=True, slots=True)
class Mark:
    """A dot in a plot with one row per track.

    The text `written` appears under the mouse pointer.
    """

    value: float
    colour: str
    written: str


@dataclass(frozen=True, slots=True)
class Track:
    """A row of a track plot: its name and its dots."""

    name: str
    marks: Sequence[Mark]

    @property
    def words(self) -> str:
        return "\n".join([self.name, *(mark.written for mark in self.marks)])


def track_plot(tracks: Sequence[Track], x: Axis, *, label: str) -> Markup:
    """Draw one row of dots per track, all on one horizontal axis."""
    y = Axis(label="", low=0, high=1)
    height = 36 * len(tracks) + Frame.top + Frame.bottom
    frames = [Frame(x, y, width, height, left=10, margin=10) for width in (HALF, NARROW)]
    return _PLOTS.track_plot(frames, tracks, label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guides:
    """Values to mark in a density plot: vertical lines at `x`, horizontal lines at `y`."""

    x: Sequence[float] = ()
    y: Sequence[float] = ()


def hex_plot(points: Sequence[Point], x: Axis, y: Axis, *, label: str, guides: Guides) -> Markup:
    """Draw the density of points: hexagons in five shades, on a log scale."""
    frame = Frame(x, y, 330, 260)
    radius = 5.0
    across, down = radius * math.sqrt(3), radius * 1.5
    counts: Counter[tuple[int, int]] = Counter()
    for a, b in points:
        if x.low <= a <= x.high and y.low <= b <= y.high:
            row = round(frame.at_y(b) / down)
            counts[round(frame.at_x(a) / across - (row % 2) / 2), row] += 1
    most = max(counts.values(), default=1)
    corner = f"m0,{-radius:g}l{across / 2:.2f},{radius / 2:g}v{radius:g}"
    corner += f"l{-across / 2:.2f},{radius / 2:g}"
    corner += f"l{-across / 2:.2f},{-radius / 2:g}v{-radius:g}z"
    shades = [""] * 5
    for (column, row), count in counts.items():
        shade = round(4 * math.log(count) / math.log(most)) if most > 1 else 4
        shades[shade] += f"M{(column + (row % 2) / 2) * across:.1f},{row * down:.1f}{corner}"
    return _PLOTS.hex_plot(frame, shades, guides, label)
