"""Test a decoding step in one call of C, and sampling in C.

The logits of a sequence have the same bits whatever other sequences are in the step, and with any
number of threads. Every width of registers computes the same model. The inputs of layers are
rounded to the bits that the trainer rounds them to. Sampling in C draws the tokens that `draw`
draws, from the distribution that it reports.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engines.test_embedded import _model, _text, _weights
from unstale.engines.embedded import decoder
from unstale.engines.embedded.decoder import Qwen3Runner
from unstale.engines.embedded.kernels import Kernels
from unstale.engines.embedded.runner import DTYPES, Chunk, Step
from unstale.engines.embedded.sampling import Sampler, draw, uniforms
from unstale.model.quantisation import FORMATS

pytestmark = pytest.mark.skipif(
    not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")), reason="no C compiler"
)
OPENING = _text(70, seed=1)
"""More than a page, so that sequences with this opening share a page."""


def _runner(folder: Path, kind: str, dtype: str, quantise: str = "none") -> Qwen3Runner:
    model = _model(kind)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    runner = Qwen3Runner(
        config, dtype=DTYPES[dtype], max_slots=24, max_context=256, quantise=quantise
    )
    runner.load(_weights(model))
    return runner


def _logits(runner: Qwen3Runner, num_others: int) -> Tensor:
    """Return the logits of one sequence after its prompt and two more tokens.

    The other sequences of the step have its opening or another one, and run before it and after it.
    """
    texts = [[*OPENING, *_text(5 * number, seed=number)] for number in range(1, num_others, 2)]
    texts += [_text(9 * number, seed=number) for number in range(2, num_others + 1, 2)]
    texts.insert(num_others // 2, [*OPENING, *_text(21, seed=77)])
    slots = np.random.default_rng(num_others).permutation(len(texts))
    first = slots[0]
    found = []
    with torch.inference_mode():
        for slot in slots.tolist():
            if slot != first and texts[slot][:70] == texts[first][:70]:
                runner.copy_prefix(int(first), slot, 64)
            start = 64 if slot != first and texts[slot][:70] == texts[first][:70] else 0
            chunk = Chunk(slot, start, len(texts[slot]))
            step = Step(
                rows=torch.empty(0, dtype=torch.int64),
                chunks=(chunk,),
                tokens=torch.tensor(texts[slot][start:]),
                positions=torch.arange(start, len(texts[slot])),
            )
            found.append((slot, runner.forward(step)[0]))
        for number in range(2):
            rows = torch.arange(len(texts))
            at = torch.tensor([len(text) + number for text in texts])
            step = Step(rows=rows, chunks=(), tokens=torch.full_like(at, 3), positions=at)
            logits = runner.forward(step)
            found += [(slot, logits[slot]) for slot in range(len(texts))]
    return torch.stack([each for slot, each in found if slot == num_others // 2])


@pytest.mark.parametrize("quantise", ["none", "fp8", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_bits_in_every_batch(
    dtype: str, quantise: str, tmp_path: Path
) -> None:
    alone = _logits(_runner(tmp_path, "qwen3, tied", dtype, quantise), 0)
    for num_others in (1, 6, 21):
        beside = _logits(_runner(tmp_path, "qwen3, tied", dtype, quantise), num_others)
        assert torch.equal(beside, alone)


@pytest.mark.parametrize("width", [40, 128, 200, 384])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantise", ["fp8", "int8"])
def test_inputs_of_layers_are_rounded_to_the_bits_of_the_trainer(
    quantise: str, dtype: str, width: int, tmp_path: Path
) -> None:
    kernels = _runner(tmp_path, "qwen3, tied", dtype, quantise)._kernels
    assert kernels is not None
    random = torch.Generator().manual_seed(width)
    sizes = torch.randn(500, 1, generator=random).exp() ** 3
    inputs = (sizes * torch.randn(500, width, generator=random)).to(DTYPES[dtype])
    inputs[3] = 0
    inputs[4, 5:] = 1e-30
    rounded = inputs.float().clone()
    for row in rounded:
        kernels.round_input(row, width)
    assert torch.equal(rounded, FORMATS[quantise].activations(inputs).float())
    assert not torch.equal(rounded, inputs.float())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantise", ["none", "fp8", "int8"])
def test_threads_change_no_bits(quantise: str, dtype: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = _logits(_runner(tmp_path, "qwen3, untied", dtype, quantise), 7)
        torch.set_num_threads(3)
        three = _logits(_runner(tmp_path, "qwen3, untied", dtype, quantise), 7)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [4, 16])
def test_registers_of_every_width_compute_the_same(
    width: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = _logits(_runner(tmp_path, "qwen3, tied", dtype), 5)
    monkeypatch.setattr(decoder, "Kernels", partial(Kernels, NATIVE=width))
    changed = _logits(_runner(tmp_path, "qwen3, tied", dtype), 5)
    torch.testing.assert_close(
        changed, usual, atol={"float32": 1e-5, "bfloat16": 0.1}[dtype], rtol=0
    )


@pytest.mark.parametrize("vocab", [3, 64, 65, 5000])
def test_sampling_in_c_draws_what_torch_draws(vocab: int) -> None:
    """Also with probabilities of zero, at any temperature, and for the most probable token."""
    random = np.random.default_rng(vocab)
    logits = torch.from_numpy(3 * random.standard_normal((300, vocab))).float()
    logits[::7, vocab // 2 :] = -torch.inf
    temperature = random.choice([0, 0.5, 1, 1.3], 300).astype(np.float32)
    seeds = random.integers(0, 2**64, 300, dtype=np.uint64)
    positions = random.integers(0, 4096, 300)
    sampler = Sampler()
    assert sampler.compiled
    tokens, logp, _ = sampler(logits, temperature, seeds, positions)
    noise = torch.from_numpy(uniforms(seeds, positions))
    wanted, _ = draw(logits.double(), torch.from_numpy(temperature), noise)
    assert (tokens == wanted.numpy()).all()
    heat = torch.from_numpy(temperature).double()[:, None]
    exact = (logits.double() / heat.masked_fill(heat == 0, 1)).log_softmax(-1)
    exact = exact.gather(1, wanted[:, None])[:, 0].masked_fill(heat[:, 0] == 0, 0)
    assert np.abs(logp - exact.numpy()).max() < 2e-6


@pytest.mark.parametrize("wrong", [[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
def test_sampling_in_c_refuses_logits_that_are_not_finite(wrong: list[float]) -> None:
    inputs = np.ones(2, np.float32), np.zeros(2, np.uint64), np.zeros(2, np.int64)
    with pytest.raises(FloatingPointError, match="not finite"):
        Sampler()(torch.tensor([[1.0, 2.0], wrong]), *inputs)
