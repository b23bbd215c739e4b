"""Describe tools, calls and results in the text of messages, if a chat template does not render
them.

A `Chat` uses a `ToolText` if the option `tools_in_prompt` is set and its chat template leaves out
the descriptions of tools.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError

from unstale.envs import Image, Message, ToolCall
from unstale.envs.calls import JsonCalls

_EXAMPLE = ToolCall("NAME", {"ARGUMENT": "VALUE"})
_BEFORE_RESULT, _AFTER_RESULT = "<tool_response>\n", "\n</tool_response>"

Render = Callable[[Sequence[Message]], str]
"""A function that returns the text of a conversation in the chat template. It raises the template's
errors.
"""


@dataclass(frozen=True, slots=True)
class ToolText:
    """The description of tools for a prompt, and what the chat template renders itself."""

    description: str
    """A text that describes the tools and the format of calls."""
    as_system: bool
    """True if the chat template renders system messages. Otherwise the description starts the first
    user message.
    """
    writes_calls: bool
    """True if the chat template renders tool calls. Otherwise they become part of the reply's
    content.
    """
    writes_results: bool
    """True if the chat template renders the role `tool`. Otherwise results become user messages."""

    def prompt(self, messages: Sequence[Message]) -> list[Message]:
        """Return a prompt's messages, with the description of the tools added at the start."""
        role = "system" if self.as_system else "user"
        messages = list(messages)
        place = next((at for at, each in enumerate(messages) if each.role == role), None)
        if place is None or (self.as_system and place > 0):
            return [Message(role, self.description), *messages]  # type: ignore[arg-type]
        texts = [messages[place].content, self.description]
        content = "\n\n".join(texts if self.as_system else texts[::-1])
        images = _moved(messages[place], 0 if self.as_system else len(self.description) + 2)
        messages[place] = replace(messages[place], content=content, images=images)
        return messages

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages in which the chat template can render all tool calls and results.

        Successive results become one user message, because many templates require that users and
        assistants alternate.
        """
        changed: list[Message] = []
        after_result = False
        for message in messages:
            if message.tool_calls and not self.writes_calls:
                calls = JsonCalls().write(message.tool_calls)
                content = "\n".join(filter(None, [message.content, calls]))
                message = replace(message, content=content, tool_calls=())
            is_result = message.role == "tool" and not self.writes_results
            if is_result:
                content = f"{_BEFORE_RESULT}{message.content}{_AFTER_RESULT}"
                message = Message("user", content, images=_moved(message, len(_BEFORE_RESULT)))
            if is_result and after_result:
                before = f"{changed[-1].content}\n"
                images = (*changed[-1].images, *_moved(message, len(before)))
                changed[-1] = replace(message, content=before + message.content, images=images)
            else:
                changed.append(message)
            after_result = is_result
        return changed


def _moved(message: Message, added: int) -> tuple[Image, ...]:
    """Return a message's pictures, in a content that has `added` characters before this one."""
    return tuple(replace(image, at=image.at + added) for image in message.images)


def tool_text(
    tools: Sequence[Mapping[str, Any]], render: Render, write: Callable[[Sequence[ToolCall]], str]
) -> ToolText:
    """Return the description of `tools` and what the chat template renders itself.

    `render` renders messages without tools. `write` returns what the template writes for tool
    calls, empty if nothing.
    """
    question = Message("user", "?")
    reply = Message("assistant", "!")
    mark = "@@tools@@"
    example = write([_EXAMPLE])
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    description = (
        f"You have these tools, each described by a JSON schema:\n{lines}\n\n"
        f"To call a tool, write\n{example or JsonCalls().write([_EXAMPLE])}\n"
        "with its name and arguments. Write one such block for each call."
    )
    return ToolText(
        description,
        as_system=_renders(render, [Message("system", mark), question], mark),
        writes_calls=bool(example),
        writes_results=_renders(render, [question, reply, Message("tool", mark)], mark),
    )


def _renders(render: Render, messages: Sequence[Message], mark: str) -> bool:
    try:
        return mark in render(messages)
    except (TemplateError, TypeError, ValueError):
        return False
