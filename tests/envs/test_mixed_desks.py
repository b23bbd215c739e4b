"""Test the mixture of desks: desks take turns, and an episode has only the tools of its desk."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from transformers import AutoTokenizer

from unstale.config import SHIPPED_POLICY, ConfigError, EngineConfig, RolloutConfig, make_task
from unstale.engines import SamplingParams
from unstale.engines.scripted import ScriptedEngine
from unstale.envs import HasTaskTools
from unstale.envs.calculator import CalculatorTasks
from unstale.envs.chat import Chat
from unstale.envs.desk import desk_names, shipped_desks
from unstale.envs.mixed import MixedTasks
from unstale.envs.registry import build_taskset
from unstale.isolation.tasks import IsolatedTasks
from unstale.records import Task, Trajectory
from unstale.rollout.episode import Rollout
from unstale.rollout.generator import Generator
from unstale.testing import check_env


def test_all_desks_take_turns_and_each_task_is_one_of_its_desk() -> None:
    mixed = build_taskset(make_task("desks", level="2"))
    check_env(mixed, episodes=5)
    drawn = list(islice(mixed.train(3), 25))
    assert Counter(task.env for task in drawn) == dict.fromkeys(desk_names(), 5)
    retail = shipped_desks(level="2")["retail"]
    assert [task for task in drawn if task.env == "retail"] == list(islice(retail.train(3), 5))
    held_out = mixed.held_out(12)
    assert len(held_out) == 12 and not {task.key for task in held_out} & {t.key for t in drawn}
    assert isinstance(mixed, HasTaskTools)
    for desk, tasks in shipped_desks(level="2").items():
        assert mixed.tools_of(Task(desk, "train", 0)) == tasks.tools


def test_some_desks_can_be_chosen_and_unknown_ones_are_refused() -> None:
    mixed = build_taskset(make_task("desks", desks="telecom, airline"))
    assert [task.env for task in mixed.held_out(4)] == ["telecom", "airline"] * 2
    with pytest.raises(ConfigError, match=r"task\.desks cannot have 'airlin'; did you mean airl"):
        make_task("desks", desks="airlin,retail")
    with pytest.raises(ConfigError, match=r"task\.desks is an option of desks; "):
        make_task("retail", desks="airline")


def test_an_episode_has_the_tools_of_its_desk() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_POLICY)
    mixed = build_taskset(make_task("desks"))
    chat = Chat(tokenizer, mixed.tools)
    done = tokenizer.encode("Done.<|im_end|>", add_special_tokens=False)

    def reply(tokens: Sequence[int], params: SamplingParams) -> Sequence[int]:
        return done

    async def prompt(task: Task) -> str:
        engine = ScriptedEngine(reply)
        await engine.start()
        await engine.load({}, version=0)
        await engine.resume()
        rollout = Rollout(Generator(engine, chat, EngineConfig()), mixed, RolloutConfig())
        outcome = await rollout.episode(task, env_seed=7, noise_seed=8)
        assert isinstance(outcome, Trajectory) and outcome.stop == "done"
        return tokenizer.decode(outcome.pieces[0].tokens)

    for task in mixed.held_out(5):
        own = [tool["function"]["name"] for tool in mixed.tools_of(task)]
        assert f"Tools: {' '.join(own)}<|im_end|>" in asyncio.run(prompt(task))


def test_worker_processes_keep_the_tools_of_each_desk() -> None:
    mixed = build_taskset(make_task("desks"))
    isolated = IsolatedTasks(mixed, workers=None)  # type: ignore[arg-type]
    assert isinstance(mixed, HasTaskTools) and isinstance(isolated, HasTaskTools)
    for task in mixed.held_out(5):
        assert isolated.tools_of(task) == mixed.tools_of(task)
    plain = IsolatedTasks(build_taskset(make_task("retail")), workers=None)  # type: ignore[arg-type]
    assert not isinstance(plain, HasTaskTools)


def test_a_mixture_names_the_part_that_is_wrong() -> None:
    class Ends(CalculatorTasks):
        name = "ends"

        def train(self, seed: int) -> Iterator[Task]:
            yield from islice(super().train(seed), 2)

    tasks = MixedTasks("both", [CalculatorTasks(), Ends()]).train(0)
    assert [task.env for task in islice(tasks, 4)] == ["calculator", "ends"] * 2
    with pytest.raises(ConfigError, match=r"train\(0\) of ends ended; it must be endless"):
        list(islice(tasks, 2))
    with pytest.raises(ConfigError, match="parts of both must have different names, got calc"):
        MixedTasks("both", [CalculatorTasks(), CalculatorTasks()])
