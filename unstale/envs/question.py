"""An environment with one question and one tool, answered in text."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from unstale.envs import Message, ToolCall, Turn
from unstale.envs.numbers import last_number

_AROUND = ".,;:!?\"'`*_$()[]{}\\"
"""Punctuation and markup that may stand around the answer."""
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class ToolRunner:
    """A runner of the calls of one tool, whose only argument is a string.

    `tool` is its schema. `run` returns the tool's result, or raises `ValueError` with an error
    message.
    """

    def __init__(self, tool: Mapping[str, Any], run: Callable[[str], Awaitable[str]]) -> None:
        self._name = tool["function"]["name"]
        (self._argument,) = tool["function"]["parameters"]["required"]
        self._run = run
        self.calls = 0
        self.errors = 0

    async def answer(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """Return the results of the calls, or error messages, in their order."""
        return tuple([Message("tool", await self._call(call)) for call in calls])

    async def _call(self, call: ToolCall) -> str:
        self.calls += 1
        try:
            if call.error:
                raise ValueError(call.error)
            if call.name != self._name:
                raise ValueError(f"unknown tool {call.name!r}; the tool is {self._name}")
            if set(call.arguments) != {self._argument}:
                raise ValueError(f"{self._name} takes {self._argument}")
            argument = call.arguments[self._argument]
            if not isinstance(argument, str):
                raise ValueError(f"{self._argument} must be a string")
            return await self._run(argument)
        except ValueError as error:
            self.errors += 1
            return f"Error: {error}"


class Question:
    """The environment of one question. The first reply without a tool call ends the episode.

    If `answer` is a number, the reward is 1 if the last number of that reply equals `answer`.
    Otherwise it is 1 if a word of that reply, without punctuation around the word, equals `answer`.
    """

    def __init__(self, prompts: tuple[Message, ...], answer: str, runner: ToolRunner) -> None:
        self._prompts = prompts
        self._answer = answer
        self._runner = runner

    async def begin(self) -> Turn:
        return Turn(self._prompts)

    async def step(self, reply: Message) -> Turn:
        answers = await self._runner.answer(reply.tool_calls)
        facts = {"tool_errors": float(self._runner.errors)}
        if answers:
            return Turn(answers, facts=facts)
        success = float(_is_right(reply.content, self._answer))
        return Turn((), done=True, rewards={"success": success}, facts=facts)


def _is_right(text: str, answer: str) -> bool:
    """Return True if a reply gives the answer. Of several numbers, the last one counts.

    >>> _is_right("12 or 13", "12"), _is_right("It is **-5,032**.", "-5032")
    (False, True)
    >>> _is_right("It is \\\\boxed{tunlaw}.", "tunlaw")
    True
    """
    expected = last_number(answer)
    if expected is not None:
        return last_number(text) == expected
    return answer in [word.strip(_AROUND) for word in _BOXED.sub(r" \1 ", text).split()]
