"""Test weights that are sent to an engine in the values and scales of its number format.

Unpacked, they are bit for bit those that an engine rounds itself, for every format, precision and
shape. Later versions are sent as differences, also after the engine was started again with whole
weights. The engine then samples as one that gets whole weights.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.weights.test_publish import Remembering, publish, size, step
from unstale.config import ClusterConfig, EngineConfig, RunConfig, TrainerConfig
from unstale.engines import Reply, SamplingParams
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.registry import EngineOptions, packs_weights
from unstale.model.packed_weights import RoundedWeights, pack
from unstale.model.quantisation import FORMATS, quantised
from unstale.testing import tiny_policy
from unstale.weights.bits import words
from unstale.weights.codec import advance
from unstale.weights.publish import DirectPublisher
from unstale.weights.store import Delta

pytestmark = pytest.mark.usefixtures("forked_children")

PARAMS = SamplingParams(max_tokens=40, stop_tokens=(), seed=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
def test_unpacked_weights_are_bit_for_bit_the_rounded_ones(kind: str, dtype: torch.dtype) -> None:
    weights = dict(tiny_policy(experts=4).weights())
    noise = torch.Generator().manual_seed(0)
    for number, shape in enumerate([(130, 257), (1, 1), (64, 31), (300, 128)]):
        name = f"model.layers.9.mlp.part{number}.weight"
        weights[name] = torch.randn(shape, generator=noise) * 10.0 ** (number - 2)
    weights["model.layers.9.mlp.zeros.weight"] = torch.zeros(40, 40)
    packed = pack(weights, kind, dtype)
    unpacked = RoundedWeights(packed, kind, dtype)
    assert set(unpacked) == weights.keys() and len(unpacked) == len(weights)
    for name, weight in weights.items():
        expected = quantised(name, weight.to(dtype), kind)
        assert torch.equal(words(unpacked[name]), words(expected)), name
    assert pack(packed, kind, dtype).keys() == packed.keys()
    matrices = sum(weights[name].numel() for name in weights if f"{name}.scales" in packed)
    stored = sum(packed[name].nbytes for name in weights if f"{name}.scales" in packed)
    assert 0 < matrices == stored


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FORMATS)
def test_each_version_is_sent_as_the_difference_of_values_and_scales(kind: str, dtype: str) -> None:
    policy, engine = tiny_policy(dtype=dtype), Remembering()
    publisher = DirectPublisher(engine, dtype=torch.bfloat16, packed=kind)
    expected = []

    async def run() -> None:
        await engine.start()
        for version in range(4):
            if version:
                step(policy, version)
            await publish(publisher, policy)
            expected.append(
                {
                    name: quantised(name, weight.bfloat16(), kind).clone()
                    for name, weight in policy.weights().items()
                }
            )

    asyncio.run(run())
    held, *deltas = engine.loaded
    assert not isinstance(held, Delta)
    packed = {name: tensor.clone() for name, tensor in held.items()}
    for version, weights in enumerate(expected):
        if version:
            delta = deltas[version - 1]
            assert isinstance(delta, Delta) and delta.nbytes < size(policy) / 8
            advance(packed, delta)
        rounded = RoundedWeights(packed, kind, torch.bfloat16)
        assert all(torch.equal(words(rounded[name]), words(weights[name])) for name in weights)


def test_an_engine_samples_as_one_that_rounds_whole_weights(tmp_path: Path) -> None:
    policy = tiny_policy(dtype="bfloat16")
    policy.save(tmp_path)
    options = EngineOptions(tmp_path, quantise="int4", max_running=4, max_context=64)

    async def run() -> list[tuple[Reply, Reply]]:
        fed = EmbeddedEngine(replace(options, deltas=True, packed=True))
        whole = EmbeddedEngine(options)
        publishers = (
            DirectPublisher(fed, dtype=torch.bfloat16, packed="int4"),
            DirectPublisher(whole, dtype=torch.bfloat16),
        )
        replies = []
        try:
            await fed.start()
            await whole.start()
            for version in range(3):
                if version == 2:  # as after a crash
                    await fed.start()
                    await fed.load(policy.weights(), 1)
                if version:
                    step(policy, version)
                for publisher in publishers:
                    await publish(publisher, policy)
                one, other = [await engine.sample([5, 6, 7], PARAMS) for engine in (fed, whole)]
                replies.append((one, other))
                assert (publishers[0].bytes < size(policy) / 8) == (version > 0)
        finally:
            await fed.close()
            await whole.close()
        return replies

    replies = asyncio.run(run())
    assert all(one == other for one, other in replies)
    assert len({one.piece.behavior_logp for one, _ in replies}) == 3


def test_only_a_single_embedded_engine_gets_packed_weights() -> None:
    config = RunConfig(recipe="", engine=EngineConfig(quantise="fp8"))
    assert packs_weights(config)
    for other in (
        replace(config, engine=EngineConfig()),
        replace(config, engine=EngineConfig(quantise="fp8", processes=2)),
        replace(config, engine=EngineConfig(quantise="fp8", backend="vllm")),
        replace(config, trainer=TrainerConfig(lora_rank=4)),
        replace(config, cluster=ClusterConfig(trainers=2)),
    ):
        assert not packs_weights(other)
