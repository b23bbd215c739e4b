"""Write the tables and pictures of `discrepancy` from its numbers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.both_sides import PLACES
from benchmarks.discrepancy import CHOICES, FEW, PAIRS, Side
from benchmarks.tables import columns, legend_below, picture, row, write
from unstale.algorithms import corrections

Kept = Callable[[str], Any]
"""A function that returns the numbers of a measurement by its name, or None."""

BANDS: dict[str, tuple[float, float, str]] = {
    "0.5 to 2, token (the default)": (0.5, 2.0, "token"),
    "0 to 5, token (AReaL)": (0.0, 5.0, "token"),
    "0.8 to 1.25, token": (0.8, 1.25, "token"),
    "0.95 to 1.05, sequence": (0.95, 1.05, "sequence"),
    "0.995 to 1.005, sequence": (0.995025, 1.005, "sequence"),
    "0.998 to 1.002, sequence": (0.998004, 1.002, "sequence"),
}
"""Bands on D: the limits, and the tokens whose geometric mean is compared with them."""
DRAWN = (
    (Side("float32"), Side("float32")),
    (Side("float16"), Side("float16")),
    (Side("bfloat16"), Side("bfloat16")),
    (Side("bfloat16", "int8"), Side("bfloat16", "int8")),
    (Side("bfloat16", "fp8"), Side("bfloat16", "fp8")),
    (Side("bfloat16", "int4"), Side("bfloat16")),
)
"""The pairs of engine and trainer in the picture."""
EDGES: dict[str, tuple[float, ...]] = {
    "position": (0, 8, 16, 32, 64, 128),
    "context": (0, 48, 64, 96, 128, 192, 512),
    "entropy": (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 12.0),
}
"""The edges of the bins of tokens."""


def write_results(kept: Kept) -> None:
    """Write the tables and pictures of all numbers that were measured."""
    lines: list[str] = []
    for part in (_pairs, _bands, _by, _layers, _parts, _plain):
        lines += ["", *part(kept)]
    write("discrepancy", "The discrepancy of SmolLM2-135M-Instruct", lines[1:])
    _draw(kept)


def _found(kept: Kept) -> Iterator[tuple[Side, Side, Any]]:
    """Yield the pairs that were measured."""
    for engine, trainers in PAIRS.items():
        for trainer in trainers:
            if (numbers := kept(f"pair {engine} - {trainer}")) is not None:
                yield engine, trainer, numbers


def _pairs(kept: Kept) -> list[str]:
    lines = ["## |log D| of a token, in nats", ""]
    lines += columns("engine", "trainer", "tokens", "mean", "p99", "largest", "mean of D")
    for engine, trainer, numbers in _found(kept):
        log_d = numbers["log_d"]
        size = log_d.abs()
        cells = [float(each) for each in (size.mean(), size.quantile(0.99), size.max())]
        shown = (f"{each:.2g}" for each in cells)
        lines.append(row(engine, trainer, len(size), *shown, f"{float(log_d.exp().mean()):.4f}"))
    return lines


def _bands(kept: Kept) -> list[str]:
    lines = ["## Share of tokens that a band on D drops, by engine - trainer", ""]
    found = list(_found(kept))
    lines += columns("band", *(f"{engine} - {trainer}" for engine, trainer, _ in found))
    for name, (low, high, unit) in BANDS.items():
        shares = (dropped(numbers, low, high, unit) for *_, numbers in found)
        lines.append(row(name, *(f"{share:.2%}" for share in shares)))
    return lines


def dropped(numbers: Any, low: float, high: float, unit: str) -> float:
    """Return the share of tokens whose D, or whose reply's mean of it, is outside of a band."""
    log_d, reply = numbers["log_d"], numbers["reply"]
    sampled = torch.ones_like(log_d, dtype=torch.bool)
    if unit == "sequence":
        log_d = corrections.aggregate(log_d, reply, sampled=sampled)
    kept = corrections.mask(log_d, corrections.keep_all(sampled), low=low, high=high).keep
    return 1 - float(kept.double().mean())


def means(numbers: Any, of: str) -> list[tuple[float, int]]:
    """Return the mean |log D| between two `EDGES` each, and the number of tokens there."""
    size, places = numbers["log_d"].abs(), numbers[of].double()
    edges = EDGES[of]
    found = []
    for low, high in pairwise(edges):
        chosen = size[(places >= low) & (places < high)]
        found.append((float(chosen.mean()) if len(chosen) else float("nan"), len(chosen)))
    return found


def _by(kept: Kept) -> Iterator[str]:
    names = {
        "position": "token of the reply",
        "context": "tokens of context",
        "entropy": "entropy in nats",
    }
    for of, what in names.items():
        edges = EDGES[of]
        heads = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
        yield from [f"## Mean |log D| by {what}", "", *columns("engine", "trainer", *heads)]
        for engine, trainer, numbers in _found(kept):
            yield row(engine, trainer, *(f"{mean:.2g}" for mean, _ in means(numbers, of)))
        for *_, numbers in list(_found(kept))[:1]:
            yield row("tokens of the first pair", "", *(count for _, count in means(numbers, of)))
        yield ""


def _layers(kept: Kept) -> Iterator[str]:
    dtypes = [dtype for dtype in ("bfloat16", "float32") if kept(f"layers {dtype}")]
    yield from ["## Hidden states of engine and trainer", ""]
    yield "Median over tokens of the norm of the difference, as a share of the state's norm; the"
    yield "share of numbers that differ; and the error of the trainer alone against float32."
    yield ""
    heads = ("difference", "numbers that differ", "error")
    yield from columns("after", *(f"{dtype}: {head}" for dtype in dtypes for head in heads))
    for name in kept(f"layers {dtypes[0]}")["modules"] if dtypes else ():
        cells: list[str] = []
        for dtype in dtypes:
            found = kept(f"layers {dtype}")["modules"][name]
            cells += [f"{found['difference']:.2g}", f"{found['unequal']:.0%}"]
            cells.append(f"{found['error']:.2g}" if dtype != "float32" else "—")
        yield row(name, *cells)


def _size(difference: Tensor) -> str:
    return f"{float(difference.abs().mean()):.2g}"


def _parts(kept: Kept) -> Iterator[str]:
    yield from ["## Mean |log D| if only some places round to bfloat16", ""]
    yield f"{FEW} replies. Everything else is computed in float32, with weights in bfloat16."
    yield "*error* is that of the trainer, against rounding nowhere."
    yield ""
    everywhere, nowhere = kept("parts all"), kept("parts none")
    yield from columns("rounded", "both sides", "engine only", "trainer only", "error")
    for name in CHOICES:
        if (found := kept(f"parts {name}")) is None:
            continue
        yield row(
            name,
            _size(found["trainer"] - found["engine"]),
            _size(nowhere["trainer"] - found["engine"]),
            _size(found["trainer"] - nowhere["engine"]),
            _size(found["trainer"] - nowhere["trainer"]),
        )
    yield from ["", "One place in float32, all others rounded:", ""]
    yield from columns("in float32", "on both sides", "in the engine", "in the trainer", "nowhere")
    for place in PLACES:
        if (found := kept(f"parts all but {place}")) is None:
            continue
        yield row(
            place,
            _size(found["trainer"] - found["engine"]),
            _size(everywhere["trainer"] - found["engine"]),
            _size(found["trainer"] - everywhere["engine"]),
            _size(everywhere["trainer"] - everywhere["engine"]),
        )


def _plain(kept: Kept) -> Iterator[str]:
    found = kept("plain")
    yield from [f"## Errors against float64, {FEW} replies of the bfloat16 engine, in nats", ""]
    yield "The weights are rounded to bfloat16 first, in all rows. *In parts* is a sequence in"
    yield "parts of 16 tokens with a KV cache."
    yield ""
    yield from columns("log-probabilities by", "mean error", "p99", "largest")
    for name in found or ():
        if name != "float64":
            error = (found[name] - found["float64"]).abs()
            cells = (error.mean(), error.quantile(0.99), error.max())
            label = name if " " in name and "parts" not in name else f"transformers {name}"
            yield row(label, *(f"{float(each):.2g}" for each in cells))
    yield from ["", *columns("two computations of one precision", "mean difference")]
    pairs = (
        ("bfloat16", "bfloat16, in parts"),
        ("float32", "float32, in parts"),
        ("bfloat16", "trainer bfloat16"),
        ("bfloat16", "engine bfloat16"),
        ("trainer bfloat16", "engine bfloat16"),
    )
    for one, other in pairs if found else ():
        yield row(f"{one} - {other}", _size(found[one] - found[other]))


def _draw(kept: Kept) -> None:
    """Draw |log D| by pair, by entropy and by layer."""
    with picture("discrepancy", width=10.2, height=3.7, panels=3) as panels:
        _draw_sizes(panels[0], kept)
        _draw_entropy(panels[1], kept)
        _draw_layers(panels[2], kept)
        legend_below(*panels[1:], ncols=4, fontsize=8)


def _draw_sizes(panel: Any, kept: Kept) -> None:
    drawn = [pair for pair in DRAWN if kept(f"pair {pair[0]} - {pair[1]}") is not None]
    for place, (engine, trainer) in enumerate(drawn):
        size = kept(f"pair {engine} - {trainer}")["log_d"].abs()
        panel.plot([place] * 2, [size.mean(), size.quantile(0.99)], color="#999999", linewidth=1.2)
        for value, marker in ((size.mean(), "o"), (size.quantile(0.99), "^"), (size.max(), "x")):
            panel.plot(place, value, marker, color="#1f77b4", markersize=5)
    labels = [f"{engine.dtype} {engine.quantise}".replace(" none", "") for engine, _ in drawn]
    panel.set_xticks(range(len(drawn)), [each.split()[-1] for each in labels], rotation=35)
    panel.set_yscale("log")
    panel.set_ylabel("|log D| of a token, nats")
    panel.set_title("mean (dot), p99 (triangle), largest (cross)", fontsize=9)


def _draw_entropy(panel: Any, kept: Kept) -> None:
    edges: Sequence[float] = EDGES["entropy"]
    labels = [f"{low:g}-{high:g}" for low, high in pairwise(edges)]
    for engine, trainer in DRAWN:
        if (numbers := kept(f"pair {engine} - {trainer}")) is not None:
            values = [mean for mean, _ in means(numbers, "entropy")]
            label = f"{engine} - {trainer}" if engine != trainer else f"both {engine}"
            panel.plot(range(len(values)), values, marker="o", markersize=3, label=label)
    panel.set_xticks(range(len(labels)), labels, rotation=35, fontsize=8)
    panel.set_yscale("log")
    panel.set_xlabel("entropy of the token, nats")
    panel.set_title("mean |log D| by entropy", fontsize=9)


def _draw_layers(panel: Any, kept: Kept) -> None:
    for dtype, colour in (("bfloat16", "#d62728"), ("float32", "#2ca02c")):
        if found := kept(f"layers {dtype}"):
            layers = {n: v for n, v in found["modules"].items() if n.startswith("layer ")}
            values = [each["difference"] for each in layers.values()]
            panel.plot(range(1, len(values) + 1), values, color=colour, label=f"{dtype}, by layer")
    panel.set_yscale("log")
    panel.set_xlabel("layer")
    panel.set_title("difference of hidden states, share of norm", fontsize=9)
