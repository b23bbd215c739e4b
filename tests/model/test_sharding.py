"""Test policies that are divided among ranks."""

from pathlib import Path

import pytest
import torch

from tests.support.ranks import run_ranks
from unstale.model.expert_products import EXPERTS
from unstale.model.peers import RankGroup
from unstale.model.policy import Policy
from unstale.records import collate
from unstale.testing import episode, tiny_policy


def _scores(peers: RankGroup, folder: Path, dtype: str) -> list[torch.Tensor]:
    policy = Policy.load(folder, dtype=dtype, peers=peers)
    batch = collate([episode(i, [20, (5 + i, 0), 4, (3, 0)]) for i in range(5)])
    return policy.score(batch, batch.sampled, temperature=0.7, max_tokens_per_microbatch=40).logp


@pytest.mark.costly
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_log_probabilities_are_those_of_one_process(count: int, dtype: str, tmp_path: Path) -> None:
    tiny_policy(seed=3).save(tmp_path)
    whole = _scores(RankGroup(), tmp_path, dtype)
    for scores in run_ranks(count, _scores, tmp_path, dtype):
        assert torch.equal(scores, whole)


def _expert_options(peers: RankGroup, folder: Path) -> tuple[list[str], bool]:
    """Return how policy and twin compute experts, and whether packing changes a log-probability."""
    policy = Policy.load(folder, peers=peers, independent_rows=True)
    models = (policy.model, policy.twin().model)
    batch = collate([episode(i, [20, (5 + i, 0), 4, (3, 0)]) for i in range(5)])
    apart, together = (
        policy.score(batch, batch.sampled, temperature=1.0, max_tokens_per_microbatch=size).logp
        for size in (40, 400)
    )
    return [str(m.config._experts_implementation) for m in models], torch.equal(apart, together)


def test_a_sharded_moe_model_computes_rows_independently(tmp_path: Path) -> None:
    tiny_policy(seed=3, experts=4).save(tmp_path)
    for implementations, same in run_ranks(2, _expert_options, tmp_path):
        assert implementations == [EXPERTS, EXPERTS] and same
