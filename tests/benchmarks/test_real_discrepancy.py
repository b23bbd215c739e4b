"""The measurement of the discrepancy: replies computed again, emulated rounding, dropped tokens."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.both_sides import (
    PLACES,
    LocalEngine,
    Replies,
    chat_prompts,
    plain_logps,
    rounded,
    trainer_logps,
)
from benchmarks.discrepancy_tables import dropped, means
from unstale.model.policy import Policy
from unstale.testing import tiny_policy

# Python compiles a package that reasoning-gym needs at its first import, and warns of its code.
pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Llama model whose weights are bfloat16 numbers."""
    path = tmp_path_factory.mktemp("llama")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, initializer_range=0.3))
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    policy = tiny_policy()
    model.save_pretrained(path)
    policy.tokenizer.save_pretrained(path)
    return path


def sampled(folder: Path, dtype: str) -> tuple[Policy, LocalEngine, Replies]:
    policy = Policy.load(folder, dtype=dtype, trained=False)
    engine = LocalEngine(folder, dtype=dtype, max_running=4)
    engine.load(policy.weights())
    prompts = [prompt[:40] for prompt in chat_prompts(policy, 6)]
    return policy, engine, engine.sample(prompts, [], 12)


def test_replies_are_computed_again_as_they_were_sampled(folder: Path) -> None:
    _, engine, replies = sampled(folder, "bfloat16")
    assert (engine.replay(replies) - replies.behavior_logp).abs().max() < 1e-5
    few = replies.first(2)
    assert (engine.replay(few) - few.behavior_logp).abs().max() < 0.1
    reply, position, context = replies.numbers()
    assert len(reply) == len(replies.behavior_logp) == 72
    assert (context - position == torch.tensor(list(map(len, replies.prompts)))[reply]).all()


def test_engine_trainer_and_transformers_agree_in_float32(folder: Path) -> None:
    policy, _, replies = sampled(folder, "float32")
    logps, entropy = trainer_logps(policy, replies)
    assert (logps - replies.behavior_logp).abs().max() < 1e-4
    model = LlamaForCausalLM.from_pretrained(folder).double().eval()
    for chunk in (0, 5):
        assert (plain_logps(model, replies, chunk=chunk) - logps).abs().max() < 1e-4
    assert entropy.min() > 0


def test_a_float16_engine_rounds_less_than_a_bfloat16_engine(folder: Path) -> None:
    wide, exact, replies = sampled(folder, "float32")
    errors = []
    for dtype in ("float16", "bfloat16"):
        engine = LocalEngine(folder, dtype=dtype, max_running=4)
        engine.load(wide.weights())
        errors.append((engine.replay(replies) - exact.replay(replies)).abs().mean())
    assert 0 < errors[0] < errors[1] / 4


def test_rounding_at_all_places_has_the_error_of_a_bfloat16_model(folder: Path) -> None:
    wide, engine, replies = sampled(folder, "float32")
    narrow = Policy.load(folder, dtype="bfloat16", trained=False)
    theirs, _ = trainer_logps(narrow, replies)
    exact, _ = trainer_logps(wide, replies)
    with rounded(wide.model, PLACES):
        ours, _ = trainer_logps(wide, replies)
    with rounded(engine.model, PLACES):
        by_engine = engine.replay(replies)
    noise = (theirs - exact).abs().mean()
    assert noise > 1e-3
    # bfloat16 attention also rounds the weights of values, so single numbers differ
    assert (ours - exact).abs().mean() == pytest.approx(float(noise), rel=0.4)
    assert (ours - theirs).abs().mean() < noise
    assert (ours - by_engine).abs().median() < noise / 10
    again, _ = trainer_logps(wide, replies)
    assert torch.equal(again, exact), "the hooks are removed"
    with rounded(wide.model, ["head"]):
        head, _ = trainer_logps(wide, replies)
    assert 0 < (head - exact).abs().mean() < noise


def test_a_band_drops_tokens_or_whole_replies() -> None:
    ratios = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.4, 1.0])
    numbers = {
        "log_d": ratios.double().log(),
        "reply": torch.tensor([0, 0, 0, 1, 1, 1]),
        "entropy": torch.tensor([0.0, 0.2, 0.2, 0.2, 2.5, 0.005]),
    }
    assert dropped(numbers, 0.5, 2.0, "token") == pytest.approx(2 / 6)
    assert dropped(numbers, 0.0, 5.0, "token") == 0
    # geometric means: 3^(1/3) = 1.44 and 0.4^(1/3) = 0.74
    assert dropped(numbers, 0.7, 1.4, "sequence") == pytest.approx(3 / 6)
    by_entropy = means(numbers, "entropy")
    assert [count for _, count in by_entropy] == [2, 0, 3, 0, 0, 1, 0]
    assert by_entropy[2][0] == pytest.approx(torch.tensor(3.0).log() / 3)
