"""The bounds of a step are those of its arithmetic and its memory traffic, by hand."""

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.growth import PROMPT, Round, Work, table
from benchmarks.train import SIBLINGS, Shape, make_model

SMALL = Work(Shape(layers=2, hidden=8, heads=2, vocab=16), prompts=3, tokens=5)


def test_the_weights_that_are_counted_are_the_model_s(tmp_path: Path) -> None:
    make_model(tmp_path, SMALL.shape)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    found = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert SMALL.body + SMALL.head == found


def test_the_limits_follow_from_arithmetic_and_traffic() -> None:
    # Queries and outputs have 64 weights, keys and values 32, each matrix of the MLP 192.
    assert SMALL.body == 2 * (2 * 64 + 2 * 32 + 3 * 192) and SMALL.head == 128
    assert SMALL.sampled == 3 * SIBLINGS * 5 == 120 and SMALL.trained == 120 + 3 * PROMPT
    weights = 1536 + 128
    products = 6 * (1536 * 144 + 128 * 120)
    assert SMALL.training_limit(1e3, 1e2) == pytest.approx(products / 1e3 + 28 * weights / 1e2)
    prefill = 2 * 1536 * 24
    fast_memory, slow_memory = SMALL.sampling_limit(1.0, 1e9), SMALL.sampling_limit(1e9, 1.0)
    assert fast_memory == pytest.approx(prefill + 5 * 2 * weights * 24)
    assert slow_memory == pytest.approx(5 * 4 * weights, rel=1e-3)


def test_the_table_has_the_median_shares_of_each_part() -> None:
    bounds = (1.0, 2.0, 2.0, 4.0, {})
    rounds = [
        Round(10.0, 4.0, 5.0, 12.0, 4.0, 5.0, *bounds),
        Round(20.0, 8.0, 5.0, 24.0, 8.0, 5.0, *bounds),
    ]
    sampling, training, whole = table("small", SMALL, rounds)
    assert sampling == (
        "| small | sampling | 6 (4 to 8) | 20 | 6 (4 to 8) | 19% (12% to 25%) | 38% (25% to 50%) |"
    )
    assert "| 5 (5 to 5) | 29 | 5 (5 to 5) | 40% (40% to 40%) | 80% (80% to 80%) |" in training
    assert whole == (
        "| small | whole step | 15 (10 to 20) | 8 | 18 (12 to 24) | 19% (12% to 25%) | "
        "38% (25% to 50%) |"
    )
