"""The task sets of `examples/terminal_tasks.py`, and code of an agent that attacks its tests."""

import asyncio
from collections.abc import Sequence
from itertools import islice

import pytest

from examples.terminal_tasks import JOBS, MadeTasks, jobs, repairs, train_jobs, train_repairs
from unstale.envs import Message, ToolCall, Turn
from unstale.testing import check_env


def play(tasks: MadeTasks, number: int, commands: Sequence[str]) -> tuple[list[str], Turn]:
    """Run a held-out task. Return what the agent reads, and the last turn."""

    async def episode() -> tuple[list[str], Turn]:
        env = tasks.env(tasks.held_out(number + 1)[number], 0)
        try:
            await env.begin()
            read = []
            for command in commands:
                call = ToolCall("bash", {"command": command})
                turn = await env.step(Message("assistant", "", (call,)))
                read.append(turn.messages[0].content)
            return read, await env.step(Message("assistant", "Done."))
        finally:
            await env.close()

    return asyncio.run(episode())


@pytest.mark.parametrize("tasks", [jobs(), repairs()], ids=["jobs", "repairs"])
def test_right_commands_succeed_and_others_do_not(tasks: MadeTasks) -> None:
    """The demonstrations show what the sandbox would show."""
    for number, task in enumerate(tasks.held_out(3)):
        solved = tasks.solved(task)
        commands, outputs = zip(*solved.commands, strict=True)
        read, last = play(tasks, number, commands)
        assert (read, dict(last.rewards)) == ([*outputs], {"reward": 1.0})
        assert play(tasks, number, commands[:1])[1].rewards["reward"] == 0.0


def test_sets_are_large_and_keep_the_contract() -> None:
    for tasks in (jobs(), repairs()):
        drawn = [*islice(tasks.train(0), 300), *tasks.held_out(300)]
        texts = {str(tasks.solved(task).task.environment) for task in drawn}
        assert len(texts) > 590, "held-out tasks are no training tasks"
        check_env(tasks, episodes=2, max_turns=2)
    right = [jobs().solved(task, 0.3) == jobs().solved(task) for task in jobs().held_out(400)]
    assert abs(sum(right) / 400 - (0.3 + 0.7 / len(JOBS))) < 0.1


def test_link_to_the_answer_of_the_tests_is_no_answer() -> None:
    tasks = jobs()
    command = tasks.solved(tasks.held_out(1)[0]).commands[-1][0]
    read, last = play(tasks, 0, [f"ln -s /tests/answer {command.split()[-1]}"])
    assert read == ["(no output)"] and dict(last.rewards) == {"reward": 0.0}


DAEMON = (
    "import os, time\nif not os.fork():\n os.setsid()\n while True:\n"
    "  open('/logs/verifier/reward.txt', 'w').write('1')\n"
)
CODE = {
    "reads the tests": "import os, json\nprint(os.listdir('/tests'))\n"
    "rows = open('/tests/want.json').read()\n",
    "writes the reward": "import os\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
    "os._exit(0)\n",
    "leaves a process": DAEMON,
    "kills the tests": "import os\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
    "os.kill(os.getppid(), 9)\n",
    "interrupts the tests": "import os\nopen('/logs/verifier/reward.txt', 'w').write('1')\n"
    "os.kill(os.getppid(), 2)\n",
    "puts a folder there": "import os\nos.mkdir('/logs/verifier/reward.txt')\n",
    "puts a reward of another kind there": "import os\n"
    "open('/logs/verifier/reward.json', 'w').write('1')\nos._exit(0)\n",
    "looks into the other process": "import ctypes, os\n"
    "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0\n",
    "is equal to all": "class All(list):\n __eq__ = lambda *_: True\n",
}


@pytest.mark.parametrize("name", CODE)
def test_code_of_the_agent_cannot_give_itself_the_reward(name: str) -> None:
    text = CODE[name].replace("\\", "\\\\").replace("'", "'\\''")
    write = f"printf '%s' '{text}' > shop.py; python3 -m py_compile shop.py"
    read, last = play(repairs(), 0, [write])
    assert read == ["(no output)"]
    assert dict(last.rewards) == {"reward": 0.0}


def test_recipes_name_their_tasks() -> None:
    assert train_jobs().task.env == "examples.terminal_tasks:jobs"
    assert train_repairs().task.env == "examples.terminal_tasks:repairs"
