"""Test what the linter says of routing replay: it warns without, and refuses what cannot work."""

from pathlib import Path

import pytest

from tests.lint.test_lint import configured
from unstale.config.options import override
from unstale.lint import check
from unstale.testing import tiny_policy

REPLAY = "--trainer.routing_replay true"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("moe")
    tiny_policy(experts=8).save(folder)
    return f"--model {folder}"


def test_an_exact_route_of_an_moe_without_replay_is_warned_of(moe: str) -> None:
    warnings = [str(finding) for finding in check(configured(moe)).warnings]
    (warning,) = [each for each in warnings if "without routing replay" in each]
    assert warning.endswith("Fix: --trainer.routing_replay true")
    inexact = check(configured(f"{moe} --old_logps.route ewma_prox"))
    for verdict in (check(configured(f"{moe} {REPLAY}")), inexact):
        assert not any("routing replay" in each.wrong for each in verdict.warnings)


def test_replay_of_a_dense_policy_is_refused() -> None:
    (refusal,) = check(configured(REPLAY)).refusals
    assert refusal.wrong == "routing replay of a dense policy"
    assert refusal.fix == "--trainer.routing_replay false"


@pytest.mark.parametrize("flag", ["--no-enable-prefix-caching", "--pipeline-parallel-size=2"])
def test_servers_that_would_record_no_routes_are_refused(moe: str, flag: str) -> None:
    vllm = f"{moe} {REPLAY} --engine.backend vllm"
    (refusal,) = check(configured(f"{vllm} --engine.args={flag}")).refusals
    assert flag.partition("=")[0] in refusal.wrong
    assert not check(configured(f"{vllm} --engine.args=--max-num-seqs=4")).refusals


def test_adapters_of_an_moe_are_refused_before_the_model_is_loaded(moe: str) -> None:
    lora = "--trainer.lora_rank 4 --trainer.lora_alpha 8 --engine.adapters unmerged"
    config = configured(f"{moe} {lora}")
    (refusal,) = check(config).refusals
    assert refusal.wrong == "trainer.lora_rank 4 with a model of 8 experts in a layer"
    fixed = override(config, refusal.fixes[0])
    assert not fixed.trainer.lora_rank and not check(fixed).refusals
