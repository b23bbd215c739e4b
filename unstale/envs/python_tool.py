"""Puzzles that are easy with Python, and a tool that runs the policy's code in the sandbox."""

from collections.abc import Mapping
from random import Random
from typing import Any

from unstale.envs import NumberedTasks, ToolCall, sandbox
from unstale.envs.question import Question
from unstale.envs.registry import EnvSpec
from unstale.records import Task

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program. What it prints is the answer.",
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "For example print(2 ** 100)."}
            },
            "required": ["code"],
        },
    },
}
LIMITS = sandbox.Limits(seconds=5.0, memory_mb=256, file_mb=1, processes=4, output_kb=1)
MAX_CODE = 4000
WORDS = ("copper", "lantern", "orchard", "pebble", "saddle", "thimble", "walnut", "zephyr")


class PythonTasks(NumberedTasks):
    """A task set of small puzzles. The reward is 1 if the last reply has the answer."""

    name = "python"
    tools: tuple[Mapping[str, Any], ...] = (TOOL,)

    def puzzle(self, task: Task) -> tuple[str, str]:
        """Return a question and its answer.

        >>> PythonTasks().puzzle(Task("python", "train", 0))
        ('What is the remainder of 48 ** 22 divided by 97?', '93')
        """
        random = Random(task.key)
        base = random.randrange(12, 99)
        power = random.randrange(9, 30)
        words = random.sample(WORDS, 4)
        questions = (
            (
                f"What is the sum of the digits of {base} ** {power}?",
                sum(map(int, str(base**power))),
            ),
            (f"What is the remainder of {base} ** {power} divided by 97?", base**power % 97),
            (
                f"Which letters of {' '.join(words)} are left when every third is kept?",
                "".join(words)[::3],
            ),
            (f"What is {' '.join(words)} without spaces, backwards?", "".join(words)[::-1]),
        )
        question, answer = random.choice(questions)
        return question, str(answer)

    def env(self, task: Task, seed: int) -> Question:
        """Ignore `seed`: all randomness comes from the task."""
        return Question("Work it out with the tool, then answer.", *self.puzzle(task), _tool)


async def _tool(call: ToolCall) -> str:
    """Return the output of the program. Raises `ValueError` if the call or the program fails."""
    code = call.arguments.get("code")
    if call.error:
        raise ValueError(call.error)
    if call.name != "python" or not isinstance(code, str) or len(call.arguments) != 1:
        raise ValueError("the tool is python, and takes code")
    if len(code) > MAX_CODE:
        raise ValueError(f"a program may have {MAX_CODE} characters")
    done = await sandbox.run(code, limits=LIMITS)
    if done.ended == "timeout":
        raise ValueError(f"the program took longer than {LIMITS.seconds:g} s")
    if done.code:
        raise ValueError((done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1])
    return done.stdout.strip() or "The program printed nothing."


ENV = EnvSpec("python", lambda options: PythonTasks())
