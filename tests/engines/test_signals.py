"""Signals of replies: entropy and the two most probable tokens of each token's distribution."""

import numpy as np
import pytest
import torch

from unstale.engines import SamplingParams, check_request
from unstale.engines.embedded.sampling import Sampler
from unstale.signals import Signals


def test_signals_are_those_of_the_distribution_at_the_temperature_of_sampling() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -torch.inf], [0.0, 0.0, 0.0, 0.0]])
    found = Sampler().measure(logits, np.array([0.5, 0.0], np.float32))
    p = np.exp([4.0, 0.0, 2.0]) / np.exp([4.0, 0.0, 2.0]).sum()
    assert found.entropy == pytest.approx([-(p * np.log(p)).sum(), np.log(4)], rel=1e-6)
    assert found.likeliest[0].tolist() == [0, 2]
    assert found.logp[0] == pytest.approx(np.log(p[[0, 2]]), rel=1e-6)
    again = Signals.frombuffer(Signals.join([found.at(slice(1)), found.at(slice(1, 2))]).tobytes())
    assert again.tobytes() == found.tobytes()


def test_a_bias_of_logits_is_part_of_the_distribution() -> None:
    found = Sampler([(1, -1e9)]).measure(torch.zeros(1, 3), np.ones(1, np.float32))
    assert found.entropy == pytest.approx([np.log(2)]) and set(found.likeliest[0]) == {0, 2}


def test_an_engine_without_signals_refuses_them() -> None:
    with pytest.raises(ValueError, match="returns no signals"):
        check_request([1], SamplingParams(4, (), signals=True))


def test_bytes_that_are_no_signals_are_refused() -> None:
    with pytest.raises(ValueError, match="21 bytes are no signals, which have 20 a token"):
        Signals.frombuffer(bytes(21))
