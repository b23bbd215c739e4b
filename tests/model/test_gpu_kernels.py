"""Kernels for GPUs against transformers and torch.

Without a GPU, Triton's interpreter runs them on the CPU.

* Norms, heads with rotary positions, and SwiGLU have the values and gradients of transformers.
* Log-probabilities and entropies have those of a softmax in float64, over tiles of the vocabulary.
* A model has the same log-probabilities and gradients as with the code of transformers.
* Flash attention gets each token's earlier tokens as keys, in order.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from tests.model.test_fused import MODELS, learnt, tree
from unstale.model import fused, head, tree_attention
from unstale.model.policy import Policy
from unstale.model.tree_attention import flash_layout, layout_of
from unstale.testing import tiny_policy

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton: make test-kernels"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def gpu() -> Any:
    """Return the kernels. `tests/conftest.py` turns on Triton's interpreter without a GPU."""
    from unstale.model.gpu_kernels import GpuKernels

    return GpuKernels()


@pytest.fixture
def on_gpu(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models use the kernels, also on the CPU."""
    if DEVICE == "cuda":
        return
    monkeypatch.setattr(fused, "kernels_for", lambda x: gpu)
    monkeypatch.setattr(head, "gpu_kernels", lambda: gpu)
    monkeypatch.setattr(head, "fits_gpu", lambda *tensors: tensors[0].dtype != torch.float64)


def noise(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made.to(DEVICE)


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Return True if the largest error is a few roundings of the largest value."""
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    error = (found.double() - expected.double()).abs().max()
    return bool(error <= limit * expected.double().abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1000])
@pytest.mark.usefixtures("on_gpu")
def test_a_norm_is_that_of_transformers(width: int, dtype: torch.dtype) -> None:
    module = Qwen3RMSNorm(width, eps=1e-3).to(DEVICE, dtype)
    with torch.no_grad():
        module.weight.copy_(noise(width, seed=1))
    x, grad = (noise(37, width, seed=seed).to(dtype).requires_grad_() for seed in (2, 3))
    expected = module(x)
    slopes = torch.autograd.grad(expected, (x, module.weight), grad)
    found = fused._Norm.apply(x, module.weight, 1e-3)
    mine = torch.autograd.grad(found, (x, module.weight), grad)
    assert near(found, expected, dtype)
    assert all(near(each, slope, dtype) for each, slope in zip(mine, slopes, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "width"), [(3, 16), (4, 128)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_those_of_transformers(
    gpu: Any, count: int, width: int, normed: bool, dtype: torch.dtype
) -> None:
    rows = 21
    joined = noise(rows, count * width + 32, seed=4).to(dtype)
    part = joined[:, 16 : 16 + count * width].requires_grad_()
    angles = noise(rows, width // 2, seed=5).repeat(1, 2)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    norm = Qwen3RMSNorm(width, eps=1e-6).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(noise(width, seed=6))
    x = part.view(1, rows, count, width)
    heads = (norm(x) if normed else x).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads, heads, cosine[None], sine[None])
    grad = noise(rows, count, width, seed=7).to(dtype)
    inputs = (part, norm.weight) if normed else (part,)
    slopes = torch.autograd.grad(expected[0].transpose(0, 1), inputs, grad)

    weight = norm.weight.detach() if normed else None
    roots = torch.empty(rows, count, device=DEVICE) if normed else None
    found = torch.empty(rows, count, width, dtype=dtype, device=DEVICE)
    x, stride = part.detach(), part.stride(0)
    gpu.heads(x, stride, weight, 1e-6, cosine, sine, found, roots, rows, count, width)
    assert near(found, expected[0].transpose(0, 1), dtype)
    mine = torch.full_like(joined, 3.0)
    to = mine[:, 16 : 16 + count * width]
    sums = torch.empty(gpu.pieces(rows), width, device=DEVICE)
    gpu.heads_backward(x, stride, weight, cosine, sine, roots, grad, to, sums, rows, count, width)
    assert near(to, slopes[0], dtype)
    assert (mine[:, :16] == 3).all() and (mine[:, 16 + count * width :] == 3).all()
    if normed:
        assert near(sums.sum(0), slopes[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("on_gpu")
def test_a_gated_layer_is_that_of_torch(dtype: torch.dtype) -> None:
    rows = noise(19, 32, seed=1).to(dtype).requires_grad_()
    weights = [noise(*shape, seed=9).to(dtype) for shape in ((1100, 32), (1100, 32), (32, 1100))]
    gate, up, down = (each.requires_grad_() for each in weights)
    expected = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
    grad = noise(19, 32, seed=3).to(dtype)
    slopes = torch.autograd.grad(expected, (rows, gate, up, down), grad)
    found = fused._GatedMLP.apply(rows, gate, up, down)
    mine = torch.autograd.grad(found, (rows, gate, up, down), grad)
    assert near(found, expected, dtype)
    assert all(near(each, slope, dtype) for each, slope in zip(mine, slopes, strict=True))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.usefixtures("on_gpu")
def test_log_probabilities_are_those_of_a_softmax(
    with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(head.TILE, DEVICE, 37)  # three tiles, the last one short
    monkeypatch.setitem(head.MAX_LOGITS, DEVICE, 37 * 32)  # and two parts of the rows
    layer = nn.Linear(24, 100).to(DEVICE)
    rows = noise(50, 24).float().requires_grad_()
    targets = torch.arange(50, device=DEVICE) * 2
    query = {"temperature": 0.7, "with_entropy": with_entropy}
    found, entropy = head.token_logps(layer, rows, targets, **query)
    inputs = (rows, layer.weight, layer.bias)
    mine = torch.autograd.grad((found * targets + entropy.square()).sum(), inputs)

    logps = (layer.double()(rows.double()) / 0.7).log_softmax(-1)
    expected = logps.gather(1, targets[:, None])[:, 0]
    spread = -(logps.exp() * logps).sum(-1) if with_entropy else torch.zeros_like(expected)
    inputs = (rows, layer.weight, layer.bias)
    slopes = torch.autograd.grad((expected * targets + spread.square()).sum(), inputs)
    assert near(found, expected, torch.float32)
    assert not with_entropy or near(entropy, spread, torch.float32)
    assert all(near(each, slope, torch.float32) for each, slope in zip(mine, slopes, strict=True))


@pytest.mark.parametrize("name", ["Qwen3", "Llama, with biases"])
@pytest.mark.usefixtures("on_gpu")
def test_a_model_is_that_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    policy = Policy(MODELS[name]().to(DEVICE), tiny_policy().tokenizer)
    found, mine = learnt(policy)
    monkeypatch.setattr(fused, "fits", lambda *tensors: False)
    monkeypatch.setattr(head, "fits_gpu", lambda *tensors: False)
    expected, slopes = learnt(policy)
    assert not torch.equal(found, expected)  # other code
    assert near(found, expected, torch.float32) and mine.keys() == slopes.keys()
    assert all(near(mine[each], slopes[each], torch.float32) for each in slopes)


def test_flash_attention_gets_the_earlier_tokens_as_keys() -> None:
    run = tree()
    layout = flash_layout(run.segments, CPU)
    assert layout.keys is not None and len(run.segments) > 3
    num_tokens = len(run.tokens)
    query, key, value = (noise(num_tokens, 2, 16, seed=seed).float().cpu() for seed in (1, 2, 3))
    out = torch.empty_like(query)
    starts = zip(layout.query_starts.tolist(), layout.key_starts.tolist(), strict=True)
    (begin, low), *others = starts
    for end, high in others:
        own = layout.keys[low:high]
        assert torch.equal(own[low - high :][-(end - begin) :], torch.arange(begin, end))
        assert end - begin <= layout.longest[0] and high - low <= layout.longest[1]
        hidden = torch.ones(end - begin, high - low).tril(high - low - end + begin) == 0
        scores = torch.einsum("qhd,khd->hqk", query[begin:end], key[own]) * 0.25
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, value[own])
        begin, low = end, high
    assert begin == num_tokens
    expected, _ = layout_of(run, CPU).attend(query, key, value, 0.25)
    assert near(out, expected, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
@pytest.mark.parametrize("name", ["Qwen3", "Llama, with biases"])
def test_a_bfloat16_model_has_the_gradients_of_a_float32_one(name: str) -> None:
    """In bfloat16 attention is torch's flash attention. The weights are the same numbers."""
    torch.manual_seed(0)
    model = MODELS[name]().to(DEVICE, torch.bfloat16)
    found, mine = learnt(Policy(model, tiny_policy().tokenizer))
    expected, slopes = learnt(Policy(model.float(), tiny_policy().tokenizer))
    assert (found - expected).abs().mean() < 0.05
    for each, slope in slopes.items():
        assert (mine[each] - slope).norm() < 0.1 * slope.norm(), each


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_flash_attention_has_the_values_and_gradients_of_the_kernels_for_cpus() -> None:
    run = tree()
    inputs = [noise(len(run.tokens), heads, 64, seed=heads) for heads in (4, 2, 2)]
    grad = noise(len(run.tokens), 4, 64, seed=5)
    results = []
    for device, dtype in ((CPU, torch.float32), (torch.device("cuda"), torch.bfloat16)):
        own = [each.to(device, dtype).requires_grad_() for each in inputs]
        layout = layout_of(run, device)
        out = tree_attention.TreeAttention.apply(*own, (layout, 0.125))
        slopes = torch.autograd.grad(out, own, grad.to(device, dtype))
        results.append([each.float().cpu() for each in (out, *slopes)])
    for expected, found in zip(*results, strict=True):
        assert near(found, expected, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_on_a_gpu_a_value_does_not_depend_on_what_it_is_packed_with() -> None:
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    from transformers import Qwen3ForCausalLM

    from tests.model.test_packing import put, text

    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16)
    policy = Policy(model, tiny_policy().tokenizer)
    trunk, *ends = text(150, 70, 21, 130)
    (other,) = text(40, seed=1)
    together = policy.logps(put(*(trunk + end for end in ends), other), temperature=1.0)
    start = 0
    for tokens in (*(trunk + end for end in ends), other):
        alone = policy.logps(put(tokens), temperature=1.0)
        part = together[start : start + len(tokens)]
        assert near(part, alone, torch.bfloat16)
        start += len(tokens)
