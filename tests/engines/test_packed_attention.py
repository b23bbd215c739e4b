"""Test the attention of packed sequences against softmax over whole sequences, on random states."""

from typing import Any

import pytest
import torch
from torch import Tensor

from unstale.engines.embedded import packed
from unstale.engines.embedded.kernels import Kernels
from unstale.engines.embedded.runner import Chunk, Step
from unstale.native import NotCompiled

HEADS, KV_HEADS, KEYS, VALUES = 4, 2, 24, 8
LENGTH = 200
"""Number of tokens of a sequence, on four pages."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest error. Rounding to bfloat16 changes a result of up to 4 by up to 2**-7 (0.0078)."""


def _expected(states: list[Tensor], window: int, cap: float, sinks: Tensor | None) -> Tensor:
    query, key, value = (each[0].float() for each in states)
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 0) for each in (key, value))
    scores = query @ key.mT * KEYS**-0.5
    if cap:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    hidden = (distance < 0) | (distance >= (window or LENGTH))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        further = sinks.float()[:, None, None].expand(-1, LENGTH, 1)
        scores = torch.cat([scores, further], -1)
    return (scores.softmax(-1)[..., :LENGTH] @ value).transpose(0, 1)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    ("window", "cap", "sink"),
    [(0, 0.0, False), (0, 1.5, False), (0, 0.0, True), (90, 0.0, False), (90, 1.5, True)],
)
@pytest.mark.parametrize(
    ("dtype", "states_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
def test_attention_over_several_pages(  # noqa: PLR0913 - the parameters
    compiled: bool,
    window: int,
    cap: float,
    sink: bool,
    dtype: torch.dtype,
    states_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sequences as prompts in two parts and then token by token. States may be float32 in a
    bfloat16 cache."""

    def no_compiler(*arguments: Any) -> Kernels:
        raise NotCompiled("no C compiler")

    if not compiled:
        monkeypatch.setattr(packed, "_compiled", no_compiler)
    layer = packed._Layer(HEADS, KV_HEADS, KEYS, VALUES, window)
    pages = packed._Pages([layer], dtype, 2, 256)
    if compiled and pages.warning:
        pytest.skip(pages.warning)
    generator = torch.Generator().manual_seed(0)

    def states(heads: int, width: int) -> Tensor:
        return torch.randn(1, heads, LENGTH, width, generator=generator).to(dtype).to(states_dtype)

    sequences = [
        [2 * states(HEADS, KEYS), states(KV_HEADS, KEYS), states(KV_HEADS, VALUES)]
        for _ in range(2)
    ]
    sinks = torch.linspace(-1.0, 2.0, HEADS).to(states_dtype) if sink else None
    expected = [_expected(each, window, cap, sinks) for each in sequences]
    parts = [[(0, 0, 100), (1, 0, 130)], [(0, 100, 195), (1, 130, 195)]]
    parts += [[(0, at, at + 1), (1, at, at + 1)] for at in range(195, LENGTH)]
    worst = 0.0
    for step in parts:
        at = torch.cat([torch.arange(start, end) for _, start, end in step])
        rows = torch.tensor([slot for slot, start, end in step if end == start + 1])
        chunks = tuple(Chunk(*part) for part in step if part[2] > part[1] + 1)
        pages.begin(Step(rows.long(), chunks, at, at))
        query, key, value = (
            torch.cat([sequences[slot][kind][:, :, start:end] for slot, start, end in step], 2)
            for kind in range(3)
        )
        options = {"softcap": cap or None, "s_aux": sinks}
        out = pages.attend(query, key, value, None, options)
        assert out.dtype == states_dtype
        wanted = torch.cat([expected[slot][start:end] for slot, start, end in step])
        worst = max(worst, float((out[0].float() - wanted).abs().max()))
    assert worst < TOLERANCES[dtype]


def test_kernels_refuse_tensors_of_another_device() -> None:
    pages = packed._Pages([packed._Layer(1, 1, 16, 16, 0)], torch.float32, 1, 64)
    if pages.warning:
        pytest.skip(pages.warning)
    (kernels,) = pages._kernels.values()
    with pytest.raises(ValueError, match="needs tensors of the CPU, got one of meta"):
        kernels.place(torch.empty(1, device="meta"))
