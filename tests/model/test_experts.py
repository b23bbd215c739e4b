"""Test that an MoE policy is packed, and replays the experts that an engine chose.

Replaying the policy's own choice changes no bit; another choice is weighted by the current
probabilities, with a gradient; a missing row keeps the policy's choice. Recomputed activations
replay too. Each version of a trajectory has its own rows, and siblings share a token only if their
rows agree. Granite-MoE and OLMoE load, replay and train like Qwen3-MoE.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from unstale.config import ConfigError
from unstale.model.experts import ExpertRecorder, find_routers, replay_experts
from unstale.model.forward import ForwardOptions
from unstale.model.packing_check import check_packing
from unstale.model.policy import Policy
from unstale.model.prefix_tree import MIN_SHARED, Packed, build_prefix_tree
from unstale.records import Sampled, ScoredTrajectory, Trajectory, collate
from unstale.routed_experts import RoutedExperts, link, pack_experts
from unstale.testing import episode, tiny_policy

EXPERTS = 8
LAYERS = 2


def moe(seed: int = 0) -> Policy:
    policy = tiny_policy(seed=seed, experts=EXPERTS)
    policy.replay_experts()
    return policy


def packed(length: int = 20, *, routed_experts: Tensor | None = None) -> Packed:
    tokens = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(1))
    return Packed(tokens, (0, length), routed_experts)


@torch.no_grad()
def own_routes(policy: Policy, tokens: Tensor) -> Tensor:
    """Return the experts `[T, layers, k]` that the policy chooses for one sequence."""
    other = policy.twin()
    recorder = ExpertRecorder(other.model)
    other.model(input_ids=tokens[None], use_cache=False)
    return recorder.take().to(torch.uint8)


def records(*counts: int, first: int = 0) -> np.ndarray:  # type: ignore[type-arg]
    """Return distinguishable rows `[n, layers, 2]`."""
    (count,) = counts
    numbers = (np.arange(count) + first) % EXPERTS
    return np.repeat(numbers[:, None, None], LAYERS, 1).repeat(2, 2).astype(np.uint8)


def test_packing_changes_no_bit_where_each_token_has_its_own_products() -> None:
    assert tiny_policy(experts=EXPERTS).packing_noise == 0.0


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_implementations_may_round_otherwise(experts: str, dtype: str) -> None:
    policy = tiny_policy(experts=EXPERTS, dtype=dtype)
    policy.model.set_experts_implementation(experts)
    assert policy.has_experts and 0 <= check_packing(policy.model).noise < 0.3


def test_ones_own_choice_changes_no_bit() -> None:
    policy = moe()
    text = packed()
    plain = policy.logps(text, temperature=1.0)
    replayed = policy.logps(
        replace(text, routed_experts=own_routes(policy, text.tokens)), temperature=1.0
    )
    assert torch.equal(plain, replayed)


def test_another_choice_is_weighted_by_current_probabilities() -> None:
    """Compare with a model whose routers are made to choose the recorded experts."""
    policy = moe()
    text = packed()
    routed_experts = own_routes(tiny_policy(seed=3, experts=EXPERTS), text.tokens)
    replayed = policy.logps(replace(text, routed_experts=routed_experts), temperature=1.0)
    assert not torch.equal(replayed, policy.logps(text, temperature=1.0))

    forced = tiny_policy(experts=EXPERTS)
    for layer, router in enumerate(find_routers(forced.model)):

        def choose(hidden: Tensor, router: object = router, layer: int = layer) -> object:
            logits = torch.nn.functional.linear(hidden, router.weight)  # type: ignore[attr-defined]
            index = routed_experts[:, layer].long()
            weights = logits.softmax(-1).gather(1, index)
            return logits, weights / weights.sum(-1, keepdim=True), index

        router.forward = choose  # type: ignore[assignment]
    logits = forced.model(input_ids=text.tokens[None], use_cache=False).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, text.tokens[1:, None])[:, 0]
    torch.testing.assert_close(replayed[1:], expected, rtol=1e-5, atol=1e-5)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "Granite-MoE": lambda: GraniteMoeForCausalLM(
        GraniteMoeConfig(**SIZES, num_local_experts=EXPERTS)
    ),
    "OLMoE": lambda: OlmoeForCausalLM(OlmoeConfig(**SIZES, num_experts=EXPERTS)),
}


@pytest.mark.costly
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_load_replay_and_train(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    model.save_pretrained(tmp_path)
    tiny_policy().tokenizer.save_pretrained(tmp_path)
    policy = Policy.load(tmp_path, independent_rows=True)
    policy.replay_experts()
    assert policy.packing_noise == 0.0
    assert all(torch.equal(policy.weights()[name], p) for name, p in model.named_parameters())

    text = packed()
    plain = policy.logps(text, temperature=1.0)
    own = replace(text, routed_experts=own_routes(policy, text.tokens))
    other = replace(text, routed_experts=own_routes(tiny_policy(experts=EXPERTS), text.tokens))
    # Granite's router normalizes before the softmax, which rounds differently.
    torch.testing.assert_close(policy.logps(own, temperature=1.0), plain, rtol=1e-5, atol=1e-5)
    replayed = policy.logps(other, temperature=1.0)
    assert (replayed - plain).abs().max() > 0.1
    replayed.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in find_routers(policy.model))  # type: ignore[union-attr]


def test_gradients_reach_the_router_and_recomputed_layers_replay_too() -> None:
    gradients = []
    routed_experts = own_routes(tiny_policy(seed=3, experts=EXPERTS), packed().tokens)
    for recompute in (False, True):
        policy = moe()
        policy.set_forward_options(ForwardOptions(gradient_checkpointing=recompute))
        policy.logps(packed(routed_experts=routed_experts), temperature=1.0).sum().backward()
        router = find_routers(policy.model)[0]
        gradients.append([p.grad for p in policy.model.parameters() if p.grad is not None])
        assert router.weight.grad.abs().sum() > 0  # type: ignore[union-attr]
    for kept, recomputed in zip(*gradients, strict=True):
        assert torch.equal(kept, recomputed)


def test_a_missing_row_keeps_the_policys_choice() -> None:
    policy = moe()
    text = packed()
    own = own_routes(policy, text.tokens)
    other = own_routes(tiny_policy(seed=3, experts=EXPERTS), text.tokens)
    nothing = torch.full_like(own, 255)
    plain = policy.logps(text, temperature=1.0)
    assert torch.equal(policy.logps(replace(text, routed_experts=nothing), temperature=1.0), plain)
    late = torch.cat([nothing[:10], other[10:]])
    mixed = policy.logps(replace(text, routed_experts=late), temperature=1.0)
    assert torch.equal(mixed[:11], plain[:11]) and not torch.equal(mixed[11:], plain[11:])


def test_a_twin_replays_too() -> None:
    policy = moe()
    text = packed(routed_experts=own_routes(tiny_policy(seed=3, experts=EXPERTS), packed().tokens))
    twin = policy.twin()
    assert torch.equal(twin.logps(text, temperature=1.0), policy.logps(text, temperature=1.0))


def test_siblings_share_a_token_only_if_its_rows_agree() -> None:
    prompt = torch.arange(2 * MIN_SHARED)
    tokens = torch.cat([prompt, torch.tensor([1]), prompt, torch.tensor([2])])
    length = len(prompt) + 1
    same = torch.from_numpy(records(length)).repeat(2, 1, 1)
    differs = same.clone()
    differs[length + MIN_SHARED] += 1  # a row in the middle of the second prompt
    counts = [
        build_prefix_tree(
            Packed(tokens, (0, length, 2 * length), routed_experts), share=True
        ).num_tokens
        for routed_experts in (None, same, differs)
    ]
    assert counts == [length + 1, length + 1, length + 1 + MIN_SHARED]


def scored(*pieces: Sampled, context: int = 4) -> ScoredTrajectory:
    blank = episode(0, [context]).trajectory
    text = (*blank.pieces, *pieces)
    trajectory = Trajectory(text, {"reward": 1.0}, "done", blank.task, seed=0)
    return ScoredTrajectory(trajectory, (1.0,))


def sampled(count: int, version: int, routed_experts: RoutedExperts | None) -> Sampled:
    return Sampled((5,) * count, (-1.0,) * count, version, routed_experts=routed_experts)


def test_a_row_is_of_the_version_that_samples_the_next_token() -> None:
    """Four tokens of context, two tokens of version 0, two of version 1."""
    old = RoutedExperts(0, records(5))
    new = RoutedExperts(0, records(7, first=3))
    batch = collate([scored(sampled(2, 0, old), sampled(2, 1, new))], replay_experts=True)
    assert (
        batch.routed_experts and batch.routed_experts.complete.tolist() == [False] * 4 + [True] * 4
    )
    rows = batch.routed_experts.rows(batch, batch.sampled)[:, 0, 0].tolist()
    assert rows == [0, 1, 2, 3, 4, (5 + 3) % 8, (6 + 3) % 8, 255]
    of_new = batch.routed_experts.rows(batch, batch.sampled & (batch.version == 1))[
        :, 0, 0
    ].tolist()
    assert of_new == [3, 4, 5, 6, 7, 0, 1, 255]
    of_old = batch.routed_experts.rows(batch, batch.sampled & (batch.version == 0))[
        :, 0, 0
    ].tolist()
    assert of_old == [0, 1, 2, 3, 4, 255, 255, 255]


def test_tokens_after_a_gap_are_incomplete() -> None:
    late = RoutedExperts(2, records(3, first=2))
    rows = records(5)
    rows[3] = 255
    hole = RoutedExperts(0, rows)
    for routed_experts in (late, hole, None):
        batch = collate([scored(sampled(2, 0, routed_experts))], replay_experts=True)
        assert batch.routed_experts and not batch.routed_experts.complete.any()
    empty = collate([scored(sampled(2, 0, None))], replay_experts=True)
    assert moe().logps(empty, temperature=1.0).shape == (6,)
    assert collate([scored(sampled(2, 0, hole))]).routed_experts is None


def test_a_later_reply_of_the_same_version_adds_rows() -> None:
    first = RoutedExperts(0, records(5))
    later = link(RoutedExperts(5, records(9, first=5)), first, stop=8)
    assert later and later.covered == 8
    assert later.rows(9)[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 255]
    assert link(None, first, stop=8) is first


def test_a_later_reply_fills_a_hole_of_an_earlier_one() -> None:
    """So the rows are there that `covered` counts."""
    rows = records(100)
    rows[50] = 255
    later = link(RoutedExperts(50, records(150, first=50)), RoutedExperts(0, rows), stop=200)
    assert later and later.covered == 200
    assert (later.rows(200) == records(200)).all()
    rows = records(150, first=60)
    rows[0] = 255
    assert (RoutedExperts(60, rows, later).rows(200) == records(200)).all()


def test_numbers_of_a_layer_without_a_router_mean_nothing() -> None:
    rows = pack_experts([[[-1, -1], [0, 1]], [[3, 3], [-1, 1]]], EXPERTS, routed=(False, True))
    assert rows[:, 1].tolist() == [[0, 1], [255, 255]]
    assert RoutedExperts(0, rows).covered == 1
    recorded = pack_experts([[[-1, 1]]], EXPERTS, routed=(False, True))  # the routed layer alone
    assert RoutedExperts(0, recorded).covered == 0


def test_rows_that_name_no_expert_are_missing() -> None:
    rows = pack_experts([[[0, 1]], [[-1, -1]], [[2, EXPERTS]]], EXPERTS)
    assert rows.dtype == np.uint8 and rows[:, 0, 0].tolist() == [0, 255, 255]
    many = pack_experts([[[0, 255]], [[256, 3]]], 256)
    assert many.dtype == np.int16 and many[:, 0, 1].tolist() == [255, np.iinfo(np.int16).max]
    with pytest.raises(ValueError, match=r"\[tokens, layers, k\], got \[2\]"):
        pack_experts([1, 2], EXPERTS)


def test_rows_of_another_model_are_refused() -> None:
    routed_experts = RoutedExperts(0, np.zeros((6, 3, 2), dtype=np.uint8))
    batch = collate([scored(sampled(2, 0, routed_experts))], replay_experts=True)
    with pytest.raises(ValueError, match="recorded 2 experts in 3 layers; the policy has 2 in 2"):
        moe().logps(batch, temperature=1.0)


def test_models_that_cannot_replay_are_refused() -> None:
    with pytest.raises(ConfigError, match="routing_replay must be false: Qwen3ForCausalLM has no"):
        tiny_policy().replay_experts()
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    with pytest.raises(ConfigError, match="Glm4MoeTopkRouter weights its experts by a rule"):
        replay_experts(Glm4MoeForCausalLM(config))


def test_layers_without_a_router_are_left_out() -> None:
    sizes = tiny_policy(experts=EXPERTS).model.config.to_dict()
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, "mlp_only_layers": [0]}))
    layers = replay_experts(model)
    rows = torch.from_numpy(records(3))
    assert layers.routed == (1,)
    assert torch.equal(layers.select(rows), rows[:, 1:])  # type: ignore[arg-type]
    assert layers.select(rows[:, :1]) is not None
