"""Compile the decoder's kernels for GPUs of a compute capability (80 or 90), without a GPU.

    python tests/engines/compile_gpu_kernels.py 90

Writes the name of each kernel, once for bfloat16 and once for float32.
"""

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unstale.engines.embedded import gpu_kernels
from unstale.engines.embedded.pages import PAGE, SPLIT_PAGES

HEADS, KV_HEADS = 16, 8
MOST_SHARED = 99 << 10
"""The least shared memory, in bytes, that one block of threads can have on GPUs from 8.0 on."""


def compiled(kernel: Any, types: dict[str, str], capability: int, **constants: int) -> str:
    """Compile a kernel, whose arguments have these types or are constants. Return its name."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert len(made.asm["cubin"]) > 0
    assert made.metadata.shared <= MOST_SHARED, f"{kernel.__name__}: {made.metadata.shared} bytes"
    return str(kernel.__name__)


def main() -> None:
    capability = int(sys.argv[1])
    types = dict.fromkeys(("norm", "rotations", "parts", "tops"), "*fp32")
    types |= dict.fromkeys(("positions", "cells", "tables"), "*i64")
    types |= {"eps": "fp32"} | dict.fromkeys(("width", "reach", "rows", "splits"), "i32")
    values = ("x", "more", "weight", "out", "qkv", "query", "keys", "values")
    group = HEADS // KV_HEADS
    names: list[str] = []
    for dtype in ("*bf16", "*fp32"):
        types |= dict.fromkeys(values, dtype)
        for adds in (True, False):
            norm = compiled(gpu_kernels._add_norm, types, capability, ADDS=adds, WIDTH=2048)
        names.append(norm)
        for head, wide in ((128, 128), (80, 128)):
            half = {"HALF": head // 2, "WIDE": wide // 2}
            heads = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "PAGE": PAGE, **half}
            placed = compiled(gpu_kernels._place, types, capability, **heads)
            sizes = {"KV_HEADS": KV_HEADS, "GROUP": group, "GROUPS": gpu_kernels.MIN_ROWS}
            sizes |= {"HEAD": head, "WIDE": wide, "PAGE": PAGE, "SPLIT": SPLIT_PAGES}
            for one in (True, False):
                rows = compiled(gpu_kernels._attend_rows, types, capability, **sizes, ONE_SPLIT=one)
            joined = compiled(
                gpu_kernels._join_splits, types, capability, HEADS=HEADS, HEAD=head, WIDE=wide
            )
        names += [placed, rows, joined]
    sys.stdout.write("\n".join(names))


if __name__ == "__main__":
    main()
