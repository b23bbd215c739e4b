"""Test the policy: tokens to log-probabilities.

Packed sequences give the values of single ones, for several architectures, and do not see each
other. Only requested logits are computed. A folder that is no policy is refused in one line. Saving
and loading change no bit. Lag counts batches, not version numbers.
"""

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from unstale import lint
from unstale.config import ConfigError, RunConfig
from unstale.model import head as head_module
from unstale.model.policy import Policy
from unstale.model.prefix_tree import Packed
from unstale.records import collate
from unstale.testing import episode, nudge, plain_logps, tiny_policy

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(**SHAPE, **TOKENS, num_key_value_heads=2, initializer_range=0.3)
    )


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.3)
    )


def sliding() -> PreTrainedModel:
    return MistralForCausalLM(
        MistralConfig(
            **SHAPE, **TOKENS, num_key_value_heads=2, sliding_window=4, initializer_range=0.3
        )
    )


def soft_capped() -> PreTrainedModel:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            **TOKENS,
            head_dim=8,
            num_key_value_heads=2,
            final_logit_softcapping=2.0,
            initializer_range=0.3,
        )
    )


def packed(*lengths: int, seed: int = 0) -> Packed:
    noise = torch.Generator().manual_seed(seed)
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return Packed(torch.randint(0, 64, (sum(lengths),), generator=noise), tuple(offsets))


def one_by_one(policy: Policy, batch: Packed, temperature: float) -> Tensor:
    rows = batch.tokens.split(batch.lengths)
    return torch.cat(
        [plain_logps(policy, row.tolist(), temperature=temperature) for row in rows]
    ).float()


@pytest.mark.parametrize("make", [llama, gpt2, sliding, soft_capped])
def test_packed_equals_one_sequence_at_a_time(make) -> None:
    torch.manual_seed(0)
    policy, batch = Policy(make(), None), packed(5, 17, 1, 9, 17)
    logps = policy.logps(batch, temperature=0.7)
    assert logps.dtype == torch.float32
    torch.testing.assert_close(logps, one_by_one(policy, batch, 0.7), atol=1e-5, rtol=0)


def test_a_model_whose_logits_are_all_held_is_told() -> None:
    with warnings.catch_warnings(record=True, action="always") as raised:
        Policy(llama(), None)
        assert not raised
        Policy(soft_capped(), None)
    assert [warning.category for warning in raised] == [RuntimeWarning]
    assert re.search(
        r"holds all logits .* the head of Gemma3ForCausalLM", str(raised[0].message), re.DOTALL
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
def test_packed_equals_one_sequence_at_a_time_for_qwen3(dtype: str, tolerance: float) -> None:
    policy, batch = tiny_policy(dtype=dtype), packed(5, 17, 1, 9, 17)
    slow = torch.cat(
        [plain_logps(policy, row.tolist()) for row in batch.tokens.split(batch.lengths)]
    )
    logps = policy.logps(batch, temperature=1.0)
    torch.testing.assert_close(logps.double(), slow, atol=tolerance, rtol=0)


def test_no_sequence_sees_its_neighbour() -> None:
    policy, batch = tiny_policy(), packed(6, 8, 5)
    other = Packed(batch.tokens.clone(), batch.offsets)
    other.tokens[6:14] = (other.tokens[6:14] + 1) % 64
    one, two = policy.logps(batch, temperature=1.0), policy.logps(other, temperature=1.0)
    assert torch.equal(one[:6], two[:6]) and torch.equal(one[14:], two[14:])
    assert (one[7:14] - two[7:14]).abs().min() > 1e-3


def test_only_asked_for_logits_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch, rows = tiny_policy(), packed(5, 7), []
    heads = head_module.token_logps

    def watched(
        head: nn.Module, given: Tensor, *rest: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        rows.append(len(given))
        return heads(head, given, *rest, **options)

    monkeypatch.setattr(head_module, "token_logps", watched)
    where = torch.zeros(12, dtype=torch.bool)
    where[[3, 5, 9, 11]] = True  # 5 begins a sequence: it has no log-probability
    some = policy.logps(batch, temperature=1.0, where=where)
    assert rows == [3]
    everything = policy.logps(batch, temperature=1.0)
    assert rows == [3, 10]
    assert some.nonzero().squeeze(1).tolist() == [3, 9, 11]
    torch.testing.assert_close(some[[3, 9, 11]], everything[[3, 9, 11]])
    assert not everything[[0, 5]].any()


def test_a_policy_without_opinion_has_log_probability_and_entropy_of_the_uniform() -> None:
    policy = tiny_policy()
    policy.load_weights(
        {name: torch.zeros_like(tensor) for name, tensor in policy.weights().items()}
    )
    logps, entropy = policy.logps_and_entropy(packed(3, 2), temperature=1.0)
    assert logps.tolist() == pytest.approx([0, -math.log(64), -math.log(64), 0, -math.log(64)])
    assert entropy.tolist() == pytest.approx(
        [0, math.log(64), math.log(64), 0, math.log(64)], rel=1e-5
    )


def test_log_probabilities_are_a_function_of_weights_and_tokens_alone() -> None:
    policy = Policy(
        GPT2LMHeadModel(GPT2Config(**TOKENS, n_embd=32, n_layer=1, n_head=4)).train(), None
    )  # dropout 0.1
    assert torch.equal(
        policy.logps(packed(6), temperature=1.0), policy.logps(packed(6), temperature=1.0)
    )


def test_bfloat16_weights_give_float32_log_probabilities() -> None:
    policy = tiny_policy(dtype="bfloat16")
    assert policy.dtype == torch.bfloat16
    assert policy.logps(packed(6, 4), temperature=1.0).dtype == torch.float32


def test_score_runs_what_is_asked_for_and_no_token_beyond() -> None:
    policy = tiny_policy()
    batch = collate(
        [episode(0, [4, (3, 0), 5, (2, 1), 6]), episode(1, [3, (4, 1)]), episode(2, [2, (2, 0), 9])]
    )
    where = batch.sampled & (batch.version == 0)
    scored = policy.score(batch, where, temperature=1.0, max_tokens_per_microbatch=8)
    assert scored.forward_tokens == (4 + 3) + (
        2 + 2
    )  # cut after the last of version 0; episode 1 is not run
    assert not scored.logp.requires_grad and not scored.logp[~where].any()
    torch.testing.assert_close(
        scored.logp[where], policy.logps(batch, temperature=1.0)[where], atol=1e-5, rtol=0
    )


def test_saving_and_loading_change_no_bit(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.save(tmp_path)
    loaded = Policy.load(tmp_path, device="cpu")
    assert loaded.weights().keys() == policy.weights().keys()
    assert all(
        torch.equal(tensor, policy.weights()[name]) for name, tensor in loaded.weights().items()
    )
    assert loaded.tokenizer.chat_template == policy.tokenizer.chat_template
    assert loaded.tokenizer.encode("w5 w7") == [5, 7]


def test_tied_weights_come_once() -> None:
    names = tiny_policy().weights().keys()
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_weights_move_between_policies_and_a_twin_moves_alone() -> None:
    one, two = tiny_policy(seed=0), tiny_policy(seed=1)
    twin = one.twin()
    one.load_weights(two.weights())
    batch = packed(8)
    assert torch.equal(one.logps(batch, temperature=1.0), two.logps(batch, temperature=1.0))
    assert not torch.equal(twin.logps(batch, temperature=1.0), two.logps(batch, temperature=1.0))
    assert not any(parameter.requires_grad for parameter in twin.model.parameters())


def test_weights_that_do_not_fit_are_refused() -> None:
    policy = tiny_policy()
    weights = policy.weights()
    with pytest.raises(ValueError, match=r"'model\.norm\.weight'"):
        policy.load_weights(
            {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
        )
    with pytest.raises(ValueError, match=r"model\.norm\.weight \(3,\)"):
        policy.load_weights(weights | {"model.norm.weight": torch.zeros(3)})


def test_the_policy_is_at_its_version_until_its_weights_move() -> None:
    policy = tiny_policy()
    assert (policy.version, policy.weights_match_version) == (0, True)
    nudge(policy, seed=1)
    assert (policy.version, policy.weights_match_version) == (0, False)
    policy.version += 1
    assert (policy.version, policy.weights_match_version) == (1, True)


def test_the_same_weights_under_a_higher_number_are_as_far_from_every_token_as_before() -> None:
    policy = tiny_policy()
    for version in range(5):
        policy.version = version
    before = policy.lag(torch.arange(5))
    policy.assign_new_version(7)  # 5 and 6 were published, and their training is lost
    assert (policy.version, policy.weights_match_version, policy.version_gaps) == (
        7,
        True,
        ((7, 3),),
    )
    assert policy.lag(torch.arange(5)).tolist() == before.tolist() == [4, 3, 2, 1, 0]
    assert policy.lag(torch.tensor([5, 6, 7])).tolist() == [0, 0, 0]
    assert policy.lag(8) == -1  # from the future
    policy.version = 8
    policy.version = 9
    assert policy.lag(torch.tensor([[4, 5], [6, 7], [8, 9]])).tolist() == [[2, 1], [0, 2], [1, 0]]
    nudge(policy, seed=1)
    policy.assign_new_version(12)
    assert not policy.weights_match_version  # a number is no publication
    for version in (12, 11):
        with pytest.raises(ValueError, match=f"version {version} is not higher than 12"):
            policy.assign_new_version(version)


@given(lives=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=6))
@example(lives=[(5, 2), (1, 0), (4, 0), (3, 0)])
def test_lag_counts_batches_however_often_the_run_is_resumed(lives: list[tuple[int, int]]) -> None:
    """Each start trains `batches`; the next one resumes `back` versions earlier."""
    policy, place, line = POLICY, {0: 0}, [0]
    policy.version, policy.version_gaps = 0, ()
    for batches, back in lives:
        for _ in range(batches):
            policy.version += 1
            line.append(policy.version)
            place[policy.version] = len(line) - 1
            expected = [max(0, len(line) - 1 - place[version]) for version in sorted(place)]
            assert policy.lag(torch.tensor(sorted(place))).tolist() == expected
        highest, line = max(place), line[: max(1, len(line) - back)]
        policy.version = line[-1]
        if highest > policy.version:
            policy.assign_new_version(highest + 1)
            line[-1] = policy.version
            place[policy.version] = len(line) - 1


POLICY = tiny_policy()


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Policy.load(folder, device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_cannot_be_a_policy_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "no model folder" in refusal(tmp_path / "nowhere")
    assert "no config.json" in refusal(tmp_path)
    folder = tmp_path / "model"
    policy = tiny_policy()
    policy.save(folder)
    (folder / "chat_template.jinja").unlink()
    assert "no chat template" in refusal(folder)
    (folder / "tokenizer.json").rename(tmp_path / "aside.json")
    assert "no tokenizer" in refusal(folder)
    (folder / "tokenizer.json").write_text("{")
    assert "cannot be read" in refusal(folder)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("damage", ["pointer", "header", "end", "empty"])
def test_damaged_weights_are_refused_with_their_file(tmp_path: Path, damage: str) -> None:
    policy = tiny_policy()
    policy.model.save_pretrained(tmp_path, max_shard_size="20KB")
    policy.tokenizer.save_pretrained(tmp_path)
    path = sorted(tmp_path.glob("*.safetensors"))[1]
    whole = path.read_bytes()
    parts = {"pointer": LFS_POINTER, "header": whole[:20], "end": whole[:-5], "empty": b""}
    path.write_bytes(parts[damage])
    words = f"policy: {path} is damaged or incomplete ("
    if damage == "pointer":
        words = f"policy: {path} is a pointer of Git LFS, not the file with the weights: run `git l"
    assert refusal(tmp_path).startswith(words)
    config = RunConfig(recipe="x", model=str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        lint.check(config)
    assert str(caught.value).startswith(words)


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.tokenizer.add_tokens(["w64", "w65"])
    policy.save(tmp_path)
    assert "has 66 tokens, but the model's embedding has 64 rows" in refusal(tmp_path)


def test_missing_weights_are_refused_and_not_made_up(tmp_path: Path) -> None:
    tiny_policy().save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "lacks 11 weights" in refusal(tmp_path)
