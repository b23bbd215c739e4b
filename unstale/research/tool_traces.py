"""Convert reasoning in plain text to conversations with tool calls (AgentMath).

A computation in a solution, such as `12 * 5 = 60`, becomes a call of a tool and the tool's result.
The tool is executed. A solution is kept if it has at least one call, if every result is the number
that the solution states, and if the solution ends with the row's answer. Its words do not change,
and no language model is used: computations that are not written in digits stay text.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unstale.envs import calculator, python_tool
from unstale.rewards import numeric_answer

_NUMBER = r"\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_COMPUTATION = re.compile(
    rf"(?P<expression>\(*{_NUMBER}\)*(?:\s*[-+*/\N{{MULTIPLICATION SIGN}}\N{{DIVISION SIGN}}]\s*"
    rf"\(*{_NUMBER}\)*)+)\s*=\s*(?P<value>-?{_NUMBER})"
)
_NOTE = re.compile(r"<<[^<>]*>>")
"""Pattern of the notes `<<...>>` in GSM8K, which repeat the computations of a solution."""
_SIGNS = str.maketrans({"\N{MULTIPLICATION SIGN}": "*", "\N{DIVISION SIGN}": "/", "$": "", ",": ""})
MAX_CALLS = 32
"""Largest number of calls in a conversation."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that computes expressions, with the function that converts an expression to its
    arguments.
    """

    schema: Mapping[str, Any]
    arguments: Callable[[str], dict[str, str]]
    run: Callable[[str], Awaitable[str]]

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


TOOLS: Mapping[str, Tool] = {
    "calculator": Tool(calculator.TOOL, lambda text: {"expression": text}, calculator.run),
    "python": Tool(
        python_tool.TOOL,
        lambda text: {"code": f"print({text})"},
        lambda text: python_tool.run(f"print({text})"),
    ),
}
"""The tools, by the name of the environment that has them."""


class NotTraced(Exception):
    """An error that states why a solution cannot become a conversation."""


async def trace(prompt: str, solution: str, tool: Tool) -> list[dict[str, Any]]:
    """Return the messages of a conversation in which the computations of a solution are tool calls.

    Raises `NotTraced` with the reason if the solution cannot be kept.
    """
    text = _NOTE.sub("", solution)
    found = list(_COMPUTATION.finditer(text))
    if not found:
        raise NotTraced("no computation")
    if len(found) > MAX_CALLS:
        raise NotTraced("too many computations")
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    start = 0
    for each in found:
        expression = each["expression"].translate(_SIGNS).strip()
        try:
            answer = await tool.run(expression)
        except ValueError:
            raise NotTraced("the tool cannot compute it") from None
        if not numeric_answer(answer, {"answer": each["value"].translate(_SIGNS)}):
            raise NotTraced("a wrong computation")
        call = {"name": tool.name, "arguments": tool.arguments(expression)}
        before = text[start : each.start()].strip()
        messages += [
            {"role": "assistant", "content": before, "tool_calls": [{"function": call}]},
            {"role": "tool", "content": answer},
        ]
        start = each.start("value")
    messages.append({"role": "assistant", "content": text[start:].strip()})
    return messages


async def traces(
    rows: Sequence[Mapping[str, Any]], tool: Tool, *, prompt: str, solution: str, answer: str = ""
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return a row with `messages` for each solution that is kept, and the number of others by
    reason.

    `prompt`, `solution` and `answer` are names of columns. Without `answer`, the final answer of a
    solution is not checked.
    """
    kept: list[dict[str, Any]] = []
    refused = Counter[str]()
    for row in rows:
        text = str(row[solution])
        try:
            if answer and not numeric_answer(text, {"answer": str(row[answer])}):
                raise NotTraced("another answer")
            kept.append({"messages": await trace(str(row[prompt]), text, tool)})
        except NotTraced as reason:
            refused[str(reason)] += 1
    return kept, refused
