"""Test that torch runs FlashAttention 3 where it is installed.

The module of the kernels is a fake here, except on a GPU that has them.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention

from tests.model.test_fused import tree
from unstale.model.tree_attention import (
    HOPPER,
    TreeAttention,
    can_attend,
    layout_of,
    uses_flash_attention_3,
)

MODULE = "flash_attn_interface"
KERNELS = """
import torch
library = torch.library.Library("flash_attn_3", "DEF")
for name in ("fwd", "bwd"):
    library.define(f"{name}(Tensor x) -> Tensor")
"""

installed = pytest.mark.skipif(
    not find_spec(MODULE)
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != HOPPER,
    reason="needs FlashAttention 3 and a GPU of compute capability 9.0",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder from which modules are imported. Nothing is activated before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    uses_flash_attention_3.cache_clear()
    yield tmp_path
    sys.modules.pop(MODULE, None)
    uses_flash_attention_3.cache_clear()
    attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.mark.skipif(find_spec(MODULE) is not None, reason="FlashAttention 3 is installed")
def test_torch_gets_the_kernels_once_they_are_installed(folder: Path) -> None:
    assert not uses_flash_attention_3() and attention.current_flash_attention_impl() is None
    uses_flash_attention_3.cache_clear()
    (folder / f"{MODULE}.py").write_text(KERNELS)
    assert uses_flash_attention_3() and attention.current_flash_attention_impl() == "FA3"


@pytest.mark.skipif(find_spec(MODULE) is not None, reason="FlashAttention 3 is installed")
def test_a_module_without_kernels_is_named_and_not_used(folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text("raise ImportError('built for another CUDA')")
    with pytest.warns(RuntimeWarning, match=r"cannot use it \(built for another CUDA\)"):
        assert not uses_flash_attention_3()
    assert attention.current_flash_attention_impl() is None


@installed
@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_attention_over_a_tree_has_the_gradient_of_plain_attention(heads: tuple[int, int]) -> None:
    run = tree()
    length = len(run.tokens)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for segment in run.segments:
        for start, end in (*segment.path, (segment.start, segment.end)):
            seen[segment.start : segment.end, start:end] = True
    seen.tril_()
    noise = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(length, number, 64, generator=noise).bfloat16().cuda()
        for number in (heads[0], heads[1], heads[1], heads[0])
    ]
    *rows, grad = inputs
    assert can_attend(run, rows[0], 64) and attention.current_flash_attention_impl() == "FA3"
    own = [each.clone().requires_grad_() for each in rows]
    out = TreeAttention.apply(*own, (layout_of(run, rows[0].device), 0.2))
    found = [out.detach(), *torch.autograd.grad(out, own, grad)]
    wide = [each.double().requires_grad_() for each in rows]
    plain = F.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in wide),
        attn_mask=seen.cuda(),
        scale=0.2,
        enable_gqa=True,
    )[0].transpose(0, 1)
    expected = [plain.detach(), *torch.autograd.grad(plain, wide, grad.double())]
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-2
