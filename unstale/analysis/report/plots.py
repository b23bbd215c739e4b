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
    """What a plot shows beside its lines, as `chart.js` reads it."""

    title: str
    label: str
    """Name of the horizontal axis."""
    unit: str = ""
    """`share` for values in percent."""
    scale: str = "value"
    """`value` fits the data, and `share` goes from 0 to 1."""
    height: int = 230
    names: Sequence[str] = ()
    """Names of the positions 0, 1, ... of the horizontal axis. Empty for numbers."""


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


def line_plot(lines: Sequence[Series], options: PlotOptions) -> Markup:
    """Return the place of a plot on a page. Its lines and options are in an attribute."""
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
