"""The calls of one episode. Each becomes pieces of one of its branches before it is answered."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from jinja2 import TemplateError

from unstale.engines import GenerationOptions
from unstale.envs.chat import Chat
from unstale.records import ContextPiece, Piece, Sampled, Stop
from unstale.rollout.endpoint.conversation import (
    Asked,
    Branch,
    Call,
    Conversation,
    Fork,
    History,
    Unanswerable,
    hand_out,
)
from unstale.rollout.endpoint.wire import Choice, Refused, Request

CHUNK = 16
"""Tokens between two looks at a reply that is streamed, or that a text may end."""


class Script(Protocol):
    """What was said in a branch so far."""

    episode: int
    pieces: list[Piece]

    @property
    def said(self) -> list[Piece]:
        """With what is on record and was not said again yet."""
        ...


class EndpointGenerator(Protocol):
    """Whoever samples, and writes down what was said."""

    chat: Chat
    temperature: float
    max_turns: int

    def room(self, length: int) -> int: ...

    def begin(self, number: int) -> Script:
        """A branch, the `number`-th of the episode."""
        ...

    def give(self, script: Script, pieces: Sequence[ContextPiece]) -> None:
        """Raises `NotAgain`."""
        ...

    async def speak(
        self, script: Script, number: int, how: GenerationOptions, since: int
    ) -> tuple[list[int], bool]:
        """The reply that begins with piece `since`, and whether it ended with an end token. Raises `NotAgain`."""
        ...

    def forked(self, script: Script, parent: Script, fork: Fork) -> None: ...


class NotAgain(Exception):
    """An agent whose calls are on record calls otherwise. The cause says in what."""


Heard = Callable[[int, str], None]
"""Told of a choice's number and its text so far."""


@dataclass(slots=True)
class _Held:
    """A branch's script, and its number."""

    number: int
    script: Script


@dataclass(slots=True)
class Session:
    """One episode that asks by itself. `recorded` are the scripts of an earlier life, the first one also when new.

    Answers are children of `calls`: what fails in them that is not the agent's fault ends whatever `calls` belongs to.
    """

    voice: EndpointGenerator
    calls: asyncio.TaskGroup
    recorded: list[Script]
    idle_s: float
    """The agent may take so long for one answer: while none of its calls is pending."""
    passed: Callable[[str, float], None] = lambda name, seconds: None
    """Told how many seconds an agent that is watched waited for `replies`, or did not (`tools`), when that turns."""
    stop: Stop = "done"
    """A limit, once a call was refused for it."""
    broken: BaseException | None = None
    """Why the episode cannot be gone on with."""
    closed: bool = False
    turns: int = 0
    _pending: int = 0
    _since: float | None = None
    _limit: asyncio.Timeout | None = None
    _held: dict[int, _Held] = field(default_factory=dict)
    _free: list[_Held] = field(init=False)
    _conversation: Conversation = field(init=False)
    _running: set[asyncio.Task[list[Choice] | Refused]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._free = [_Held(number, script) for number, script in enumerate(self.recorded)]
        self._conversation = Conversation(self.voice.chat)

    @property
    def scripts(self) -> list[Script]:
        """Of all branches, in the order in which they were begun."""
        return [
            held.script
            for held in sorted((*self._held.values(), *self._free), key=lambda held: held.number)
        ]

    def start(self, request: Request, heard: Heard) -> "asyncio.Task[list[Choice] | Refused]":
        """Answer a call. Cancel the task when nobody waits for it any more."""
        if self.closed:
            raise Refused("this episode is over", status=410, code="episode_over")
        if self.broken:
            raise Refused(
                f"this episode cannot be gone on with: {self.broken}", status=409, code="not_again"
            )
        task = self.calls.create_task(self._answer(request, heard))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """TimeoutError when the agent takes too long between two calls. It is over when this is left."""
        self._since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.idle_s) as self._limit:
                yield
        finally:
            self._pass()
            self.closed, self._since = True, None
            for task in self._running:
                task.cancel()

    async def _answer(self, request: Request, heard: Heard) -> list[Choice] | Refused:
        self._wait(+1)
        try:
            asked = self._ask_all(request)
            async with asyncio.TaskGroup() as choices:
                said = [
                    choices.create_task(self._speak(one, request, partial(heard, at)))
                    for at, one in enumerate(asked)
                ]
            found = [one.result() for one in said]
            refused = [one for one in found if isinstance(one, Refused)]
            return refused[0] if refused else [one for one in found if isinstance(one, Choice)]
        except Refused as refused_:
            return refused_
        finally:
            self._wait(-1)

    def _wait(self, change: int) -> None:
        """The agent's time does not run while it waits for us."""
        self._pass()
        self._pending += change
        if self._limit is not None and not self.closed and not self._limit.expired():
            idle = not self._pending
            self._limit.reschedule(
                asyncio.get_running_loop().time() + self.idle_s if idle else None
            )

    def _pass(self) -> None:
        """Time has gone by since the number of pending calls changed, or the agent began."""
        if self._since is not None:
            since, self._since = self._since, asyncio.get_running_loop().time()
            self.passed("replies" if self._pending else "tools", self._since - since)

    def _ask_all(self, request: Request) -> list[Asked]:
        """All choices or none: find their branches, and then give them what is new."""
        call, asked = request.call, list[Asked]()
        try:
            self._look_over(call)
            for _ in range(request.choices):
                asked.append(self._conversation.ask(call))
                if not asked[-1].again:
                    self._require_room(
                        sum(
                            len(piece.tokens)
                            for piece in (*asked[-1].branch.pieces, *asked[-1].given)
                        )
                    )
            self._count(sum(not one.again for one in asked))
        except (
            Refused,
            Unanswerable,
            TemplateError,
            ValueError,
            TypeError,
            RecursionError,
        ) as error:
            for one in reversed(asked):
                self._conversation.retract(one)
            if isinstance(error, Refused):
                raise
            words = (
                "" if isinstance(error, Unanswerable) else "the chat template cannot write this: "
            )
            raise Refused(f"{words}{str(error)[:300]}", param="messages") from None
        for one in asked:
            held = self._held.get(one.branch.number) or self._claim(one)
            try:
                self.voice.give(held.script, one.given)
            except NotAgain as error:
                raise self._break(error) from error
        return asked

    def _look_over(self, call: Call) -> None:
        """Refuse what no context can hold before tokens are made of it, which takes the event loop's time."""
        chat = self.voice.chat
        history = () if isinstance(call.history, str) else call.history
        tokens = [token for token in history if isinstance(token, int)]
        if tokens and not chat.are_token_ids(tokens):
            raise Refused(
                "there are tokens in the prompt that the tokenizer does not have", param="prompt"
            )
        characters = call.num_characters(tools=bool(call.tools) and chat.renders_tools)
        self._require_room(len(tokens) or -(-characters // chat.longest_token), "at least ")

    def _require_room(self, length: int, about: str = "") -> None:
        if self.voice.room(length) < 1:
            self.stop = "max_tokens"
            raise Refused(
                f"the context has {about}{length} tokens, and engine.max_context leaves no room for a reply to it",
                code="context_length_exceeded",
                param="messages",
            )

    def _count(self, replies: int) -> None:
        """What was begun once and is asked for again counts once."""
        if replies and self.turns + replies > self.voice.max_turns:
            self.stop = "max_turns"
            raise Refused(
                f"an episode has at most rollout.max_turns = {self.voice.max_turns} replies",
                code="max_turns",
            )
        self.turns += replies

    def _claim(self, asked: Asked) -> _Held:
        """The script of a new branch: one that is on record with this beginning, else a new one."""
        held = next((held for held in self._free if _begins(held.script.said, asked.given)), None)
        if held:
            self._free.remove(held)
        else:
            number = len(self._held) + len(self._free)
            held = _Held(number, self.voice.begin(number))
        if asked.fork:
            self.voice.forked(held.script, self._held[asked.fork.parent].script, asked.fork)
        self._held[asked.branch.number] = held
        asked.branch.pieces = held.script.pieces
        return held

    async def _speak(
        self, asked: Asked, request: Request, heard: Callable[[str], None]
    ) -> Choice | Refused:
        branch, held = asked.branch, self._held[asked.branch.number]
        since = branch.exchanges[-1].start
        try:
            tokens, ended = await self.voice.speak(
                held.script, held.number, self._manner(request, heard), since
            )
        except NotAgain as error:
            return self._break(error)
        finally:
            self._conversation.abandoned(branch)
        return self._hand_out(branch, request, tokens, ended=ended)

    def _manner(self, request: Request, heard: Callable[[str], None]) -> GenerationOptions:
        chat = self.voice.chat

        def ends(text: str) -> bool:
            return any(stop in text for stop in request.stops)

        def look(tokens: Sequence[int]) -> int | None:
            text = chat.text(tokens)
            if request.stream:
                heard(text)
            if not ends(text):
                return None
            return bisect_left(range(len(tokens)), True, key=lambda k: ends(chat.text(tokens[:k])))

        most = GenerationOptions().max_tokens if request.max_tokens is None else request.max_tokens
        return (
            GenerationOptions(most, CHUNK, look)
            if request.stops or request.stream
            else GenerationOptions(most)
        )

    def _hand_out(
        self, branch: Branch, request: Request, tokens: list[int], *, ended: bool
    ) -> Choice:
        """What the agent gets, and will send back as what was answered."""
        chat, call = self.voice.chat, request.call
        text = chat.text(tokens)
        cut = min((text.index(stop) for stop in request.stops if stop in text), default=None)
        said = hand_out(chat, text[:cut], tools=request.calls, plain=not call.is_chat)
        answer: History = (said,)
        if not call.is_chat:
            answer = (
                chat.text(tokens, whole=True) if isinstance(call.history, str) else tuple(tokens)
            )
        start = branch.exchanges[-1].start
        pieces = [piece for piece in branch.pieces[start:] if isinstance(piece, Sampled)]
        logps = [
            (chat.text([token], whole=True) if request.logprobs else "", logp)
            for piece in pieces
            for token, logp in zip(piece.tokens, piece.behavior_logp, strict=True)
        ]
        self._conversation.answered(branch, answer, ended=ended)
        finish = (
            "tool_calls"
            if said.message.tool_calls
            else "stop"
            if ended or cut is not None
            else "length"
        )
        length = sum(len(piece.tokens) for piece in branch.pieces[:start])
        return Choice(said, finish, tuple(logps), length, branch.number)

    def _break(self, error: NotAgain) -> Refused:
        self.broken = error.__cause__ or error
        return Refused(
            f"this episode cannot be gone on with: {self.broken}", status=409, code="not_again"
        )


def _begins(said: Sequence[Piece], given: Sequence[ContextPiece]) -> bool:
    """Whether a record, as far as it goes, begins so."""
    known = said[: len(given)]
    return list(known) == list(given[: len(known)])
