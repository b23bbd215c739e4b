"""Test the gauntlet: its page names its models, two of them pass, and what it plants is there."""

from pathlib import Path

import pytest
import torch

from unstale.testing import gauntlet
from unstale.testing.architectures import ARCHITECTURES, MASSIVE_DIMENSION, plant
from unstale.testing.pictures import NAMES as VISION

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks" / "results" / "gauntlet.md"


def test_the_page_names_the_architectures_of_the_gauntlet() -> None:
    cells = [line.split(" | ") for line in gauntlet.table_in(PAGE.read_text("utf-8"))]
    names = [line[0].removeprefix("| ") for line in cells[2:]]
    measured = [name for name in names if "(pretrained)" not in name]
    assert measured == [*ARCHITECTURES, *VISION]
    docs = (ROOT / "docs" / "models.md").read_text("utf-8").partition("| architectures |")[2]
    rows = [row.strip("| ").split(" | ") for row in docs.partition("\n\n")[0].splitlines()[2:]]
    listed = {name: row[:2] for row in rows for name in row[2].split(", ")}
    assert listed == {line[0].removeprefix("| "): line[1:3] for line in cells[2:]}


def test_the_page_has_the_bound_and_no_figure_above_it() -> None:
    page = PAGE.read_text("utf-8")
    assert f"fails with a figure above {gauntlet.MAX_ERROR:g}." in page
    cells = [line.split(" | ")[3:-1] for line in gauntlet.table_in(page)[2:]]
    figures = [float(each) for row in cells for cell in row for each in cell.split(", ")]
    assert len(figures) > 100 and max(figures) <= gauntlet.MAX_ERROR


def test_rows_of_models_that_were_not_run_stay() -> None:
    page = PAGE.read_text("utf-8")
    old = gauntlet.table_in(page)
    changed = "| Qwen2 | x |"
    new = gauntlet.table_in(gauntlet.with_table(page, [*old[:2], changed, "| mine | x |"]))
    assert changed in new and new[-1] == "| mine | x |" and len(new) == len(old) + 1
    assert [line for line in old if line not in new] == [
        line for line in old if line.startswith("| Qwen2 |")
    ]
    assert gauntlet.table_in(gauntlet.with_table(page, ["| other |", "|---|", "| mine |"])) == [
        "| other |",
        "|---|",
        "| mine |",
    ]


@pytest.mark.costly
@pytest.mark.parametrize("name", ["Llama", "Gemma 2"])
def test_an_architecture_ends_as_the_page_says(name: str) -> None:
    row = gauntlet.run_architecture(name, ["bfloat16"])
    assert not row.failures
    apart = row.plain["bfloat16"].trainer == "apart"
    assert apart == ARCHITECTURES[name].apart


def test_a_model_that_is_refused_or_inexact_fails() -> None:
    exact = {"engine": "x", "steps": 3, "asked": 3}
    for trial in (
        gauntlet.Trial(refused="policy: no"),
        gauntlet.Trial(crash="IndexError"),
        gauntlet.Trial(**exact, scored=1.0, sampled=gauntlet.MAX_ERROR + 0.1),
        gauntlet.Trial(**exact, scored=float("nan"), sampled=1.0),
    ):
        assert gauntlet.Row("x", plain={"float32": trial}).failures
    good = gauntlet.Trial(**exact, scored=1.0, sampled=1.0)
    assert not gauntlet.Row("x", plain={"float32": good}).failures
    assert gauntlet.Row("x", plain={"float32": good, "float16": gauntlet.Trial()}).failures


@pytest.mark.parametrize("name", ["Llama", "Phi-3", "Gemma 3"])
def test_planted_models_have_a_massive_dimension_and_a_sink(name: str) -> None:
    model = ARCHITECTURES[name].make()
    plant(model, sink=1)
    model.set_attn_implementation("eager")
    tokens = torch.tensor([[1, *range(40, 60)]])
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True, output_attentions=True, use_cache=False)
    for hidden in out.hidden_states[1:-1]:  # the last one is after the final norm
        size = hidden[0].abs()
        assert size[:, MASSIVE_DIMENSION].median() > 20 * size.median()
    to_first = torch.stack(out.attentions)[..., 5:, 0].mean()
    assert to_first > 0.5
