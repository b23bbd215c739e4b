"""On CUDA the embedded engine samples as on the CPU, with and without CUDA graphs.

It reads weights in the memory of this process. A checksum has the same value on both devices.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.model.test_fused import MODELS
from unstale.engines import SamplingParams
from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.decoder import Qwen3Runner
from unstale.engines.embedded.engine import EmbeddedEngine
from unstale.engines.embedded.worker import build_runner
from unstale.engines.registry import EngineOptions
from unstale.testing import tiny_policy
from unstale.weights.bits import checksum, has_checksum
from unstale.weights.store import VersionStore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SLOTS = {"max_slots": 16, "max_context": 512}
EPISODES = 10
"""More than the eight to which the number of rows is rounded, so that two graphs are recorded."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_policy().save(path)
    return path


def _batcher(folder: Path, device: str, *, dtype: str = "float32") -> Batcher:
    batcher = Batcher(build_runner(folder, dtype=dtype, device=device, **SLOTS), **SLOTS)
    with torch.inference_mode():
        batcher.load(tiny_policy().weights())
    return batcher


def _live(batcher: Batcher) -> list[list[FinishedReply]]:
    """Run episodes of three turns and unequal lengths that share a prompt."""
    contexts = {number: [*range(5, 45), *range(5, 6 + 9 * number)] for number in range(EPISODES)}
    found: list[list[FinishedReply]] = []
    with torch.inference_mode():
        for turn in range(3):
            for number, context in contexts.items():
                batcher.submit(
                    SampleRequest(number, tuple(context), 10 + 7 * number, (), 1.0, seed=number)
                )
            replies: dict[int, FinishedReply] = {}
            while batcher.has_work:
                replies |= {reply.id: reply for reply in batcher.step()}
            found.append([replies[number] for number in range(EPISODES)])
            for number, reply in replies.items():
                contexts[number] += [*reply.tokens, *range(7, 8 + turn + 11 * number)]
    return found


def test_an_engine_process_reads_the_weights_on_this_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a load the weights may change, and the engine keeps those that it read."""
    policy = tiny_policy()
    on_gpu = {name: tensor.cuda() for name, tensor in policy.weights().items()}
    params = SamplingParams(max_tokens=40, stop_tokens=(), seed=3)
    monkeypatch.setattr("unstale.engines.embedded.engine._pack_update", None)  # no bytes are sent

    async def run() -> list[int]:
        engine = EmbeddedEngine(EngineOptions(folder, dtype="float32", max_context=128))
        await engine.start()
        try:
            for version in range(3):  # other weights, and then those of the policy
                if version == 2:
                    for name, tensor in policy.weights().items():
                        on_gpu[name].copy_(tensor)
                await engine.load(on_gpu, version)
                for tensor in on_gpu.values():
                    tensor.zero_()
                torch.cuda.synchronize()
            await engine.resume()
            return list((await engine.sample(range(5, 45), params)).piece.tokens)
        finally:
            await engine.close()

    found = asyncio.run(run())
    batcher = _batcher(folder, "cuda")
    with torch.inference_mode():
        batcher.submit(SampleRequest(0, tuple(range(5, 45)), 40, (), 1.0, seed=3))
        (reply,) = [each for _ in range(60) if batcher.has_work for each in batcher.step()]
    assert found == list(reply.tokens) and len(found) == 40


def test_a_model_that_is_run_on_the_cpu_takes_weights_from_the_gpu(tmp_path: Path) -> None:
    model = MODELS["Llama, with biases"]()
    model.save_pretrained(tmp_path)
    logits = []
    for device in ("cpu", "cuda"):
        batcher = Batcher(build_runner(tmp_path, dtype="float32", **SLOTS), **SLOTS)
        weights = {name: tensor.to(device) for name, tensor in model.state_dict().items()}
        with torch.inference_mode():
            batcher.load(weights)
            batcher.submit(SampleRequest(0, tuple(range(5, 45)), 20, (), 1.0, seed=3))
            replies = [each for _ in range(40) if batcher.has_work for each in batcher.step()]
        logits.append([(reply.tokens, reply.behavior_logp) for reply in replies])
    assert logits[0] == logits[1] and logits[0]


def test_a_checksum_is_the_same_on_both_devices() -> None:
    weights = {"a": torch.arange(1003).to(torch.int16), "b": torch.randn(7, 5).bfloat16()}
    on_gpu = {name: tensor.cuda() for name, tensor in weights.items()}
    found = checksum(on_gpu)
    assert found.startswith("sum64:") and has_checksum(weights, found)
    assert has_checksum(on_gpu, checksum(weights))
    on_gpu["a"][1002] += 1
    assert checksum(on_gpu) != found


def test_a_store_on_the_gpu_has_the_versions_of_one_on_the_cpu() -> None:
    noise = torch.Generator().manual_seed(0)
    version = {"a": torch.randn(300, 1000, generator=noise).bfloat16(), "b": torch.randn(7)}
    version |= {str(i): torch.randn(40 + i, generator=noise).bfloat16() for i in range(20)}
    on_cpu, on_gpu = VersionStore(), VersionStore({k: v.cuda() for k, v in version.items()})
    kept = []
    for number, share in enumerate((0.0, 0.01, 0.5, 1.0)):
        for tensor in version.values():
            changed = torch.rand(tensor.shape, generator=noise) < share
            tensor.copy_(torch.where(changed, tensor * 1.01, tensor))
        kept.append({name: tensor.clone() for name, tensor in version.items()})
        on_cpu.put(number, version)
        on_gpu.put(number, {name: tensor.cuda() for name, tensor in version.items()})
        if number:
            assert on_gpu.delta(number).tensors == on_cpu.delta(number).tensors
    for number in (0, 2, 1, 3):
        found = on_gpu.tensors(number)
        assert all(torch.equal(found[name].cpu(), kept[number][name]) for name in kept[number])


def test_cuda_says_what_the_processor_says(folder: Path) -> None:
    for mine, theirs in zip(
        _live(_batcher(folder, "cuda")), _live(_batcher(folder, "cpu")), strict=True
    ):
        for on_cuda, on_cpu in zip(mine, theirs, strict=True):
            assert on_cuda.tokens == on_cpu.tokens
            assert on_cuda.behavior_logp == pytest.approx(on_cpu.behavior_logp, abs=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_say_what_is_said_without_them(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_graphs = _batcher(folder, "cuda", dtype=dtype)
    first = _live(with_graphs)
    assert isinstance(with_graphs.runner, Qwen3Runner) and len(with_graphs.runner._graphs) > 1
    monkeypatch.setattr("unstale.engines.embedded.graphs._MAX_GRAPHS", 0)
    without = _batcher(folder, "cuda", dtype=dtype)
    assert _live(without) == first
    assert isinstance(without.runner, Qwen3Runner) and len(without.runner._graphs) == 0


def test_beyond_their_number_the_graph_longest_unused_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _live(_batcher(folder, "cuda"))
    monkeypatch.setattr("unstale.engines.embedded.graphs._MAX_GRAPHS", 1)
    few = _batcher(folder, "cuda")
    assert _live(few) == first
    assert isinstance(few.runner, Qwen3Runner) and len(few.runner._graphs) == 1


def test_a_load_is_seen_by_graphs(folder: Path) -> None:
    batcher = _batcher(folder, "cuda")
    first = _live(batcher)
    with torch.inference_mode():
        batcher.load({name: tensor * 1.1 for name, tensor in tiny_policy().weights().items()})
    assert _live(batcher) != first
    with torch.inference_mode():
        batcher.load(tiny_policy().weights())
    assert _live(batcher) == first
