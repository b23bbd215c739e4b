"""Test the choice of techniques: options, messages, the linter's facts and the printed table."""

import json
import re
import shlex
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from unstale.cli.main import main
from unstale.cli.resume import config_changes
from unstale.config import ConfigError, RunConfig
from unstale.config.names import RENAMED_TECHNIQUES
from unstale.config.options import override, read_file, stored_config, with_changes
from unstale.config.techniques import chosen, needs_reference, techniques
from unstale.durability.run_folder import dumps
from unstale.envs import ListedTasks, task_identity
from unstale.envs.mixed import MixedTasks
from unstale.lint import check
from unstale.lint.techniques import methods_of_tasks
from unstale.recipes import RECIPES
from unstale.research.techniques.catalogue import COMMANDS, ROWS, WISHES, Row
from unstale.research.techniques.ess_lr import EssLr, EssLrConfig
from unstale.techniques.hooks import Techniques

NONE = RunConfig(recipe="mine")


def test_a_technique_is_chosen_by_name_and_keeps_its_options(tmp_path: Path) -> None:
    chosen = override(NONE, {"techniques": "ess_lr", "ess_lr.base": 0.5})
    assert chosen.technique_options == {"ess_lr": EssLrConfig(base=0.5)}
    assert override(chosen, {"max_steps": 3}).technique_options == chosen.technique_options
    assert stored_config(json.loads(dumps(chosen))) == chosen
    (tmp_path / "own.toml").write_text('techniques = "ess_lr"\n[ess_lr]\nbase = 0.5\n')
    assert override(NONE, read_file(tmp_path / "own.toml")) == chosen
    assert override(chosen, {"techniques": ""}) == NONE
    (part,) = Techniques.of(chosen).parts.values()
    assert isinstance(part, EssLr) and not Techniques.of(NONE).parts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"techniques": "ess"}, "techniques cannot have 'ess'; did you mean ess_lr?"),
        ({"techniques": "ess_lr ess_lr"}, "techniques has ess_lr twice"),
        ({"ess_lr.base": 2.0}, "ess_lr has options, but is not chosen.*Set --techniques 'ess_lr'"),
        ({"techniques": "ess_lr", "ess_lr.base": 0.0}, "ess_lr.base must be > 0, got 0"),
        ({"techniques": "limits", "limits.scope": "all"}, "limits.scope cannot be 'all'"),
    ],
)
def test_a_wrong_choice_is_refused_with_what_to_do(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(NONE, values)


@pytest.mark.parametrize(("former", "name"), RENAMED_TECHNIQUES.items())
def test_former_name_of_a_technique_is_refused_with_the_present_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], former: str, name: str
) -> None:
    assert name in techniques() and former not in techniques()
    error = f"{former} is now {name}"
    (tmp_path / "old.toml").write_text(f"[{former}]\nunknown = 1\n")
    options: dict[str, Any] = {former: EssLrConfig()}
    for refused in (
        lambda: override(NONE, {"techniques": f"ess_lr {former}"}),
        lambda: replace(NONE, technique_options=options),
        lambda: with_changes(NONE, {former: {"unknown": 1}}),
        lambda: read_file(tmp_path / "old.toml"),
    ):
        with pytest.raises(ConfigError, match=error):
            refused()
    for words in (["--techniques", former], [f"--{former}.unknown", "1", f"--{former}.more=2"]):
        with pytest.raises(SystemExit):
            main(["lint", "calculator", *words])
    of_value, of_option = capsys.readouterr().err.splitlines()
    assert error in of_value and of_option.count(error) == 1


def test_configuration_of_an_earlier_run_has_former_names_of_techniques() -> None:
    values = {"techniques": "ess_lr episode_filter", "episode_filter.n": 3, "ess_lr.base": 0.5}
    config = override(NONE, values)
    stored = json.loads(dumps(config))
    options = stored["technique_options"]
    earlier = {
        **stored,
        "techniques": "ess_lr pick",
        "technique_options": {"ess_lr": options["ess_lr"], "pick": options["episode_filter"]},
    }
    assert stored_config(earlier) == config


POOL = {"selection.pool": 64}
ESTIMATOR = {"advantage.estimator": "grpo"}
"""An estimator technique asks for this if the recipe has another estimator."""

CONDITIONS = {
    "baseline": POOL,
    "beta_sampler": POOL,
    "bin_sizes": POOL,
    "difficulty_bin_weights": POOL,
    "predicted_sampler": POOL,
    "hard_task_stages": POOL,
    "reward_channels": {"techniques": "tool_bonus reward_channels"},
    "confidence_clip": {"objective.loss_type": "ppo_clip"},
    "opmd": {"objective.loss_type": "none"},
    "distil": {"distil.teacher": "start", "distil.advantage_coef": 1.0},
    "estr": {"estr.tau": 0.04},
    "episode_filter": {"schedule.group_size": 8},
    "preserve_clip": {"objective.loss_type": "ppo_clip"},
    "hints": {"objective.placed": "anchor", **ESTIMATOR},
    "bus": {"bus.load": "runs/earlier", "objective.placed": "anchor", **ESTIMATOR},
    "retry": {"objective.placed": "anchor", **ESTIMATOR},
    "exemplars": {"objective.placed": "anchor", **ESTIMATOR},
    "regenerate": {
        "engine.precise_engines": 1,
        "engine.quantise": "nvfp4",
        "engine.processes": 2,
        "schedule.group_size": 8,
    },
    "hint_entropy_weights": {
        "techniques": "hint_entropy_weights hints",
        "objective.placed": "anchor",
        **ESTIMATOR,
    },
    "tree": {"techniques": "tree tree_advantage", **ESTIMATOR},
    "tree_advantage": {"techniques": "tree tree_advantage", **ESTIMATOR},
}
"""The one option that a technique may ask for before it is admitted with its defaults."""


@pytest.mark.costly(cases=12)
@pytest.mark.parametrize("name", techniques())
def test_every_recipe_admits_a_technique_with_its_defaults_or_asks_for_one_option(
    name: str,
) -> None:
    asked = False
    for recipe, make in RECIPES.items():
        options = {"techniques": name, "objective.placed": "mask"}
        config = make()
        if config.selection.test_time:
            continue  # which only the recipe's own technique allows
        if "objective.placed" in CONDITIONS.get(name, {}) and config.old_logps.needs.inline:
            continue  # placed text needs an old log-probability that is computed once per batch
        if "rloo_first" in config.advantage.estimator and techniques()[name].slot == "estimator":
            options |= ESTIMATOR
        try:
            made = override(config, options)
        except ConfigError as error:
            (option, value), *_ = CONDITIONS[name].items()
            assert option in str(error) or f"--techniques {value!r}" in str(error), recipe
            made, asked = override(config, options | CONDITIONS[name]), True
        assert not check(made, without=[methods_of_tasks]).refusals, recipe
        assert Techniques.of(made).parts
    assert asked == (name in CONDITIONS)


BEGINS_WITH_OPTIONS = re.compile(r"(?:--[\w.]+ (?:'[^']*'|[^\s,;:]+)(?:[,;:]|$| ))+")
NAMES = {"N": "256", "TAU": "0.04", "DIR": "runs/shared", "NAME": "one", "RUN": "runs/earlier"}
"""What stands for the words in capitals in the options of the table."""


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.how.startswith("--techniques")],
    ids=lambda row: str(row.number),
)
def test_the_options_of_a_row_can_be_used_as_they_are_written(
    row: Row, capsys: pytest.CaptureFixture[str]
) -> None:
    found = BEGINS_WITH_OPTIONS.match(row.how)
    assert found
    words = [NAMES.get(word, word) for word in shlex.split(re.sub("[,;:]( |$)", " ", found[0]))]
    with pytest.raises(SystemExit) as end:
        main(["lint", "retail", *words])
    assert end.value.code == 0, (words, *capsys.readouterr())


def test_a_resumed_run_keeps_its_techniques() -> None:
    chosen = override(NONE, {"techniques": "ess_lr"})
    with pytest.raises(ConfigError, match="techniques cannot change from empty to ess_lr"):
        config_changes(NONE, chosen)
    (changed,) = config_changes(chosen, override(chosen, {"ess_lr.base": 0.5}))
    assert changed == "ess_lr.base is 0.5, it was 1.0: takes effect from here on"


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("bin_sizes", "bins", 5),
        ("bin_sizes", "min", 2),
        ("bin_sizes", "max", 10),
        ("difficulty_bin_weights", "bins", 5),
    ],
)
def test_a_resumed_run_keeps_the_options_that_its_state_depends_on(
    name: str, option: str, value: int
) -> None:
    chosen = override(NONE, {"techniques": name, "selection.pool": 9})
    changed = override(chosen, {f"{name}.{option}": value})
    with pytest.raises(ConfigError, match=f"{name}.{option} cannot change from .* the checkpoint"):
        config_changes(chosen, changed)
    (said,) = config_changes(chosen, override(chosen, {f"{name}.visits": 4}))
    assert "takes effect from here on" in said


@pytest.mark.parametrize(
    ("name", "kind", "free"),
    [
        ("baseline", {"centre": "prior"}, {"decay": 0.5}),
        ("predicted_sampler", {"forecast": "model"}, {"alpha": 0.4}),
    ],
)
def test_a_resumed_run_keeps_the_kind_of_a_technique(name: str, kind: dict, free: dict) -> None:
    chosen = override(NONE, {"techniques": name, "selection.pool": 9})

    def change(values: dict) -> list[str]:
        changed = {f"{name}.{option}": value for option, value in values.items()}
        return config_changes(chosen, override(chosen, changed))

    with pytest.raises(ConfigError, match=f"{name}.{min(kind)} cannot change .* the state of that"):
        change(kind)
    (said,) = change(free)
    assert "takes effect from here on" in said


def test_help_has_only_the_options_of_chosen_techniques(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = []
    for words in ([], ["--techniques", "ess_lr"]):
        with pytest.raises(SystemExit):
            main(["train", "retail", "--help", *words])
        shown.append(capsys.readouterr().out)
    assert ["--ess_lr.base" in text for text in shown] == [False, True]
    assert ["--techniques" in text for text in shown] == [True, True]


def test_the_linter_says_what_each_technique_changes() -> None:
    chosen = override(NONE, {"techniques": "ess_lr", "ess_lr.base": 0.5})
    facts = check(chosen).facts
    assert "ess_lr: the learning rate times sqrt(ESS / n / 0.5)" in facts["techniques"]
    assert "techniques" not in check(NONE).facts
    assert not check(chosen).refusals


def _printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["techniques", *words])
    assert not end.value.code
    return capsys.readouterr().out


def test_the_table_has_every_row_and_every_technique(capsys: pytest.CaptureFixture[str]) -> None:
    assert [row.number for row in ROWS] == list(range(1, 62))
    table = json.loads(_printed(capsys, "--json"))
    assert sum(table["counts"].values()) == 61
    listed = {name for row in table["rows"] for name in row["techniques"]}
    assert listed == set(techniques())
    for row in table["rows"]:
        assert all(re.search(rf"\b{name}\b", row["how"]) for name in row["techniques"]), row
    assert "VCPO" in _printed(capsys, "--all")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.paper)
def test_a_row_says_what_is_missing_unless_it_works(row: Row) -> None:
    assert bool(row.missing) != (row.state == "works")
    assert row.how or row.state == "idea only"
    assert not row.missing or (row.missing[0].isupper() and row.missing.endswith("."))


def test_techniques_are_listed_by_what_a_user_wants(capsys: pytest.CaptureFixture[str]) -> None:
    listed = [name for names in WISHES.values() for name in names]
    assert sorted(listed) == sorted([*techniques(), *COMMANDS])
    printed = _printed(capsys)
    assert [line for line in printed.splitlines() if line in WISHES] == list(WISHES)
    assert all(re.search(rf"^{name} ", printed, re.MULTILINE) for name in listed)


def test_a_technique_is_explained_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for name, entry in techniques().items():
        with pytest.raises(SystemExit) as end:
            main(["techniques", name, "--json"])
        words = json.loads(capsys.readouterr().out)
        assert not end.value.code
        assert words["papers"] and words["about"] == entry.formula
        assert all(words[each] for each in ("use it if", "exactness", "measured")), name
    with pytest.raises(SystemExit) as end:
        main(["techniques", "ess"])
    assert end.value.code == 2 and "did you mean ess_lr" in capsys.readouterr().err


def test_a_slot_that_holds_one_technique_refuses_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unstale.config.techniques.EXCLUSIVE", frozenset({"controller"}))
    monkeypatch.setattr(
        "unstale.config.techniques.techniques",
        lambda: {each: replace(techniques()["ess_lr"], name=each) for each in ("a", "b")},
    )
    with pytest.raises(ConfigError, match=r"has a and b.*each is the controller of the run"):
        chosen("a b")


def test_a_task_has_one_identity_each_time_a_list_repeats() -> None:
    class Listed(ListedTasks):
        tools = ()
        data = {"train": ["a", "b", "c"], "held_out": ["d"]}  # noqa: RUF012

        def __init__(self, name: str) -> None:
            self.name = name

    tasks = Listed("listed")
    order = tasks.train(3)
    drawn = [next(order) for _ in range(9)]
    assert len({task.key for task in drawn}) == 9
    found = {(task_identity(tasks, task), tasks.data_of(task)) for task in drawn}  # type: ignore[arg-type]
    assert found == {(f"listed/train/{i}", entry) for i, entry in enumerate("abc")}
    both = MixedTasks("both", [tasks, Listed("other")])  # type: ignore[list-item]
    mixed = {task_identity(both, task) for task in islice(both.train(3), 18)}
    assert mixed == {f"{name}/train/{i}" for name in ("listed", "other") for i in range(3)}


def test_a_technique_with_a_reference_keeps_a_copy_in_memory() -> None:
    assert [
        needs_reference(each)
        for each in (NONE, override(NONE, {"techniques": "confident_error_penalty"}))
    ] == [
        False,
        True,
    ]
