"""Test the command line.

A user's mistake gives one line that names the nearest words, and exit status 2, before anything is
trained. Options reach the config. The help of an option is its field's docstring. `report` names
the bottleneck.
"""

import json
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import unstale
from tests.support.fake_run import fake_run
from unstale.builders.policy import check_expert_ranks, warn_of_float32
from unstale.cli import evaluate, main, recipe_options
from unstale.cli.grades import EvalResult
from unstale.config import (
    SHIPPED_POLICY,
    ClusterConfig,
    ConfigError,
    CorrectionConfig,
    EngineConfig,
    OldLogpsConfig,
    RunConfig,
    TaskConfig,
    TrainerConfig,
    fast_dtype,
    training,
)
from unstale.config.names import VALUES
from unstale.config.options import field_docs, options
from unstale.config.sampling import has_gpu
from unstale.durability.run_folder import RunLog
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
        (("train", "retail", "--sede=1"), "unknown argument --sede=1; did you mean --seed?"),
        (
            ("train", "retail", "--old_logps.route", "snapsht"),
            "--old_logps.route cannot be 'snapsht'; did you mean snapshot_old",
        ),
        (("train", "retail", "--trainer.lr", "fast"), "--trainer.lr must be a number, got 'fast'"),
        (
            ("train", "retail", "--max_steps", "2.5"),
            "--max_steps must be a whole number, got '2.5'",
        ),
        (("train", "retail", "--trainer.lr", "-1"), "trainer.lr must be > 0, got -1.0"),
        (
            ("train", "retail", "--schedule.max_staleness", "-1"),
            "schedule.max_staleness must be >= 0, got -1",
        ),
        (
            ("train", "retail", "--correction.low", "1.5"),
            "correction.low must be between 0 and 1, got 1.5",
        ),
        (("train", "retail", "--engine.top_k", "1"), "keeps only the most probable token"),
        (
            ("train", "retail", "--deterministic", "perhaps"),
            "--deterministic must be true or false, got 'perhaps'",
        ),
        (
            ("train", "retail", "--old_logps.route", "rollout"),
            "a weight on D (mask_weight) beside a loss that is anchored on mu",
        ),
        (("lint", "retial"), "unknown recipe 'retial'; did you mean retail?"),
        (("train",), "train needs a recipe (calculator, demo, airline, "),
        (("trian", "retail"), "unknown command 'trian'; did you mean train?"),
        (
            ("train", "retail", "--schedule.window", "3"),
            "schedule.window is now schedule.lookahead_window",
        ),
        (
            ("train", "retail", "--credit.estimator=rloo"),
            "credit.estimator is now advantage.estimator",
        ),
        (("train", "retail", "--tensorboard", "true"), "tensorboard is now trackers"),
        (("train", "retail", "--max_steps"), "--max_steps needs a value"),
        (("report", "runs/x", "--seed", "3"), "unknown argument --seed"),
        (("report", "no-such-run"), "no-such-run is not a run folder"),
        (("report",), "missing: run; see unstale report --help"),
        (("report", "a", "b"), "'b' is not expected here: options begin with --"),
        (("report", __file__), "is not a run folder: it is a file"),
        (("journal", "nope"), "nope holds no journal: it does not exist"),
        (("journal", __file__), "holds no journal: it is a file"),
        (("align", "runs/x", "teacher"), "align is now probe-distillation"),
        (("exprt", "runs/x"), "unknown command 'exprt'; did you mean export?"),
        (("export", "runs/x"), "missing: folder; see unstale export --help"),
        (("export", "runs/x", "out", "--step", "-1"), "--step: must be between 0 and "),
        (("export", "no-such-run", "out"), "no-such-run is not a run folder: it does not exist"),
        (
            ("export-trajectories", "x", "--format", "csv"),
            "--format: must be one of ",
        ),
        (("eval", "nope"), "nope is neither a run folder nor a model folder: it does not exist"),
        (("eval", "base"), "so the task is not known: name a recipe, as in `unstale eval base"),
        (("eval", "nope", "--k", "x"), "--k: must be a whole number, got 'x'"),
        (("eval", "nope", "--k", "3", "--attempts", "2"), "--k must be at most --attempts (2)"),
        (
            ("lint", "retail", "--lr", "1"),
            "unknown argument --lr; did you mean --trainer.lr or --sft.lr (the second is of a",
        ),
        (
            ("lint", "llm", "--num_generations", "8"),
            "unknown argument --num_generations; did you mean --schedule.group_size?",
        ),
        (
            ("lint", "llm", "--num_generations", "8", "--learning_rate=1", "--runz", "x"),
            "unknown argument --num_generations; did you mean --schedule.group_size? "
            "unknown argument --learning_rate=1; did you mean --trainer.lr? "
            "unknown argument --runz; did you mean --runs?",
        ),
        (
            ("lint", "llm", "--loss_type", "dr_grpo"),
            "dr_grpo is objective.loss_aggregation constant, objective.constant N",
        ),
        (
            ("lint", "llm", "--objective.loss_type", "dr_grpo"),
            "it is ppo_clip here, with advantage.estimator = dr_grpo, objective.loss_aggregation = "
            "constant and objective.constant = the largest",
        ),
        (
            ("lint", "llm", "--per_device_train_batch_size", "8"),
            "--schedule.groups_per_step or --trainer.max_tokens_per_microbatch (the first counts",
        ),
        (
            ("train", "bugs.tml"),
            "bugs.tml is no recipe, and no such file exists: a file of options ends",
        ),
        (("lint", "llm", "--max_completion_length=8"), "did you mean --engine.max_completion_tok"),
        (
            ("lint", "llm", "--no_such_name", "8"),
            "unknown argument --no_such_name; --help lists the arguments, and docs/other",
        ),
        (("recipes", "--json"), "unknown argument --json; --help lists the arguments"),
        (("lint", "llm", "--task.env", "nope"), "env cannot be 'nope'; there are: airline, bfcl:"),
        (
            ("lint", "retail", "--techniques", "ess_lr,replay"),
            "separate the names by spaces: --techniques 'ess_lr replay'",
        ),
        (("plan", "--model", "8B", "--gpus", "1.5"), "--gpus: must be a whole number, got '1.5'"),
        (("simulate", "--set", "fleet.engines"), "--set must be NAME=VALUE, got 'fleet.engines'"),
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
        capsys, "train", "retail", "--model", str(model), "--runs", str(tmp_path / "runs")
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
        "--trackers",
        "wandb, mlflow",
        "--deterministic",
        "true",
        "--runs",
        "elsewhere",
    )
    assert (config.trainer.lr, config.seed, config.trackers, config.runs) == (
        1e-5,
        3,
        "wandb, mlflow",
        Path("elsewhere"),
    )
    assert config.deterministic
    assert config.trainer.grad_clip == RECIPES["retail"]().trainer.grad_clip


def test_help_is_the_docstring_under_the_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["train", "retail", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert 30 <= text.count("Now: ") <= 60 and "--help all describes" in text
    with pytest.raises(SystemExit):
        main.main(["train", "retail", "--help", "all"])
    whole = " ".join(capsys.readouterr().out.split())
    assert "--journal.token_share" in whole and "--journal.token_share" not in text
    assert "--help all describes" not in whole
    assert "--schedule.max_staleness" in text
    assert (
        "Largest number of versions between the weights that sampled a token and the weights "
        "that train on it. 0 trains synchronously." in text
    )


def test_help_has_the_values_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "llm"\n[engine]\nmax_context = 333\n')
    for words in ([str(file)], ["--config", str(file)], [f"--config={file}"]):
        with pytest.raises(SystemExit):
            main.main(["train", *words, "--help", "--max_steps", "7"])
        text = capsys.readouterr().out
        assert max(map(len, text.partition("\nrun: ")[2].splitlines())) <= 80
        shown = " ".join(text.split())
        assert f"options of {file}:" in shown
        for value in ("with prompts and replies. Now: 333", "to train on. Now: 7", "Now: 1e-06"):
            assert value in shown


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
        ("--objective.loss_type=dual_clip", "--objective.dual_clip "),
        ("--objective.loss_type=sapo", "--objective.tau_pos"),
        ("--trainer.lora_rank=4", "--trainer.lora_alpha"),
    ):
        assert option not in shown() and option in shown(choice)
    with_ray = shown("all", "--task.isolate=ray")
    assert "--cluster.address" in with_ray and "--cluster.patience_s" in with_ray
    assert int(re.findall(r"(\d+) more options", shown())[0]) > 20


def test_a_file_sets_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('recipe = "retail"\nsteps = 3\n[trainer]\nlr = 1\n[schedule]\ngroup_size = 4\n')
    config = parse("train", "--config", str(file), "--max_steps", "5")
    assert (config.recipe, config.max_steps, config.trainer.lr) == ("retail", 5, 1.0)
    assert config.schedule.group_size == 4
    assert config.task == RECIPES["retail"]().task


@pytest.mark.parametrize(
    "text, says",
    [
        ("[trainer]\nlrr = 1", "run.toml: unknown option trainer.lrr; did you mean trainer.lr"),
        (
            "[actor_rollout_ref.rollout]\nn = 8",
            "unknown option actor_rollout_ref.rollout.n; did you mean schedule.group_size?",
        ),
        (
            "[actor.rollout]\nn = 8\nkl_loss_coef = 1\n[trainer]\nlrr = 1",
            "run.toml: unknown option actor.rollout.n; did you mean schedule.group_size? unknown "
            "option actor.rollout.kl_loss_coef; did you mean objective.kl_coef? unknown option "
            "trainer.lrr; did you mean trainer.lr",
        ),
        (
            "[objective]\nloss_type = 'grpo'",
            "'grpo'; it is ppo_clip here, with objective.loss_aggregation = sequence_mean",
        ),
        ("[objective]\nloss_aggregation = 'token-mean'", "it is action_tokens here"),
        ("[trainer]\nlr = 'x'", "run.toml, trainer.lr must be a number, got 'x'"),
        ("[schedule]\nwindow = 4", "schedule.window is now schedule.lookahead_window"),
        ("trainer = 3", "run.toml, trainer must be a table of options, got 3"),
        ("trainer lr", "run.toml is not valid TOML"),
    ],
)
def test_an_error_in_a_file_names_file_and_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    line = complaint(capsys, "train", "retail", "--config", str(tmp_path / "run.toml"))
    assert says in line


def test_the_values_of_other_trainers_lead_to_values_that_exist() -> None:
    for name, values in VALUES.items():
        choices = options()[name].choices
        if name == "trainer.optimizer":  # names of torch, and one of the package
            choices = ("AdamW", "AdamW8bit")
        assert not set(values) & set(choices)
        for value in values.values():
            assert value.partition("; ")[0] in ("", *choices)


def test_a_name_that_a_file_of_options_has_twice_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text('{"max_steps": 3, "trainer": {"lr": 1, "lr": 2}}')
    line = complaint(capsys, "train", "retail", "--config", str(tmp_path / "run.json"))
    assert "run.json is not valid JSON: the name 'lr' is given twice" in line
    line = complaint(capsys, "train", "llm", "--chat_template_kwargs", '{"a": 1, "a": 2}')
    assert "chat_template_kwargs must be a JSON object" in line


def test_help_lists_the_download_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["train", "--help"])
    assert "--model_download" in capsys.readouterr().out


def test_a_file_may_stand_in_the_place_of_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('recipe = "retail"\nsteps = 3\n[trainer]\nlr = 1\n')
    (tmp_path / "run.json").write_text('{"recipe": "retail", "max_steps": 3, "trainer": {"lr": 1}}')
    for name in ("run.toml", "run.json"):
        config = parse("train", str(tmp_path / name), "--trainer.lr", "1e-6")
        assert (config.recipe, config.max_steps, config.trainer.lr) == ("retail", 3, 1e-6)
        assert config.task == RECIPES["retail"]().task


@pytest.mark.parametrize(
    "config",
    [
        RECIPES["llm"](),
        RunConfig(
            recipe="of_a_script",
            task=TaskConfig(env="desk:Tasks"),
            old_logps=OldLogpsConfig(route="ewma_prox", beta=0.5),
            trainer=TrainerConfig(grad_clip=float("inf")),
        ),
    ],
)
def test_the_configuration_of_a_run_can_be_given_back(tmp_path: Path, config: RunConfig) -> None:
    RunLog.create(tmp_path / "run", config).close()
    again = parse("train", str(tmp_path / "run" / "config.json"), "--seed=3")
    assert again == replace(config, seed=3)


def test_a_file_of_an_earlier_version_may_have_options_that_its_run_did_not_use(
    tmp_path: Path,
) -> None:
    config = replace(RECIPES["llm"](), correction=CorrectionConfig(mode="none"))
    RunLog.create(tmp_path / "run", config).close()
    file = tmp_path / "run" / "config.json"
    row = json.loads(file.read_text())
    row["correction"]["low"] = 0.9
    file.write_text(json.dumps(row))
    assert parse("train", str(file)) == config


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", '{"recipe": "of_a_script", "max_steps": 3}', "unknown recipe 'of_a_script'"),
        ("run.json", '{"max_steps": ', "run.json is not valid JSON"),
        ("run.json", '{"trainer": {"lr": "x"}}', "run.json, trainer.lr must be a number, got 'x'"),
        ("run.json", "[]", "run.json must hold an object, got []"),
        ("run.toml", "max_steps = 3", "no recipe is given"),
        ("other.toml", None, "cannot read"),
    ],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, says: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert says in complaint(capsys, "train", str(tmp_path / name))


def test_one_file_of_options_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "train", "a.toml", "--config", "b.toml")
    assert "give one file of options, a.toml or --config b.toml" in line


OWN_RECIPES = """
from unstale.recipes import retail

def short(**changes):
    return retail(max_steps=2, **changes)

def nothing():
    return 3

def wrong():
    return retail(max_steps=0)
"""


def test_a_recipe_of_ones_own_is_named_by_its_module(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes_of_mine.py").write_text(OWN_RECIPES)
    monkeypatch.syspath_prepend(tmp_path)
    config = parse("train", "recipes_of_mine:short", "--seed", "3")
    assert (config.recipe, config.max_steps, config.seed) == ("recipes_of_mine:short", 2, 3)
    for function, says in (
        ("none", "has no attribute 'none'"),
        ("nothing", "'recipes_of_mine:nothing' returned a int, no RunConfig"),
        ("wrong", "'recipes_of_mine:wrong' cannot be used: max_steps must be >= 1, got 0"),
    ):
        assert says in complaint(capsys, "train", f"recipes_of_mine:{function}")


def test_reward_is_a_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("--reward", "sums:mine"), ("--reward=sums:mine",), ("--task.reward=sums:mine",)):
        config = parse("train", "llm", "--task.env", "dataset:sums.jsonl", *words)
        assert config.task.reward == "sums:mine"  # type: ignore[attr-defined]
    line = complaint(capsys, "train", "retail", "--reward", "sums:mine")
    assert "task.reward is an option of dataset:" in line
    with pytest.raises(SystemExit):
        main.main(["train", "llm", "--help"])
    assert "--task.reward, --reward STR" in capsys.readouterr().out


def test_the_neutral_recipe_suits_a_model_of_ones_own() -> None:
    config = RECIPES["llm"]()
    assert (config.trainer.lr, config.trainer.dtype, config.engine.dtype) == (
        1e-6,
        "bfloat16",
        "bfloat16",
    )
    assert config.minutes == 0 and config.engine.max_completion_tokens >= 2048
    assert config.model != "base"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == f"unstale {unstale.__version__}\n"


@pytest.mark.skipif(not shutil.which("bash"), reason="asks bash")
def test_a_shell_completes_verbs_recipes_options_and_their_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["completion", "bash"])
    script = capsys.readouterr().out
    for words, expected in (
        ("unstale tr", {"train"}),
        ("unstale train reta", {"retail"}),
        ("unstale train retail --trainer.l", {"--trainer.lr", "--trainer.lr_schedule"}),
        ("unstale train retail --rew", {"--reward"}),
        ("unstale train retail --trainer.dtype bf", {"bfloat16"}),
        ("unstale eval runs/x --js", {"--json"}),
    ):
        asked = (
            f"{script}\nCOMP_WORDS=({words}); COMP_CWORD=$(({len(words.split())} - 1))\n"
            '_shtab_unstale unstale; echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash"], input=asked, capture_output=True, text=True, check=True)
        assert expected <= set(done.stdout.split()), (words, done.stdout, done.stderr)


def of_run(config: RunConfig) -> Path:
    """Return the folder of a trained run with this configuration."""
    RunLog.create(config.runs / "run", config).close()
    (config.runs / "run" / "policy").mkdir()
    return config.runs / "run"


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Return the configurations that are evaluated, without evaluating them."""
    configs: list[RunConfig] = []

    def record(trained: Path, config: RunConfig, **options: object) -> EvalResult:
        configs.append(config)
        return EvalResult((1, 0, 0, 0))

    monkeypatch.setattr(evaluate, "evaluate", record)
    return configs


def done(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(arguments)
    assert not end.value.code


def test_eval_reads_the_configuration_of_the_run(
    tmp_path: Path, evaluated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    trained = RECIPES["retail"](runs=tmp_path, engine=EngineConfig(temperature=0.7))
    done("eval", str(of_run(trained)), "--eval.tasks", "8", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["avg@1"]["value"] == 0.25 and told["task"] == "retail"
    (config,) = evaluated
    assert (config.engine, config.task, config.eval.tasks) == (trained.engine, trained.task, 8)


@pytest.mark.parametrize("file", ["events.jsonl", "journal.sqlite"])
def test_a_run_without_a_policy_is_to_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str
) -> None:
    RunLog.create(tmp_path / "run", RECIPES["retail"](runs=tmp_path)).close()
    (tmp_path / "run" / "events.jsonl").unlink(missing_ok=True)
    (tmp_path / "run" / file).touch()
    run = str(tmp_path / "run")
    out = str(tmp_path / "out")
    for words in (["eval", run], ["serve", run], ["push-to-hub", run, "--folder", out]):
        said = complaint(capsys, *words)
        assert f"{run} has no trained policy" in said
        assert f"resume it with unstale train --resume {run}" in said
        assert f"written by unstale export {run} FOLDER" in said


def test_eval_refuses_another_task_unless_told(
    tmp_path: Path, evaluated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(of_run(RECIPES["retail"](runs=tmp_path)))
    line = complaint(capsys, "eval", run, "calculator")
    assert "was trained with task.env retail, and calculator has calculator" in line
    assert "add --task.env calculator" in line
    (tmp_path / "level.toml").write_text('recipe = "retail"\n[task]\nlevel = "2"\n')
    line = complaint(capsys, "eval", run, str(tmp_path / "level.toml"))
    assert "was trained with task.level 1, and retail has 2" in line and not evaluated
    done("eval", run, "retail")
    done("eval", run, "--task.level", "2")
    done("eval", run, "calculator", "--task.env", "calculator")
    done("eval", run, "--task.env", "calculator")
    assert [config.task.env for config in evaluated] == [*["retail"] * 2, *["calculator"] * 2]


def test_eval_imports_code_that_a_run_names_only_if_it_is_named_again(
    tmp_path: Path, evaluated: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    task = RECIPES["llm"]().task
    own = replace(task, env="dataset:x.jsonl", reward="harm:mine")  # type: ignore[call-arg]
    run = str(of_run(RECIPES["llm"](runs=tmp_path, task=own)))
    assert "names your own code. To run it, add --task.reward harm:mine" in complaint(
        capsys, "eval", run
    )
    done("eval", run, "--reward", "harm:mine")
    assert evaluated[0].task == own


@pytest.mark.parametrize(
    ("words", "name", "code"),
    [
        (("lint", "retail"), "refusals", 0),
        (("report", "RUN"), "report", 0),
        (("check-template", str(SHIPPED_POLICY), "--conversations", "3"), "checks", 0),
        (("journal", "RUN"), "content", 1),  # the fake journal has gaps
        (
            (
                "simulate",
                "--set",
                "costs.decode=0.01",
                "costs.train_token=1e-4",
                "--steps",
                "4",
            ),
            "mean_step_s",
            0,
        ),
    ],
)
def test_figures_are_printed_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], name: str, code: int
) -> None:
    run = str(fake_run(tmp_path / "run", steps=3)) if "RUN" in words else ""
    with pytest.raises(SystemExit) as end:
        main.main([run if word == "RUN" else word for word in words] + ["--json"])
    assert end.value.code == code and name in json.loads(capsys.readouterr().out)


def test_every_option_has_a_docstring() -> None:
    for option in options().values():
        assert option.field in field_docs(option.owner), option.name


@pytest.mark.parametrize(
    "knobs, code, says",
    [((), 0, "no problem found"), (("--old_logps.route", "rollout"), 2, "refused")],
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
        serve,
        "serve",
        lambda trained, config, *, token, port, limit_turns: tokens.append(token),
    )
    monkeypatch.setenv("UNSTALE_TOKEN", "of the environment")
    with pytest.raises(SystemExit) as end:
        main.main(["serve", "base", "retail", *words])
    assert end.value.code == 0 and tokens == [asked]


def test_the_help_of_serve_names_the_variable_of_the_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    assert "$UNSTALE_TOKEN, which other users of the machine do not see" in " ".join(
        capsys.readouterr().out.split()
    )


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
    (run / "events.jsonl").write_text("")  # the shares of time are then those of the metrics
    with pytest.raises(SystemExit) as end:
        main.main(["report", str(run)])
    assert not end.value.code
    path, state, told, advice = capsys.readouterr().out.splitlines()
    assert path.endswith("report.html")
    assert state.startswith("State: ")
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


def test_the_trainer_computes_in_bfloat16_on_a_gpu_and_in_float32_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The choice is recorded. Weights that are rounded for a pass are rounded stochastically."""
    for is_there, expected in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(training, "has_gpu", lambda found=is_there: found)
        chosen = TrainerConfig()
        assert (chosen.dtype, chosen.rounding) == (expected, "stochastic")
        assert TrainerConfig(dtype="float32").dtype == "float32"
    monkeypatch.undo()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_gpu() and TrainerConfig().dtype == "float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_float32(RunConfig(recipe="x"), on_gpu=False)
        with pytest.raises(RuntimeWarning, match=r"trainer.dtype = float32 on a GPU: .*bfloat16"):
            warn_of_float32(RunConfig(recipe="x"), on_gpu=True)


def test_help_and_techniques_fit_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (["techniques"], ["train", "llm", "--help"]):
        with pytest.raises(SystemExit):
            main.main(command)
        lines = capsys.readouterr().out.splitlines()
        long = [line for line in lines if len(line) > 80 and "|" not in line]
        assert len(lines) > 30 and not long  # a list of choices may be one long word
    with pytest.raises(SystemExit):
        main.main(["techniques"])
    out = capsys.readouterr().out
    assert "bin_sizes " in out and "…" not in out and len(out.splitlines()) < 115


def test_ranks_that_do_not_divide_the_experts_are_told_of_others() -> None:
    """36 ranks have 4 of 128 experts each, although 32 of them would have all."""
    with pytest.warns(RuntimeWarning, match=r"36 trainer ranks fill up the 128 .* to 144: .* 12%"):
        check_expert_ranks(ClusterConfig(trainers=36), 128)
    with pytest.warns(RuntimeWarning, match=r"to 256: .* Set cluster.trainers to 128$"):
        check_expert_ranks(ClusterConfig(trainers=256), 128)
    with pytest.warns(RuntimeWarning, match=r"Set cluster.trainers to 32 or 64 for each copy"):
        check_expert_ranks(ClusterConfig(trainers=72, replicas=2), 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for trainers in (0, 1, 22, 32, 64, 128):
            check_expert_ranks(ClusterConfig(trainers=trainers), 128)
        check_expert_ranks(ClusterConfig(trainers=36), 0)
        check_expert_ranks(ClusterConfig(trainers=32, expert_parallel=True), 128)
    apart = ClusterConfig(trainers=36, expert_parallel=True)
    with pytest.raises(ConfigError, match=r"128 experts .* among 36 trainer ranks. Use 32 or 64,"):
        check_expert_ranks(apart, 128)
    with pytest.raises(ConfigError, match="must be false: the policy has no experts"):
        check_expert_ranks(apart, 0)
