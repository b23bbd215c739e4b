"""The decoder's kernels for GPUs against torch's operations.

Without a GPU, Triton's interpreter runs them on the CPU.

* Each part of a layer has the values of torch's operations, in float32 and bfloat16.
* Rows of several sequences, which share pages, attend the right keys of the cache.
* The attention of a row is bitwise the same beside other rows.
* The kernels compile for GPUs, also where there is none.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unstale.engines.embedded.layer_parts import Cache, LayerParts, TorchParts
from unstale.engines.embedded.pages import PAGE, SPLIT_PAGES, Inputs

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton: make test-kernels"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = pytest.mark.skipif(
    DEVICE == "cpu", reason="the interpreter multiplies matrices of bfloat16 wrongly"
)
KV_HEADS, EPS, MAX_CONTEXT = 2, 1e-6, 2 * SPLIT_PAGES * PAGE
NEAR = {torch.float32: 2e-5, torch.bfloat16: 0.02}
PAGES = 30


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DEVICE, dtype)


def both_parts(head_dim: int) -> tuple[LayerParts, LayerParts]:
    """Return the parts by Triton and by torch."""
    from unstale.engines.embedded.gpu_kernels import TritonParts

    angles = noise(MAX_CONTEXT, head_dim // 2, seed=9)
    rotations = torch.polar(torch.ones_like(angles), angles)
    arguments = (KV_HEADS, rotations, EPS)
    return TritonParts(*arguments), TorchParts(*arguments)


def cache_of(head_dim: int, dtype: torch.dtype) -> Cache:
    keys = noise(PAGES * KV_HEADS, head_dim, PAGE, seed=1, dtype=dtype)
    values = noise(PAGES * KV_HEADS, PAGE, head_dim, seed=2, dtype=dtype)
    return keys, values


def inputs_of(positions: list[int], tables: list[list[int]]) -> Inputs:
    at = torch.tensor(positions, device=DEVICE)
    table = torch.tensor(tables, device=DEVICE)
    page = table.gather(1, (at // PAGE)[:, None])[:, 0]
    none = at.new_empty(0)
    return Inputs(at, at, page * PAGE + at % PAGE, table, none, none, none, none)


def near(found: Tensor, expected: Tensor) -> bool:
    error = (found.double() - expected.double()).abs().max()
    return bool(error <= NEAR[found.dtype] * expected.double().abs().max())


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize("width", [48, 1000])
def test_a_sum_and_its_norm(width: int, dtype: torch.dtype) -> None:
    mine, by_torch = both_parts(16)
    weight = noise(width, seed=3, dtype=dtype)
    more = noise(5, width, seed=4, dtype=dtype)
    sums, norms = [], []
    for parts in (mine, by_torch):
        x = noise(5, width, seed=5, dtype=dtype)
        norms.append((parts.add_norm(x, None, weight), parts.add_norm(x, more, weight)))
        sums.append(x)
    assert near(*sums)
    assert all(near(*pair) for pair in zip(*norms, strict=True))


@pytest.mark.parametrize("dtype", list(NEAR))
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (6, 24)])
def test_queries_are_rotated_and_keys_and_values_are_placed(
    heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    inputs = inputs_of([0, 63, 64, 700], [[7, 0] + [0] * 14, [3, 4] + [0] * 14] * 2)
    qkv = noise(4, heads + 2 * KV_HEADS, head_dim, seed=3, dtype=dtype)
    norm = noise(heads + KV_HEADS, head_dim, seed=4)
    found = []
    for parts in both_parts(head_dim):
        cache = cache_of(head_dim, dtype)
        found.append((parts.place(qkv, norm, inputs, cache), *cache))
    assert all(near(*pair) for pair in zip(*found, strict=True))
    assert not torch.equal(found[0][1], cache_of(head_dim, dtype)[0])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=ON_GPU)])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 16), (6, 24)])
@pytest.mark.parametrize("reach", [SPLIT_PAGES, 2 * SPLIT_PAGES])
def test_rows_attend_the_pages_of_their_sequences(
    reach: int, heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    tables = torch.zeros(4, reach, dtype=torch.int64)
    tables[0, :1] = torch.tensor([5])
    tables[1, :8] = torch.arange(6, 14)
    its_pages = torch.tensor([*range(6, 12), 20, 21, 22])[:reach]
    tables[2, : len(its_pages)] = its_pages
    positions = [3, 8 * PAGE - 1, (8 * PAGE if reach > SPLIT_PAGES else 7 * PAGE), 0]
    inputs = inputs_of(positions, tables.tolist())
    cache = cache_of(head_dim, dtype)
    query = noise(4, heads, head_dim, seed=6, dtype=dtype)
    mine, by_torch = both_parts(head_dim)
    found = mine.attend_rows(query, inputs, cache)
    assert near(found, by_torch.attend_rows(query, inputs, cache))
    for row in range(4):  # alone, and where it fits with fewer pages
        least = SPLIT_PAGES if positions[row] < SPLIT_PAGES * PAGE else reach
        alone = inputs_of(positions[row : row + 1], tables[row : row + 1, :least].tolist())
        assert torch.equal(mine.attend_rows(query[row : row + 1], alone, cache)[0], found[row])


@pytest.mark.parametrize("dtype", list(NEAR))
def test_a_gate_is_applied(dtype: torch.dtype) -> None:
    mine, by_torch = both_parts(16)
    both = noise(3, 2 * 40, seed=7, dtype=dtype)
    assert near(mine.gated(both), by_torch.gated(both))


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability: int) -> None:
    """In another process, because here the interpreter has replaced the compiler."""
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_gpu_kernels.py")
    done = subprocess.run(
        [sys.executable, script, str(capability)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr[-2000:]
    assert done.stdout.split() == ["_add_norm", "_place", "_attend_rows", "_join_splits"] * 2
