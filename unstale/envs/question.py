"""An environment that asks one question and offers one tool. The answer is text."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from typing import Any

from unstale.envs import Message, ToolCall, Turn
from unstale.envs.numbers import last_number

_AROUND = ".,;:!?\"'`*_$()[]{}\\"
"""Punctuation and markup that is removed around a word before it is compared with the answer."""
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


class ToolRunner:
    """A runner of the calls of one tool, whose only argument is a string.

    `tool` is the tool's schema. `run` returns the result for an argument, or raises `ValueError`
    with a text for the policy.
    """

    def __init__(self, tool: Mapping[str, Any], run: Callable[[str], Awaitable[str]]) -> None:
        self._name = tool["function"]["name"]
        (self._argument,) = tool["function"]["parameters"]["required"]
        self._run = run
        self.calls = 0
        self.errors = 0

    async def answer(self, calls: Sequence[ToolCall]) -> tuple[Message, ...]:
        """Return one message per call, in order: its result or an error."""
        return tuple([Message("tool", await self._call(call)) for call in calls])

    def facts(self) -> dict[str, float]:
        """Return the numbers of calls and of errors so far, by the names that techniques read."""
        return {"tool_calls": float(self.calls), "tool_errors": float(self.errors)}

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

    If `answer` is a number, the reward is 1 if it equals the reply's last number. Otherwise it is 1
    if it equals a word of the reply, without punctuation around the word.
    """

    def __init__(self, prompts: tuple[Message, ...], answer: str, runner: ToolRunner) -> None:
        self._prompts = prompts
        self._answer = answer
        self._runner = runner

    async def begin(self) -> Turn:
        return Turn(self._prompts)

    async def step(self, reply: Message) -> Turn:
        answers = await self._runner.answer(reply.tool_calls)
        facts = self._runner.facts()
        if answers:
            return Turn(answers, facts=facts)
        success = float(_is_right(reply.content, self._answer))
        return Turn((), done=True, rewards={"success": success}, facts=facts)

    def fork(self) -> "Question":
        return Question(self._prompts, self._answer, copy(self._runner))


def _is_right(text: str, answer: str) -> bool:
    r"""Return True if a reply gives the answer. Of several numbers, only the last one counts.

    >>> _is_right("12 or 13", "12"), _is_right("It is **-5,032**.", "-5032")
    (False, True)
    >>> _is_right("It is \\boxed{tunlaw}.", "tunlaw")
    True
    """
    expected = last_number(answer)
    if expected is not None:
        return last_number(text) == expected
    return answer in [word.strip(_AROUND) for word in _BOXED.sub(r" \1 ", text).split()]
