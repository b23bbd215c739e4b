"""Test policies whose sequences cannot be packed: each has a forward pass of its own.

Log-probabilities are those of plain transformers for recurrent layers, convolutions, sinks and
position biases. Other sequences change no bit. Models in which a token changes earlier ones are
refused, packed or not.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from unstale.config import ConfigError
from unstale.config.run import SHIPPED_POLICY
from unstale.model.forward import ForwardOptions
from unstale.model.loading import load_tokenizer
from unstale.model.lora import Lora
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.old_logps.scoring.local_scorer import LocalScorer
from unstale.testing.architectures import ARCHITECTURES, save_architecture

KINDS = ["Qwen3.5", "Mamba", "gpt-oss", "Bloom"]
"""Linear attention, a recurrent state, sinks with a sliding window, and a position bias."""

PROMPT = torch.randint(3, 1000, (30,), generator=torch.Generator().manual_seed(0))
FIRST, SECOND, OTHER = torch.arange(10, 25), torch.arange(40, 49), torch.arange(60, 69)


def made(name: str, **options: Any) -> Policy:
    return Policy(ARCHITECTURES[name].make(), None, **options)  # type: ignore[arg-type]


def chunked() -> PreTrainedModel:
    """Return a small model that attends in chunks of 32 tokens."""
    llama4 = ARCHITECTURES["Llama 4"]
    sizes = {**llama4.sizes, "attention_chunk_size": 32}
    return replace(llama4, sizes=sizes).make()


def packed(*answers: Tensor) -> Packed:
    """Return the prompt with each of the answers."""
    sequences = [torch.cat([PROMPT, answer]) for answer in answers]
    offsets = [0]
    for each in sequences:
        offsets.append(offsets[-1] + len(each))
    return Packed(torch.cat(sequences), tuple(offsets))


def alone(policy: Policy, sequence: Tensor) -> Tensor:
    """Return the log-probabilities `[T]` by plain transformers. The first is 0."""
    logits = policy.model(input_ids=sequence[None], use_cache=False).logits[0, :-1]
    found = logits.float().log_softmax(-1).gather(1, sequence[1:, None]).squeeze(1)
    return torch.cat([torch.zeros(1), found])


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.apart])
@pytest.mark.costly(cases=4)
def test_log_probabilities_and_gradient_are_those_of_single_sequences(name: str) -> None:
    policy = made(name)
    assert policy.computes_apart and policy.packing_noise == 0.0
    batch = packed(FIRST, SECOND)
    found = policy.logps(batch, temperature=1.0)
    expected = torch.cat([alone(policy, each) for each in batch.tokens.split(batch.lengths)])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    weights = [each for each in policy.model.parameters() if each.requires_grad]
    for one, other in zip(
        torch.autograd.grad(found.sum(), weights, allow_unused=True),
        torch.autograd.grad(expected.sum(), weights, allow_unused=True),
        strict=True,
    ):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_other_sequences_change_no_bit(name: str) -> None:
    policy = made(name)
    with torch.no_grad():
        found = policy.logps(packed(FIRST, SECOND), temperature=1.0)[:45]
        beside = policy.logps(packed(FIRST, OTHER, SECOND), temperature=1.0)[:45]
    assert torch.equal(found, beside)


def test_scoring_counts_a_prompt_once_for_each_sibling() -> None:
    policy = made("Qwen3.5")
    batch = packed(FIRST, SECOND, OTHER)
    where = torch.ones(len(batch.tokens), dtype=torch.bool)
    scored = policy.score(batch, where, temperature=1.0, max_tokens_per_microbatch=50)
    assert scored.forward_tokens == len(batch.tokens)
    with torch.no_grad():
        expected = policy.logps(batch, temperature=1.0)
    torch.testing.assert_close(scored.logp, expected, atol=0, rtol=0)


def test_layers_that_are_run_again_and_copies_change_nothing() -> None:
    policy, again = made("Qwen3.5"), made("Qwen3.5")
    again.set_forward_options(ForwardOptions(gradient_checkpointing=True))
    batch = packed(FIRST, SECOND)
    losses = [each.logps(batch, temperature=1.0).sum() for each in (policy, again)]
    grads = [
        torch.autograd.grad(loss, list(each.model.parameters()))
        for loss, each in zip(losses, (policy, again), strict=True)
    ]
    assert all(map(torch.equal, *grads))
    with torch.no_grad():
        assert torch.equal(
            policy.twin().logps(batch, temperature=1.0), policy.logps(batch, temperature=1.0)
        )


def test_adapters_of_a_hybrid_model_have_a_gradient(tmp_path: Path) -> None:
    policy = made("Qwen3.5", lora=Lora(rank=2, alpha=4.0))
    policy.logps(packed(FIRST, SECOND), temperature=1.0).sum().backward()
    grads = [each.grad for each in policy.model.parameters() if each.requires_grad]
    assert grads and any(each is not None and bool(each.abs().sum() > 0) for each in grads)


def test_recorded_experts_are_replayed_for_each_sequence() -> None:
    """All tokens are sent to the experts 0 and 1, so exchanging the others changes nothing."""
    policy = made("Qwen3.5-MoE")
    policy.replay_experts()
    batch = packed(FIRST, SECOND)
    experts = torch.tensor([0, 1], dtype=torch.uint8).expand(len(batch.tokens), 4, 2)
    replayed = Packed(batch.tokens, batch.offsets, experts)
    with torch.no_grad():
        chosen = policy.logps(batch, temperature=1.0)
        found = policy.logps(replayed, temperature=1.0)
        for name, weight in policy.model.named_parameters():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                weight[2:] = 0
        assert torch.equal(policy.logps(replayed, temperature=1.0), found)
    assert (found - chosen).abs().max() > 1e-3


def test_a_scorer_in_another_process_computes_apart_from_the_same_length_on(
    tmp_path: Path,
) -> None:
    """Attention in chunks of 32 tokens can be packed only up to that length."""
    policy = Policy(chunked(), load_tokenizer(SHIPPED_POLICY))
    with pytest.warns(RuntimeWarning, match="forward pass of its own"):
        policy.check_length(64)
    scorer = LocalScorer(policy, temperature=1.0, max_tokens=512)
    with pytest.warns(RuntimeWarning, match="forward pass of its own"):
        other = LocalScorer.load(scorer.export(tmp_path / "exported"))
    batch = packed(FIRST, SECOND)
    where = torch.ones(len(batch.tokens), dtype=torch.bool)
    assert policy.computes_apart and other.policy.computes_apart
    assert torch.equal(scorer.score(batch, where).logp, other.score(batch, where).logp)


def test_the_reason_is_told_once(tmp_path: Path) -> None:
    save_architecture(ARCHITECTURES["Qwen3.5"], tmp_path, planted=False)
    told = r"each sequence of Qwen3_5ForCausalLM in a forward pass of its own.* affect each other"
    with pytest.warns(RuntimeWarning, match=told) as found:
        Policy.load(tmp_path, device="cpu")
    assert len(found) == 1


def test_a_model_that_looks_ahead_is_refused_for_both_reasons() -> None:
    model: Any = ARCHITECTURES["Llama"].make()
    forward = model.model.norm.forward
    model.model.norm.forward = lambda hidden: forward(hidden - hidden.mean(1, keepdim=True))
    told = (
        "a token changes the logits of earlier tokens in LlamaForCausalLM.*"
        "cannot be packed either.* affect each other"
    )
    with pytest.raises(ConfigError, match=told):
        Policy(model, load_tokenizer(SHIPPED_POLICY))
