"""Map the calls of an agent to recorded tokens, so that recorded text is never tokenized again.

An agent sends its whole history with every call. If the history repeats an earlier call and its
answer, the recorded tokens are used as the context. Only the new messages are tokenized. An edited
history starts a branch, which is a second sequence of tokens. It begins with the recorded tokens up
to the last unchanged answer. The messages after that are tokenized. This module neither samples nor
waits.
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
    """Error: the model cannot reply to this history, because of its form."""


@dataclass(frozen=True)
class HistoryMessage:
    """One message of an agent's history.

    The results of tool calls follow the calls in their order. `thoughts` is None if the agent left
    out the reasoning text.
    """

    message: Message
    thoughts: str | None = None

    @cached_property
    def key(self) -> str:
        """A text that is equal for two messages with the same role, content, pictures and tool
        calls.

        The ids of calls do not matter.
        """
        calls = [[call.name, call.arguments] for call in self.message.tool_calls]
        images = [[image.digest, image.at] for image in self.message.images]
        content = [self.message.role, self.message.content, calls, *images]
        return json.dumps(content, sort_keys=True, default=dict)


History = tuple[HistoryMessage, ...] | str | tuple[int, ...]
"""The prompt of a request: messages, a text, or tokens."""


@dataclass(frozen=True)
class Call:
    """The history and the tools of one request. Only a history of messages can have tools."""

    history: History
    tools: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template for this request, in addition to the run's
    `chat_template_kwargs`.
    """
    role: str = ""
    """The role that makes the call. Each role has its own conversations."""
    _chats: dict[Chat, Chat] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def form(self) -> str:
        """A text that identifies the tools and template variables, or the type of a prompt.

        It is the type (text or tokens) for a prompt without messages. All calls of a branch (a
        conversation) have the same text.
        """
        first = self.history[0] if self.history else ""
        variables = json.dumps(self.template_kwargs) if self.template_kwargs else ""
        return json.dumps(self.tools) + variables if self.is_chat else type(first).__name__

    def chat(self, base: Chat) -> Chat:
        """Return the chat format `base` with the tools and template variables of this call.

        The result is cached, because every part of a stream needs it, and tools may have 2 MB.
        """
        if not self.is_chat:
            return base
        if base not in self._chats:
            self._chats[base] = base.with_tools(self.tools, self.template_kwargs)
        return self._chats[base]

    def num_characters(self, *, tools: bool) -> int:
        """Return a lower limit of the prompt's length in characters. 0 for a prompt of tokens.

        `tools` adds the length of the tools. The exact length is not known, because chat templates
        may leave out blanks and reasoning texts.
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
    """A prompt and its answer in a branch (a conversation). The answer is the branch's
    `pieces[start:end]`.
    """

    prompt: History
    start: int
    end: int = 0
    answer: History | None = None
    """The answer as the agent may send it back in a later history. None until it is complete."""
    ended: bool = False
    """True if the answer's tokens include the token that ends a reply."""


@dataclass(slots=True)
class Branch:
    """One conversation of an episode: a sequence of tokens, with the prompts and answers in it."""

    number: int
    form: str
    exchanges: list[Exchange]
    role: str = ""
    pieces: list[Piece] = field(default_factory=list)
    pending: bool = False
    """True while a client waits for the last answer of this conversation."""


@dataclass(frozen=True, slots=True)
class Match:
    """The part of a call's history that agrees with a branch.

    A branch is one conversation of the episode.
    """

    branch: Branch
    exchanges: int
    """Number of exchanges (prompts with their answers) that agree."""
    end: int
    """Index in the call's history after the last exchange that agrees."""
    difference: str = ""
    """The reason why the call cannot continue the branch (conversation). Empty if it can."""
    differs_at: int = 0
    """Index of the first message, character or token of the history that differs from the branch
    (conversation).
    """
    resumes: bool = False
    """True if the call repeats the last call of the branch (conversation), whose client had
    disconnected.
    """


@dataclass(frozen=True, slots=True)
class Continuation:
    """The branch that gets the answer to a request, and context tokens to add to it first.

    A branch is one conversation of the episode.
    """

    branch: Branch
    context: tuple[ContextPiece, ...]
    fork: Match | None = None
    """The place at which a new branch (conversation) leaves the branch from which it starts. None
    if it starts from no other branch.
    """
    resumed: bool = False
    """True if the request continues an answer whose client had disconnected."""


@dataclass(frozen=True, slots=True)
class _Before:
    """The end of the answer before a prompt.

    `ended` is True if the answer's tokens include the token that ends a reply. `calls` are its tool
    calls.
    """

    ended: bool
    calls: Sequence[ToolCall]


class Conversation:
    """The calls of one episode, in branches (conversations). A call with an edited history starts a
    new branch.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.branches: list[Branch] = []
        self._answers: dict[str, tuple[HistoryMessage, tuple[int, ...], bool]] = {}
        """Each answer by its key: its message, its tokens, and True if the tokens include the end
        token.
        """

    def ask(self, call: Call) -> Continuation:
        """Find the branch (conversation) that a call continues, or begin a new branch.

        The branch is then `pending` and cannot be continued by another call. Raises `Unanswerable`,
        and changes nothing, if no reply can follow the history.
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
        """Record that the pieces (runs of tokens) added to a branch since `ask` are this answer.

        A branch is one conversation of the episode. `ended` is True if the tokens include the token
        that ends a reply.
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

        Must be called before the continuation's context was added to the branch (conversation).
        """
        continuation.branch.pending = False
        if continuation.branch.pieces and not continuation.resumed:
            continuation.branch.exchanges.pop()
        elif not continuation.resumed:
            self.branches.pop()

    def _nearest(self, call: Call) -> Match | None:
        """Return how a call agrees with the branch of its role that has most answers in common.

        Of several such branches (conversations), one that the call can continue is preferred, then
        the oldest. None if there is no branch.
        """

        def rank(match: Match) -> tuple[int, bool, int]:
            continues = match.resumes or not match.difference
            return match.exchanges, continues, -match.branch.number

        own = (_match(branch, call) for branch in self.branches if branch.role == call.role)
        return max(own, key=rank, default=None)

    def _render(
        self, call: Call, prompt: History, after: Exchange | None
    ) -> tuple[ContextPiece, ...]:
        """Tokenize a prompt. Answers in it that this episode sampled keep their recorded tokens.

        `after` is the exchange before the prompt, or None at the start of a conversation.
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
    """Return the pieces (runs of tokens), with the sampled ones as context.

    A new branch (conversation) that begins with them then does not train on them again.
    """
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
    """Return where two histories differ first, and the kind of difference. None if they are equal.

    The place is the index of a message, character or token. The kind is "message", "thoughts",
    "text" or "length". Reasoning texts that `other` leaves out do not count as different.
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

    If `tools` is False, or a tool call is malformed, tool calls are returned as content. With
    `plain`, the whole text is content, and reasoning text is not separated.
    """
    if plain:
        return HistoryMessage(Message("assistant", text))
    thoughts, message = chat.reader.parse_text(text, calls=tools)
    if any(call.error or is_too_deep(call.arguments) for call in message.tool_calls):
        thoughts, message = chat.reader.parse_text(text, calls=False)
    return HistoryMessage(message, thoughts)


def with_call_ids(reply: HistoryMessage, place: str) -> HistoryMessage:
    """Return a reply whose tool calls have ids: those that the policy wrote, or new ones.

    `place` is a text that must differ between replies. New ids are computed from it, so that they
    are the same in a replay, which some agents need.
    """
    calls = reply.message.tool_calls
    if len({call.id for call in calls if is_call_id(call.id)}) == len(calls):
        return reply
    calls = tuple(
        replace(call, id=hashed_id(f"{place}/{index}")) for index, call in enumerate(calls)
    )
    return replace(reply, message=replace(reply.message, tool_calls=calls))
