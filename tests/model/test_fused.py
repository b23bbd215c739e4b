"""Fused operations of a decoder layer, against transformers and torch.

* Log-probabilities and gradients are those of the code of transformers, up to rounding.
* Attention over a prefix tree has the gradient of plain attention in float64.
* Layers that run again for the gradient (gradient checkpointing) have the same gradients.
* A value has the same bits whatever it is packed with, and with any number of threads.
* Layers with adapters or hooks, other dtypes and machines without a compiler run torch's code.
"""

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.model.test_packing import put, text
from unstale.model import attention, fused, kernels
from unstale.model.forward import ForwardOptions
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.model.prefix_tree import PrefixTree, build_prefix_tree
from unstale.model.tree_attention import TreeAttention, layout_of
from unstale.native import NotCompiled

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 2,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "Llama, with biases": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=1000)),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "Qwen3Moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    if kernels.kernels() is None:
        pytest.skip("no C compiler")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tree() -> PrefixTree:
    trunk, *ends = text(150, 70, 21, 130)
    (other,) = text(40, seed=1)
    return build_prefix_tree(put(*(trunk + end for end in ends), other), share=True)


def learnt(policy: Policy, weight_seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    policy.model.zero_grad()
    trunk, *ends = text(100, 70, 9)
    logps = policy.logps(put(*(trunk + end for end in ends)), temperature=1.0)
    noise = torch.Generator().manual_seed(weight_seed)
    (torch.randn(len(logps), generator=noise).to(logps) * logps).sum().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }
    return logps.detach(), gradients


def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the forward passes of each fused operation."""
    calls = dict.fromkeys(("_Norm", "_Attention", "_GatedMLP"), 0)

    def counted(name: str) -> Callable[..., Any]:
        apply = getattr(fused, name).apply

        def run(*arguments: Any) -> Any:
            calls[name] += 1
            return apply(*arguments)

        return run

    for name in calls:
        monkeypatch.setattr(getattr(fused, name), "apply", counted(name))
    return calls


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for parameter in model.parameters():  # norms and biases are 1 and 0 in a new model
        parameter.data += 0.2 * torch.randn_like(parameter)
    policy = Policy(model, None)
    calls = count(monkeypatch)
    logps, gradients = learnt(policy)
    sparse = name == "Qwen3Moe"
    assert calls == {"_Norm": 5, "_Attention": 2, "_GatedMLP": 1 if sparse else 2}
    for module in (fused, attention):
        monkeypatch.setattr(module, "fits", lambda *tensors: False)
    plain_logps, plain_gradients = learnt(policy)
    assert calls["_Attention"] == 2
    torch.testing.assert_close(logps, plain_logps, atol=2e-5, rtol=0)
    assert gradients.keys() == plain_gradients.keys()
    for parameter, gradient in gradients.items():
        error = (gradient - plain_gradients[parameter]).norm()
        assert error <= 1e-4 * plain_gradients[parameter].norm() + 1e-6, parameter


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_run_again_have_the_same_gradients(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    policy = Policy(MODELS[name](), None)
    calls = count(monkeypatch)
    kept = learnt(policy)
    policy.set_forward_options(ForwardOptions(gradient_checkpointing=True))
    logps, gradients = learnt(policy)
    assert calls["_Attention"] == 2 + 4  # each of the two layers runs again for the gradient
    assert torch.equal(logps, kept[0])
    torch.testing.assert_close(gradients, kept[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
def test_attention_has_the_gradient_of_plain_attention(heads: tuple[int, int]) -> None:
    run = tree()
    length = len(run.tokens)
    seen = torch.zeros(length, length, dtype=torch.bool)
    for segment in run.segments:
        for start, end in (*segment.path, (segment.start, segment.end)):
            seen[segment.start : segment.end, start:end] = True
    seen.tril_()
    noise = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        3 * torch.randn(length, number, 32, generator=noise)
        for number in (heads[0], heads[1], heads[1], heads[0])
    )
    own = [each.clone().requires_grad_() for each in (query, key, value)]
    out = TreeAttention.apply(*own, (layout_of(run, torch.device("cpu")), 0.2))
    found = [out.detach(), *torch.autograd.grad(out, own, grad)]
    wide = [each.double().requires_grad_() for each in (query, key, value)]
    plain = F.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in wide), attn_mask=seen, scale=0.2, enable_gqa=True
    )[0].transpose(0, 1)
    expected = [plain.detach(), *torch.autograd.grad(plain, wide, grad.double())]
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 2e-6


def test_attention_has_the_same_bits_whatever_it_is_packed_with() -> None:
    trunk, *ends = text(150, 70, 21, 130)
    (other,) = text(90, seed=1)
    rows = [trunk + end for end in ends]
    packed = put(other, *rows)
    shared, apart = (build_prefix_tree(packed, share=share) for share in (True, False))
    noise = torch.Generator().manual_seed(0)
    of_token = [torch.randn(300, 64, number, 16, generator=noise) for number in (4, 2, 2)]

    def attended(run: PrefixTree) -> Tensor:
        # Equal tokens at equal positions have equal inputs, as siblings have in a model.
        inputs = [each[run.positions, run.tokens] for each in of_token]
        return TreeAttention.apply(*inputs, (layout_of(run, torch.device("cpu")), 0.25))[run.place]

    together = attended(shared)
    assert torch.equal(together, attended(apart))
    alone = torch.cat([attended(build_prefix_tree(put(row), share=True)) for row in (other, *rows)])
    assert torch.equal(together, alone)


def test_the_number_of_threads_does_not_change_a_bit(threads: Callable[[int], None]) -> None:
    torch.manual_seed(0)
    run = tree()
    length = len(run.tokens)
    inputs = [torch.randn(length, number, 16, requires_grad=True) for number in (4, 2, 2)]
    hidden, weight = torch.randn(length, 32, requires_grad=True), torch.randn(32)
    weight.requires_grad_()
    results = []
    for number in (1, 2, 3):
        threads(number)
        out = TreeAttention.apply(*inputs, (layout_of(run, torch.device("cpu")), 0.25))
        normed = fused._Norm.apply(hidden, weight, 1e-6)
        loss = out.square().sum() + normed.square().sum()
        results.append([out, normed, *torch.autograd.grad(loss, [*inputs, hidden, weight])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("change", ["adapters", "hook", "float64"])
def test_changed_layers_run_the_code_of_transformers(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS["Qwen3"]()
    policy = Policy(
        model.double() if change == "float64" else model,
        None,
        lora=Lora(4) if change == "adapters" else None,
    )
    called = []
    if change == "hook":
        for name in ("self_attn.q_proj", "mlp.up_proj"):
            layer = policy.model.get_submodule(f"model.layers.0.{name}")
            layer.register_forward_hook(lambda *_: called.append(1))
    calls = count(monkeypatch)
    learnt(policy)
    layers = policy.model.config.num_hidden_layers
    expected = {"adapters": 0, "hook": layers - 1, "float64": 0}[change]
    assert calls["_Attention"] == calls["_GatedMLP"] == expected
    assert len(called) == (2 if change == "hook" else 0)


def _norm(found: kernels.Kernels) -> Tensor:
    x = torch.linspace(-1, 1, 16 * 200).view(200, 16)
    out, roots = torch.empty_like(x), torch.empty(200)
    found.norm(x, torch.ones(16), 1e-6, out, roots, 200, 16)
    return out


def test_the_openmp_library_of_torch_need_not_be_in_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, threads: Callable[[int], None]
) -> None:
    threads(2)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    _norm(kernels.Kernels())  # warns if it computes in one thread


def test_without_an_openmp_library_the_kernels_warn_once_of_their_one_thread(
    monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]
) -> None:
    expected = _norm(kernels.Kernels())
    load = ctypes.CDLL

    def without_openmp(name: str, *options: Any) -> ctypes.CDLL:
        if "omp" in Path(name).name:
            raise OSError(f"{name} is not loaded")
        return load(name, *options)

    monkeypatch.setattr(ctypes, "CDLL", without_openmp)
    found = kernels.Kernels()
    threads(1)
    _norm(found)
    threads(2)
    with pytest.warns(RuntimeWarning, match="kernels.c computes in one thread: none of") as seen:
        assert torch.equal(_norm(found), expected)
        _norm(found)
    assert len(seen) == 1


def test_without_a_compiler_torch_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(MODELS["Qwen3"](), None)
    logps, gradients = learnt(policy)

    def fail(*arguments: object) -> None:
        raise NotCompiled("no C compiler")

    monkeypatch.setattr(kernels, "compile_library", fail)
    kernels.kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"kernels\.c does not compile: no C compiler"):
            plain_logps, plain_gradients = learnt(policy)
    finally:
        kernels.kernels.cache_clear()
    torch.testing.assert_close(logps, plain_logps, atol=1e-5, rtol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain_gradients[name], atol=1e-4, rtol=1e-3)
