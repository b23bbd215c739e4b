"""The promises of `tools.advice_table`, which writes the figures of docs/advise.md.

- A setting of a study is one row, with the differences of its arms from the exact reference.
- An arm is shown study by study, and without each study.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.analysis.test_advise import STALE, configure, run_folder
from tools import advice_table
from tools.advice_table import ComparisonTable, SettingKind, by_study, measure, pool
from unstale.config import ConfigError
from unstale.config.options import override
from unstale.durability.run_folder import METRICS, dumps


def case(
    name: str,
    mean: float,
    arm: str = "rollout",
    *,
    pairs: int = 4,
    sd: float | None = 0.02,
    **options: Any,
) -> dict[str, Any]:
    """Return a row of the table with one arm. An option's name has `__` in place of the dot."""
    study, _, setting = name.partition("/")
    named = {key.replace("__", "."): value for key, value in options.items()}
    of_route = {key: named.pop(key) for key in list(named) if key.startswith("old_logps.")}
    described = {
        "task.env": "retail",
        "trainer.minibatches_per_batch": 1,
        "objective.unit": "token",
        "objective.loss_type": "ppo_clip",
        **named,
    }
    arms = [{"name": arm, "options": of_route, "pairs": pairs, "mean": mean, "sd": sd}]
    return {"study": study, "name": setting, "options": described, "arms": arms}


def test_pairs_of_all_settings_are_pooled() -> None:
    settings = [
        case("one/a", -0.2),
        case("one/b", -0.1, pairs=12),
        case("one/c", 0.3, sd=None),  # one pair, or equal ones
        case("one/d", 0.05, "ewma_prox", old_logps__beta=0.75),
        case("one/e", 0.05, objective__loss_type="sapo"),
        case("one/f", 0.05, trainer__minibatches_per_batch=4, objective__unit="sequence"),
    ]
    one, other, young, soft, several = ComparisonTable(settings).cases
    assert young.arm == "ewma_prox, beta 0.75", "averages of another age are another arm"
    assert (one.kind, soft.kind) == (SettingKind(True, True), None)
    assert several.kind == SettingKind(False, False)
    pooled = pool([one.difference, other.difference])
    assert (pooled.n, pooled.mean) == (16, pytest.approx(-0.125))
    whole = 15 * pooled.sd**2
    assert whole == pytest.approx(3 * 0.02**2 + 11 * 0.02**2 + 4 * 0.075**2 + 12 * 0.025**2)


def test_the_table_is_measured_from_the_folders_of_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for arm, final in (("snapshot_old", 0.7), ("rollout", 0.6), ("ewma_prox", 0.1)):
        for seed in (0, 1):
            config = replace(configure(arm), seed=seed)
            if arm == "ewma_prox":
                config = override(config, {"old_logps.beta": 0.5})
            folder = tmp_path / "study" / "int4" / f"{arm}-seed{seed}"
            run_folder(folder, config, STALE)
            rows = (folder / METRICS).read_text().splitlines()
            change = seed * (1 if arm == "snapshot_old" else 2) / 100
            last = {**json.loads(rows[-1]), "eval/success_rate": final + change}
            (folder / METRICS).write_text("\n".join([*rows[:-1], dumps(last)]) + "\n")
            runs.append({"arm": arm, "seed": seed, "folder": folder.name})
    plan = {"runs": runs, "commands": [], "warnings": {}}
    (tmp_path / "study" / "int4" / "plan.json").write_text(json.dumps(plan))
    (setting,), left_out = measure([tmp_path / "study"])
    assert measure([tmp_path / "study" / "int4"]) == ([setting], left_out) and left_out == []
    unfinished = tmp_path / "study" / "fp8"
    unfinished.mkdir()
    planned = [{"arm": "snapshot_old", "seed": 0, "folder": "snapshot_old-seed0"}]
    (unfinished / "plan.json").write_text(json.dumps({**plan, "runs": planned}))
    assert measure([tmp_path / "study"]) == ([setting], [unfinished])
    assert (setting["study"], setting["name"]) == ("study", "int4")
    assert setting["reference"] == {"name": "snapshot_old", "runs": 2}
    by_name = {arm["name"]: arm for arm in setting["arms"]}
    assert by_name["rollout"]["mean"] == pytest.approx(-0.095)
    assert by_name["rollout"]["sd"] == pytest.approx(0.01 / math.sqrt(2))
    assert by_name["ewma_prox"]["pairs"] == 2
    assert by_name["ewma_prox"]["options"] == {"old_logps.beta": 0.5}
    assert [each.is_worse for each in ComparisonTable([setting]).cases] == [True, True]
    out = tmp_path / "table.json"
    write = ["advice_table", str(tmp_path / "study"), "--out", str(out)]
    package = ComparisonTable.load()
    for more, settings in (([], [setting]), (["--keep"], [*package.settings, setting])):
        monkeypatch.setattr("sys.argv", [*write, *more])
        advice_table.main()
        assert ComparisonTable.load(out) == ComparisonTable(settings, package.about)
    with pytest.raises(ConfigError, match="two folders have the setting study/int4"):
        measure([tmp_path / "study", tmp_path / "study" / "int4"])
    with pytest.raises(ConfigError, match="no comparison"):
        measure([tmp_path / "study" / "int4" / "rollout-seed0"])


def test_an_arm_is_shown_study_by_study() -> None:
    settings = [
        case("old/a", -0.3, pairs=2, sd=0.1),
        case("old/b", -0.1, pairs=2, sd=0.1),
        case("new/a", 0.1, pairs=4, sd=0.1),
    ]
    *rows, mean = by_study(ComparisonTable(settings).cases, "rollout")
    # Two samples of two pairs: squares 2 * 0.01 + 4 * 0.01, so sd is sqrt(0.06 / 3) = 0.1414, and
    # half of the interval is 3.1824 (Student's t, 3 degrees of freedom) * 0.1414 / 2 = 0.225.
    # The four pairs of `new`: 3.1824 * 0.1 / 2 = 0.159.
    assert rows[2:4] == [
        "| old | 2 | 4 | -20.0 (-42.5 to +2.5) | +10.0 (-5.9 to +25.9) |",
        "| new | 1 | 4 | +10.0 (-5.9 to +25.9) | -20.0 (-42.5 to +2.5) |",
    ]
    # All: squares 0.06 + 0.03 + 8 * 0.15^2 = 0.27, sd 0.1964, 2.3646 * 0.1964 / sqrt(8) = 0.164
    assert rows[4] == "| all | 3 | 8 | -5.0 (-21.4 to +11.4) | — |"
    # Two studies: sd 0.2121, 12.7062 * 0.2121 / sqrt(2) = 1.906
    assert mean == "Mean of 2 studies, each as one value: -5.0 (-195.6 to +185.6)"


def test_the_stored_table_can_be_read() -> None:
    found = ComparisonTable.load()
    names = {(setting["study"], setting["name"]) for setting in found.settings}
    assert len(names) == len(found.settings), "a setting occurs once"
    for setting in found.settings:
        assert setting["reference"]["runs"] >= 1 and setting["arms"]
    for case in found.cases:
        assert case.kind and -1 <= case.difference.mean <= 1 and case.difference.n >= 2
