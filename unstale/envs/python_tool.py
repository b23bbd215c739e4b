"""The environment `python`: puzzles that are easy with a tool that runs Python code in a
sandbox.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from unstale.config.tasks import EnvSpec
from unstale.envs import Message, NumberedTasks, sandbox, tool_schema
from unstale.envs.question import Question, ToolRunner
from unstale.records import Task

TOOL = tool_schema(
    "python",
    "Run a Python program. What it prints is the answer.",
    {"code": {"type": "string", "description": "For example print(2 ** 100)."}},
)
LIMITS = sandbox.Limits(seconds=5.0, memory_mb=256, file_mb=1, processes=4, output_kb=1)
MAX_CODE = 4000
WORDS = ("copper", "lantern", "orchard", "pebble", "saddle", "thimble", "walnut", "zephyr")


class PythonTasks(NumberedTasks):
    """Tasks with small puzzles. The reward is 1 if the last reply has the answer."""

    name = "python"
    tools: tuple[Mapping[str, Any], ...] = (TOOL,)

    def puzzle(self, task: Task) -> tuple[str, str]:
        """Return the question of a task and its answer.

        >>> PythonTasks().puzzle(Task("python", "train", 0))
        ('What is the remainder of 48 ** 22 divided by 97?', '93')
        """
        random = Random(task.key)
        base = random.randrange(12, 99)
        power = random.randrange(9, 30)
        words = random.sample(WORDS, 4)
        listed = " ".join(words)
        digits = str(base**power)
        return random.choice(
            (
                (
                    f"What is the sum of the digits of {base} ** {power}?",
                    str(sum(map(int, digits))),
                ),
                (
                    f"What is the remainder of {base} ** {power} divided by 97?",
                    str(base**power % 97),
                ),
                (
                    f"Which letters of {listed} are left when every third is kept?",
                    "".join(words)[::3],
                ),
                (f"What is {listed} without spaces, backwards?", "".join(words)[::-1]),
            )
        )

    def env(self, task: Task, seed: int) -> Question:
        """Return the environment of a task. `seed` is not used, because nothing in it is random."""
        question, answer = self.puzzle(task)
        system = Message("system", "Work it out with the tool, then answer.")
        return Question((system, Message("user", question)), answer, ToolRunner(TOOL, run))


async def run(code: str) -> str:
    """Run a program in the sandbox and return its output. Raises `ValueError` if the program
    fails.
    """
    if len(code) > MAX_CODE:
        raise ValueError(f"a program may have {MAX_CODE} characters")
    done = await sandbox.run(code, limits=LIMITS)
    if done.ended == "timeout":
        raise ValueError(f"the program took longer than {LIMITS.seconds:g} s")
    if done.code:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1])
    return done.stdout.strip() or "The program printed nothing."


def _make(options: object) -> PythonTasks:
    sandbox.check_allowed()
    return PythonTasks()


ENV = EnvSpec("python", _make)
