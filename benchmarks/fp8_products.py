"""Measure FP8 products on a CPU against bfloat16 ones: one thread, and a check of the values.

    python -m benchmarks.fp8_products          # half a minute

Rows of inputs are multiplied by a square matrix. The rounding of the inputs is not measured.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.tables import alternate, columns, ratios, row, spread, write

SHAPES = ((64, 2048), (512, 1024))
"""Rows, and inputs and outputs of the matrix."""
CALLS = 5
"""Products of one measurement, after one that is not measured."""


def timed_ms(product: Callable[[], Tensor]) -> float:
    """Return the milliseconds of one product, as a mean over `CALLS`."""
    product()
    began = time.perf_counter()
    for _ in range(CALLS):
        product()
    return (time.perf_counter() - began) * 1000 / CALLS


def compare(rows: int, size: int, repeats: int) -> str:
    """Return the table's row of a shape.

    Raises SystemExit if the FP8 product is not the float32 product of the rounded numbers.
    """
    torch.manual_seed(0)
    inputs, weights = torch.randn(rows, size), torch.randn(size, size)
    one = torch.ones(())
    x, w = (each.to(torch.float8_e4m3fn) for each in (inputs, weights))
    x16, w16 = (each.to(torch.bfloat16) for each in (inputs, weights))

    def fp8() -> Tensor:
        return torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.float32)

    true = x.double() @ w.double().t()
    error = ((fp8() - true).abs().max() / true.abs().max()).item()
    if error > 1e-5:
        raise SystemExit(f"fp8_products: the FP8 product is off by {error:.2g}")
    found = alternate(
        {"fp8": lambda: timed_ms(fp8), "bfloat16": lambda: timed_ms(lambda: x16 @ w16.t())}, repeats
    )
    times = (spread(found[name], "{:.3g}") for name in ("fp8", "bfloat16"))
    return row(
        f"{rows} x {size}",
        *times,
        spread(ratios(found, "fp8", "bfloat16"), "{:.3g}"),
        f"{error:.1g}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = columns("rows x inputs", "FP8, ms", "bfloat16, ms", "ratio", "largest error, relative")
    lines += [compare(*shape, options.repeats) for shape in SHAPES]
    text = (
        "Median and range. The error of the FP8 product is that against float64 products of the "
        "rounded numbers, relative to the largest of them."
    )
    write("fp8-products", "FP8 products on a CPU", [text, "", *lines])


if __name__ == "__main__":
    main()
