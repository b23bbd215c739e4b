"""Test the verifiers adapter with the library (`make test-adapters`).

Episodes are recorded as sampled and streamed, with rewards by name. Harness programs do not see the
endpoint's key. An episode that the library cannot score fails. Task sets that would run code here
are refused. The command of the docs runs.
"""

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.docs import block, run_command
from unstale.config import ConfigError, TaskConfig
from unstale.envs.registry import build_taskset
from unstale.records import Failure, Trajectory

pytest.importorskip("verifiers.v1", reason="needs verifiers: make test-adapters")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.rollout.test_external import CHAT, World, says  # noqa: E402 - it needs the endpoint


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the task set and `uv` on the search paths, as in an activated environment."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")


def adder(tokens: Sequence[int], params: Any) -> list[int]:
    number = int(re.findall(r"What is (\d+)", CHAT.text(tokens, whole=True))[-1])
    return says(f"It is {number + 1}.")


def play(say: Any, count: int = 2) -> tuple[World, list[Trajectory | Failure]]:
    world, tasks = World(say, timeout_s=120.0), build_taskset(TaskConfig(env="verifiers:tiny_sums"))

    async def main() -> list[Trajectory | Failure]:
        async with world.open(), asyncio.TaskGroup() as group:
            rollout = world.rollout(tasks)  # type: ignore[arg-type]
            running = [
                group.create_task(rollout.episode(task, env_seed=1, noise_seed=2))
                for task in tasks.held_out(count)
            ]
        return [each.result() for each in running]

    return world, asyncio.run(main())


def test_its_episodes_are_streamed_and_recorded_as_they_were_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unstale.rollout.endpoint import answers

    seen: list[bool] = []
    choice = answers.ChatFormat.choice

    def spy(self: answers.ChatFormat, *values: Any, streamed: bool) -> answers.Fields:
        seen.append(streamed)
        return choice(self, *values, streamed=streamed)

    monkeypatch.setattr(answers.ChatFormat, "choice", spy)
    world, outcomes = play(adder)
    assert len(outcomes) == 2
    for outcome in outcomes:
        assert isinstance(outcome, Trajectory), outcome
        assert (
            outcome.rewards == {"right": 1.0, "short": 0.5}
            and outcome.stop == "done"
            and not outcome.branches
        )
    heard = {(*context, *said) for context, said, _ in world.sampled}
    assert {outcome.tokens for outcome in outcomes if isinstance(outcome, Trajectory)} == heard
    assert seen and all(seen)


def test_programs_of_a_harness_do_not_see_the_key_of_the_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from unstale.research.adapters.verifiers import KEY

    started: list[dict[str, str]] = []
    start = asyncio.create_subprocess_exec

    async def watched(*words: str, **options: Any) -> Any:
        started.append(dict(options.get("env") or os.environ))
        return await start(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    monkeypatch.setenv(KEY, "")
    _, (outcome,) = play(adder, 1)
    assert isinstance(outcome, Trajectory) and started and os.environ[KEY]
    assert not [given for given in started if KEY in given or os.environ[KEY] in given.values()]


def test_what_its_rewards_cannot_judge_is_a_failed_episode() -> None:
    _, (outcome,) = play(lambda tokens, params: says("broken"), 1)
    assert isinstance(outcome, Failure) and "this reply cannot be judged" in outcome.error


def test_training_and_held_out_tasks_are_different_rows() -> None:
    tasks = build_taskset(TaskConfig(env="verifiers:tiny_sums"))
    assert [task.data.answer for task in tasks.data["held_out"]] == [1, 2]  # type: ignore[attr-defined]
    assert [task.data.answer for task in tasks.data["train"]] == [*range(3, 11)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"taskset": "no_such_taskset"}, "taskset 'no_such_taskset' not found"),
        ({"taskset": "tiny_sums", "held_out": 10}, "held_out must be below the 10 tasks"),
        (
            {"taskset": "tiny_sums", "env": {"agent": {"harness": {"id": "nul"}}}},
            "harness 'nul' not found",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, Any], says: str) -> None:
    from unstale.research.adapters.verifiers import VerifiersTasks

    with pytest.raises(ConfigError, match=says):
        VerifiersTasks(**options)


def test_no_harness_runs_code_here_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers.v1 as vf

    monkeypatch.setattr(vf, "default_harness_id", lambda taskset: "mini_swe_agent")
    with pytest.raises(ConfigError, match="runs code of the policy; give it a container"):
        build_taskset(TaskConfig(env="verifiers:tiny_sums"))


def test_uv_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="pip install uv"):
        build_taskset(TaskConfig(env="verifiers:tiny_sums"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "plus_one.py").write_text(block("plus_one.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("plus_one", None)


def test_the_command_of_the_docs_plays_episodes(
    module: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "2 tasks, 1 attempts each" in run_command("verifiers:plus_one", capsys)
