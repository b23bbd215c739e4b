"""Asynchronous runs of a model with linear attention, whose sequences cannot be packed.

Old log-probabilities of every token are exact for both exact routes, and engine and trainer agree.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.config import OldLogpsConfig, RunConfig

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_tiny(folder)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder


def configure(model: Path, runs: Path, **changes: Any) -> RunConfig:
    return replace(tiny_run(model, runs, max_steps=5), **changes)


@pytest.mark.parametrize("route", ["snapshot_old", pytest.param("eager", marks=pytest.mark.costly)])
def test_every_token_is_exact_and_engine_and_trainer_agree(
    route: str, model: Path, tmp_path: Path
) -> None:
    config = configure(model, tmp_path, old_logps=OldLogpsConfig(route=route))
    rows = session.train(config, console=quiet()).metrics
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) == 0.0
    assert max(row["correction/log_d_abs_p99"] for row in rows) < 1e-4
    assert min(row["trainer/grad_norm"] for row in rows) > 0, "every version has other weights"
