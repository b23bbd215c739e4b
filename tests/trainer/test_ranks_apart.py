"""Test ranks that train a model whose sequences cannot be packed, as one process does.

Old log-probabilities are exact, bit for bit. Dividing the tokens of a sequence is refused.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.trainer.test_ranks import BASE, SMALL, Outcome, learn
from unstale.config import ConfigError, OldLogpsConfig
from unstale.model.peers import SINGLE_PROCESS, RankGroup
from unstale.model.policy import Policy
from unstale.testing.architectures import ARCHITECTURES, save_architecture

KINDS = ("Qwen3.5", "Gemma 2", "Mamba")
"""Linear attention, soft caps on attention and logits, and a recurrent state."""


OWN = replace(SMALL, old_logps=OldLogpsConfig(route="snapshot_old", placement="own"))


def learn_apart(peers: RankGroup, folder: Path) -> dict[str, Outcome]:
    configs = dict.fromkeys(KINDS, BASE) | {"Mamba": OWN}
    return {name: learn(peers, folder / name, config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apart")
    for name in KINDS:
        save_architecture(ARCHITECTURES[name], path / name, planted=False)
    return path


@cache
def outcomes(folder: Path) -> list[dict[str, Outcome]]:
    return [learn_apart(SINGLE_PROCESS, folder), *run_ranks(2, learn_apart, folder)]


@pytest.mark.costly(cases=0)
@pytest.mark.parametrize("name", KINDS)
def test_ranks_learn_what_one_process_learns(name: str, folder: Path) -> None:
    one, *ranks = (found[name] for found in outcomes(folder))
    assert one.moved > 1e-4 and all(one.exact)
    for rank in ranks:
        error = max((one.weights[n] - t).abs().max().item() for n, t in rank.weights.items())
        assert error <= 1e-6
        assert all(rank.exact) and len(rank.exact) == len(one.exact)
    for name in ("trainer/grad_norm", "objective/loss", "trainer/action_tokens"):
        values = [[row[name] for row in each.metrics] for each in (one, ranks[0])]
        assert values[1] == pytest.approx(values[0], rel=1e-5, abs=1e-6)


def load_in_context(peers: RankGroup, folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        Policy.load(folder, dtype="float32", peers=peers.in_context_groups(2))
    return str(refused.value)


def load_olmo(peers: RankGroup, folder: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        Policy.load(folder, dtype="float32", peers=peers)
    return str(refused.value)


def test_a_model_whose_weights_would_be_divided_wrongly_is_refused(tmp_path: Path) -> None:
    save_architecture(ARCHITECTURES["OLMo-hybrid"], tmp_path, planted=False)
    for told in run_ranks(2, load_olmo, tmp_path):
        assert "linear_attn.conv1d.weight" in told and "wrongly among trainer ranks" in told


def test_a_sequence_of_such_a_model_is_not_divided(folder: Path) -> None:
    for told in run_ranks(2, load_in_context, folder / "Mamba"):
        assert "cluster.context must be 1, got 2" in told
