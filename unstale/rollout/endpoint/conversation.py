"""Map the calls of an agent to recorded tokens, so that recorded text is never tokenized again.

An agent sends its whole history with every call. If the history repeats an earlier prompt and its
answer, their recorded tokens become the context, and only the new messages are tokenized. If an
agent edits its history, a branch begins: a second sequence of tokens. It starts with the recorded
tokens up to the last unchanged answer, and the messages after that are tokenized. This module
neither samples nor waits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unstale.config.files import is_too_deep
from unstale.envs import Message, ToolCall
from unstale.envs.calls import hashed_id, is_call_id
from unstale.envs.chat import Chat, context_piece
from unstale.records import ContextPiece, Piece, Provenance


class Unanswerable(ValueError):
    """Error: no reply can follow this history, for example because it ends with a reply."""


@dataclass(frozen=True)
class HistoryMessage:
    """One message of an agent's history.

    `thoughts` is the reasoning text of a reply, None if the agent left it out. In a history, the
    messages with results of tool calls have the order of the calls.
    """

    message: Message
    thoughts: str | None = None

    @cached_property
    def key(self) -> str:
        """A text that is equal for messages with the same role, content, pictures and tool calls.

        The ids of tool calls do not matter.
        """
        calls = [[call.name, call.arguments] for call in self.message.tool_calls]
        images = [[image.digest, image.at] for image in self.message.images]
        content = [self.message.role, self.message.content, calls, *images]
        return json.dumps(content, sort_keys=True, default=dict)

    def without_files(self) -> "HistoryMessage":
        """Return a message that compares like this one, but does not hold the files of pictures."""
        if not self.message.images:
            return self
        kept = replace(self, message=replace(self.message, images=()))
        vars(kept)["key"] = self.key
        return kept


History = tuple[HistoryMessage, ...] | str | tuple[int, ...]
"""The prompt of a request: messages, a text, or token ids."""


@dataclass(frozen=True)
class Call:
    """The history of one request, with its tools. Only a history of messages can have tools."""

    history: History
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this request, in addition to the run's
    `chat_template_kwargs`.
    """
    role: str = ""
    """The role of the agent that makes the call. Each role has conversations of its own."""
    _chats: dict[Chat, Chat] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def form(self) -> str:
        """A text that all calls of one conversation share.

        It depends on the tools and template variables, or on the type of a prompt without messages.
        """
        first = self.history[0] if self.history else ""
        variables = json.dumps(self.template_kwargs) if self.template_kwargs else ""
        return json.dumps(self.tools) + variables if self.is_chat else type(first).__name__

    def chat(self, base: Chat) -> Chat:
        """Return the chat format `base` with the tools and template variables of this call.

        The result is cached, because each event of a stream needs it and tools may have 2 MB.
        """
        if not self.is_chat:
            return base
        if base not in self._chats:
            self._chats[base] = base.with_tools(self.tools, self.template_kwargs)
        return self._chats[base]

    def num_characters(self, *, tools: bool) -> int:
        """Return a lower limit of the prompt's length in characters. 0 for a prompt of token ids.

        `tools` is True if the chat template writes the tools. The exact length is unknown:
        templates may leave out blanks and reasoning texts.
        """
        if isinstance(self.history, str):
            return len(self.history.strip())
        messages = [each.message for each in self.history if isinstance(each, HistoryMessage)]
        content = sum(len(message.content.strip()) for message in messages)
        return content + len(json.dumps(self.tools, ensure_ascii=False)) * tools

    @property
    def is_chat(self) -> bool:
        return bool(self.history) and isinstance(self.history[0], HistoryMessage)


@dataclass(slots=True)
class Exchange:
    """A prompt and its answer in a conversation. The answer's tokens are in `pieces[start:end]` of
    the `Branch`.
    """

    prompt: History
    start: int
    end: int = 0
    answer: History | None = None
    """The answer in the form in which a later history may repeat it. None until it is complete."""
    ended: bool = False
    """True if the last token of the answer is an end token."""


@dataclass(slots=True)
class Branch:
    """One conversation of an episode: its tokens, as pieces, and the prompts and answers in it."""

    number: int
    form: str
    exchanges: list[Exchange]
    role: str = ""
    pieces: list[Piece] = field(default_factory=list)
    pending: bool = False
    """True while a client waits for the last answer."""


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a call's history that agrees with a branch. A branch is one conversation of the
    episode.
    """

    branch: Branch
    exchanges: int
    """Number of prompts with answers at the start of the conversation `branch` that the history
    repeats.
    """
    end: int
    """Index in the history after the last repeated answer."""
    difference: str = ""
    """Why the call cannot continue the conversation `branch`. Empty if it can."""
    differs_at: int = 0
    """Index in the history of the first item that differs from the conversation `branch`: of a
    message in a chat, otherwise of a character or token of the prompt (text or token IDs).
    """
    resumes: bool = False
    """True if the call repeats the last call of the conversation, whose client disconnected before
    the answer.
    """


@dataclass(frozen=True, slots=True)
class Continuation:
    """The branch (conversation) that a call continues or begins, and the context to add to it
    first.
    """

    branch: Branch
    context: tuple[ContextPiece, ...]
    fork: Match | None = None
    """The common beginning of a new conversation and the most similar earlier one of the same role.
    None if the conversation is not new, or if it is the first of its role.
    """
    resumed: bool = False
    """True if the call continues an answer whose client had disconnected."""


@dataclass(frozen=True, slots=True)
class _Before:
    """Two facts about the answer before a prompt: True if its last token is an end token, and its
    tool calls.
    """

    ended: bool
    calls: Sequence[ToolCall]


class Conversation:
    """The calls of one episode, as branches. A branch is one conversation with unedited history."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.branches: list[Branch] = []
        self._answers: dict[str, tuple[HistoryMessage, tuple[int, ...], bool]] = {}
        """For each answer, by its key: its message, its tokens, and True if the last token is an
        end token.
        """

    def ask(self, call: Call) -> Continuation:
        """Return the conversation (`Branch`) that a call continues, or a new one, with the context
        to add.

        The branch is then `pending`, and no other call can continue it. Raises `Unanswerable`, and
        changes nothing, if no reply can follow the history.
        """
        match = self._nearest(call)
        if match and match.resumes:
            match.branch.pending = True
            return Continuation(match.branch, (), resumed=True)
        prompt = call.history[match.end if match else 0 :]
        last = call.history[-1]
        if isinstance(last, HistoryMessage) and last.message.role == "assistant":
            raise Unanswerable("the last message is the assistant's: there is nothing to answer")
        shared = match.branch.exchanges[: match.exchanges] if match else []
        context = self._render(call, prompt, shared[-1] if shared else None)
        if call.is_chat:
            messages = (each for each in prompt if isinstance(each, HistoryMessage))
            prompt = tuple(each.without_files() for each in messages)
        if match and not match.difference:
            branch = match.branch
            branch.exchanges.append(Exchange(prompt, len(branch.pieces) + len(context)))
            branch.pending = True
            return Continuation(branch, context)
        prefix = _as_context(match.branch.pieces[: shared[-1].end]) if match and shared else ()
        exchanges = [replace(exchange) for exchange in shared]
        exchanges.append(Exchange(prompt, len(prefix) + len(context)))
        branch = Branch(len(self.branches), call.form, exchanges, call.role, pending=True)
        self.branches.append(branch)
        return Continuation(branch, (*prefix, *context), fork=match)

    def add_answer(self, branch: Branch, answer: History, *, ended: bool) -> None:
        """Record that `answer` is the text of the tokens that were added to the conversation since
        `ask`.

        `ended` is True if the last token is an end token.
        """
        exchange = branch.exchanges[-1]
        exchange.answer = answer
        exchange.ended = ended
        exchange.end = len(branch.pieces)
        branch.pending = False
        tokens = tuple(token for piece in branch.pieces[exchange.start :] for token in piece.tokens)
        for message in answer:
            if isinstance(message, HistoryMessage):
                self._answers[message.key] = message, tokens, ended

    def retract(self, continuation: Continuation) -> None:
        """Undo the call of `ask` that returned this continuation.

        Call it before the continuation's context is added to the conversation.
        """
        continuation.branch.pending = False
        if continuation.branch.pieces and not continuation.resumed:
            continuation.branch.exchanges.pop()
        elif not continuation.resumed:
            self.branches.pop()

    def _nearest(self, call: Call) -> Match | None:
        """Return the match with the conversation of the same role that shares most answers with the
        call.

        Among equal ones, a conversation that the call can continue comes first, then the oldest.
        None if there is no conversation.
        """

        def rank(match: Match) -> tuple[int, bool, int]:
            continues = match.resumes or not match.difference
            return match.exchanges, continues, -match.branch.number

        own = (_match(branch, call) for branch in self.branches if branch.role == call.role)
        return max(own, key=rank, default=None)

    def _render(
        self, call: Call, prompt: History, after: Exchange | None
    ) -> tuple[ContextPiece, ...]:
        """Return a prompt's tokens. Answers in it that this episode sampled keep their recorded
        tokens.

        `after` has the previous prompt and its answer, None at the start of a conversation.
        """
        if isinstance(prompt, str):
            text = after.answer if after and isinstance(after.answer, str) else ""
            return (ContextPiece(self._chat.encode(prompt, after=text)),) if prompt else ()
        pieces: list[ContextPiece] = []
        messages: list[Message] = []
        before = _Before(after.ended, _calls_of(after.answer)) if after else None
        for each in prompt:
            if not isinstance(each, HistoryMessage):
                return (ContextPiece(tuple(token for token in prompt if isinstance(token, int))),)
            answer = self._answers.get(each.key)
            if answer and messages and first_difference((answer[0],), (each,)) is None:
                pieces.append(self._write(call, messages, before))
                pieces.append(ContextPiece(answer[1], Provenance.REWRITTEN))
                messages = []
                before = _Before(answer[2], answer[0].message.tool_calls)
            else:
                messages.append(replace(each.message, thoughts=each.thoughts or ""))
        if messages:
            pieces.append(self._write(call, messages, before))
        return tuple(pieces)

    def _write(
        self, call: Call, messages: Sequence[Message], before: "_Before | None"
    ) -> ContextPiece:
        chat = call.chat(self._chat)
        tokens = (
            chat.encode_prompt(messages)
            if before is None
            else chat.encode_continuation(messages, ended=before.ended, calls=before.calls)
        )
        # The agent itself wrote this assistant message. No engine sampled it.
        placed = any(message.role == "assistant" for message in messages)
        source = Provenance.FORCED if placed else Provenance.ENVIRONMENT
        return context_piece(chat, tokens, source)


def _calls_of(answer: History | None) -> tuple[ToolCall, ...]:
    last = answer[-1] if answer else None
    return last.message.tool_calls if isinstance(last, HistoryMessage) else ()


def _as_context(pieces: Sequence[Piece]) -> tuple[ContextPiece, ...]:
    return tuple(
        piece if isinstance(piece, ContextPiece) else ContextPiece(piece.tokens, Provenance.FORCED)
        for piece in pieces
    )


def _match(branch: Branch, call: Call) -> Match:
    if branch.form != call.form:
        return Match(
            branch,
            0,
            0,
            "other tools or template variables" if call.is_chat else "another kind of prompt",
        )
    history = call.history
    at = 0
    for number, exchange in enumerate(branch.exchanges):
        end = at + len(exchange.prompt)
        if difference := first_difference(exchange.prompt, history[at:end]):
            return Match(
                branch, number, at, "an earlier prompt was edited", differs_at=at + difference[0]
            )
        if exchange.answer is None:
            resumes = end == len(history) and not branch.pending
            return Match(branch, number, at, "the answer is still pending", end, resumes=resumes)
        if end == len(history):
            return Match(branch, number, at, "the same prompt again", end)
        if difference := first_difference(
            exchange.answer, history[end : end + len(exchange.answer)]
        ):
            place, kind = difference
            return Match(branch, number, at, f"the {kind} of an answer was edited", end + place)
        at = end + len(exchange.answer)
    return Match(branch, len(branch.exchanges), at)


def first_difference(one: History, other: History) -> tuple[int, str] | None:
    """Return (place, kind) of the first difference between two histories. None if they are equal.

    The place is the index of a message, character or token. The kind is "message", "thoughts",
    "text" or "length". Reasoning text that only `other` leaves out does not count as a difference.
    """
    shared = min(len(one), len(other))
    if shared and isinstance(one[0], HistoryMessage):
        for index, (first, second) in enumerate(zip(one, other, strict=False)):
            if not isinstance(first, HistoryMessage) or not isinstance(second, HistoryMessage):
                return index, "message"
            if first.key != second.key:
                return index, "message"
            if second.thoughts is not None and second.thoughts != (first.thoughts or ""):
                return index, "thoughts"
    else:
        low = 0
        high = shared
        while low < high:  # bisection on slices is faster than a loop over characters
            middle = (low + high + 1) // 2
            if one[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle - 1
        if low < shared:
            return low, "text"
    return None if len(one) == len(other) else (shared, "length")


def parse_reply(chat: Chat, text: str, *, tools: bool, plain: bool = False) -> HistoryMessage:
    """Return the text of a reply as a message.

    Tool calls remain text if `tools` is False or one of them is malformed. With `plain`, all text
    is content, even reasoning text.
    """
    if plain:
        return HistoryMessage(Message("assistant", text))
    thoughts, message = chat.reader.parse_text(text, calls=tools)
    if any(call.error or is_too_deep(call.arguments) for call in message.tool_calls):
        thoughts, message = chat.reader.parse_text(text, calls=False)
    return HistoryMessage(message, thoughts)


def with_call_ids(reply: HistoryMessage, place: str) -> HistoryMessage:
    """Return a reply whose tool calls have unique ids: those that the policy wrote, or else new
    ones.

    `place` is a text that differs between replies. New ids are computed from it, because some
    agents need the same ids in a replay.
    """
    calls = reply.message.tool_calls
    if len({call.id for call in calls if is_call_id(call.id)}) == len(calls):
        return reply
    calls = tuple(
        replace(call, id=hashed_id(f"{place}/{index}")) for index, call in enumerate(calls)
    )
    return replace(reply, message=replace(reply.message, tool_calls=calls))
