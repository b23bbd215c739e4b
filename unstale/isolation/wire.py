"""The messages between a run and its worker processes, as JSON.

The receiver checks each message.
"""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from unstale.envs import EnvError, Message, Turn

Row = dict[str, Any]

MAX_FRAME_BYTES = 1 << 26
"""Largest size in bytes of one message from a worker, which may have a turn and a snapshot. The
worker measures each message that it sends, because a character takes up to 12 bytes in JSON.
"""
MAX_CHARACTERS = 1 << 23
"""Largest number of characters in a snapshot, and in the contents of a turn's messages together. A
million tokens have about four million characters.
"""
MAX_MESSAGES = 1 << 14
"""Largest number of messages in one turn. Reading that many takes about 50 ms."""
MAX_ERROR = 1000
"""Largest number of characters in the text of an error, or in a name. `guard.describe` returns
fewer.
"""


def message_row(message: Message) -> Row:
    calls = [
        {"name": call.name, "arguments": dict(call.arguments), "error": call.error, "id": call.id}
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": message.content,
        "tool_calls": calls,
        "thoughts": message.thoughts,
        "images": [
            {"data": b64encode(image.data).decode(), "at": image.at} for image in message.images
        ],
    }


def read_message(row: Any) -> Message:
    """Return a message from its JSON form. Raises ValueError for another form."""
    return msgspec.convert(row, Message)


def turn_row(turn: Turn) -> Row:
    """Return the JSON form of a turn. Raises `EnvError` if it is too long to be sent."""
    if len(turn.messages) > MAX_MESSAGES:
        raise EnvError(
            f"Turn.messages has {len(turn.messages):,} messages; with task.isolate = process at "
            f"most {MAX_MESSAGES:,} are allowed"
        )
    rows = [message_row(message) for message in turn.messages]
    files = [image["data"] for row in rows for image in row["images"]]
    check_length("Turn.messages", [*(message.content for message in turn.messages), *files])
    return {
        "messages": rows,
        "done": bool(turn.done),
        "rewards": dict(turn.rewards),
        "reward": turn.reward,
        "facts": dict(turn.facts),
        "fresh": bool(turn.fresh),
        "tools": None if turn.tools is None else [dict(tool) for tool in turn.tools],
    }


def read_turn(row: Any) -> Turn:
    """Return a turn from its JSON form. Raises ValueError for another form."""
    try:
        return msgspec.convert(row, Turn)
    except EnvError as error:
        raise ValueError(str(error)) from None


def check_length(name: str, texts: Sequence[str]) -> None:
    """Raise `EnvError` if the texts have more than `MAX_CHARACTERS` characters together.

    The error's message calls the texts `name`.
    """
    characters = sum(map(len, texts))
    if characters > MAX_CHARACTERS:
        raise EnvError(
            f"{name} has {characters:,} characters; with task.isolate = process at most "
            f"{MAX_CHARACTERS:,} are allowed"
        )


def read_text(row: Mapping[str, Any], name: str, max_length: int) -> str:
    """Return the text `row[name]`.

    Raises ValueError if it is not a text, or has more than `max_length` characters.
    """
    text = row.get(name)
    if not isinstance(text, str) or len(text) > max_length:
        raise ValueError(f"{name} is not a text of at most {max_length} characters")
    return text


def read_line(row: Mapping[str, Any], name: str) -> str:
    """Return the text `row[name]`, which must be one line.

    Raises ValueError if it is longer than `MAX_ERROR` or has control characters.
    """
    line = read_text(row, name, MAX_ERROR)
    if not line.isprintable():
        raise ValueError(f"{name} is not one line")
    return line
