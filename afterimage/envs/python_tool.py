"""Puzzles that are hard in the head and easy in Python, and one tool: it runs what the policy wrote, in the sandbox."""

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Any

from afterimage.envs import EnvError, Message, Numbered, ToolCall, Turn, sandbox
from afterimage.trajectory import Task

TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program. What it prints is the answer.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "For example print(2 ** 100)."}},
            "required": ["code"],
        },
    },
}
LIMITS = sandbox.Limits(seconds=5.0, memory_mb=256, file_mb=1, processes=4, output_kb=1)
MAX_CODE = 4000
WORDS = ("copper", "lantern", "orchard", "pebble", "saddle", "thimble", "walnut", "zephyr")


class PythonTasks(Numbered):
    """Powers, digits and letters. Reward is 1 when the final text holds the result as a word of its own."""

    name = "python"
    tools: tuple[Mapping[str, Any], ...] = (TOOL,)

    def puzzle(self, task: Task) -> tuple[str, str]:
        """A question and its answer.

        >>> PythonTasks().puzzle(Task("python", "train", 0))
        ('What is the remainder of 48 ** 22 divided by 97?', '93')
        """
        random = Random(task.key)
        base, power = random.randrange(12, 99), random.randrange(9, 30)
        words = random.sample(WORDS, 4)
        questions = (
            (f"What is the sum of the digits of {base} ** {power}?", sum(map(int, str(base**power)))),
            (f"What is the remainder of {base} ** {power} divided by 97?", base**power % 97),
            (f"Which letters of {' '.join(words)} are left when every third is kept?", "".join(words)[::3]),
            (f"What is {' '.join(words)} without spaces, backwards?", "".join(words)[::-1]),
        )
        question, answer = random.choice(questions)
        return question, str(answer)

    def env(self, task: Task, seed: int) -> "PythonEnv":
        """Nothing here is random beyond the task, so `seed` changes nothing."""
        return PythonEnv(*self.puzzle(task))


class PythonEnv:
    """One puzzle. A reply without a tool call is the answer and ends the episode."""

    def __init__(self, question: str, answer: str) -> None:
        self._question, self._answer = question, answer
        self._state = "new"
        self._errors = 0

    async def begin(self) -> Turn:
        if self._state != "new":
            raise EnvError("an episode begins once; make a new environment")
        self._state = "open"
        return Turn((Message("system", "Work it out with the tool, then answer."), Message("user", self._question)))

    async def step(self, reply: Message) -> Turn:
        if self._state != "open":
            raise EnvError(f"step() in an episode that is {self._state}")
        told = tuple([Message("tool", await self._run(call)) for call in reply.tool_calls])
        facts = MappingProxyType({"tool_errors": float(self._errors)})
        if told:
            return Turn(told, facts=facts)
        self._state = "over"
        right = self._answer in reply.content.rstrip(".").split()
        return Turn((), done=True, rewards=MappingProxyType({"success": float(right)}), facts=facts)

    async def _run(self, call: ToolCall) -> str:
        """What the program printed, or what was wrong."""
        code = call.arguments.get("code")
        wrong = call.error
        if not wrong and (call.name != "python" or not isinstance(code, str) or len(call.arguments) != 1):
            wrong = "the tool is python, and takes code"
        elif not wrong and len(str(code)) > MAX_CODE:
            wrong = f"a program may have {MAX_CODE} characters"
        if not wrong:
            done = await sandbox.run(str(code), limits=LIMITS)
            if done.ended == "timeout":
                wrong = f"the program took longer than {LIMITS.seconds:g} s"
            elif done.code:
                wrong = (done.stderr.strip().splitlines() or [f"exit code {done.code}"])[-1]
            else:
                return done.stdout.strip() or "The program printed nothing."
        self._errors += 1
        return f"Error: {wrong}"
