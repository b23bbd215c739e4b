"""Runs with `engine.bitwise`: D is exactly 1, and the trainer checks it at every step.

* In an asynchronous run with weight updates in the middle of replies, every token of every step is
  compared, and no bit differs. `rollout` then trains as an exact route does.
* A token with another value ends the run. The error names episode, token and both values.
* Options with which the two cannot be equal are refused by name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.test_run import quiet
from tests.support.tiny_runs import save_tiny, tiny_run
from unstale.cli import session
from unstale.cli.failures import RunFailed
from unstale.config import (
    AuditConfig,
    ConfigError,
    CorrectionConfig,
    EngineConfig,
    OldLogpsConfig,
    RunConfig,
    ScheduleConfig,
    TrainerConfig,
)
from unstale.lint import semantics
from unstale.model import kernels
from unstale.model.policy import Policy
from unstale.trainer.bitwise import COMPARED

pytestmark = pytest.mark.usefixtures("forked_children")

ENGINE = EngineConfig(
    dtype="float32", bitwise=True, max_context=256, max_completion_tokens=24, max_running=16
)
ROLLOUT = {
    "old_logps": OldLogpsConfig(route="rollout", baseline=True),
    "correction": CorrectionConfig(mode="none"),
}


@pytest.fixture(autouse=True)
def compiled() -> None:
    if kernels.kernels() is None:
        pytest.skip("no C compiler")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, bitwise=True)
    return folder


def configure(model: Path, runs: Path, **changes: Any) -> RunConfig:
    base = tiny_run(model, runs, max_steps=6, engine=ENGINE)
    return replace(base, **changes)


def in_bfloat16() -> dict[str, Any]:
    return {
        "engine": replace(ENGINE, dtype="bfloat16"),
        "trainer": TrainerConfig(lr=1e-3, dtype="bfloat16"),
    }


def check(rows: list[dict[str, Any]]) -> None:
    assert max(row["schedule/staleness_max"] for row in rows) == 2
    assert max(row["schedule/mixed_version_share"] for row in rows) > 0, "updates within replies"
    assert {row["old_logps/exact_share"] for row in rows} == {1.0}
    assert {row["correction/log_d_abs_mean"] for row in rows} == {0.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) == 0.0
    assert min(row["trainer/grad_norm"] for row in rows) > 0, "every version has other weights"


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("changes", [{}, in_bfloat16()], ids=["float32", "bfloat16"])
def test_every_token_of_an_asynchronous_run_has_the_same_bits(
    model: Path, tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    rows = session.train(configure(model, tmp_path, **changes), console=quiet()).metrics
    check(rows)
    assert all(row[COMPARED] >= row["trainer/tokens_with_gradient"] for row in rows)


def test_rollout_is_exact(model: Path, tmp_path: Path) -> None:
    config = configure(model, tmp_path, **ROLLOUT)
    check(session.train(config, console=quiet()).metrics)
    assert semantics.facts(config)["exact"].startswith("yes, bit for bit")


@pytest.mark.costly
def test_prompts_and_replies_of_different_engines_have_the_same_bits(
    model: Path, tmp_path: Path
) -> None:
    """Caches go from engine to engine, engines change phase, and the trainer checks each token."""
    engine = replace(
        ENGINE,
        processes=3,
        prefill_engines=1,
        prefill_ratio=0.5,
        send_cache=True,
        move_engines=True,
    )
    config = configure(model, tmp_path, engine=engine, deterministic=False)
    rows = session.train(config, console=quiet()).metrics
    assert sum(row["engine/received_tokens"] for row in rows) > 0
    assert {row["correction/log_d_abs_mean"] for row in rows} == {0.0}
    assert max(row["audit/logp_error_abs_mean"] for row in rows) == 0.0
    assert all(row[COMPARED] >= row["trainer/tokens_with_gradient"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [2, 5])
def test_two_hundred_steps_in_two_batch_sizes(
    model: Path, tmp_path: Path, dtype: str, groups: int
) -> None:
    changes = in_bfloat16() if dtype == "bfloat16" else {}
    schedule = ScheduleConfig(max_staleness=2, groups_per_step=groups, group_size=4)
    config = configure(model, tmp_path, max_steps=200, schedule=schedule, **changes)
    rows = session.train(replace(config, deterministic=False), console=quiet()).metrics
    assert len(rows) == 200
    check(rows)


def test_another_value_ends_the_run_with_the_episode_and_both_values(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = Policy.score

    def off_by_one_bit(self: Policy, *args: Any, **options: Any) -> Any:
        found = compute(self, *args, **options)
        at = found.logp.nonzero()[3:4, 0]
        found.logp[at] = torch.nextafter(found.logp[at], torch.tensor(-1e9))
        return found

    monkeypatch.setattr(Policy, "score", off_by_one_bit)
    config = configure(model, tmp_path, audit=AuditConfig(share=0))
    message = (
        r"old_logp is -\d\.\d+ and behavior_logp is -\d\.\d+ at token \d+ of episode \d+, "
        r"sampled and scored by version 0; they must be equal"
    )
    with pytest.raises(RunFailed, match=message):
        session.train(config, console=quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer": TrainerConfig(dtype="bfloat16")}, "engine.dtype = float32 and trainer.dtype"),
        ({"trainer": TrainerConfig(lora_rank=4)}, "needs trainer.lora_rank = 0, got 4"),
        ({"trainer": TrainerConfig(compile=True)}, "needs trainer.compile = false"),
        ({"engine": replace(ENGINE, keep_cache=True)}, "needs engine.keep_cache = false"),
        ({"engine": replace(ENGINE, quantise="int8")}, "needs engine.quantise = none, got int8"),
        (
            {"engine": replace(ENGINE, backend="vllm"), "deterministic": False},
            "needs engine.backend = embedded, got vllm",
        ),
    ],
)
def test_options_with_which_they_cannot_be_equal_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path, tmp_path, **changes)
