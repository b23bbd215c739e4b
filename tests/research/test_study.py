"""Promises: a study runs each of its settings as a comparison, all of one seed before the next, and
continues after an interruption; names choose its parts; an arm of equal reach is cut at the
reference's pi / mu; a mistake in the file has one message before anything runs; the linter accepts
every arm of the shipped study; an archive of a study is continued in another folder, and the
shipped ones with today's defaults."""

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import study_archive
from unstale.analysis.report.compare import read_comparison
from unstale.cli import main
from unstale.config import ConfigError
from unstale.config.options import read_file
from unstale.durability.run_folder import dumps
from unstale.research import study
from unstale.research.compare import Planned
from unstale.research.launcher import Plan, compare

STUDY = """
[study]
recipe = "retail"
seeds = 2
reference = "snapshot_old"
[options]
max_steps = 20
[arms]
rollout = {}
snapshot_old = {}
low = { trainer.lr = 1e-4 }
[dials.bound]
s2 = {}
s6 = { schedule.max_staleness = 6 }
[dials.format]
bf16 = {}
int4 = { engine.quantise = "int4" }
[parts.stale]
bound = ["s6", "s2"]
arms = ["rollout", "snapshot_old"]
[parts.coarse]
format = ["int4"]
[planned]
settings = ["stale"]
"""
FAKE_RUN = """
import json, pathlib, sys
folder, config = pathlib.Path(sys.argv[1]), sys.argv[2]
with (folder.parent.parent / "ran").open("a") as file:
    file.write(f"{folder.parent.name}/{folder.name}\\n")
folder.mkdir()
(folder / "config.json").write_text(config)
broken = (folder.parent.parent / "break").exists()
event = {"kind": "stopped", "reason": "failed" if broken else "finished"}
(folder / "events.jsonl").write_text(json.dumps(event) + "\\n")
sys.exit(broken)
"""


@pytest.fixture
def fake_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are processes that write a folder instead of training."""
    command = property(
        lambda run: [sys.executable, "-S", "-c", FAKE_RUN, str(run.folder), dumps(run.config)]
    )
    monkeypatch.setattr(Planned, "command", command)


def planned(tmp_path: Path, *words: str, text: str = STUDY) -> Plan:
    (tmp_path / "mine.toml").write_text(text)
    file = str(tmp_path / "mine.toml")
    return study.planned(main.parse(["compare", file, "--runs", str(tmp_path), *words]))


def start(plan: Plan) -> str:
    said = io.StringIO()
    compare(plan, command="unstale compare mine.toml", console=Console(file=said, width=200))
    return said.getvalue()


def ran(tmp_path: Path) -> list[str]:
    return (tmp_path / "mine" / "ran").read_text().split()


@pytest.mark.costly
@pytest.mark.usefixtures("fake_run")
def test_a_study_alternates_settings_and_continues(tmp_path: Path) -> None:
    said = start(planned(tmp_path, "--settings", "stale", "--seeds", "1"))
    first = [f"{bound}-bf16/{arm}-seed0" for bound in ("s6", "s2") for arm in ("rollout", "x")]
    first = [name.replace("/x-", "/snapshot_old-") for name in first]
    assert ran(tmp_path) == first
    assert "4 runs in" in said and "s2-bf16/snapshot_old-seed0: " in said
    assert (tmp_path / "mine" / "study.md").exists()
    plan = json.loads((tmp_path / "mine" / "plan.json").read_text())
    assert plan["settings"]["s2-int4"] == {"bound": "s2", "format": "int4"}
    # of the whole file, so that a part of the results is corrected for all planned differences
    assert plan["planned"] == [["s6-bf16", "rollout"], ["s2-bf16", "rollout"]]
    found = read_comparison(tmp_path / "mine" / "s6-bf16")
    assert (found.reference.name, len(found.finished)) == ("snapshot_old", 2)
    assert (tmp_path / "mine" / "s6-bf16" / "compare.md").exists()

    (tmp_path / "mine" / "break").touch()
    start(planned(tmp_path, "--settings", "s2-bf16"))
    (tmp_path / "mine" / "break").unlink()
    said = start(planned(tmp_path, "--settings", "s2-*"))
    assert "9 runs in" not in said and "2 of them already finished" in said
    seed1 = ["s2-bf16/rollout-seed1", "s2-bf16/snapshot_old-seed1"]
    int4 = [f"s2-int4/{arm}-seed{seed}" for seed in (0, 1) for arm in ("rollout", "x", "low")]
    int4 = [name.replace("/x-", "/snapshot_old-") for name in int4]
    assert ran(tmp_path)[4:] == [*seed1, *int4[:3], *seed1, *int4[3:]]


def test_names_choose_settings_and_the_arms_of_a_part(tmp_path: Path) -> None:
    def runs(*names: str) -> dict[str, int]:
        plan = planned(tmp_path, *(["--settings", *names] if names else []))
        return {each.folder.name: len(each.runs) for each in plan.comparisons}

    assert runs() == {"s6-bf16": 4, "s2-bf16": 4, "s2-int4": 6}
    assert runs("coarse", "s6-*") == {"s6-bf16": 4, "s2-int4": 6}
    assert runs("sta*") == {"s6-bf16": 4, "s2-bf16": 4}
    plan = planned(tmp_path, "--settings", "coarse", "--trainer.lr", "2e-3", "--seed", "7")
    configs = [run.config for run in plan.comparisons[0].runs]
    assert {config.engine.quantise for config in configs} == {"int4"}
    assert {config.seed for config in configs} == {7, 8}
    assert [config.trainer.lr for config in configs[:3]] == [0.002, 0.002, 0.0001]
    with pytest.raises(ConfigError, match=r"no setting or part is called 'coarsely'; did you"):
        runs("coarsely")


REACH = STUDY.replace(
    "low = { trainer.lr = 1e-4 }",
    """loglinear = { old_logps.route = "interp_prox_loglinear", reach = "equal" }
recompute = { old_logps.route = "current_recompute", reach = "equal" }
same = { old_logps.route = "rollout", reach = "equal" }""",
)


def test_an_arm_may_leave_options_of_the_setting_unused(tmp_path: Path) -> None:
    text = STUDY.replace(
        "s6 = { schedule", 's6 = { correction = { mode = "mask", low = 0.9 }, schedule'
    )
    plan = planned(tmp_path, "--settings", "s6-*", "--seeds", "1", text=text)
    controls = {run.arm: run.config.correction for run in plan.comparisons[0].runs}
    assert (controls["snapshot_old"].mode, controls["snapshot_old"].low) == ("mask", 0.9)
    assert (controls["rollout"].mode, controls["rollout"].low) == ("none", 0.5)
    given = {run.arm: "correction.low" in run.values for run in plan.comparisons[0].runs}
    assert given == {"snapshot_old": True, "rollout": False}


def test_an_arm_of_equal_reach_is_cut_at_the_same_ratio(tmp_path: Path) -> None:
    text = REACH.replace(
        '["rollout", "snapshot_old"]', '["loglinear", "recompute", "snapshot_old"]'
    )
    plan = planned(tmp_path, "--settings", "s6-*", "--seeds", "1", text=text)
    configs = {run.arm: run.config for run in plan.comparisons[0].runs}
    loglinear, recompute = configs["loglinear"], configs["recompute"]
    # the weight of pi is 5/6 at lag 6, so S is the sixth root of pi / mu
    assert 1 + loglinear.objective.clip_high == pytest.approx(1.28 ** (1 / 6))
    assert 1 - loglinear.objective.clip_low == pytest.approx(0.8 ** (1 / 6))
    assert loglinear.correction.high == 2.0  # 1.28 ** (5 / 6) is within the band
    # S is 1, so only the band on D can limit pi / mu
    assert (recompute.correction.low, recompute.correction.high) == (0.8, 1.28)
    assert recompute.objective.clip_high == 0.28

    # the clip of rollout is on pi / mu already, so the arm would be a copy
    every = planned(tmp_path, "--settings", "coarse", "--seeds", "1", text=REACH)
    assert "same" not in [run.arm for run in every.comparisons[0].runs]

    # a band on tokens would not be the clip on sequences that it replaces
    unit = ["--objective.unit", "sequence", "--objective.aggregate", "sum"]
    plan = planned(tmp_path, "--settings", "s6-*", "--seeds", "1", *unit, text=text)
    (band,) = (run.config.correction for run in plan.comparisons[0].runs if run.arm == "recompute")
    assert (band.unit, band.aggregate) == ("sequence", "sum")

    average = REACH.replace('"current_recompute", reach', '"ppo_ewma_async", reach')
    with pytest.raises(ConfigError, match="ppo_ewma_async leaves a part of the staleness in D"):
        planned(tmp_path, "--settings", "coarse", text=average)
    swapped = REACH.replace('reference = "snapshot_old"', 'reference = "loglinear"')
    swapped = swapped.replace('arms = ["rollout"', 'arms = ["loglinear", "recompute"')
    with pytest.raises(ConfigError, match="equal reach needs a reference such as snapshot_old"):
        planned(tmp_path, "--settings", "stale", text=swapped)


def test_a_copy_of_the_reference_is_left_out_and_is_no_planned_difference(tmp_path: Path) -> None:
    text = STUDY.replace("rollout = {}", "rollout = {}\ncopy = { engine.quantise = 'int4' }")
    text = text.replace('settings = ["stale"]', 'settings = ["coarse"]')
    plan = planned(tmp_path, "--settings", "coarse", "--seeds", "1", text=text)
    assert [run.arm for run in plan.comparisons[0].runs] == ["rollout", "snapshot_old", "low"]
    assert plan.planned == [("s2-int4", "rollout"), ("s2-int4", "low")]
    nothing = STUDY.replace('settings = ["stale"]', 'settings = ["stale"]\narms = ["low"]')
    with pytest.raises(ConfigError, match="planned chooses no difference"):
        planned(tmp_path, text=nothing)


@pytest.mark.usefixtures("fake_run")
def test_the_first_run_fixes_the_planned_differences(tmp_path: Path) -> None:
    start(planned(tmp_path, "--settings", "s6-bf16", "--seeds", "1"))
    more = STUDY.replace('settings = ["stale"]', 'settings = ["stale", "coarse"]')
    start(planned(tmp_path, "--settings", "s6-bf16", "--seeds", "2", text=more))
    plan = json.loads((tmp_path / "mine" / "plan.json").read_text())
    assert plan["planned"] == [["s6-bf16", "rollout"], ["s2-bf16", "rollout"]]


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("[options]", "[option]", "unknown table option; did you mean options?"),
        ("max_steps = 20", "max_step = 20", "unknown option max_step; did you mean max_steps?"),
        ("max_steps = 20", 'recipe = "llm"', "give the recipe as study.recipe, not in options"),
        ("seeds = 2", "seed = 2", "unknown key study.seed; did you mean seeds?"),
        ("seeds = 2", 'seeds = "2"', "study.seeds must be a whole number, got '2'"),
        ('"snapshot_old"\n', '"exact"\n', "study.reference is 'exact', which is not an arm"),
        ("rollout = {}", "rollout = 1", "arms.rollout must be a table of options, got 1"),
        ("rollout = {}", "rollout = {reach = 2}", "reach must be nominal or equal, got 2"),
        ("trainer.lr", "trainer.rl", "arms.low: unknown option trainer.rl"),
        ('format = ["int4"]', 'formats = ["int4"]', "unknown dial formats; did you mean format?"),
        ('["int4"]', '["int5"]', "parts.coarse.format: 'int5' is unknown; did you mean int4?"),
        ('["int4"]', '"int4"', "parts.coarse.format must be a list of names, got 'int4'"),
        ('", "snapshot_old"]', '"]', "parts.stale.arms must have the reference 'snapshot_old'"),
        ("bf16 = {}", '"b/16" = {}', "'b/16' must have only letters, digits"),
        ("bf16 = {}", "bf16 = {schedule.max_staleness = 3}", "two dials set schedule.max_st"),
        (
            "max_steps = 20",
            "minutes = 3.0",
            "setting 's6-bf16': minutes would stop slow arms early",
        ),
        ("1e-4", "-1.0", "setting 's2-int4': arm 'low': trainer.lr must be > 0"),
        ('settings = ["stale"]', 'settings = ["stal"]', "is called 'stal'; did you mean stale?"),
        ('settings = ["stale"]', 'at = ["step"]', "planned.at: 'step' is unknown; did you mean"),
        ('settings = ["stale"]', 'arm = ["low"]', "unknown key planned.arm; did you mean arms?"),
        ("[parts.stale]", "[parts]\nx = 1\n[parts.stale]", "parts.x must be a table of lists"),
    ],
)
def test_a_mistake_in_a_study_has_one_message(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in STUDY
    with pytest.raises(ConfigError, match=re.escape(says)):
        planned(tmp_path, text=STUDY.replace(old, new))


def test_the_command_line_tells_studies_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "options.toml").write_text("max_steps = 3\n")
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "broken.toml").write_text("[study")
    for verb, file, words, says in (
        ("compare", "options.toml", ["--settings", "a"], "--settings needs a study file"),
        ("compare", "study.toml", ["--routes", "eager"], "is a study: its recipe and arms"),
        ("compare", "broken.toml", [], "broken.toml is not valid TOML"),
        ("lint", "study.toml", [], "is a study: run it with unstale compare"),
    ):
        with pytest.raises(SystemExit) as end:
            main.main([verb, str(tmp_path / file), *words])
        assert end.value.code == 2
        assert says in capsys.readouterr().err


@pytest.mark.costly
def test_the_linter_accepts_the_shipped_study() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "studies" / "exactness.toml"
    parts: dict[str, Any] = {}
    for setting in study.read_study(file).settings.values():
        parts |= setting.parts
    del parts["all"]
    plan = study.planned(main.parse(["compare", str(file), "--seeds", "1", "--settings", *parts]))
    assert len(plan.comparisons) > 10


@pytest.mark.costly
@pytest.mark.usefixtures("fake_run")
def test_an_archive_of_a_study_is_continued_in_another_folder(tmp_path: Path) -> None:
    here, there, archive = tmp_path / "here", tmp_path / "there", tmp_path / "kept.tar.xz"
    here.mkdir(), there.mkdir()
    with pytest.raises(ConfigError, match=r"mine has no finished runs"):
        study_archive.pack(here / "mine", archive)
    start(planned(here, "--settings", "s6-bf16", "--seeds", "1"))
    run = here / "mine" / "s6-bf16" / "rollout-seed0"
    rows = [{"step": step, "eval/success_rate": 0.25 * step, "large": 1} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(map("{}\n".format, map(dumps, rows))))
    (run / "old").write_text("weights")
    (here / "mine" / "break").touch()
    start(planned(here, "--settings", "s2-bf16", "--seeds", "1"))
    assert study_archive.pack(here / "mine", archive) == 2
    first = archive.read_bytes()
    assert (study_archive.pack(here / "mine", archive), archive.read_bytes()) == (2, first)

    assert study_archive.unpack(archive, there / "mine") == 2
    assert not (there / "mine" / "s6-bf16" / "rollout-seed0" / "old").exists()
    said = start(planned(there, "--settings", "stale", "--seeds", "1"))
    assert "4 runs in" in said and "2 of them already finished" in said
    assert ran(there) == ["s2-bf16/rollout-seed0", "s2-bf16/snapshot_old-seed0"]
    trials = {trial.arm: trial for trial in read_comparison(there / "mine" / "s6-bf16").trials}
    assert (trials["rollout"].final, trials["rollout"].launch["jobs"]) == (0.5, 1)
    with pytest.raises(ConfigError, match=r"lacks 2 runs of .*, such as s6-bf16/rollout-seed0"):
        shutil.rmtree(there / "mine" / "s6-bf16")
        study_archive.pack(there / "mine", archive)
    assert archive.read_bytes() == first
    with pytest.raises(ConfigError, match=r"mine already has runs"):
        study_archive.unpack(archive, there / "mine")


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "settings"), [("techniques", 2), ("levels", 9), ("bands", 7), ("minibatches", 2)]
)
def test_the_linter_accepts_other_shipped_studies(name: str, settings: int) -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "studies" / f"{name}.toml"
    plan = study.planned(main.parse(["compare", str(file)]))
    assert len(plan.comparisons) == settings


@pytest.mark.costly
@pytest.mark.usefixtures("fake_run")
@pytest.mark.parametrize(
    ("name", "options", "runs"),
    [("levels", ["--settings", "bfloat16-s2", "--seeds", "1"], 8), ("moe", [], 35)],
)
def test_the_shipped_archives_are_continued_with_the_defaults_of_today(
    name: str, options: list[str], runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study file pins each option whose default has changed since its runs were made."""
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)  # a policy is given relative to the repository
    study_archive.unpack(root / "benchmarks" / "results" / f"{name}.tar.xz", tmp_path / name)
    words = [str(root / "benchmarks" / "studies" / f"{name}.toml"), "--runs", str(tmp_path)]
    said = start(study.planned(main.parse(["compare", *words, *options])))
    assert f"{runs} runs in" in said and f"{runs} of them already finished" in said


@pytest.mark.parametrize("text", ["[study]\nx = " + "[" * 5000 + "]" * 5000, f"[{'a.' * 400}b]\n"])
def test_a_study_or_options_file_nested_too_deep_is_refused_by_name(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    for read in (study.read_study, read_file):
        with pytest.raises(ConfigError, match=r"deep\.toml is nested more than 100 times"):
            read(path)
