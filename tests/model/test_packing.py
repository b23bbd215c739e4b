"""Test packed forward passes.

Every token of a prefix tree is run once. Its gradient equals the unshared one to 1e-10, for several
architectures, windows and adapters. Siblings do not see each other. Passes keep to their token
budget. At most one tile of logits exists at a time. Gradient checkpointing saves memory and changes
nothing. A compiled policy gives the same values.
"""

import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.model.test_policy import gpt2, llama, sliding
from unstale.config import ConfigError
from unstale.model import attention, linear
from unstale.model import head as head_module
from unstale.model.forward import ForwardOptions, checkpoint_layers
from unstale.model.head import token_logps
from unstale.model.lora import Lora
from unstale.model.packing import cut, pack, pack_shared
from unstale.model.policy import Policy
from unstale.model.prefix_tree import MIN_SHARED, ROUND, Packed, Segment, build_prefix_tree
from unstale.testing import nudge, plain_logps, tiny_policy


def text(*lengths: int, seed: int = 0) -> list[list[int]]:
    noise = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 64, (length,), generator=noise).tolist() for length in lengths]


def put(*sequences: list[int]) -> Packed:
    return Packed(
        torch.tensor([token for tokens in sequences for token in tokens]),
        tuple(accumulate(map(len, sequences), initial=0)),
    )


def siblings() -> Packed:
    """Return two groups. The first has two long shared prefixes; one sequence ends where another
    branches."""
    one, two, turn, *ends = text(40, 25, 20, 9, 7, 12, 3, 8)
    return put(
        one + ends[0],
        two + ends[1],
        one + turn + ends[2],
        one + turn + ends[3],
        two + ends[4],
        one,
        ends[0],
    )


def test_what_is_shared_is_run_once_and_lies_before_all_that_follows_it() -> None:
    packed = siblings()
    run = build_prefix_tree(packed, share=True)
    assert run.num_tokens == 40 + 9 + 20 + 12 + 3 + 25 + 7 + 8 + 9 and len(run.tokens) % ROUND == 0
    assert torch.equal(run.tokens[run.place], packed.tokens)
    assert run.positions[run.place].tolist() == [
        at for length in packed.lengths for at in range(length)
    ]
    assert run.segments[:5] == (
        Segment(0, 40, 84),
        Segment(40, 49, 49, ((0, 40),)),
        Segment(49, 69, 84, ((0, 40),)),
        Segment(69, 81, 81, ((0, 40), (49, 69))),
        Segment(81, 84, 84, ((0, 40), (49, 69))),
    )
    assert (~run.follows).nonzero().squeeze(1).tolist() == list(packed.offsets[:-1])
    apart = build_prefix_tree(packed, share=False)
    assert apart.num_tokens == len(packed.tokens) and not any(
        s.path or s.last > s.end for s in apart.segments
    )


def test_a_short_beginning_is_not_shared() -> None:
    (one,) = text(MIN_SHARED - 1)
    assert build_prefix_tree(put([*one, 1, 3], [*one, 0, 3]), share=True).num_tokens == 2 * (
        MIN_SHARED + 1
    )


def gradient(policy: Policy, packed: Packed, *, share: bool) -> tuple[Tensor, Tensor]:
    policy.set_forward_options(ForwardOptions(share_prompts=share))
    policy.model.zero_grad()
    logps, entropy = policy.logps_and_entropy(packed, temperature=0.7)
    weights = torch.randn(len(logps), generator=torch.Generator().manual_seed(0), dtype=logps.dtype)
    (weights * logps + 0.3 * entropy.square()).sum().backward()
    found = [
        parameter.grad.flatten()
        for parameter in policy.model.parameters()
        if parameter.grad is not None
    ]
    return logps.detach(), torch.cat(found)


def qwen3() -> PreTrainedModel:
    return tiny_policy().model


def precise(model: nn.Module) -> None:
    """transformers computes these norms in float32 for every model precision."""
    for module in model.modules():
        if type(module).__name__ in ("Qwen3RMSNorm", "LlamaRMSNorm", "MistralRMSNorm"):
            module.forward = partial(
                F.rms_norm, normalized_shape=module.weight.shape, weight=module.weight, eps=1e-6
            )


@pytest.mark.parametrize("make", [qwen3, llama, gpt2, sliding])
def test_a_shared_beginning_has_the_gradient_of_the_unshared_one(
    make: Callable[[], PreTrainedModel],
) -> None:
    torch.manual_seed(0)
    policy = Policy(make().double(), None)
    precise(policy.model)
    for one, other in zip(
        gradient(policy, siblings(), share=True),
        gradient(policy, siblings(), share=False),
        strict=True,
    ):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=1e-10)


def test_adapters_have_it_too() -> None:
    policy = tiny_policy(dtype="float64", lora=Lora(4))
    nudge(policy, seed=1)
    precise(policy.model)
    shared, apart = (gradient(policy, siblings(), share=share) for share in (True, False))
    torch.testing.assert_close(shared[1], apart[1], atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_siblings_have_the_log_probabilities_that_each_has_alone(
    dtype: str, tolerance: float
) -> None:
    policy, packed = tiny_policy(dtype=dtype), siblings()
    alone = torch.cat(
        [plain_logps(policy, row.tolist()) for row in packed.tokens.split(packed.lengths)]
    )
    torch.testing.assert_close(
        policy.logps(packed, temperature=1.0).double(), alone, atol=tolerance, rtol=0
    )
    long = put(*text(300, 5, seed=3))  # more blocks than one
    alone = torch.cat(
        [plain_logps(policy, row.tolist()) for row in long.tokens.split(long.lengths)]
    )
    torch.testing.assert_close(
        policy.logps(long, temperature=1.0).double(), alone, atol=tolerance, rtol=0
    )


def test_no_sibling_sees_another() -> None:
    policy, packed = tiny_policy(), siblings()
    start, end = packed.spans()[2]
    tokens = packed.tokens.clone()
    tokens[start + 62 : end] = (tokens[start + 62 : end] + 1) % 64  # its own end alone
    one, two = (
        policy.logps(Packed(some, packed.offsets), temperature=1.0)
        for some in (packed.tokens, tokens)
    )
    same = torch.ones(len(tokens), dtype=torch.bool)
    same[start + 62 : end] = False
    assert torch.equal(one[same], two[same]) and (one[~same] - two[~same]).abs().min() > 0


def test_pack_fills_groups_up_to_the_budget() -> None:
    groups = pack([30, 100, 70, 25, 45, 300], budget=100)
    assert groups == [[5], [1], [2, 0], [4, 3]]  # 300 is longer than the budget, and goes alone


def test_passes_count_what_they_run_and_keep_siblings_together() -> None:
    packed = siblings()
    for budget in (10, 60, 80, 130, 1000):
        groups = pack_shared(packed, budget, packed.lengths)
        assert sorted(i for group in groups for i in group) == list(range(7))
        for group in groups:
            part, _ = cut(packed, [packed.spans()[i] for i in group])
            assert len(group) == 1 or build_prefix_tree(part, share=True).num_tokens <= budget
    assert sorted(map(sorted, pack_shared(packed, 84, packed.lengths))) == [[0, 2, 3, 5], [1, 4, 6]]
    assert pack_shared(put(), 10, ()) == []


def test_scoring_forwards_what_siblings_share_once() -> None:
    policy, packed = tiny_policy(), siblings()
    everything = torch.ones(len(packed.tokens), dtype=torch.bool)
    shared = policy.score(packed, everything, temperature=1.0, max_tokens_per_microbatch=1000)
    policy.set_forward_options(ForwardOptions(share_prompts=False))
    apart = policy.score(packed, everything, temperature=1.0, max_tokens_per_microbatch=1000)
    assert (shared.forward_tokens, apart.forward_tokens) == (133, len(packed.tokens))
    torch.testing.assert_close(shared.logp, apart.logp, atol=1e-5, rtol=0)


def test_chunks_of_the_head_change_neither_value_nor_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both equal autograd through log_softmax, with and without entropy."""
    noise = torch.Generator().manual_seed(0)
    rows, targets = (
        torch.randn(75, 32, generator=noise).double(),
        torch.randint(0, 64, (75,), generator=noise),
    )
    head = nn.Linear(32, 64).double()

    def learn(entropy: bool) -> list[Tensor]:
        given = rows.clone().requires_grad_()
        logp, spread = token_logps(head, given, targets, temperature=0.7, with_entropy=entropy)
        return [
            logp,
            spread,
            *torch.autograd.grad(
                (logp.sin() + 0.3 * spread.square()).sum(), [given, *head.parameters()]
            ),
        ]

    given = rows.clone().requires_grad_()
    everything = torch.log_softmax(head(given) / 0.7, -1)
    for entropy in (False, True):
        logp, spread = (
            everything.gather(1, targets[:, None]).squeeze(1),
            -(everything.exp() * everything).sum(-1),
        )
        spread = spread if entropy else torch.zeros_like(logp)
        loss = (logp.sin() + 0.3 * spread.square()).sum()
        expected = [
            logp,
            spread,
            *torch.autograd.grad(loss, [given, *head.parameters()], retain_graph=True),
        ]
        for limit, tile in ((2**22, 2**11), (1, 2**11), (2**22, 24), (1, 24)):
            monkeypatch.setattr(head_module, "MAX_LOGITS", {"cpu": limit})
            monkeypatch.setattr(head_module, "TILE", {"cpu": tile})
            for one, other in zip(learn(entropy), expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


class Largest(TorchDispatchMode):
    """The size of the largest matrix computed, except those with a row per vocabulary entry."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.logits = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if (
                isinstance(tensor, Tensor)
                and tensor.dim() == 2
                and tensor.shape[0] != self.vocabulary
            ):
                self.logits = max(self.logits, tensor.numel())
        return made


@pytest.mark.parametrize("vocabulary", [1_000, 32_000, 150_000])
def test_no_more_logits_exist_than_a_tile_of_them(vocabulary: int) -> None:
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    policy, packed = Policy(Qwen3ForCausalLM(config), None), put(*text(60, 90))
    with Largest(vocabulary) as seen:
        policy.score(
            packed,
            torch.ones(150, dtype=torch.bool),
            temperature=1.0,
            max_tokens_per_microbatch=1000,
        )
        policy.logps(packed, temperature=1.0).sum().backward()
    assert (
        148 * min(vocabulary, head_module.TILE["cpu"])
        == seen.logits
        <= head_module.MAX_LOGITS["cpu"]
    )


@contextmanager
def kept() -> Iterator[list[int]]:
    """Return the bytes saved for the backward pass, counting each storage once."""
    seen: dict[int, int] = {}
    total = [0]

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            total[0] = sum(seen.values())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield total


@pytest.mark.parametrize("lora", [None, Lora(4)])
def test_running_layers_again_keeps_less_and_changes_nothing(lora: Lora | None) -> None:
    found, sizes = [], []
    for passes in (ForwardOptions(), ForwardOptions(gradient_checkpointing=True)):
        policy, packed = tiny_policy(lora=lora), siblings()
        nudge(policy, seed=1)
        policy.set_forward_options(passes)
        with kept() as size:
            logps = policy.logps(packed, temperature=1.0)
        logps.sum().backward()
        sizes.append(size[0])
        found.append(
            torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])
        )
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-6)
    assert sizes[1] < 0.3 * sizes[0]


def test_a_twin_of_a_policy_that_runs_again_runs_its_own_layers() -> None:
    policy = tiny_policy()
    policy.set_forward_options(ForwardOptions(gradient_checkpointing=True))
    twin = policy.twin()
    before = twin.logps(siblings(), temperature=1.0)
    nudge(policy, seed=1)
    assert torch.equal(twin.logps(siblings(), temperature=1.0), before)
    assert not torch.equal(policy.logps(siblings(), temperature=1.0), before)


def test_a_model_without_layers_to_run_again_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Linear has no layers that can be run again",
    ):
        checkpoint_layers(nn.Linear(2, 2))


@pytest.mark.skipif("COMPILE" not in os.environ, reason="a minute; COMPILE=1 runs it")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_policy_says_the_same_and_so_does_its_twin() -> None:
    plain, policy = tiny_policy(), tiny_policy()
    policy.set_forward_options(ForwardOptions(compile=True))
    found = []
    for one in (plain, policy):
        logps = one.logps(siblings(), temperature=1.0)
        logps.sum().backward()
        found.append(
            (logps.detach(), torch.cat([p.grad.flatten() for p in one.model.parameters()]))
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    every = torch.ones(len(siblings().tokens), dtype=torch.bool)
    scored = [
        one.score(
            siblings(), every, temperature=1.0, max_tokens_per_microbatch=99, with_entropy=True
        )
        for one in (plain, policy)
    ]
    torch.testing.assert_close(scored[0].entropy, scored[1].entropy, atol=1e-4, rtol=1e-4)
    for head_only in (False, True):
        norms = [
            one.gradient_norm(siblings(), every, temperature=1.0, head_only=head_only)
            for one in (plain, policy)
        ]
        assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    twin = policy.twin()
    nudge(policy, seed=1)
    assert (twin.logps(siblings(), temperature=1.0) - found[0][0]).abs().max() < 1e-4


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_layers_that_are_trained_compile(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes shapes for which oneDNN multiplies. Without g++ no kernels are compiled."""
    monkeypatch.setattr(linear, "MULTIPLIES_BFLOAT16", False)
    backend = "aot_eager" if shutil.which("g++") is None else "inductor"
    # Inductor would compile a program for each set of vector instructions, to see if it works.
    options = {"cpp.vec_isa_ok": False} if backend == "inductor" else None
    layers = nn.Sequential(linear.Linear(64, 96), nn.SiLU(), linear.Linear(96, 64, bias=False))
    layers.to(dtype)
    compiled = torch.compile(layers, dynamic=True, backend=backend, options=options)
    found = []
    for run in (layers, compiled):
        for tokens in (32, 61):
            given = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            out = run(given.requires_grad_())
            found.append(
                [out.detach(), *torch.autograd.grad(out.sin().sum(), [given, *layers.parameters()])]
            )
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        limit = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
        torch.testing.assert_close(ours, theirs, atol=limit, rtol=limit)


@pytest.mark.parametrize("tokens", [64, 61])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_are_those_of_torch(tokens: int, bias: bool) -> None:
    ours, theirs = linear.Linear(96, 32, bias=bias), nn.Linear(96, 32, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    found = []
    for layer in (ours, theirs):
        given = torch.randn(
            2, tokens, 96, generator=torch.Generator().manual_seed(0)
        ).requires_grad_()
        out = layer(given)
        found.append(
            [out.detach(), *torch.autograd.grad(out.sin().sum(), [given, *layer.parameters()])]
        )
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6


@pytest.mark.costly
def test_what_a_processor_lacks_is_left_to_torch() -> None:
    """Uses new processes, because oneDNN reads the allowed instructions once."""
    asked = (
        "import torch; from unstale.model import linear\n"
        "from unstale.model.linear import product, supported; a = torch.ones(32, 32)\n"
        "linear.MULTIPLIES_BFLOAT16 = True\n"
        "for d in (torch.float32, torch.bfloat16, torch.float64):\n"
        "    assert torch.equal(product(a.to(d), a.to(d)), (32 * a).to(d)) and supported(d) in "
        "(True, False)\n"
        "print(supported(torch.bfloat16), supported(torch.float64))\n"
        "linear.MULTIPLIES_BFLOAT16 = False\n"
        "print(supported(torch.bfloat16) == supported(torch.float32))\n"
        "torch.backends.mkldnn.enabled = False\n"
        "print(supported(torch.float32))\n"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", asked]
    told = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert told.split() == ["False", "False", "True", "False"]


@pytest.mark.parametrize("hidden", [32, 256, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_of_a_model_of_any_width_is_known_to_be_plain(
    hidden: int, dtype: torch.dtype
) -> None:
    config = Qwen3Config(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    assert Policy(Qwen3ForCausalLM(config).to(dtype), None)._plain_head


def test_linear_layers_keep_what_their_gradients_need() -> None:
    given = torch.randn(64, 96, requires_grad=True)
    for frozen, learnt in ((True, given), (False, given.detach())):
        layer = linear.Linear(96, 32, bias=False)
        layer.weight.requires_grad_(not frozen)
        with kept() as size:
            layer(learnt).sum().backward()
        assert size[0] == (0 if frozen else given.numel() * 4)


def test_what_adds_up_over_chunks_is_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a bfloat16 head and trunk round as if they were computed in one piece."""
    noise = torch.Generator().manual_seed(0)
    rows, targets = (
        torch.randn(2048, 32, generator=noise).bfloat16(),
        torch.randint(0, 64, (2048,), generator=noise),
    )
    head = nn.Linear(32, 64, bias=True).bfloat16()

    def learnt(dtype: torch.dtype, limit: int) -> Tensor:
        monkeypatch.setattr(head_module, "MAX_LOGITS", {"cpu": limit})
        layer = nn.Linear(32, 64).to(dtype)
        layer.load_state_dict(head.state_dict())
        logp, _ = token_logps(layer, rows.to(dtype), targets, temperature=1.0, with_entropy=False)
        return torch.cat(
            [
                grad.double().flatten()
                for grad in torch.autograd.grad(logp.sum(), layer.parameters())
            ]
        )

    true = learnt(torch.float64, 2**22)
    errors = [
        float((learnt(torch.bfloat16, limit) - true).norm() / true.norm())
        for limit in (2**22, 64 * 32)
    ]
    assert errors[1] < 1.3 * errors[0] < 0.01


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("by_segment", [False, True])
def test_the_gradient_of_many_blocks_is_that_of_sdpa(
    dtype: torch.dtype, tolerance: float, by_segment: bool
) -> None:
    trunk, *ends = text(300, 150, 150)
    run, noise = (
        build_prefix_tree(put(*(trunk + end for end in ends)), share=True),
        torch.Generator().manual_seed(0),
    )
    assert [s.end - s.start for s in run.segments] == [300, 150, 150, 8]
    seen = torch.zeros(608, 608, dtype=torch.bool)
    for s in run.segments:
        for start, end in (*s.path, (s.start, s.end)):
            seen[s.start : s.end, start:end] = True
    seen.tril_()
    *given, grad = (
        torch.randn(1, heads, 608, 16, generator=noise).to(dtype) for heads in (4, 2, 2, 4)
    )

    def learnt(attend: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        own = [tensor.to(dtype).requires_grad_() for tensor in given]
        out = attend(*own)
        return [out.detach(), *torch.autograd.grad(out, own, grad.to(dtype))]

    def ours(*qkv: Tensor) -> Tensor:
        if by_segment:
            return attention.attend_by_segment(*qkv, run, None, None)
        return attention.attend_by_block(*qkv, run.segments, None)

    plain = learnt(
        partial(F.scaled_dot_product_attention, attn_mask=seen, enable_gqa=True), torch.float64
    )
    for one, other in zip(learnt(ours, dtype), plain, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < tolerance


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2, 2), (1, 1, 1)])
def test_attention_gives_every_tree_what_it_gets_alone_to_the_bit(
    heads: tuple[int, int, int], dtype: torch.dtype, two_threads: None
) -> None:
    """Blocks of one length share a call: trees of two shapes, with a long one between them."""
    shapes = [
        (40, (24, 24, 31)),
        (3, (2,)),
        (40, (24, 24, 31)),
        (3, (2,)),
        (300, (24,)),
        (40, (31, 24, 24)),
        (16, (130, 130)),
    ]
    made = [text(size, *ends, seed=seed) for seed, (size, ends) in enumerate(shapes)]
    trees = [[trunk + end for end in ends] for trunk, *ends in made]
    alone = [build_prefix_tree(put(*tree), share=True) for tree in trees]
    run = build_prefix_tree(put(*(row for tree in trees for row in tree)), share=True)
    noise = torch.Generator().manual_seed(0)
    given = [torch.randn(1, each, len(run.tokens), 64, generator=noise).to(dtype) for each in heads]
    together = attention.attend_by_block(*given, run.segments, None)
    calls = attention.attention_calls(run.segments, True)
    assert any(isinstance(call.queries, Tensor) for call in calls)
    assert any(call.num > 3 for call in calls)
    start = 0
    for tree in alone:
        own = [tensor[:, :, start : start + len(tree.tokens)] for tensor in given]
        said = attention.attend_by_block(*own, tree.segments, None)[:, :, : tree.num_tokens]
        assert torch.equal(said, together[:, :, start : start + tree.num_tokens])
        start += tree.num_tokens


def test_a_torch_without_the_processor_s_flash_attention_says_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = tiny_policy()
    fused = policy.logps(siblings(), temperature=1.0)
    monkeypatch.setattr(attention, "_flash", lambda: ())
    torch.testing.assert_close(policy.logps(siblings(), temperature=1.0), fused, atol=1e-5, rtol=0)


def test_branches_nest_as_deep_as_they_like() -> None:
    (trunk,) = text(20 * 200)
    packed = put(*([*trunk[: 20 * (i + 1)], i % 64, 1, 1] for i in range(200)))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        run = build_prefix_tree(packed, share=True)
    finally:
        sys.setrecursionlimit(limit)
    assert torch.equal(run.tokens[run.place], packed.tokens) and run.num_tokens < 6_000
    assert max(len(s.path) for s in run.segments) > 190


def test_a_pass_asks_for_a_few_times_as_many_log_probabilities_as_it_runs() -> None:
    packed = put(*text(100) * 64)
    assert len(pack_shared(packed, 400, [0] * 64)) == 1
    assert [len(group) for group in pack_shared(packed, 400, [100] * 64)] == [16] * 4


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_compiled_policy_is_compiled_once_for_all_forests(gradient_checkpointing: bool) -> None:
    plain, policy = tiny_policy(), tiny_policy()
    for each in (plain, policy):  # one layer of two: dynamo traces every layer
        del each.model.model.layers[1:]
    policy.set_forward_options(ForwardOptions(gradient_checkpointing=gradient_checkpointing))
    torch._dynamo.reset()
    built = CompileCounter()
    policy._body = torch.compile(policy._whole, dynamic=True, backend=built)
    counts = []
    for packed in (
        siblings(),
        put(*text(30, 33, 7, seed=5)),
        put(*text(70, 200, seed=6)),
    ):
        found, expected = (one.logps(packed, temperature=1.0) for one in (policy, plain))
        found.sum().backward()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        counts.append(built.frame_count)
    assert 0 < counts[0] == counts[-1]


@pytest.mark.parametrize("tile", [2**11, 2, 1])
def test_what_cannot_be_said_adds_nothing_to_the_entropy(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of probability 0 add nothing, not even when they fill a tile."""
    monkeypatch.setattr(head_module, "TILE", {"cpu": tile})
    head, targets = nn.Linear(8, 5), torch.tensor([1, 4])
    nn.init.constant_(head.bias, -torch.inf).data[1:] = 0.0
    rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logp, entropy = token_logps(head, rows, targets, temperature=1.0, with_entropy=True)
    everything = torch.log_softmax(head(rows)[:, 1:], -1)
    torch.testing.assert_close(entropy, -(everything.exp() * everything).sum(-1))
    (found,) = torch.autograd.grad(logp.sum() + 3 * entropy.sum(), rows)
    loss = (
        everything.gather(1, targets[:, None] - 1).sum() - 3 * (everything.exp() * everything).sum()
    )
    torch.testing.assert_close(found, torch.autograd.grad(loss, rows)[0])
