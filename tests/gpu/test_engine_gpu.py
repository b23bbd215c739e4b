"""On CUDA the embedded engine samples as on the CPU, with and without CUDA graphs."""

from pathlib import Path

import pytest
import torch

from unstale.engines.embedded.batcher import Batcher, FinishedReply, SampleRequest
from unstale.engines.embedded.decoder import Qwen3Runner
from unstale.engines.embedded.worker import build_runner
from unstale.testing import tiny_policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
SLOTS = {"max_slots": 8, "max_context": 512}
EPISODES = 6


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
    assert isinstance(with_graphs.runner, Qwen3Runner) and len(with_graphs.runner._graphs) > 0
    monkeypatch.setattr("unstale.engines.embedded.graphs._MAX_GRAPHS", 0)
    without = _batcher(folder, "cuda", dtype=dtype)
    assert _live(without) == first
    assert isinstance(without.runner, Qwen3Runner) and len(without.runner._graphs) == 0


def test_beyond_their_number_the_graph_longest_unused_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _live(_batcher(folder, "cuda"))
    monkeypatch.setattr("unstale.engines.embedded.graphs._MAX_GRAPHS", 2)
    few = _batcher(folder, "cuda")
    assert _live(few) == first
    assert isinstance(few.runner, Qwen3Runner) and len(few.runner._graphs) == 2


def test_a_load_is_seen_by_graphs(folder: Path) -> None:
    batcher = _batcher(folder, "cuda")
    first = _live(batcher)
    with torch.inference_mode():
        batcher.load({name: tensor * 1.1 for name, tensor in tiny_policy().weights().items()})
    assert _live(batcher) != first
    with torch.inference_mode():
        batcher.load(tiny_policy().weights())
    assert _live(batcher) == first
