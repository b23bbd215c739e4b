"""Promise: `estr` keeps a token up to a log-ratio that grows with the engine's own entropy.

The entropies come from the engine with the tokens, through every cut and join of a batch.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.signals import at_sampled, made, packed
from unstale.config import ConfigError, RunConfig
from unstale.config.options import override
from unstale.model.whole_weights import WholeWeights
from unstale.records import (
    Batch,
    ContextPiece,
    Sampled,
    ScoredTrajectory,
    Task,
    Trajectory,
    collate,
    concatenate,
)
from unstale.research.techniques.estr import Estr, EstrConfig
from unstale.signals import Signals
from unstale.weights.recording import Recorded, RecordedBatch, Recording

NONE = RunConfig(recipe="mine")
CHOSEN = {"techniques": "estr", "estr.tau": 0.04}


@pytest.mark.parametrize(
    ("of", "tau", "expected"),
    [
        # Limits of |log r| with tau 0.04: 0.02, 0.02, 0.201, 0.201, 0.4005.
        ("whole", 0.04, "10101"),
        ("whole", 0.16, "11111"),
        ("staleness", 0.04, "11111"),
        ("discrepancy", 0.04, "10100"),
    ],
)
def test_the_limit_grows_with_the_entropy(of: str, tau: float, expected: str) -> None:
    batch = packed(1, 5)
    entropy = at_sampled(batch, torch.tensor([0.0, 0.0, 1.0, 1.0, 4.0]))
    entropy[0] = torch.nan  # of no token that was sampled
    batch = replace(batch, engine_entropy=entropy.float())
    logp = at_sampled(batch, torch.tensor([0.019, -0.021, 0.2, -0.21, 0.4]))
    old_logp = at_sampled(batch, torch.tensor([0.019, -0.021, 0.2, -0.21, 0.41]))
    options = EstrConfig(tau=tau, of=of)  # type: ignore[arg-type]
    out = Estr(options).shape(batch, made(batch, logp=logp, old_logp=old_logp))
    assert "".join(str(int(each)) for each in out.keep[batch.sampled]) == expected
    assert torch.equal(out.advantage, batch.advantage) and not out.keep[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"estr.tau": 0}, r"estr.tau must be above 0, got 0: no value of the paper is known"),
        ({"techniques": "estr replay"}, "estr is not built with replay: stored groups have no"),
        ({"engine.top_p": 0.9}, "estr with these options needs sampling from the whole vocabulary"),
        ({"engine.backend": "vllm"}, "estr with these options needs engine.backend = embedded"),
        (
            {"estr.of": "discrepancy", "old_logps.route": "rollout"},
            "estr.of = discrepancy masks nothing",
        ),
    ],
)
def test_what_it_needs_is_refused_without(values: dict[str, object], message: str) -> None:
    assert override(NONE, CHOSEN).technique_options
    with pytest.raises(ConfigError, match=message):
        override(NONE, {**CHOSEN, **values})


def sampled(*entropies: float) -> Sampled:
    rows = len(entropies)
    signals = Signals(
        np.array(entropies, np.float32), np.zeros((rows, 2), np.int32), np.zeros((rows, 2), "f4")
    )
    return Sampled((7,) * rows, (-0.5,) * rows, 0, signals=signals)


def batch(episode: int, *pieces: ContextPiece | Sampled) -> Batch:
    item = Trajectory(pieces, {"reward": 1.0}, "done", Task("toy", "train", 3), 1, episode=episode)
    return collate([ScoredTrajectory(item, (1.0,))])


def test_entropies_stay_with_their_tokens(tmp_path: Path) -> None:
    nan = float("nan")
    one = batch(0, ContextPiece((8, 9)), sampled(0.5, 2.0), ContextPiece((5,)), sampled(1.5))
    two = batch(1, ContextPiece((8,)), sampled(3.0))
    whole = concatenate([one, two])
    expected = np.array([nan, nan, 0.5, 2.0, nan, 1.5, nan, 3.0], np.float32)
    np.testing.assert_array_equal(whole.engine_entropy, expected)
    np.testing.assert_array_equal(whole.select([1])[0].engine_entropy, expected[6:])
    plain = batch(2, ContextPiece((8,)), Sampled((7,), (-0.5,), 0))
    assert plain.engine_entropy is None and concatenate([one, plain]).engine_entropy is None

    recording = Recording(tmp_path)
    for version in (0, 1):
        recording.version(version, WholeWeights({}, lambda name: torch.zeros(0)))
    recording.batch(RecordedBatch(1, 1, whole))
    recording.batch(RecordedBatch(2, 1, plain))
    again, without = (Recorded(tmp_path).batch(number).batch for number in (1, 2))
    np.testing.assert_array_equal(again.engine_entropy, expected)
    assert without.engine_entropy is None
