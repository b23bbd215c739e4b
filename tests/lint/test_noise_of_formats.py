"""Test what the linter says of engines that round to a format of few values (`engine.quantise`).

The table of discrepancies is that of the docs. It warns of thresholds inside the noise of a format,
of a route that puts this noise into S, and of rounding in the trainer that has little effect.
"""

import re
from pathlib import Path

import pytest

from tests.lint.test_lint import configured
from unstale.lint import Finding, check
from unstale.lint.noise import BFLOAT16_D, QUANTISED_D

ROOT = Path(__file__).parents[2]


def warnings(options: str) -> list[Finding]:
    return list(check(configured(options)).warnings)


def the_warning(options: str, text: str) -> Finding:
    (found,) = [each for each in warnings(options) if text in each.wrong]
    return found


def test_the_noise_of_formats_is_the_table_of_the_docs() -> None:
    page = (ROOT / "docs" / "quantisation.md").read_text()
    row = r"^\| (`?\w+`?) \| (bfloat16|float32) \| ([\d.]+) \| ([\d.]*) ?\|$"
    found = {
        (kind.strip("`"), dtype): (float(alone), float(both or 0))
        for kind, dtype, alone, both in re.findall(row, page, re.MULTILINE)
    }
    assert found == QUANTISED_D | {("none", "bfloat16"): (BFLOAT16_D, 0.0)}


@pytest.mark.parametrize(
    ("options", "is_narrow"),
    [
        ("--engine.quantise fp8", False),
        ("--engine.quantise int4", False),
        ("--engine.quantise int4 --correction.high 1.2", True),
        ("--correction.high 1.2", False),
        ("--engine.quantise int4 --trainer.quantise int4 --correction.high 1.2", False),
        ("--engine.quantise fp8 --correction.low 0.95", True),
        ("--engine.quantise fp8 --trainer.quantise fp8 --correction.low 0.95", True),
        ("--engine.quantise fp8 --correction.low 0.85", False),
    ],
)
def test_a_band_inside_the_noise_of_the_format_is_warned_of(options: str, is_narrow: bool) -> None:
    found = [each for each in warnings(options) if "narrower than the noise" in each.wrong]
    assert bool(found) == is_narrow
    if found:
        assert "rounding to" in found[0].why
        assert "--correction.low 0.5 --correction.high 2" in found[0].fix


def test_a_veto_inside_the_noise_of_the_format_is_warned_of_or_refused() -> None:
    veto = "--engine.quantise int4 --correction.token_veto_threshold"
    assert not [each for each in warnings(f"{veto} 0.01") if "veto" in each.wrong]
    mild = the_warning(f"{veto} 0.2", "drops sequences for mere noise")
    assert mild.fix.startswith("--correction.token_veto_threshold 0.01, or")
    assert "--trainer.quantise none --engine.quantise none" in mild.fix
    (severe,) = check(configured(f"{veto} 0.9")).refusals
    assert "drops nearly every sequence" in severe.wrong
    plain = "--correction.token_veto_threshold 0.9"
    assert not check(configured(plain)).refusals


def test_a_route_that_puts_the_format_into_the_clip_is_warned_of() -> None:
    rollout = "--old_logps.route rollout --correction.mode none"
    found = the_warning(f"{rollout} --engine.quantise fp8", "contains the rounding of the engine")
    for fix in ("--old_logps.route snapshot_old", "--trainer.quantise fp8"):
        assert fix in found.fix
    for options in (
        rollout,
        f"{rollout} --engine.quantise fp8 --trainer.quantise fp8",
        f"{rollout} --engine.quantise fp8 --old_logps.baseline true",
        "--engine.quantise fp8",
    ):
        assert not [each for each in warnings(options) if "contains the rounding" in each.wrong]


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4", "nvfp4", "mxfp4"])
def test_rounding_in_the_trainer_without_effect_is_warned_of(kind: str) -> None:
    both = f"--engine.quantise {kind} --trainer.quantise {kind} --engine.dtype"
    found = [each for each in warnings(f"{both} bfloat16") if "removes little" in each.wrong]
    assert bool(found) == (kind in ("fp8", "int8"))
    for each in found:
        assert each.fix == "--engine.dtype float32, or --trainer.quantise none"
    assert not [each for each in warnings(f"{both} float32") if "removes little" in each.wrong]


def test_the_page_says_that_engine_and_trainer_round() -> None:
    facts = check(configured("--engine.quantise int4 --trainer.quantise int4")).facts
    assert "rounded to int4" in facts["mu"] and "rounded to int4" in facts["pi"]
