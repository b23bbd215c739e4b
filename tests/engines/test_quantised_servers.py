"""Test `engine.quantise` with inference servers, against fakes of them.

A vLLM server that the run starts gets vLLM's flag, which the user cannot set. A server that already
runs must have the same flag. The log-probabilities of an FP8 server pass the probe, and agree with
a trainer that rounds to the same format. SGLang servers that quantise are refused.
"""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.fake_sglang import FakeSglang
from tests.support.fake_vllm import FakeVllm
from unstale.engines import SamplingParams, vllm_server
from unstale.engines.registry import EngineOptions
from unstale.engines.remote import ProbeFailed
from unstale.engines.servers import vllm
from unstale.engines.servers.sglang import SglangEngine
from unstale.engines.servers.vllm import VllmEngine
from unstale.engines.vllm_server import VllmServer, can_quantise
from unstale.model.forward import ForwardOptions
from unstale.model.policy import Policy
from unstale.testing import nudge, plain_logps, tiny_policy

PROMPT = [3, 1, 4, 1, 5]


def arguments(folder: Path, *args: str, quantise: str = "fp8") -> list[str]:
    return VllmServer(EngineOptions(folder, quantise=quantise, args=args))._arguments


def test_a_started_server_gets_the_flag(tmp_path: Path) -> None:
    assert "--quantization=fp8_per_block" in arguments(tmp_path)
    assert not [each for each in arguments(tmp_path, quantise="none") if "quant" in each]
    for flag in ("--quantization=fp8", "--quant", "-q", "--quantization_config={}"):
        with pytest.raises(ValueError, match=f"cannot set {flag}.*set engine.quantise = fp8"):
            arguments(tmp_path, flag, quantise="none")


def test_a_machine_without_fp8_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpuinfo = tmp_path / "cpuinfo"
    for flags, expected in (("avx512f amx_bf16 amx_tile", True), ("avx512f", False)):
        cpuinfo.write_text(f"flags : {flags}")
        assert can_quantise(cpuinfo) == expected
    monkeypatch.setattr(vllm, "can_quantise", lambda: False)
    monkeypatch.setattr(vllm_server, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="needs a GPU, or a CPU with AMX"):
        VllmEngine(EngineOptions(tmp_path, quantise="fp8"))


def wide_policy(*, seed: int) -> Policy:
    """Return a model whose matrices have 128 rows each. So their blocks are those of vLLM."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    tokenizer = tiny_policy().tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=64, tie_word_embeddings=True, initializer_range=0.15, **sizes, **heads
        )
        return Policy(Qwen3ForCausalLM(config).eval(), tokenizer)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    wide_policy(seed=5).save(folder)
    return folder


def attached(model: Path, url: str, quantise: str = "fp8") -> VllmEngine:
    return VllmEngine(EngineOptions(model, url=url, quantise=quantise))


@pytest.mark.costly
def test_an_fp8_server_computes_with_weights_rounded_anew_at_each_load(
    model: Path, tmp_path: Path
) -> None:
    """The trainer's rounding removes most of the discrepancy, for each of two versions.

    The fake has its own code for vLLM's blocks and scales.
    """
    policy = wide_policy(seed=5)
    found: dict[str, list[torch.Tensor]] = {"none": [], "fp8": []}

    async def story() -> None:
        await engine.start()
        for version in range(2):
            nudge(policy, seed=version, size=0.1)
            policy.load_weights(
                {name: each.bfloat16().float() for name, each in policy.weights().items()}
            )
            await engine.interrupt()
            await engine.load(policy.weights(), version)
            await engine.resume()
            piece = (await engine.sample(PROMPT, SamplingParams(40, ()))).piece
            for quantise, errors in found.items():
                twin = policy.twin()
                twin.set_forward_options(
                    ForwardOptions(quantise=quantise, published_dtype="bfloat16")
                )
                logp = plain_logps(twin, [*PROMPT, *piece.tokens])[-len(piece.tokens) :]
                errors.append((logp - torch.tensor(piece.behavior_logp)).abs())
        server.corrupt = "model.layers.1.mlp.down_proj.weight"
        await engine.interrupt()
        await engine.load({name: 3 * each for name, each in policy.weights().items()}, 2)
        with pytest.raises(ProbeFailed, match="after loading version 2"):
            await engine.interrupt()
        await engine.close()

    with FakeVllm(tmp_path, wide_policy(seed=99), quantization="fp8_per_block") as server:
        engine = attached(model, server.url)
        asyncio.run(story())
    for alone, both in zip(found["none"], found["fp8"], strict=True):
        assert both.mean() < 0.4 * alone.mean() and alone.mean() > 0.05


@pytest.mark.parametrize(
    ("quantise", "quantization", "message"),
    [
        ("fp8", None, "started with --quantization fp8_per_block, but .* has no quantization"),
        ("fp8", "mxfp8", "started with --quantization fp8_per_block, but .* has mxfp8"),
        ("none", "fp8_per_block", "started without --quantization, but .* has fp8_per_block"),
    ],
)
def test_a_running_server_must_have_the_flag(
    model: Path, tmp_path: Path, quantise: str, quantization: str | None, message: str
) -> None:
    with (
        FakeVllm(tmp_path, quantization=quantization) as server,
        pytest.raises(ValueError, match=message),
    ):
        asyncio.run(attached(model, server.url, quantise).start())


def test_an_sglang_server_that_quantises_is_refused(model: Path) -> None:
    with (
        FakeSglang(quantization="fp8") as server,
        pytest.raises(ValueError, match="without --quantization fp8: SGLang cannot load new"),
    ):
        asyncio.run(SglangEngine(EngineOptions(model, url=server.url)).start())
