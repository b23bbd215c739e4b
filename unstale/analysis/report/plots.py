"""Describe the plots of the pages of comparisons and studies. `static/plots.js` draws them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from markupsafe import Markup

from unstale.durability.run_folder import dumps

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a plot. With `dots`, a circle is drawn at every point."""

    name: str
    colour: str
    """Name of a colour in the style sheet."""
    points: Sequence[Point]
    intervals: Sequence[Point] = ()
    """Confidence interval (low, high) of each point. Empty if there are none."""
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotOptions:
    """The title, axes and size of a plot, as `chart.js` reads them."""

    title: str
    label: str
    """Name of the horizontal axis."""
    unit: str = ""
    """Unit of the values: `share` for shares, which are shown in percent, or ""."""
    scale: str = "value"
    """Range of the vertical axis: `value` fits the data, and `share` goes from 0 to 1."""
    height: int = 230
    names: Sequence[str] = ()
    """Names of the positions 0, 1, ... of the horizontal axis. Empty for numbers."""


def thin(points: Sequence[Point], limit: int = 240) -> list[Point]:
    """Return at most `limit` points. More points are averaged with their neighbours.

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


def line_plot(lines: Sequence[Series], options: PlotOptions) -> Markup:
    """Return the HTML element of a plot. An attribute has the plot's lines and options as JSON."""
    series = []
    for line in lines:
        x, y = [x for x, _ in line.points], [y for _, y in line.points]
        row = {"name": line.name, "colour": line.colour, "dots": line.dots, "x": x, "y": y}
        if line.intervals:
            row |= {
                "low": [low for low, _ in line.intervals],
                "high": [high for _, high in line.intervals],
            }
        series.append(row)
    text = dumps({**asdict(options), "series": series})
    return Markup('<div data-plot="{}"></div>').format(text)
