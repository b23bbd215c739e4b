"""Test the command line.

A user's mistake gives one line that names the nearest words, and exit status 2, before anything is
trained. Options reach the config. The help of an option is its field's docstring. `report` names
the bottleneck.
"""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.fake_run import fake_run
from unstale.cli import main, recipe_options
from unstale.config import EngineConfig, RunConfig, fast_dtype
from unstale.config.options import field_docs, options
from unstale.recipes import RECIPES


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    assert end.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (("train", "retial"), "unknown recipe 'retial'; did you mean retail?"),
        (
            ("train", "retail", "--trainer.lrr", "1"),
            "unknown argument --trainer.lrr; did you mean --trainer.lr",
        ),
        (("train", "retail", "--sede=1"), "unknown argument --sede=1; did you mean --seed or"),
        (
            ("train", "retail", "--old_logps.route", "snapsht"),
            "--old_logps.route cannot be 'snapsht'; did you mean snapshot_old",
        ),
        (("train", "retail", "--trainer.lr", "fast"), "--trainer.lr must be a number, got 'fast'"),
        (("train", "retail", "--steps", "2.5"), "--steps must be a whole number, got '2.5'"),
        (("train", "retail", "--trainer.lr", "-1"), "trainer.lr must be > 0, got -1.0"),
        (
            ("train", "retail", "--schedule.max_staleness", "-1"),
            "schedule.max_staleness must be >= 0, got -1",
        ),
        (
            ("train", "retail", "--correction.low", "1.5"),
            "correction.low must be between 0 and 1, got 1.5",
        ),
        (("train", "retail", "--engine.top_p", "0.9"), "truncated support"),
        (
            ("train", "retail", "--tensorboard", "perhaps"),
            "--tensorboard must be true or false, got 'perhaps'",
        ),
        (
            ("train", "retail", "--old_logps.route", "rollout"),
            "a weight on D (mask_weight) beside a loss that is anchored on mu",
        ),
        (("lint", "retial"), "unknown recipe 'retial'; did you mean retail?"),
        (("train",), "train needs a recipe (calculator, retail"),
        (("trian", "retail"), "unknown verb 'trian'; did you mean train?"),
        (
            ("train", "retail", "--schedule.window", "3"),
            "schedule.window is now schedule.lookahead_window",
        ),
        (
            ("train", "retail", "--credit.estimator=rloo"),
            "credit.estimator is now advantage.estimator",
        ),
        (("train", "retail", "--steps"), "--steps needs a value"),
        (("report", "runs/x", "--seed", "3"), "unknown argument --seed"),
        (("report", "no-such-run"), "no-such-run is not a run folder"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in complaint(capsys, *arguments)


def test_a_module_in_the_current_folder_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_user.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    told = complaint(capsys, "train", "retail", "--task.env", "beside_the_user:desk")
    assert "module 'beside_the_user' has no attribute 'desk'" in told


@pytest.mark.parametrize(
    "prepare, says",
    [("missing", "no model folder at"), ("empty", "not a Hugging Face model folder")],
)
def test_a_wrong_model_folder_is_told_before_a_run_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: str, says: str
) -> None:
    model = tmp_path / "model"
    if prepare == "empty":
        model.mkdir()
    line = complaint(
        capsys, "train", "retail", "--policy", str(model), "--runs", str(tmp_path / "runs")
    )
    assert says in line and not (tmp_path / "runs").exists()


def test_a_run_folder_that_holds_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"step": 1}\n')
    line = complaint(capsys, "train", "retail", "--runs", str(tmp_path), "--name", "mine")
    assert "already holds a run" in line
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == '{"step": 1}\n'


def parse(*arguments: str) -> RunConfig:
    return recipe_options.configure(main.parse(arguments))


def test_knobs_reach_the_config() -> None:
    config = parse(
        "train",
        "retail",
        "--trainer.lr",
        "1e-5",
        "--seed=3",
        "--tensorboard",
        "true",
        "--runs",
        "elsewhere",
    )
    assert (config.trainer.lr, config.seed, config.tensorboard, config.runs) == (
        1e-5,
        3,
        True,
        Path("elsewhere"),
    )
    assert config.trainer.grad_clip == RECIPES["retail"]().trainer.grad_clip


def test_help_is_the_docstring_under_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["train", "retail", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--schedule.max_staleness" in text
    assert (
        "Versions a token may lag behind the policy that trains on it. 0 trains synchronously."
        in text
    )


def test_help_hides_options_that_the_choices_do_not_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit):
            main.main(["train", "retail", "--help", *words])
        return capsys.readouterr().out

    for choice, option in (
        ("--old_logps.route=ppo_ewma_async", "--old_logps.averages"),
        ("--advantage.estimator=turn_level", "--advantage.discount"),
        ("--objective.kind=dual_clip", "--objective.dual_clip "),
        ("--trainer.lora_rank=4", "--trainer.lora_alpha"),
    ):
        assert option not in shown() and option in shown(choice)
    assert len(re.findall(r"^  --", shown(), re.MULTILINE)) < 75


def test_a_file_sets_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('recipe = "retail"\nsteps = 3\n[trainer]\nlr = 1\n[schedule]\ngroup_size = 4\n')
    config = parse("train", "--config", str(file), "--steps", "5")
    assert (config.recipe, config.steps, config.trainer.lr) == ("retail", 5, 1.0)
    assert config.schedule.group_size == 4
    assert config.task == RECIPES["retail"]().task


@pytest.mark.parametrize(
    "text, says",
    [
        ("[trainer]\nlrr = 1", "run.toml: unknown option trainer.lrr; did you mean trainer.lr"),
        ("[trainer]\nlr = 'x'", "run.toml, trainer.lr cannot be 'x': expected float"),
        ("[schedule]\nwindow = 4", "schedule.window is now schedule.lookahead_window"),
        ("trainer = 3", "run.toml, trainer is not a table of options"),
        ("trainer lr", "run.toml is not valid TOML"),
    ],
)
def test_an_error_in_a_file_names_file_and_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    line = complaint(capsys, "train", "retail", "--config", str(tmp_path / "run.toml"))
    assert says in line


def test_every_option_has_a_docstring() -> None:
    for option in options().values():
        assert option.field in field_docs(option.owner), option.name


@pytest.mark.parametrize(
    "knobs, code, says",
    [((), 0, "nothing to refuse"), (("--old_logps.route", "rollout"), 2, "refused")],
)
def test_lint_shows_its_page_and_tells_by_its_exit_code(
    capsys: pytest.CaptureFixture[str], knobs: tuple[str, ...], code: int, says: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["lint", "retail", *knobs])
    out = capsys.readouterr().out
    assert end.value.code == code
    assert all(word in out for word in ("numerator", "denominator", "versions", "costs", says))


@pytest.mark.parametrize(
    ("words", "asked"), [((), "of the environment"), (("--token", "given"), "given")]
)
def test_serve_takes_its_token_from_where_ps_does_not_show_it(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], asked: str
) -> None:
    from unstale.cli import serve

    tokens: list[str] = []
    monkeypatch.setattr(
        serve, "serve", lambda trained, config, *, token, port: tokens.append(token)
    )
    monkeypatch.setenv("UNSTALE_TOKEN", "of the environment")
    with pytest.raises(SystemExit) as end:
        main.main(["serve", "base", "retail", *words])
    assert end.value.code == 0 and tokens == [asked]


def test_recipes_are_listed_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["recipes"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and all(name in out for name in RECIPES)


def test_the_report_names_the_bottleneck_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(tmp_path / "run", steps=3)
    with (run / "metrics.jsonl").open("w") as file:
        for step, busy in ((0, 0.0), (1, 1.0), (2, 1.0), (3, 1.0)):
            row = {
                "step": step,
                "time_s": 10.0 * step,
                "schedule/wait_for_batch_s": 4.0,
                "engine/busy_share": busy,
            }
            file.write(json.dumps(row) + "\n")
    with pytest.raises(SystemExit) as end:
        main.main(["report", str(run)])
    assert not end.value.code
    path, told, advice = capsys.readouterr().out.splitlines()
    assert path.endswith("report.html")
    assert told.startswith(
        "Generation is the bottleneck: the trainer waited for episodes 40% of the time"
    )
    assert advice.startswith("What would help: ") and "engine.threads" in advice


def test_auto_is_the_precision_that_the_processor_multiplies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = {}
    for flags in ("avx2 avx512f", "avx512f avx512_bf16", "amx_bf16"):
        (tmp_path / "cpuinfo").write_text(f"flags : fpu {flags}")
        found[flags] = fast_dtype(tmp_path / "cpuinfo")
    assert list(found.values()) == ["float32", "bfloat16", "bfloat16"]
    assert EngineConfig(dtype="auto").dtype == fast_dtype()
