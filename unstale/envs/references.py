"""Conversations in a file, encoded as a run would record them, for supervised training."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unstale.config import ConfigError
from unstale.envs import Image, Message, ToolCall
from unstale.envs.chat import Chat
from unstale.envs.rows import FILES, file_type, load_rows
from unstale.envs.strict_json import loads
from unstale.pictures import read_data_url

ROLES = ("system", "user", "assistant", "tool")
Conversations = Callable[[Sequence[Message]], Iterable[tuple[Sequence[Message], Collection[int]]]]


@dataclass(frozen=True, slots=True)
class Reference:
    """A conversation for supervised training, as token ids."""

    tokens: tuple[int, ...]
    replies: tuple[bool, ...]
    """For each token, True if it belongs to a reply of the assistant. Only these are trained on."""

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.replies):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.replies)} marks")


def load_references(
    path: Path | str,
    chat: Chat,
    *,
    max_tokens: int,
    own_tools: bool = False,
    read_as: Conversations = lambda messages: [(messages, ())],
) -> list[Reference]:
    """Return the conversations of a JSONL, JSON or Parquet file.

    Each row has `messages` with `role`, `content` and, for calls of the assistant, `tool_calls` in
    OpenAI's format. All replies of the assistant are trained on. A row may have `tools`, a list of
    schemas in OpenAI's format, in place of those of `chat`. With `own_tools`, every row must have
    them. Raises `ConfigError` with the row's place if a row cannot be encoded or has more than
    `max_tokens` tokens. `read_as` returns the conversations that are learned from a row's messages,
    each with the places of replies that are not trained on.
    """
    path = Path(path)
    if file_type(str(path)) not in FILES or not path.is_file():
        raise ConfigError(f"{path} must be an existing file of type {', '.join(FILES)}")
    references = []
    for row in load_rows(str(path)):
        try:
            tools = read_tools(row, required=own_tools)
            form = chat if tools is None else chat.with_tools(tools)
            found = [encode_conversation(form, *each) for each in read_as(read_messages(row))]
        except ValueError as error:
            raise ConfigError(f"{row.place}: {error}") from error
        longest = max(len(reference.tokens) for reference in found)
        if longest > max_tokens:
            raise ConfigError(
                f"{row.place} has {longest} tokens, more than "
                f"engine.max_context = {max_tokens}; leave it out, or raise engine.max_context"
            )
        references += found
    if not references:
        raise ConfigError(f"{path} has no rows")
    return references


def encode_conversation(
    chat: Chat, messages: Sequence[Message], shown: Collection[int] = ()
) -> Reference:
    """Return a conversation as the tokens that a run would have recorded.

    Replies at the places `shown` of `messages` are not trained on. Raises ValueError if it does not
    begin with a prompt and end with a reply, or if the chat template cannot write a reply.
    """
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not places or places[0] == 0 or places[-1] != len(messages) - 1:
        raise ValueError("messages must begin with a prompt and end with a reply of the assistant")
    tokens = [*chat.encode_prompt(messages[: places[0]])]
    replies = [False] * len(tokens)
    for place, following in zip(places, [*places[1:], len(messages)], strict=True):
        between = messages[place + 1 : following]
        reply = chat.encode_reply(messages[place], between)
        tokens += reply
        replies += [place not in shown] * len(reply)
        if following == len(messages):
            break
        if not between:
            raise ValueError("two replies of the assistant follow each other")
        calls = messages[place].tool_calls
        tokens += chat.encode_continuation(between, ended=True, calls=calls)
        replies += [False] * (len(tokens) - len(replies))
    return Reference(tuple(tokens), tuple(replies))


def read_messages(
    row: Mapping[str, Any], picture: Callable[[str], bytes] | None = None
) -> list[Message]:
    """Return the messages of a row. Raises ValueError if they are not a list of chat messages.

    With `picture`, a user's content may be a list of parts as in the OpenAI API, some of which are
    pictures. It returns the file that a URL names.
    """
    found = row.get("messages")
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError(f"messages must be a list of messages, got {str(found)[:80]!r}")
    messages = []
    for each in found:
        match each:
            case {"function_call": call} if call:
                raise ValueError("function_call is not read: write it as tool_calls")
            case {"role": role, "content": str() | None as content} if role in ROLES:
                calls = tuple(_call(call) for call in each.get("tool_calls") or ())
                thoughts = str(each.get("reasoning_content") or "")
                messages.append(Message(role, content or "", calls, thoughts))
            case {"role": "user", "content": list(parts)} if picture:
                messages.append(_with_pictures(parts, picture))
            case _:
                raise ValueError(
                    f"a message needs a role of {', '.join(ROLES)} and a content, got "
                    f"{str(each)[:80]!r}"
                )
    return messages


def _with_pictures(parts: Sequence[Any], picture: Callable[[str], bytes]) -> Message:
    text, images = "", []
    for part in parts:
        match part:
            case {"type": "text", "text": str(words)}:
                text += words
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                images.append(Image(picture(url), len(text)))
            case _:
                raise ValueError(
                    f"a part of a content must be of type text or image_url, got {str(part)[:80]!r}"
                )
    return Message("user", text, images=tuple(images))


def picture_reader(folder: Path, *, only_check: bool = False) -> Callable[[str], bytes]:
    """Return a function that reads the picture of a URL: a data URL, or a file within `folder`.

    It raises ValueError for another one. With `only_check` it returns no files.
    """

    def read(url: str) -> bytes:
        if url.startswith("data:"):
            data = read_data_url(url)
            if data is None:
                raise ValueError(f"{url[:60]!r} is not a data URL with a picture in base64")
            return b"" if only_check else data
        if not (folder / url).is_file():
            raise ValueError(f"there is no picture {url!r} beside the file of the rows")
        return b"" if only_check else (folder / url).read_bytes()

    return read


def read_tools(row: Mapping[str, Any], *, required: bool) -> list[Mapping[str, Any]] | None:
    """Return the schemas of a row's tools. None if the row has no `tools`.

    Raises ValueError if they are no schemas of functions, or if they are `required` and missing.
    """
    tools = row.get("tools")
    if tools is None and not required:
        return None
    if tools is None:
        raise ValueError("tools is missing: the tasks of task.env have different tools")
    if isinstance(tools, str):  # a column of a Parquet file cannot hold schemas of any form
        tools = loads(tools)
    for tool in tools if isinstance(tools, list) else [tools]:
        match tool:
            case {"function": {"name": str()}}:
                continue
        raise ValueError(f"tools must be a list of schemas of functions, got {str(tool)[:80]!r}")
    return list(tools)


def _call(call: Any) -> ToolCall:
    """Return a tool call that is given in OpenAI's format, or as only the `function` in it."""
    match call:
        case {"function": function}:
            return _call(function)
        case {"name": str(name), "arguments": str(text)}:
            return _call({"name": name, "arguments": loads(text)})
        case {"name": str(name), "arguments": Mapping() as arguments}:
            return ToolCall(name, dict(arguments))
    raise ValueError(f"a tool call needs a name and arguments, got {str(call)[:80]!r}")
