"""Test stochastic rounding: its mean, its neighbours, and that all implementations give one result.

The random bits depend on seed, step, name and the index in the whole tensor, and on nothing else.
"""

import math

import pytest
import torch
from torch import Tensor

from unstale.model import rounding
from unstale.model.kernels import kernels
from unstale.model.rounding import BLOCK, NARROW, Draw, round_stochastically

DTYPES = pytest.mark.parametrize("dtype", NARROW)


def rounded(
    weights: Tensor, dtype: torch.dtype, draw: Draw, *, name: str = "w", first: int = 0
) -> Tensor:
    out = torch.empty_like(weights, dtype=dtype)
    round_stochastically(weights, out, draw, name=name, first=first)
    return out


def numbers(count: int = 50_000) -> Tensor:
    """Return numbers of all sizes that float16 has, and of some smaller ones, of both signs."""
    noise = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.rand(count, generator=noise) * 45 - 30)
    return sizes * torch.randn(count, generator=noise).sign()


def neighbours(weights: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the largest number of the format that is not above, and the least not below."""
    near = weights.to(dtype)
    below = torch.where(
        near.double() > weights.double(), torch.nextafter(near, near - math.inf), near
    )
    above = torch.where(
        near.double() < weights.double(), torch.nextafter(near, near + math.inf), near
    )
    return below, above


@DTYPES
def test_only_the_two_neighbours_occur(dtype: torch.dtype) -> None:
    weights = numbers()
    below, above = neighbours(weights, dtype)
    found = rounded(weights, dtype, Draw(1, 1))
    assert bool(((found == below) | (found == above)).all())
    apart = below != above
    assert 0.4 < (found == above)[apart].float().mean() < 0.6


@DTYPES
def test_the_mean_over_steps_is_the_float32_weight(dtype: torch.dtype) -> None:
    """The mean of n draws has the variance p (1 - p) gap^2 / n, and 5 of its roots are allowed."""
    weights, draws = numbers(2000), 400
    below, above = (each.double() for each in neighbours(weights, dtype))
    gap = above - below
    share = torch.where(gap > 0, (weights.double() - below) / gap, 0)
    total = sum(rounded(weights, dtype, Draw(3, step)).double() for step in range(draws))
    error = (total / draws - weights.double()) / gap.clamp(min=1e-300)
    error[gap == 0] = 0
    root = (share * (1 - share) / draws).sqrt().clamp(min=1 / draws)
    assert (error.abs() / root).max() < 5
    # The mean over all weights has no bias that the mean of one weight would hide.
    assert abs(error.mean()) < 4 * (share * (1 - share)).mean().sqrt() / math.sqrt(draws * 2000)


@DTYPES
def test_a_number_of_the_format_never_moves(dtype: torch.dtype) -> None:
    words = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    every = words.view(dtype)
    for step in range(8):
        found = rounded(every.float(), dtype, Draw(0, step))
        is_number = ~every.isnan()
        assert torch.equal(found.view(torch.int16)[is_number], words[is_number])
        assert bool(found.isnan()[~is_number].all())


@DTYPES
def test_a_finite_number_does_not_become_infinite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    limit = torch.finfo(torch.float32).max if dtype == torch.bfloat16 else 65535.996
    weights = torch.tensor([largest * 1.0001, limit, -limit] * 1000)
    found = rounded(weights, dtype, Draw(0, 1))
    assert bool((found.abs() == largest).all())
    beyond = torch.tensor([math.inf, -math.inf] + [65536.0, 1e30] * (dtype == torch.float16))
    assert bool(rounded(beyond, dtype, Draw(0, 1)).isinf().all())


@DTYPES
def test_torch_gives_the_bits_of_the_compiled_kernel(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels(rounding.SOURCE) is not None
    noise = torch.Generator().manual_seed(2)
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (70_001,), generator=noise)
    weights = torch.cat([words.to(torch.int32).view(torch.float32), numbers()])
    first = BLOCK - 5_000  # two blocks
    native = rounded(weights, dtype, Draw(7, 2), first=first)
    monkeypatch.setattr(rounding, "kernels", lambda source: None)
    plain = rounded(weights, dtype, Draw(7, 2), first=first)
    assert torch.equal(native.view(torch.int16), plain.view(torch.int16))


def test_parts_of_a_tensor_are_rounded_like_the_whole() -> None:
    weights = numbers(200_000)
    whole = rounded(weights, torch.bfloat16, Draw(1, 9))
    parts = [
        rounded(weights[start : start + 70_000], torch.bfloat16, Draw(1, 9), first=start)
        for start in range(0, 200_000, 70_000)
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_other_seeds_steps_and_names_draw_other_bits() -> None:
    weights = torch.full((50_000,), 1 + 2.0**-8)  # in the middle of two neighbours
    draws = [("w", Draw(1, 1)), ("w", Draw(2, 1)), ("w", Draw(1, 2)), ("v", Draw(1, 1))]
    ups = torch.stack(
        [(rounded(weights, torch.bfloat16, draw, name=name) > 1).float() for name, draw in draws]
    )
    correlation = torch.corrcoef(torch.cat([ups, ups[:1].roll(1, 1)]))
    assert (correlation - torch.eye(5)).abs().max() < 0.03
    assert (ups.mean(1) - 0.5).abs().max() < 0.02


def test_other_dtypes_are_refused() -> None:
    weights = torch.ones(4, 4)
    for wide, out in [
        (weights, torch.empty(4, 4)),
        (weights.double(), weights.half()),
        (weights, torch.empty(16, dtype=torch.bfloat16)),
        (weights.T[:, :2], torch.empty(4, 2, dtype=torch.bfloat16)),
    ]:
        with pytest.raises(ValueError, match="are rounded to bfloat16 or float16"):
            round_stochastically(wide, out, Draw(0, 0), name="w")
