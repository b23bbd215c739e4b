"""Test the library on a pretrained chat model: load, pack, score, learn and sample.

Skipped if the package of the model is not installed.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from unstale.builders import build_old_logps, build_scorer
from unstale.config import (
    CorrectionConfig,
    ObjectiveConfig,
    OldLogpsConfig,
    RunConfig,
    TrainerConfig,
)
from unstale.config.gguf import origin_of
from unstale.engines import SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions
from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.envs.references import Reference, encode_conversation
from unstale.model.policy import Policy
from unstale.records import Batch
from unstale.techniques.hooks import Techniques
from unstale.trainer import train_on
from unstale.trainer.local import LocalTrainer
from unstale.trainer.supervised import CrossEntropy, reference_batch

pytestmark = pytest.mark.usefixtures("forked_children")

QUESTION = [Message("user", "What is the capital of France?")]
TEXT = "The old harbour lies behind the market. In spring, the boats leave before sunrise."


@pytest.fixture(scope="module")
def policy(pretrained: Path) -> Policy:
    """Return the float32 policy. Loading it passes the check of packing."""
    return Policy.load(pretrained, device="cpu")


def batch(policy: Policy) -> Batch:
    """Return a chat and a plain text, packed. All tokens but the prompt of the chat count."""
    chat = encode_conversation(
        Chat(policy.tokenizer, (), ends=policy.ends),
        [*QUESTION, Message("assistant", "The capital of France is Paris.")],
    )
    tokens = tuple(policy.tokenizer(TEXT).input_ids)
    text = Reference(tokens, (False, *[True] * (len(tokens) - 1)))
    return reference_batch([chat, text], version=0)


def test_the_folder_names_its_file(pretrained: Path) -> None:
    origin = origin_of(pretrained)
    assert origin["quantisation"] == "Q4_1" and origin["file"].endswith(".gguf")
    assert pretrained.name.startswith(origin["sha256"])


def test_packed_log_probabilities_are_those_of_transformers(
    policy: Policy, pretrained: Path
) -> None:
    packed = batch(policy)
    with torch.no_grad():
        found = policy.logps(packed, temperature=1.0)
        plain = AutoModelForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
        for first, end in zip(packed.offsets, packed.offsets[1:], strict=False):
            tokens = packed.tokens[first:end]
            logits = plain(tokens[None]).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            assert expected.std() > 0.5
            assert (found[first + 1 : end] - expected).abs().max() < 1e-4


def test_a_step_raises_the_likelihood_of_its_batch(policy: Policy) -> None:
    objective = CrossEntropy()
    config = RunConfig(
        recipe="llm",
        trainer=TrainerConfig(dtype="float32", lr=1e-5, warmup_steps=0),
        old_logps=OldLogpsConfig(route="rollout"),
        correction=CorrectionConfig(mode="none"),
        objective=ObjectiveConfig(loss_type="none"),
    )
    old = build_old_logps(config.old_logps, build_scorer(config, policy))
    trainer = LocalTrainer(policy, config, old, techniques=Techniques({"sft": objective}))
    nll = []
    for _ in range(2):
        train_on(trainer, batch(policy))
        nll.append(objective.take_nll())
    assert 0.2 < nll[1] < nll[0] < 5


@pytest.mark.costly
def test_the_engine_answers_a_question(pretrained: Path) -> None:
    """At temperature 0 and in bfloat16, with the weights of the folder."""
    weights = Policy.load(pretrained, dtype="bfloat16", device="cpu", trained=False)
    chat = Chat(weights.tokenizer, (), ends=weights.ends)

    async def reply() -> str:
        options = EngineOptions(pretrained, dtype="bfloat16", max_running=1, max_context=128)
        engine = EmbeddedEngine(options)
        try:
            await engine.start()
            await engine.load(weights.weights(), 0)
            await engine.resume()
            params = SamplingParams(max_tokens=12, stop_tokens=chat.stop_tokens, temperature=0)
            sampled = await engine.sample(list(chat.encode_prompt(QUESTION)), params)
            return str(weights.tokenizer.decode(sampled.piece.tokens))
        finally:
            await engine.close()

    assert "Paris" in asyncio.run(reply())
