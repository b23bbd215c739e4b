"""Prepared weights give the same products by MKL, by oneDNN and in float32, and are copies."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from unstale.model import linear

pytestmark = pytest.mark.skipif(
    not linear.supported(torch.float32), reason="oneDNN cannot multiply float32 on this CPU"
)


@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
@pytest.mark.parametrize("outputs", [128, 2048])
def test_prepared_weights_multiply_like_plain_ones(
    monkeypatch: pytest.MonkeyPatch, capability: str, outputs: int
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    noise = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, 128, generator=noise)
    rows, bias = torch.randn(16, 128, generator=noise), torch.randn(outputs, generator=noise)
    expected = F.linear(rows, weight, bias)
    prepared = linear.prepare(weight)
    by_mkl = capability == "AVX2" and outputs * 128 <= linear.SMALL_WEIGHTS
    assert prepared.is_mkldnn != by_mkl
    weight.zero_()
    torch.testing.assert_close(linear.prepared_product(rows, prepared, bias), expected)


@pytest.mark.parametrize("native", [True, False])
def test_prepared_bfloat16_weights_multiply_with_float32_sums(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(linear, "MULTIPLIES_BFLOAT16", native)
    if not linear.supported(torch.bfloat16):
        pytest.skip("oneDNN cannot multiply bfloat16 on this CPU")
    noise = torch.Generator().manual_seed(0)
    weight, rows, bias = (
        torch.randn(*shape, generator=noise).bfloat16() for shape in ((256, 512), (64, 512), (256,))
    )
    exact = F.linear(rows.double(), weight.double(), bias.double())
    prepared = linear.prepare(weight)
    assert (prepared.dtype == torch.float32) != native
    product = linear.prepared_product(rows, prepared, bias)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-4)


def test_bfloat16_layers_are_float32_ones_with_rounded_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear, "MULTIPLIES_BFLOAT16", False)
    torch.manual_seed(0)
    layer = nn.Linear(64, 96).bfloat16()
    exact = copy.deepcopy(layer).float()
    linear.use(layer)
    linear.use(exact)
    rows, grad = torch.randn(3, 32, 64).bfloat16(), torch.randn(3, 32, 96).bfloat16()
    results = []
    for each, dtype in ((layer, torch.bfloat16), (exact, torch.float32)):
        inputs = rows.to(dtype, copy=True).requires_grad_()
        product = each(inputs)
        product.backward(grad.to(dtype))
        results.append((product.detach(), inputs.grad, each.weight.grad))
    for found, wanted in zip(*results, strict=True):
        assert found is not None and wanted is not None
        assert torch.equal(found, wanted.bfloat16())


@pytest.mark.parametrize("terms", [96, 384, 800, 1536, 4096])
def test_a_sum_in_blocks_is_the_product_and_no_less_exact(terms: int) -> None:
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(64, terms), torch.randn(96, terms), torch.randn(96)
    wanted = rows.double() @ weight.double().t() + bias
    errors = [
        (each(rows, weight, bias) - wanted).abs().mean() / wanted.abs().mean()
        for each in (linear.accurate_product, linear.product)
    ]
    assert errors[0] < 4e-7 and errors[0] <= 1.05 * errors[1]
