"""An environment with one question, one tool and an answer as text."""

from collections.abc import Awaitable, Callable
from types import MappingProxyType

from unstale.envs import Message, SingleUse, ToolCall, Turn


class Question(SingleUse):
    """One question. The first reply without a tool call ends the episode.

    The reward is 1 if `answer` is a word of that reply.
    """

    def __init__(
        self, system: str, question: str, answer: str, tool: Callable[[ToolCall], Awaitable[str]]
    ) -> None:
        """`tool` raises `ValueError` for a call that cannot be made."""
        self._opening = Turn((Message("system", system), Message("user", question)))
        self._answer = answer
        self._tool = tool
        self._errors = 0

    async def begin(self) -> Turn:
        self._open()
        return self._opening

    async def step(self, reply: Message) -> Turn:
        self._check_open()
        answers = tuple([Message("tool", await self._call(call)) for call in reply.tool_calls])
        facts = MappingProxyType({"tool_errors": float(self._errors)})
        if answers:
            return Turn(answers, facts=facts)
        self._state = "over"
        is_right = self._answer in reply.content.rstrip(".").split()
        return Turn(
            (), done=True, rewards=MappingProxyType({"success": float(is_right)}), facts=facts
        )

    async def _call(self, call: ToolCall) -> str:
        try:
            return await self._tool(call)
        except ValueError as error:
            self._errors += 1
            return f"Error: {error}"
