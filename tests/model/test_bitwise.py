"""Bitwise models: the engine's and the trainer's log-probabilities have the same bits.

* They are equal for every supported architecture and dtype, whatever else is in the batch, however
  a prompt is divided into chunks, with shared pages, after an interruption, and with any number of
  threads.
* They are those of transformers, up to rounding, and so is the gradient.
* A product's row depends on that row alone.
* Other architectures are refused with their name.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.model.test_fused import SHAPE
from tests.model.test_packing import put, text
from unstale.config import ConfigError
from unstale.engines.embedded import batcher
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.bitwise import BitwiseRunner, BitwiseSampler
from unstale.model import bitwise, kernels, rowwise
from unstale.model.forward import ForwardOptions
from unstale.model.loading import DTYPES
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

TEMPERATURE = 0.7
SIZES: dict[str, Any] = SHAPE | {"vocab_size": 99}
TIED: dict[str, Any] = SIZES | {"num_key_value_heads": 1, "head_dim": 32}
DENSE: dict[str, Callable[[], PreTrainedModel]] = {
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "Llama, with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)),
    "Mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=1000)),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "Llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**TIED, tie_word_embeddings=True)),
    "Llama, scaled angles": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SIZES,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
}
OPENING, *ENDS = text(70, 3, 1, 60, 12, 5, 30, 2, 9, seed=3)
PROMPTS = [OPENING + end for end in ENDS[:5]] + ENDS[5:]


@pytest.fixture(autouse=True)
def compiled() -> None:
    if kernels.kernels() is None:
        pytest.skip("no C compiler")


def policy_of(model: PreTrainedModel, folder: Path, dtype: str) -> Policy:
    torch.manual_seed(3)
    for parameter in model.parameters():  # norms and biases are not 1 and 0
        parameter.data += 0.05 * torch.randn(parameter.shape)
    Policy(model, tiny_policy().tokenizer).save(folder)
    return Policy.load(folder, dtype=dtype, device="cpu")


def engine_of(policy: Policy, folder: Path, slots: int) -> Batcher:
    dtype = DTYPES[str(policy.dtype).removeprefix("torch.")]
    runner = BitwiseRunner(folder, dtype=dtype, max_slots=slots, max_context=256)
    made = Batcher(runner, max_slots=slots, max_context=256, sampler=BitwiseSampler())
    made.load(policy.weights())
    return made


def sample(engine: Batcher, prompts: list[list[int]], *, steps: int = 99) -> list[FinishedReply]:
    """Return replies in the order of the prompts, interrupted after some steps."""
    for number, prompt in enumerate(prompts):
        engine.submit(SampleRequest(number, prompt, 6 + number, [], TEMPERATURE, number))
    done: list[FinishedReply] = []
    while engine.has_work and steps:
        done += engine.step()
        steps -= 1
    return sorted([*done, *engine.interrupt()], key=lambda reply: reply.id)


def assert_equal(policy: Policy, prompts: list[list[int]], replies: list[FinishedReply]) -> None:
    """Compare the log-probabilities of replies with those of one packed pass, bit for bit."""
    packed = put(*(p + r.tokens for p, r in zip(prompts, replies, strict=True)))
    logp = policy.logps(packed, temperature=TEMPERATURE).detach()
    compared = 0
    for (_, end), reply in zip(packed.spans(), replies, strict=True):
        count = len(reply.tokens)
        assert logp[end - count : end].tolist() == reply.behavior_logp
        compared += count
    assert compared > len(prompts)


@pytest.mark.costly(cases=4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", DENSE)
def test_engine_and_trainer_compute_the_same_bits(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(DENSE[name](), tmp_path, dtype)
    policy.set_forward_options(ForwardOptions(bitwise=True))
    with torch.inference_mode():
        engine = engine_of(policy, tmp_path, slots=4)  # so requests wait, and others' pages remain
        assert_equal(policy, PROMPTS, sample(engine, PROMPTS))
        monkeypatch.setattr(batcher, "MAX_CHUNK_TOKENS", 13)
        larger = engine_of(policy, tmp_path, slots=16)
        begun = sample(larger, PROMPTS, steps=11)
        assert {reply.stop for reply in begun} == {"interrupted", "length"}
        assert_equal(policy, PROMPTS[:3], begun[:3])
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.01)
        larger.load(policy.weights())
        contexts = [prompt + reply.tokens for prompt, reply in zip(PROMPTS, begun, strict=True)]
        assert_equal(policy, contexts, sample(larger, contexts))


def test_a_pass_has_the_same_bits_with_any_number_of_threads(tmp_path: Path) -> None:
    policy = policy_of(DENSE["Qwen3"](), tmp_path, "bfloat16")
    policy.set_forward_options(ForwardOptions(bitwise=True))
    packed = put(*PROMPTS)
    threads = torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(policy.logps(packed, temperature=1.0).detach())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", DENSE)
def test_values_and_gradients_are_those_of_the_ordinary_pass(name: str, tmp_path: Path) -> None:
    plain = policy_of(DENSE[name](), tmp_path, "float32")
    other = Policy.load(tmp_path, dtype="float32", device="cpu")
    other.set_forward_options(ForwardOptions(bitwise=True))
    packed = put(*PROMPTS)
    found = []
    for policy in (plain, other):
        logp, entropy = policy.logps_and_entropy(packed, temperature=TEMPERATURE)
        (logp.sum() + 0.5 * entropy.sum()).backward()
        gradients = [parameter.grad for parameter in policy.model.parameters()]
        found.append((logp.detach(), entropy.detach(), gradients))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=2e-4)


def test_the_gradient_in_bfloat16_is_that_of_float32_up_to_rounding(tmp_path: Path) -> None:
    policy_of(DENSE["Llama, with biases"](), tmp_path, "float32").save(tmp_path)
    packed = put(*PROMPTS)
    found = []
    for dtype in ("float32", "bfloat16"):
        policy = Policy.load(tmp_path, dtype=dtype, device="cpu")
        policy.set_forward_options(ForwardOptions(bitwise=True))
        policy.logps(packed, temperature=TEMPERATURE).sum().backward()
        gradients = [each.grad for each in policy.model.parameters() if each.grad is not None]
        assert len(gradients) == len(list(policy.model.parameters()))
        found.append(torch.cat([each.float().flatten() for each in gradients]))
    assert torch.cosine_similarity(*found, dim=0) > 0.999


@pytest.mark.parametrize("dtype", rowwise.DTYPES)
def test_a_row_of_a_product_depends_on_that_row_alone(dtype: torch.dtype) -> None:
    weight = torch.randn(75, 48).to(dtype)
    rows = torch.randn(401, 48)
    panels = rowwise.pack(weight)
    whole = rowwise.product(rows, panels)
    expected = rows.to(dtype).double() @ weight.double().t()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 11, 13, 200):
        for first in (0, 7, 401 - count):
            some = rowwise.product(rows[first : first + count], panels)
            assert torch.equal(some, whole[first : first + count])


def test_other_models_are_refused_by_name(tmp_path: Path) -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**SHAPE, query_pre_attn_scalar=16))
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM: its architecture is not supported"):
        bitwise.require_supported(gemma)
    with pytest.raises(ConfigError, match=r"its linear layers were replaced"):
        policy = policy_of(DENSE["Qwen3"](), tmp_path, "float32")
        policy.set_forward_options(ForwardOptions(bitwise=True, quantise="int8"))
    with pytest.raises(ConfigError, match="sliding window of 1000 tokens"):
        bitwise.require_supported(DENSE["Mistral"](), 1001)
    narrow = LlamaForCausalLM(LlamaConfig(**SHAPE | {"intermediate_size": 40}))
    with pytest.raises(ConfigError, match="not multiples of 16"):
        bitwise.require_supported(narrow)
