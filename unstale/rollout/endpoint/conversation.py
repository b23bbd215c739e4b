"""Which tokens a call stands for: what was said before is never tokenised again.

An agent sends the whole history with every call. Where it is the history of an earlier call and its answer, the
recorded tokens are the context, and only what is new becomes tokens. Where it was edited, a branch begins: its context
is the longest recorded one that ends with an answer the two histories share, and the rest as text. Nothing here samples
or waits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from unstale.envs import Message
from unstale.envs.chat import Chat
from unstale.records import ContextPiece, Piece, Provenance, Sampled

MAX_DEPTH = 100
"""Lists and objects in each other that the arguments of a call may have."""


class Unanswerable(ValueError):
    """A history that leaves nothing to answer, or that the chat template cannot write."""


@dataclass(frozen=True)
class HistoryMessage:
    """A message of a history. `thoughts` is None where the history does not speak of them."""

    message: Message
    thoughts: str | None = None

    @cached_property
    def key(self) -> str:
        """Equal for messages that say the same: content to the letter, calls by name and arguments, in their order."""
        calls = [[call.name, call.arguments] for call in self.message.tool_calls]
        return json.dumps(
            [self.message.role, self.message.content, calls], sort_keys=True, default=dict
        )


History = tuple[HistoryMessage, ...] | str | tuple[int, ...]
"""Messages; or a prompt that is text or tokens already."""


@dataclass(frozen=True)
class Call:
    """What is asked. `tools` only count with messages."""

    history: History
    tools: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def form(self) -> str:
        """Histories of different forms have nothing in common: the tools stand at the beginning of the tokens."""
        first = self.history[0] if self.history else ""
        return json.dumps(self.tools) if isinstance(first, HistoryMessage) else type(first).__name__

    def num_characters(self, *, tools: bool) -> int:
        """Of what is written in any case, with `tools`; templates leave out blanks around it, and thoughts."""
        if isinstance(self.history, str):
            return len(self.history.strip())
        said = sum(
            len(item.message.content.strip())
            for item in self.history
            if isinstance(item, HistoryMessage)
        )
        return said + len(json.dumps(self.tools, ensure_ascii=False)) * tools

    @property
    def is_chat(self) -> bool:
        return bool(self.history) and isinstance(self.history[0], HistoryMessage)


@dataclass(slots=True)
class Exchange:
    """What was told, and what was answered. `start` and `end` count pieces of the branch: the answer's own."""

    told: History
    start: int
    end: int = 0
    answer: History | None = None
    """As it may be sent back; None until it was handed out."""
    ended: bool = False
    """The answer's tokens hold its end token."""


@dataclass(slots=True)
class Branch:
    """One sequence of tokens and how it came about. Whoever speaks appends to `pieces`."""

    number: int
    form: str
    exchanges: list[Exchange]
    pieces: list[Piece] = field(default_factory=list)
    asking: bool = False
    """An answer is awaited."""


@dataclass(frozen=True, slots=True)
class Fork:
    """Why a branch is not its parent: they share so many exchanges, and then at a message something is otherwise."""

    parent: int
    exchanges: int
    at: int
    """Of the messages of the call, or of the characters or tokens of its prompt."""
    reason: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a call is answered, and what is to be given there first."""

    branch: Branch
    context: tuple[ContextPiece, ...]
    fork: Fork | None = None
    resumed: bool = False
    """For the rest of an answer that nobody waited for."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """The first `exchanges` of a branch are a call's, up to `at` in its history."""

    exchanges: int
    at: int
    differs: str = ""
    """Why no more of it is; empty when the call goes on where the branch ends."""
    place: int = 0
    """Where it differs."""
    again: bool = False
    """It asks what the branch asked last, and nobody waits for that answer any more."""


class Conversation:
    """All that was said in one episode, in as many branches as there were edits."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.branches: list[Branch] = []
        self._spoken: dict[str, tuple[HistoryMessage, tuple[int, ...], bool]] = {}
        """Every answer as it was handed out, its tokens, and whether they end with an end token."""

    def ask(self, call: Call) -> Continuation:
        """Where this call goes on. Until `add_answer` or `abandon`, its branch takes no other.

        Raises `Unanswerable`; nothing is changed then.
        """
        shared, parent = self._nearest(call)
        if parent and shared.again:
            parent.asking = True
            return Continuation(parent, (), resumed=True)
        told = call.history[shared.at :]
        last = call.history[-1]
        if isinstance(last, HistoryMessage) and last.message.role == "assistant":
            raise Unanswerable("the last message is the assistant's: there is nothing to answer")
        before = parent.exchanges[: shared.exchanges] if parent else []
        given = self._render(call, told, ended=before[-1].ended if before else None)
        if parent and not shared.differs:
            parent.exchanges.append(Exchange(told, len(parent.pieces) + len(given)))
            parent.asking = True
            return Continuation(parent, given)
        prefix = self._prefix(parent.pieces[: before[-1].end]) if parent and before else ()
        grown = [replace(exchange) for exchange in before]
        branch = Branch(
            len(self.branches),
            call.form,
            [*grown, Exchange(told, len(prefix) + len(given))],
            asking=True,
        )
        self.branches.append(branch)
        fork = (
            Fork(parent.number, shared.exchanges, shared.place, shared.differs) if parent else None
        )
        return Continuation(branch, (*prefix, *given), fork)

    def add_answer(self, branch: Branch, answer: History, *, ended: bool) -> None:
        """The pieces that the branch has grown by since `ask` are this answer, as it was handed out."""
        exchange = branch.exchanges[-1]
        exchange.answer, exchange.ended, exchange.end = answer, ended, len(branch.pieces)
        branch.asking = False
        tokens = tuple(token for piece in branch.pieces[exchange.start :] for token in piece.tokens)
        for said in answer:
            if isinstance(said, HistoryMessage):
                self._spoken[said.key] = said, tokens, ended

    def abandon(self, branch: Branch) -> None:
        """Nobody waits for the answer any more. Who asks the same again gets it from where it was left."""
        branch.asking = False

    def retract(self, asked: Continuation) -> None:
        """As if this had not been asked; nothing of it was given."""
        asked.branch.asking = False
        if asked.branch.pieces and not asked.resumed:
            asked.branch.exchanges.pop()
        elif not asked.resumed:
            self.branches.pop()

    def _nearest(self, call: Call) -> tuple[_Shared, Branch | None]:
        """The branch that shares most answers with the call; of several, one that it simply continues."""
        found = [(_compare(branch, call), branch) for branch in self.branches]
        if not found:
            return _Shared(0, 0), None
        return max(
            found,
            key=lambda pair: (
                pair[0].exchanges,
                pair[0].again or not pair[0].differs,
                -pair[1].number,
            ),
        )

    def _prefix(self, pieces: Sequence[Piece]) -> tuple[ContextPiece, ...]:
        """What a branch shares with another is trained there, and only context here."""
        return tuple(
            ContextPiece(p.tokens, Provenance.FORCED) if isinstance(p, Sampled) else p
            for p in pieces
        )

    def _render(self, call: Call, told: History, *, ended: bool | None) -> tuple[ContextPiece, ...]:
        """New text as tokens; `ended` is None at the beginning.

        An answer of this episode that now stands in another context keeps its tokens.
        """
        if isinstance(told, str):
            return (ContextPiece(self._chat.encode(told)),) if told else ()
        pieces: list[ContextPiece] = []
        waiting: list[Message] = []
        for item in told:
            if not isinstance(item, HistoryMessage):
                return (ContextPiece(tuple(token for token in told if isinstance(token, int))),)
            spoken = self._spoken.get(item.key)
            if spoken and waiting and not _differs((spoken[0],), (item,)):
                pieces += [
                    self._write(call, waiting, ended),
                    ContextPiece(spoken[1], Provenance.REWRITTEN),
                ]
                waiting, ended = [], spoken[2]
            else:
                waiting.append(replace(item.message, thoughts=item.thoughts or ""))
        return (*pieces, self._write(call, waiting, ended)) if waiting else tuple(pieces)

    def _write(self, call: Call, messages: Sequence[Message], ended: bool | None) -> ContextPiece:
        """What an assistant is made to say that no engine said is placed, not sampled."""
        chat = self._chat.with_tools(call.tools)
        tokens = (
            chat.encode_prompt(messages)
            if ended is None
            else chat.encode_continuation(messages, ended=ended)
        )
        placed = any(message.role == "assistant" for message in messages)
        return ContextPiece(tokens, Provenance.FORCED if placed else Provenance.ENVIRONMENT)


def _compare(branch: Branch, call: Call) -> _Shared:
    """How far the history of a call is that of a branch."""
    if branch.form != call.form:
        return _Shared(
            0, 0, "there are other tools" if call.is_chat else "the prompt has another form"
        )
    history, at = call.history, 0
    for number, exchange in enumerate(branch.exchanges):
        after = at + len(exchange.told)
        if differs := _differs(exchange.told, history[at:after]):
            return _Shared(number, at, "it is not what was asked before", at + differs[0])
        if exchange.answer is None:
            alone = after == len(history) and not branch.asking
            return _Shared(
                number, at, "the answer before it was not handed out yet", after, again=alone
            )
        if after == len(history):
            return _Shared(number, at, "the same is asked again", after)
        if differs := _differs(exchange.answer, history[after : after + len(exchange.answer)]):
            return _Shared(number, at, f"{differs[1]} not what was handed out", after + differs[0])
        at = after + len(exchange.answer)
    return _Shared(len(branch.exchanges), at)


def _differs(one: History, other: History) -> tuple[int, str] | None:
    """The first place where two histories say different things, and what is different there."""
    low, high = 0, min(len(one), len(other))
    if high and isinstance(one[0], HistoryMessage):
        for low, (mine, came) in enumerate(zip(one, other, strict=False)):
            if (
                not isinstance(mine, HistoryMessage)
                or not isinstance(came, HistoryMessage)
                or mine.key != came.key
            ):
                return low, "the message is"
            if came.thoughts is not None and came.thoughts != (mine.thoughts or ""):
                return low, "the thoughts are"
        low = high
    shared = high
    while low < high:  # of a text or of tokens, the half that is the same, again and again
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    if low < shared:
        return low, "the text is"
    return None if len(one) == len(other) else (shared, "it is")


def parse_reply(chat: Chat, text: str, *, tools: bool, plain: bool = False) -> HistoryMessage:
    """What an answer says, as a message; `plain` text is all content. One with a call that is none is so, too."""
    if plain:
        return HistoryMessage(Message("assistant", text))
    thoughts, message = chat.parse_text(text, calls=tools)
    if any(call.error or _is_deep(call.arguments) for call in message.tool_calls):
        thoughts, message = chat.parse_text(text, calls=False)
    return HistoryMessage(message, thoughts)


def _is_deep(value: Any, room: int = MAX_DEPTH) -> bool:
    """JSON that was read where the stack was less full cannot be written in any place."""
    held = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    return not room or any(_is_deep(one, room - 1) for one in held)
