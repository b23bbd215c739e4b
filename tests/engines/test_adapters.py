"""Test the embedded engine with adapters of several versions, added to the outputs of layers.

Log-probabilities are those of PEFT in the trainer. Several versions in one batch equal each in a
batch of its own. Every reply has the version that sampled it. No cached context is used by another
version, and an episode that goes on with its version computes no context again.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.model.test_lora import told
from tests.support.fake_vllm import FakeVllm
from unstale.engines import EngineDied, SamplingParams
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.worker import build_runner
from unstale.engines.pool import EnginePool, Recovery
from unstale.engines.registry import EngineOptions
from unstale.engines.servers.vllm import AdapterVllmEngine
from unstale.model.lora import Base, Lora
from unstale.model.policy import Policy
from unstale.testing import nudge, plain_logps, tiny_policy
from unstale.weights.publish import DirectPublisher, num_bytes
from unstale.weights.store import VersionStore

pytestmark = pytest.mark.usefixtures("forked_children")

LORA = Lora(rank=4, alpha=6.0, seed=5)
"""The scale 1.5 is no power of two, so that products with it are rounded."""
PROMPT = [*range(2, 40)]
OTHER_PROMPT = [*range(40, 5, -1)]
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def save_model(folder: Path, kind: str) -> None:
    policy = tiny_policy()
    if kind == "llama":
        torch.manual_seed(0)
        policy = Policy(LlamaForCausalLM(LlamaConfig(**LLAMA)), policy.tokenizer)
    policy.save(folder)


def trained(folder: Path, count: int, *, dtype: str = "float32") -> list[Policy]:
    """Return policies with the adapters of versions 0 to `count` - 1. Those of 0 are new."""
    policies = []
    for version in range(count):
        policies.append(Policy.load(folder, dtype=dtype, lora=LORA))
        if version:
            nudge(policies[-1], seed=version, size=0.1)
    return policies


def batcher_of(folder: Path, policies: list[Policy], *, dtype: str = "float32") -> Batcher:
    merging = policies[0].merging
    assert merging is not None
    limits: dict[str, Any] = {"max_slots": 8, "max_context": 256}
    runner = build_runner(folder, dtype=dtype, base=Base(folder, merging), **limits)
    batcher = Batcher(runner, **limits)
    for version, policy in enumerate(policies):
        batcher.load(policy.weights(), version)
    return batcher


def request(
    number: int, version: int, *, tokens: list[int] = PROMPT, count: int = 24
) -> SampleRequest:
    return SampleRequest(number, tokens, count, (), 1.0, seed=number, version=version)


def finish(batcher: Batcher, *requests: SampleRequest) -> dict[int, FinishedReply]:
    for each in requests:
        batcher.submit(each)
    found: dict[int, FinishedReply] = {}
    with torch.inference_mode():
        while batcher.has_work:
            found |= {reply.id: reply for reply in batcher.step()}
    return found


def largest_error(policy: Policy, reply: FinishedReply, *, tokens: list[int] = PROMPT) -> float:
    """Return the largest difference of the reply's log-probabilities from a plain forward pass."""
    expected = plain_logps(policy, [*tokens, *reply.tokens])[len(tokens) :]
    return float((torch.tensor(reply.behavior_logp).double() - expected).abs().max())


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_log_probabilities_of_versions_in_one_batch_are_those_of_peft(
    kind: str, tmp_path: Path
) -> None:
    save_model(tmp_path, kind)
    policies = trained(tmp_path, 4)
    replies = finish(
        batcher_of(tmp_path, policies),
        *(request(number, number % 4) for number in range(8)),
    )
    for number, reply in replies.items():
        assert reply.version == number % 4 and len(reply.tokens) == 24
        assert largest_error(policies[reply.version], reply) < 1e-5
        other = policies[(reply.version + 1) % 4]
        assert largest_error(other, reply) > 1e-2, "the versions differ"


def test_bfloat16_adapters_are_rounded_as_in_the_trainer(tmp_path: Path) -> None:
    """Merged weights, which are rounded once more, are further from the trainer."""
    save_model(tmp_path, "llama")
    (base, policy) = trained(tmp_path, 2, dtype="bfloat16")
    reply = finish(batcher_of(tmp_path, [base, policy], dtype="bfloat16"), request(0, 1, count=96))[
        0
    ]
    runner = build_runner(tmp_path, dtype="bfloat16", max_slots=8, max_context=256)
    merged = Batcher(runner, max_slots=8, max_context=256)
    assert policy.merging is not None
    merged.load(Base(tmp_path, policy.merging).merged(policy.weights()))
    of_merged = finish(merged, request(0, -1, count=96))[0]
    errors = []
    for each in (reply, of_merged):
        expected = plain_logps(policy, [*PROMPT, *each.tokens])[len(PROMPT) :]
        errors.append((torch.tensor(each.behavior_logp).double() - expected).abs().mean())
    assert errors[0] < errors[1]


def test_several_versions_in_one_batch_equal_each_alone(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    policies = trained(tmp_path, 4)
    together = finish(
        batcher_of(tmp_path, policies), *(request(number, number % 4) for number in range(8))
    )
    for version in range(4):
        alone = finish(batcher_of(tmp_path, policies), request(version, version))[version]
        both = together[version]
        assert alone.tokens == both.tokens
        assert torch.allclose(
            torch.tensor(alone.behavior_logp), torch.tensor(both.behavior_logp), atol=2e-6
        )


def test_a_cached_context_belongs_to_the_version_that_computed_it(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    policies = trained(tmp_path, 3)
    batcher = batcher_of(tmp_path, policies)
    first = finish(batcher, request(0, 1))[0]
    later = [*PROMPT, *first.tokens, 7, 8, 9]
    batcher.counters.clear()
    same = finish(batcher, request(1, 1, tokens=later))[1]
    assert batcher.counters["prefill_tokens"] == len(later) - len(PROMPT) - len(first.tokens) + 1
    batcher.counters.clear()
    other = finish(batcher, request(2, 2, tokens=later))[2]
    assert batcher.counters["prefill_tokens"] == len(later)
    assert largest_error(policies[1], same, tokens=later) < 1e-5
    assert largest_error(policies[2], other, tokens=later) < 1e-5


def test_a_load_leaves_the_contexts_of_earlier_versions_until_they_are_dropped(
    tmp_path: Path,
) -> None:
    save_model(tmp_path, "qwen3")
    policies = trained(tmp_path, 3)
    batcher = batcher_of(tmp_path, policies[:2])
    first = finish(batcher, request(0, -1))[0]
    assert first.version == 1
    later = [*PROMPT, *first.tokens]
    batcher.load(policies[2].weights(), 2)
    batcher.keep_versions([1])
    batcher.counters.clear()
    assert finish(batcher, request(1, 1, tokens=later))[1].version == 1
    assert batcher.counters["reprefill_tokens"] == 0 < batcher.counters["cached_tokens"]
    newest = finish(batcher, request(2, -1, tokens=later))[2]
    assert newest.version == 2 and batcher.counters["reprefill_tokens"] > 0
    assert batcher.runner.adapters is not None
    batcher.keep_versions([])
    assert batcher.runner.adapters.versions == {2}
    batcher.counters.clear()
    batcher.runner.adapters.add(1, policies[1].weights())
    again = finish(batcher, request(3, 1, tokens=later))[3]
    assert batcher.counters["cached_tokens"] == 0, "its contexts went with its adapters"
    assert largest_error(policies[1], again, tokens=later) < 1e-5


def test_a_version_that_samples_is_kept(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    policies = trained(tmp_path, 3)
    batcher = batcher_of(tmp_path, policies)
    batcher.submit(request(0, 1))
    with torch.inference_mode():
        batcher.step()
    batcher.keep_versions([])
    assert batcher.runner.adapters is not None and batcher.runner.adapters.versions == {1, 2}
    assert largest_error(policies[1], finish(batcher)[0]) < 1e-5


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    policies = trained(tmp_path, 1)
    batcher = batcher_of(tmp_path, policies)
    adapters = dict(policies[0].weights())
    name = next(name for name in adapters if name.endswith("lora_A.weight"))
    with pytest.raises(ValueError, match="need a lora_A and a lora_B"):
        batcher.load({each: adapters[each] for each in adapters.keys() - {name}}, 1)
    with pytest.raises(ValueError, match="does not fit the base"):
        batcher.load(adapters | {name: torch.zeros(4, 5)}, 1)
    layer = name.removesuffix("lora_A.weight")
    fewer = {each: adapters[each] for each in adapters if not each.startswith(layer)}
    with pytest.raises(ValueError, match="adapters of other layers"):
        batcher.load(fewer, 1)


@pytest.mark.costly
def test_a_pool_publishes_adapters_and_brings_versions_back_after_a_death(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3")
    policies = trained(tmp_path, 3)
    source = policies[0]
    options = EngineOptions(
        tmp_path,
        dtype="float32",
        max_context=256,
        max_running=8,
        deltas=True,
        merging=source.merging,
        adapters="unmerged",
    )
    engine = EmbeddedEngine(options)
    pool = EnginePool([engine], Recovery(lambda version: policies[version].weights(), restarts=1))
    publisher = DirectPublisher(
        pool,
        dtype=source.dtype,
        store=VersionStore(source.twin().weights()),
        keep_versions=pool.keep_versions,
    )
    whole = num_bytes(tiny_policy().weights())

    async def sample(version: int) -> None:
        params = SamplingParams(16, (), version=version)
        piece = (await pool.sample(PROMPT, params)).piece
        expected = plain_logps(policies[version], [*PROMPT, *piece.tokens])[len(PROMPT) :]
        assert piece.version == version
        assert torch.allclose(torch.tensor(piece.behavior_logp).double(), expected, atol=1e-5)

    async def story() -> None:
        await pool.start()
        for version, policy in enumerate(policies):
            source.load_weights(policy.weights())
            source.version = version
            publisher.prepare(source, live=range(version))
            assert 0 < publisher.bytes <= num_bytes(source.weights()) < whole / 2
            await publisher.publish()
            for each in range(version + 1):
                await sample(each)
        assert engine._child is not None
        engine._child.kill()
        lost = await pool.sample(PROMPT, SamplingParams(16, (), version=1))
        assert lost.stop == "interrupted" and not lost.piece.tokens
        await asyncio.gather(*(sample(version) for version in (1, 0, 1, 2)))
        await pool.keep_versions([1])
        with pytest.raises(
            ValueError, match=r"version 0 was requested, but the engine has \[1, 2\]"
        ):
            await engine.sample(PROMPT, SamplingParams(16, (), version=0))

    source = Policy.load(tmp_path, lora=LORA)
    told(pool, story)


of_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def adapter_server(folder: Path, base: Path) -> FakeVllm:
    """Return a vLLM server that was started with --enable-lora and the base weights."""
    server = FakeVllm(folder, Policy.load(base))
    server.adapters = {}
    server.head = server.policy.model.lm_head.weight
    return server


def vllm_engine(folder: Path, server: FakeVllm, policy: Policy) -> AdapterVllmEngine:
    options = EngineOptions(
        folder,
        dtype="float32",
        url=server.url,
        merging=policy.merging,
        adapters="unmerged",
        max_versions=4,
    )
    return AdapterVllmEngine(options)


@of_peft
def test_a_vllm_server_samples_versions_at_once_from_adapters_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(base, "qwen3")
    policies = trained(base, 3)
    with adapter_server(tmp_path, base) as server:
        engine = vllm_engine(base, server, policies[0])
        pool = EnginePool([engine], Recovery(lambda version: policies[version].weights()))

        async def sample(version: int) -> None:
            params = SamplingParams(16, (), version=version)
            piece = (await pool.sample(PROMPT, params)).piece
            expected = plain_logps(policies[version], [*PROMPT, *piece.tokens])[len(PROMPT) :]
            assert piece.version == version
            assert torch.allclose(torch.tensor(piece.behavior_logp).double(), expected, atol=1e-4)

        async def story() -> None:
            await pool.start()
            before = {name: each.clone() for name, each in server.policy.weights().items()}
            for version, policy in enumerate(policies):
                await pool.interrupt()
                await pool.load(policy.weights(), version)
                await pool.resume()
            await asyncio.gather(*(sample(version) for version in (0, 1, 2, 1)))
            for name, each in server.policy.weights().items():
                assert torch.equal(each, before[name]), "no weight of the base was sent"
            assert server.adapters is not None and len(server.adapters) == 3
            assert engine._folder is not None
            (largest, *_) = sorted(
                (sum(file.stat().st_size for file in each.iterdir()), each.name)
                for each in engine._folder.iterdir()
                if each.is_dir()
            )[::-1]
            assert largest[0] < num_bytes(before) / 2
            await pool.keep_versions([1])
            assert [name[-1] for name in server.adapters] == ["1", "2"]
            await sample(0)  # is added again
            assert [name[-1] for name in server.adapters] == ["1", "2", "0"]

        told(pool, story)
        assert engine._folder is not None and not engine._folder.exists()


@of_peft
def test_a_vllm_server_that_samples_with_another_adapter_is_found(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(base, "qwen3")
    policies = trained(base, 2)
    with adapter_server(tmp_path, base) as server:
        engine = vllm_engine(base, server, policies[0])
        pool = EnginePool([engine])

        async def story() -> None:
            await pool.start()
            for version, policy in enumerate(policies):
                await pool.interrupt()
                await pool.load(policy.weights(), version)
                await pool.resume()
            await pool.sample(PROMPT, SamplingParams(16, ()))
            server.confuses_adapters = True
            with pytest.raises(EngineDied, match=r"16 tokens of version 1 are stamped \(\('0', 16"):
                await pool.sample(PROMPT, SamplingParams(16, ()))

        told(pool, story)


def test_a_vllm_server_without_adapters_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    save_model(base, "qwen3")
    policies = trained(base, 1)
    with FakeVllm(tmp_path) as server:
        engine = vllm_engine(base, server, policies[0])

        async def story() -> None:
            with pytest.raises(ValueError, match="with --enable-lora and VLLM_ALLOW_RUNTIME"):
                await engine.start()

        told(engine, story)
