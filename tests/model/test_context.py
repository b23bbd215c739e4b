"""Test passes that several ranks run together, each on a slice of the tokens (Ulysses).

Log-probabilities and gradients equal those of one process. What cannot be divided is refused.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.long_context import TINY, saved_bytes, shape_of
from tests.support.ranks import run_ranks
from unstale.config import ConfigError
from unstale.model import fused
from unstale.model.context import ContextGroup
from unstale.model.forward import ForwardOptions, run_model
from unstale.model.head import token_logps
from unstale.model.peers import RankGroup
from unstale.model.policy import Policy
from unstale.model.prefix_tree import PrefixTree
from unstale.records import Batch, collate
from unstale.testing import episode, tiny_policy

EXPERTS = 8
LOGP_ERROR = 1e-6
GRADIENT_ERROR = 1e-6


def siblings() -> Batch:
    """Return a long sequence, and three that share a prefix and are not as long as a slice."""
    short = [episode(1, [64, (30 + i, 0)]) for i in range(3)]
    return collate([episode(7, [600, (400, 0)]), *short])


def run_pass(policy: Policy, run: PrefixTree, index: Tensor) -> Tensor:
    """Return the log-probabilities of the packed tokens at `index`, by the ranks of the tree."""
    assert run.context
    here, places = run.context.mine(run.place[index - 1], len(run.tokens))
    hidden = run_model(policy.model.base_model, run, places, True)
    targets = run.tokens[run.place[index]][here]
    head = policy.model.get_output_embeddings()
    logp, _ = token_logps(head, hidden, targets, temperature=0.7, with_entropy=False)
    return run.context.assemble(logp, here, len(index))


def gradients_of(policy: Policy) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }


def replaying(policy: Policy, run: PrefixTree) -> PrefixTree:
    """Return the tree with random experts to replay, and missing rows where no token is."""
    policy.replay_experts()
    layers = policy.model.config.num_hidden_layers
    random = torch.Generator().manual_seed(2)
    routed_experts = torch.stack(
        [torch.randperm(EXPERTS, generator=random)[:2] for _ in range(len(run.tokens) * layers)]
    )
    routed_experts = routed_experts.view(-1, layers, 2).to(torch.uint8)
    routed_experts[run.num_tokens :] = torch.iinfo(torch.uint8).max
    return replace(run, routed_experts=routed_experts)


def count_fused_attention() -> list[int]:
    """Return a list that gets one item for each attention layer that runs as one operation."""
    calls: list[int] = []
    attend = fused.attend

    def counted(*args: Any) -> Tensor:
        calls.append(1)
        return attend(*args)

    fused.attend = counted  # this process is one rank of a test
    return calls


def compare_with_one_process(peers: RankGroup, how: str) -> tuple[float, float, int]:
    """Return the largest error of a log-probability, the largest relative error of the gradient
    of a weight matrix (by its norm), and the number of tokens of this rank."""
    assert dist.group.WORLD
    policy = tiny_policy(seed=5, experts=EXPERTS * (how == "experts"))
    calls = count_fused_attention()
    if how:
        policy.set_forward_options(ForwardOptions(gradient_checkpointing=True))
    batch = siblings()
    run = policy.prefix_tree(batch)
    if policy.has_experts:
        run = replaying(policy, run)
    index = (run.follows & batch.sampled).nonzero().squeeze(1)
    weights = torch.linspace(-1, 1, len(index))
    expected = policy.logps(run, temperature=0.7, where=batch.sampled)[index]
    (expected * weights).sum().backward()
    alone = gradients_of(policy)
    policy.model.zero_grad()
    calls_alone = len(calls)

    group = ContextGroup.of(dist.group.WORLD)
    found = run_pass(policy, replace(run, context=group), index)
    (found * weights).sum().backward()
    together = gradients_of(policy)
    assert len(calls) == 2 * calls_alone  # a divided pass runs the same operations
    worst = 0.0
    for name, gradient in together.items():
        difference = (peers.sum(gradient) - alone[name]).norm() / alone[name].norm()
        worst = max(worst, float(difference))
    assert together.keys() == alone.keys()
    tokens = group.slice_of(len(run.tokens))
    return float((found - expected).detach().abs().max()), worst, tokens.stop - tokens.start


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize(("ranks", "how"), [(2, ""), (2, "checkpointing"), (2, "experts"), (4, "")])
def test_a_divided_pass_equals_that_of_one_process(ranks: int, how: str) -> None:
    """With 4 ranks and 2 key-value heads, each key-value head is on two ranks.

    With experts, recorded ones are replayed, also where a layer is computed again.
    """
    found = run_ranks(ranks, compare_with_one_process, how)
    tokens = len(tiny_policy().prefix_tree(siblings()).tokens)
    for logp_error, gradient_error, num_tokens in found:
        assert logp_error < LOGP_ERROR and gradient_error < GRADIENT_ERROR
        assert num_tokens == tokens // ranks


def no_rows(peers: RankGroup) -> int:
    """Ask for tokens of the first slice only. Return the rows of this rank."""
    assert dist.group.WORLD
    policy = tiny_policy(seed=5)
    run = replace(policy.prefix_tree(siblings()), context=ContextGroup.of(dist.group.WORLD))
    index = torch.arange(1, 40)
    run_pass(policy, run, index).sum().backward()
    assert run.context
    return len(run.context.mine(run.place[index - 1], len(run.tokens))[0])


def test_a_rank_without_a_wanted_token_takes_part() -> None:
    assert run_ranks(2, no_rows) == [39, 0]


def refusals(peers: RankGroup) -> list[str]:
    """Return the errors for slices and heads that cannot be divided among the ranks."""
    assert dist.group.WORLD
    group = ContextGroup.of(dist.group.WORLD)
    said = []
    with pytest.raises(ValueError, match="groups") as uneven:
        peers.in_context_groups(2)
    said.append(str(uneven.value))
    with pytest.raises(ValueError, match="divided") as error:
        group.slice_of(peers.count * 10 + 1)
    said.append(str(error.value))
    for heads, key_heads in ((4, 2), (6, 2)):
        query, keys = torch.zeros(1, heads, 4, 8), torch.zeros(1, key_heads, 4, 8)
        with pytest.raises(ConfigError) as refused:
            group.exchange(lambda query, key, value: query, query, keys, keys)
        said.append(str(refused.value))
    return said


def test_what_cannot_be_divided_is_refused() -> None:
    assert run_ranks(3, refusals)[0] == [
        "3 ranks cannot be divided into groups of 2",
        "31 tokens cannot be divided among 3 ranks",
        "cluster.context must divide the 4 attention heads, got 3",
        "cluster.context must divide the 2 key-value heads, or be a multiple of them; got 3",
    ]


def test_a_model_whose_heads_do_not_suit_the_ranks_is_refused() -> None:
    policy = tiny_policy()
    for ranks in (1, 2, 4):
        policy.check_context(ranks)
    for ranks, why in ((3, "32, because a pass is padded"), (8, "the 4 attention heads, got 8")):
        with pytest.raises(ConfigError, match=f"cluster.context must divide {why}"):
            policy.check_context(ranks)


def kept_per_token(tokens: int, *, context: int, layers: int = 2) -> float:
    """Return the bytes that each further token keeps in a computed pass with recomputation."""
    sizes = [
        saved_bytes(
            shape_of(TINY, layers),
            count,
            context=context,
            gradient_checkpointing=True,
            fake=False,
        )
        for count in (1024, tokens)
    ]
    return (sizes[1] - sizes[0]) / (tokens - 1024)


@pytest.mark.parametrize(
    "tokens", [4096, pytest.param(131_072, marks=pytest.mark.slow)], ids=["short", "long"]
)
@pytest.mark.parametrize("context", [1, 4])
def test_a_long_context_keeps_the_layers_inputs_only(tokens: int, context: int) -> None:
    """Each further token adds one hidden state per layer, and less than 4 for the final norm.

    So 131,072 tokens of Qwen3-4B (36 layers of width 2560 in bfloat16) keep 24 GB, divided by the
    ranks of the context group.
    """
    per_token = context * kept_per_token(tokens, context=context)
    inputs = 4 * TINY.layers * TINY.hidden
    assert inputs <= per_token <= inputs + 4 * (3 * TINY.hidden + 4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_counted_without_values_is_what_a_computed_pass_keeps(checkpointing: bool) -> None:
    """Integers and float32 copies of norms are as long in bfloat16, everything else half."""
    options = {"context": 2, "gradient_checkpointing": checkpointing}
    computed, counted = (
        saved_bytes(shape_of(TINY, 2), 2048, fake=fake, **options) for fake in (False, True)
    )
    assert computed / 2 < counted < computed
