"""Test the supervised start of a run: what it makes, that it is made once, and what is refused."""

import fcntl
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.waits import wait_until
from unstale.builders import load_policy
from unstale.cli.session import train
from unstale.cli.sft import RECORD
from unstale.cli.supervised_start import demonstrations, make_start
from unstale.config import (
    CheckpointConfig,
    ConfigError,
    EngineConfig,
    EvalConfig,
    RunConfig,
    ScheduleConfig,
    SftConfig,
    make_task,
)
from unstale.config.options import override
from unstale.config.start import start_folder
from unstale.envs.calculator import TOOL
from unstale.envs.calls import PythonCalls
from unstale.envs.chat import Chat
from unstale.model.policy import Policy


def configured(runs: Path) -> RunConfig:
    """Return a short run of the small model whose start has two steps."""
    return RunConfig(
        recipe="test",
        chat_template="python_calls",
        runs=runs,
        name="run",
        max_steps=1,
        task=make_task("reasoning-gym:chain_sum+lcm", tool="calculator"),
        sft=SftConfig(
            steps=2,
            env="reasoning-gym:chain_sum",
            demonstrations=4,
            batch=2,
            lr=1e-3,
        ),
        engine=EngineConfig(max_context=512, max_completion_tokens=8),
        schedule=ScheduleConfig(groups_per_step=2, group_size=2),
        checkpoint=CheckpointConfig(interval=1),
        eval=EvalConfig(tasks=2),
    )


def start(config: RunConfig) -> str:
    """Make a start and return what was printed."""
    text = io.StringIO()
    make_start(config, Console(file=text, width=200))
    return text.getvalue()


def test_a_start_is_made_once_and_is_the_policy_of_the_run(tmp_path: Path) -> None:
    config = configured(tmp_path)
    with pytest.raises(ConfigError, match="there is no supervised start in"):
        _ = config.policy_folder
    assert "step 2: -log pi" in start(config)
    folder = config.policy_folder
    assert folder == start_folder(config) and folder.parent == tmp_path / "starts"
    steps = json.loads((folder / RECORD).read_text())["steps"]
    assert len(steps) == 2 and steps[1]["nll"] < steps[0]["nll"]
    before, after = (Policy.load(each).weights() for each in (config.pretrained_folder, folder))
    assert any(not before[name].equal(after[name]) for name in before)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert "made by another run" in start(config)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_a_run_waits_for_another_that_makes_its_start(tmp_path: Path) -> None:
    config = configured(tmp_path)
    start(config)
    folder = config.policy_folder
    record = (folder / RECORD).rename(folder / "hidden")
    text = io.StringIO()
    with ThreadPoolExecutor(1) as threads, folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threads.submit(make_start, config, Console(file=text, width=200))
        wait_until(lambda: "waiting for another run" in text.getvalue(), "the other run to wait")
        record.rename(folder / RECORD)
    waiting.result()
    assert "made by another run" in text.getvalue() and "step" not in text.getvalue()


def test_another_seed_learning_rate_or_task_is_another_start(tmp_path: Path) -> None:
    config = configured(tmp_path)
    others = [
        replace(config, seed=1),
        override(config, {"sft.lr": 2e-3}),
        override(config, {"task.tool": "none"}),
    ]
    assert len({start_folder(each) for each in (config, *others)}) == 4
    for same in (replace(config, name="b"), override(config, {"trainer.lr": 1.0})):
        assert start_folder(same) == start_folder(config)


def test_the_template_describes_tools_and_its_calls_are_read_back(tmp_path: Path) -> None:
    config = configured(tmp_path)
    start(config)
    chat = Chat(Policy.load(config.policy_folder).tokenizer, [TOOL])
    assert chat.renders_tools and isinstance(chat.call_form, PythonCalls)
    text = '[calculate(expression="lcm(4, 6)")]'
    (call,) = chat.reader.message(text).tool_calls
    assert not call.error and call.arguments == {"expression": "lcm(4, 6)"}


def test_demonstrations_describe_the_tools_as_the_prompts_of_the_run_do(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    template += "{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    config = replace(configured(tmp_path), chat_template=template)
    policy = load_policy(replace(config, sft=SftConfig()))
    described = replace(config, tools_in_prompt=True)
    assert start_folder(described) != start_folder(config)
    (reference, *_) = demonstrations(described, policy)
    assert TOOL["function"]["description"] in policy.tokenizer.decode(reference.tokens)
    with pytest.raises(ConfigError, match="no demonstrations of reasoning-gym:chain_sum"):
        demonstrations(config, policy)  # this template writes no calls


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sft.env": "calculator"}, "has no method demonstration"),
        ({"sft.env": "os:getcwd"}, "must be an environment of the package"),
        ({"sft.env": "reasoning-gym:gsm_symbolic"}, "its puzzles name no expression"),
        ({"task.tool": "none"}, "only with task.tool = calculator"),
        ({"engine.max_context": 32, "engine.max_completion_tokens": 4}, "max_context must be at"),
    ],
)
def test_a_start_that_cannot_be_made_is_refused(
    tmp_path: Path, values: dict[str, object], says: str
) -> None:
    config = configured(tmp_path)
    if values.get("sft.env") == "calculator":
        config = replace(config, task=make_task("calculator"))
    with pytest.raises(ConfigError, match=says):
        start(override(config, values))
    assert not (tmp_path / "starts").exists()


def test_options_of_a_start_need_a_start() -> None:
    with pytest.raises(ConfigError, match=r"sft\.lr = 0\.1 is used only with sft\.steps > 0"):
        SftConfig(lr=0.1)


@pytest.mark.costly
def test_a_run_trains_from_its_start_and_its_policy_needs_none(tmp_path: Path) -> None:
    config = configured(tmp_path)
    run = train(config, console=Console(file=io.StringIO()))
    assert [row["step"] for row in run.metrics] == [0, 1]
    kept = run.folder / "policy" / "chat_template.jinja"
    assert kept.read_text() == (config.policy_folder / "chat_template.jinja").read_text()
    trained = config.with_policy(run.folder / "policy")
    assert trained.policy_folder == run.folder / "policy" and not trained.sft.steps
