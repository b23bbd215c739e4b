"""One question, a tool to work it out with, and an answer to give as text."""

from collections.abc import Awaitable, Callable
from types import MappingProxyType

from unstale.envs import EnvError, Message, ToolCall, Turn


class Question:
    """A reply without a tool call is the answer and ends the episode: reward is 1 if `answer` is a word of it."""

    def __init__(
        self, system: str, question: str, answer: str, tool: Callable[[ToolCall], Awaitable[str]]
    ) -> None:
        """`tool` raises ValueError for what is wrong with a call."""
        self._asked = Turn((Message("system", system), Message("user", question)))
        self._answer, self._tool = answer, tool
        self._state = "new"
        self._errors = 0

    async def begin(self) -> Turn:
        if self._state != "new":
            raise EnvError("an episode begins once; make a new environment")
        self._state = "open"
        return self._asked

    async def step(self, reply: Message) -> Turn:
        if self._state != "open":
            raise EnvError(f"step() in an episode that is {self._state}")
        told = tuple([Message("tool", await self._told(call)) for call in reply.tool_calls])
        facts = MappingProxyType({"tool_errors": float(self._errors)})
        if told:
            return Turn(told, facts=facts)
        self._state = "over"
        right = self._answer in reply.content.rstrip(".").split()
        return Turn((), done=True, rewards=MappingProxyType({"success": float(right)}), facts=facts)

    async def _told(self, call: ToolCall) -> str:
        try:
            return await self._tool(call)
        except ValueError as error:
            self._errors += 1
            return f"Error: {error}"
