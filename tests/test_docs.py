"""Run the examples of the docs as they are printed, and check commands, links and install hints."""

import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rewards.test_judge import Model, model
from tests.support.forked import run_forked
from unstale import __version__
from unstale.cli import main, recipe_options
from unstale.config import ConfigError, install
from unstale.lint import check

__all__ = ["model"]  # a fixture

ROOT = Path(__file__).parent.parent


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def run_python(*words: str, cwd: Path = ROOT) -> str:
    """Return the standard output of a new Python process, which is not forked."""
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_the_package_runs_as_a_module() -> None:
    assert run_python("-m", "unstale", "--version") == f"unstale {__version__}\n"


@pytest.mark.costly
def test_the_example_task_trains(tmp_path: Path) -> None:
    tasks, script, *_ = blocks("docs/your-own-task.md", "python")
    (tmp_path / "order_desk.py").write_text(tasks)
    check = (
        "from unstale.testing import check_env; from order_desk import EchoTasks; "
        "check_env(EchoTasks())"
    )
    run_forked(check, cwd=tmp_path)
    success, report = run_forked(script, cwd=tmp_path).strip().splitlines()[-1].split(" ", 1)
    assert 0 <= float(success) <= 1 and (tmp_path / report).exists()


@pytest.mark.costly
def test_the_example_mixture_keeps_the_contract(tmp_path: Path) -> None:
    echo, _, _, mixture, *_ = blocks("docs/your-own-task.md", "python")
    sums = blocks("docs/your-own-data.md", "python")[0]
    for name, code in (("order_desk", echo), ("mixture", mixture), ("sums", sums)):
        (tmp_path / f"{name}.py").write_text(code)
    run_forked(sums, cwd=tmp_path)
    check = (
        "from itertools import islice; from unstale.testing import check_env; "
        "from mixture import tasks; mixed = tasks(); check_env(mixed); "
        "print([task.env for task in islice(mixed.train(0), 4)])"
    )
    printed = run_forked(check, cwd=tmp_path)
    assert printed == "['echo', 'calculator', 'dataset:sums.jsonl', 'echo']\n"


@pytest.mark.costly
def test_the_example_horizon_has_the_figures_of_the_page() -> None:
    *_, horizon, sqirl = blocks("docs/your-own-task.md", "python")
    first, second, learned = run_python("-c", f"{horizon}\n{sqirl}").splitlines()
    assert "depth=1," in first and "rollouts=59, episodes=944," in first
    assert "random_return=0.26" in first
    assert "episodes=822," in second and learned == "1.0 1.0"


def test_a_page_quotes_the_loop() -> None:
    source = (ROOT / "unstale" / "loop.py").read_text()
    shown = blocks("docs/asynchrony.md", "python")[-1]
    assert shown.startswith("async def take_step(") and shown in source


def test_every_command_of_the_readme_exists() -> None:
    readme = (ROOT / "README.md").read_text()
    verbs = set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE))
    assert {"demo", "test"} <= verbs
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert verbs <= targets
    for verb in set(re.findall(r"^unstale ([a-z-]+)", readme, re.MULTILINE)):
        run_forked([verb, "--help"])


def test_links_in_the_docs_resolve() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_install_hints_install_from_the_checkout() -> None:
    """Extras are installed into a checkout (`-e .[extra]`), never from a registry."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "unstale").rglob("*.py")]
    text = {str(page): page.read_text() for page in pages}
    assert not [
        name
        for name, words in text.items()
        if re.search(r"install [^\n`]*(?<![\w./])unstale\b", words)
    ]
    together = "\n".join(text.values())
    hints = re.findall(r"([\w./]*pip install [^\n`]*-e '\.\[([\w-]+)\]')", together)
    assert all(command == install(extra) for command, extra in hints)
    separate = re.findall(r"`(make env-(openenv|verifiers))`", together)
    assert separate and all(install(extra).startswith(f"{each}, ") for each, extra in separate)
    hints += separate
    extras = {extra for _, extra in hints} | set(re.findall(r"\binstall\('([\w-]+)'\)", together))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras == set(known) - {"bench", "dev", "docs", "fuzz"}


def test_the_examples_for_other_trainers_run() -> None:
    """Padded: one token of four has D = 2.5 and no gradient. Packed: gradients computed by hand."""
    padded, packed = blocks("docs/other-trainers.md", "python")
    done = [run_python("-c", padded), run_forked(packed, cwd=ROOT)]
    kept, gradient = re.fullmatch(r"kept (.*), gradient \[(.*)\]\n", done[0]).groups()  # type: ignore[union-attr]
    assert kept == "75%" and [float(value) == 0 for value in gradient.split(", ")] == [
        False,
        False,
        True,
        False,
    ]
    # r = 0.1. Lag 2: alpha 1/2, D = S = e^0.05. Lag 0: alpha 1, D = e^0.1, S = 1. All divided by 4;
    # A = +1, +1, +1, -1.
    old, fresh = -math.exp(0.1) / 4, math.exp(0.1) / 4
    expected = [round(value, 4) for value in (old, old, -fresh, fresh)]
    assert done[1] == f"loss {old * 2:.4f}, gradient {expected}\n"


def asked_for() -> list[str]:
    """Return the options in the table of what users of other trainers ask for."""
    page = (ROOT / "docs/other-trainers.md").read_text()
    table = page.partition("## What users of other trainers ask for")[2].partition("\n## ")[0]
    shown = [line.split(" | ")[-1] for line in table.splitlines() if line.startswith("| ")]
    given = [options for each in shown for options in re.findall("`(--[^`]+)`", each)]
    return [each for each in given if not each.startswith(("--model", "--task.env"))]


@pytest.mark.parametrize("given", asked_for())
def test_options_that_users_of_other_trainers_ask_for_are_accepted(given: str) -> None:
    chosen = main.parse(["lint", "retail", *shlex.split(given)])
    assert not check(recipe_options.configure(chosen)).refusals


@pytest.mark.costly(cases=1)
@pytest.mark.parametrize("given", asked_for())
def test_options_that_users_of_other_trainers_ask_for_train(given: str, tmp_path: Path) -> None:
    """With rows and a reward of one's own, as the page says, and the small model."""
    (tmp_path / "my.py").write_text("def reward(reply, row):\n    return float(len(reply) % 2)\n")
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(1300)]
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = "train llm --model base --task.env dataset:my.jsonl --reward my:reward --max_steps 1"
    small = (
        "--schedule.groups_per_step 2 --schedule.group_size 2 --eval.tasks 2 "
        "--engine.max_completion_tokens 8 --engine.max_context 256 --name run"
    )
    run_forked(shlex.split(f"{words} {small} {given}"), cwd=tmp_path)
    last = json.loads((tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and math.isfinite(last["trainer/grad_norm"])


def test_the_padded_example_ignores_what_is_off_the_mask() -> None:
    """A third row is padding alone, and everything off the mask is NaN."""
    example: dict[str, Any] = {}
    exec(blocks("docs/other-trainers.md", "python")[0], example)
    padding = torch.zeros(1, 4, dtype=torch.bool)
    mask = torch.cat([example["mask"], padding])
    version = torch.cat([example["version"], padding.long() - 1])
    inputs = {}
    for name in ("behavior_logp", "old_logp", "logp"):
        values = torch.cat([example[name].detach(), torch.zeros(1, 4)])
        inputs[name] = torch.where(mask, values, math.nan).requires_grad_(name == "logp")
    advantage = torch.tensor([1.0, -1.0, math.nan])
    loss, figures = example["padded_loss"](
        **inputs, version=version, mask=mask, advantage=advantage
    )
    loss.backward()
    assert loss.item() == example["loss"].item() and figures == example["figures"]
    gradient = inputs["logp"].grad
    assert torch.equal(gradient[:2], example["logp"].grad) and not gradient[2].any()


def test_the_reward_examples_run(model: Model, tmp_path: Path) -> None:
    """Rules, a judge at a local endpoint, its reward of a row, and combined rewards."""
    rules, judge, friendly, liked, tasks = blocks("docs/rewards.md", "python")
    with pytest.raises(ConfigError, match="no folder at models/liking"):
        exec(liked, {})
    judge, friendly = (
        code.replace("http://127.0.0.1:8000/v1", model.url) for code in (judge, friendly)
    )
    (tmp_path / "capitals.py").write_text(tasks)
    (tmp_path / "friendly.py").write_text(friendly)
    row = '{"prompt": "Where is my order?", "answer": "on its way"}\n'
    (tmp_path / "my.jsonl").write_text(row)
    of_a_row = (
        "import asyncio\nfrom unstale.envs import Message\n"
        "from unstale.envs.dataset import DatasetConfig, make_dataset\n"
        "options = DatasetConfig("
        "env='dataset:my.jsonl', reward='friendly:reward', held_out_share=0.0)\n"
        "tasks = make_dataset(options)\n"
        "env = tasks.env(next(tasks.train(0)), 0)\n"
        "turn = asyncio.run(env.step(Message('assistant', 'It will come!')))\n"
        "print(turn.done, turn.rewards)"
    )
    both = (
        "from capitals import *; from unstale.testing import check_env; check_env(CapitalTasks())\n"
    )
    both += "print(round(CapitalTasks.combine({'answer': 1.0, 'brief': 1.0}), 3))"
    # On a busy machine a program may need more than two seconds to start.
    patient = (
        "from dataclasses import replace\nfrom unstale.rewards import programs\n"
        "programs.LIMITS = replace(programs.LIMITS, seconds=60.0)\n"
    )
    rules = patient + rules
    done = [run_forked(code, cwd=tmp_path) for code in (rules, judge, both, of_a_row)]
    assert done == [
        "0.0 1.0\n1.0 1.0\n1.0\n0.75\n",
        "0.7 as it should be 1\n",
        "1.1\n",
        "True {'reward': 0.7}\n",
    ]
    assert (tmp_path / "verdicts.sqlite").exists()


@pytest.mark.costly
def test_the_example_data_trains(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(blocks("docs/your-own-data.md", "python")[0])
    (tmp_path / "run.toml").write_text(blocks("docs/your-own-data.md", "toml")[0])
    printed = []
    for line in blocks("docs/your-own-data.md", "sh")[0].splitlines():
        program, *words = line.split()
        code = (tmp_path / words[0]).read_text() if program == "python" else ""
        printed.append(run_forked(code or words, cwd=tmp_path))
    notebook = blocks("docs/your-own-data.md", "python")[1]
    (tmp_path / "notebook.py").write_text(notebook)
    assert run_python("notebook.py", cwd=tmp_path).splitlines()[-1] == "1"
    _, trained, evaluated = printed
    assert "step 2/2" in trained and json.loads(evaluated)["task"] == "dataset:sums.jsonl"
