"""The calls of one agent in one episode. Each call is recorded before it is answered."""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from jinja2 import TemplateError

from unstale.engines import GenerationOptions
from unstale.envs.chat import Chat
from unstale.pictures import PictureError
from unstale.records import CUT_REPLIES, ContextPiece, Piece, Sampled, Stop
from unstale.rollout.endpoint.conversation import (
    Branch,
    Continuation,
    Conversation,
    History,
    Unanswerable,
    parse_reply,
    with_call_ids,
)
from unstale.rollout.endpoint.off_loop import off_loop
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.wire import AnswerToken, Choice, CompletionRequest
from unstale.rollout.episode import Rollout
from unstale.rollout.transcript import NotReplayed, Transcript
from unstale.rollout.turn_limit import AllowedTurns

CHUNK_TOKENS = 16
"""Tokens per request to the engine, if a reply is streamed or may end at a stop text. The text is
examined after each chunk.
"""

_T = TypeVar("_T")
OnText = Callable[[int, str], None]
"""A function `(index, text)`, called each time the text of an answer grows. `index` is that of the
answer among the `n` that the request asks for, and `text` is the whole text so far.
"""


@dataclass(slots=True)
class AgentSession:
    """The calls of one agent in one episode.

    Each call is answered in a task of the task group `calls`, so that an error of the engine ends
    the run and not only the episode. `on_event` is called with `"forked"` and details when the
    agent edits its history, which begins a branch (a further conversation).
    """

    rollout: Rollout
    transcript: Transcript
    calls: asyncio.TaskGroup
    on_event: Callable[..., None] = lambda kind, **_: None
    reply_tokens: int = 0
    """Largest number of tokens of a reply, besides the run's limits. 0 for no such limit."""
    stop: Stop = "done"
    """Why the last call was refused: a limit, or no reply in the requested format. "done" if it was
    answered.
    """
    broken: str = ""
    """The difference between the agent's calls and the recorded ones, because of which the episode
    cannot be resumed. Empty if they are the same.
    """
    own_end: Stop = "done"
    """Stop reason if the agent ends by itself: "cut_reply" if a limit cut its last reply, else
    "done".
    """
    closed: bool = False
    num_replies: int = 0
    facts: Counter[str] = field(default_factory=Counter)
    """Counts that are reported with the episode: options that were ignored (`endpoint.lenient`),
    and replies that were sampled again for their format or were cut.
    """
    _unclaimed: list[Transcript] = field(init=False)
    _transcripts: dict[int, Transcript] = field(default_factory=dict)
    _conversation: Conversation = field(init=False)
    _asking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the conversation is changed, by a thread or on the event loop."""
    _running: set[asyncio.Task[list[Choice] | Refused]] = field(default_factory=set)
    _num_pending: int = 0
    _num_refusals: int = 0
    _changed_at: float | None = None
    _limit: asyncio.Timeout | None = None

    def __post_init__(self) -> None:
        self._unclaimed = self.transcripts
        self._conversation = Conversation(self.chat)

    @property
    def chat(self) -> Chat:
        return self.rollout.generator.chat

    @property
    def temperature(self) -> float:
        return self.rollout.generator.sampling_temperature

    @property
    def transcripts(self) -> list[Transcript]:
        """The transcripts of all conversations of the episode, in the order of their start."""
        return [self.transcript, *self.transcript.branches]

    def start(
        self,
        request: CompletionRequest,
        on_text: OnText,
        on_prompt: Callable[[int], None] = lambda num_tokens: None,
    ) -> "asyncio.Task[list[Choice] | Refused]":
        """Return a new task that answers a call. Its result is the list of answers, or the refusal.

        `on_prompt` is called with the prompt's number of tokens before `on_text` is called with
        texts. The caller must cancel the task if the client disconnects. Raises `Refused` if the
        episode or the run has ended.
        """
        self._require_open()
        self.facts.update(f"overridden_{name}" for name in request.overridden)
        answer = self._answer(request, on_text, on_prompt)
        try:
            task = self.calls.create_task(answer)
        except RuntimeError:  # an error of the engine is ending the run
            answer.close()
            raise Refused("the run is ending", status=503, code="episode_over") from None
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def role(self, name: str) -> str:
        """Return the agent's role for a base URL with the role `name`. Without a name it is the
        first role.

        Empty if the task set has no roles. Raises `Refused` if it does not have the role `name`.
        """
        roles = self.rollout.roles
        if name and name not in roles:
            known = ", ".join(roles) or "none: ExternalAgent(roles=...) names them"
            raise Refused(f"there is no role {name!r}; the roles are {known}", status=404)
        return name or next(iter(roles), "")

    async def count_tokens(self, request: CompletionRequest) -> int:
        """Return how many tokens the prompt of a call would have. Nothing is recorded.

        Raises `Refused` if no reply could follow the prompt.
        """
        self._require_open()

        def count() -> int:
            with self._refusing(request.field):
                place = self._conversation.ask(request.call)
                pieces = place.branch.pieces[: place.branch.exchanges[-1].start]
                self._retract([place])
                return sum(len(piece.tokens) for piece in (*pieces, *place.context))

        async with self._asking:
            return await self._in_thread(count, lambda num_tokens: None)

    def _require_open(self) -> None:
        if self.closed:
            raise Refused("this episode is over", status=410, code="episode_over")
        if self.broken:
            raise self._cannot_continue()

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Return a context that raises TimeoutError after `rollout.timeout_s` without a call.

        At its end the session is closed: pending calls are cancelled and new ones refused.
        """
        self._changed_at = asyncio.get_running_loop().time()
        running = self.rollout.wait_times.running
        running[self._waits_for] += 1
        try:
            async with asyncio.timeout(self.rollout.config.timeout_s) as self._limit:
                yield
        finally:
            self._count_time()
            running[self._waits_for] -= 1
            self.closed = True
            self._changed_at = None
            self._limit = None  # it holds the task, whose error would hold this session
            for task in self._running:
                task.cancel()

    async def _answer(
        self, request: CompletionRequest, on_text: OnText, on_prompt: Callable[[int], None]
    ) -> list[Choice] | Refused:
        self._add_pending(+1)
        try:
            places = await self._place_all(request)
            on_prompt(num_prompt_tokens(places[0].branch))
            refusals = self._num_refusals
            async with asyncio.TaskGroup() as choices:
                tasks = [
                    choices.create_task(self._reply(place, request, partial(on_text, index)))
                    for index, place in enumerate(places)
                ]
            results = [task.result() for task in tasks]
            refused = [result for result in results if isinstance(result, Refused)]
            if refused:
                return refused[0]
            if refusals == self._num_refusals:
                self.stop = "done"  # the agent went on after an earlier refusal
            return [result for result in results if isinstance(result, Choice)]
        except Refused as error:
            return error
        finally:
            self._add_pending(-1)

    def _add_pending(self, change: int) -> None:
        """Add `change` to the number of pending calls. The time limit runs only while this number
        is 0.
        """
        self._count_time()
        before = self._waits_for
        self._num_pending += change
        if self._changed_at is not None:
            self.rollout.wait_times.running.subtract([before])
            self.rollout.wait_times.running.update([self._waits_for])
        if self._limit is not None and not self.closed and not self._limit.expired():
            deadline = None
            if not self._num_pending:
                now = asyncio.get_running_loop().time()
                deadline = now + self.rollout.config.timeout_s
            self._limit.reschedule(deadline)

    def _count_time(self) -> None:
        if self._changed_at is not None:
            began = self._changed_at
            self._changed_at = asyncio.get_running_loop().time()
            self.rollout.wait_times.add(self._waits_for, self._changed_at - began)

    @property
    def _waits_for(self) -> str:
        return "generation_wait" if self._num_pending else "tool_wait"

    async def _place_all(self, request: CompletionRequest) -> list[Continuation]:
        """Return a branch (conversation) for each answer of a request, with the context added to
        it.

        Raises `Refused`, and changes nothing, if one of the answers is not possible.
        """
        async with self._asking:
            places = await self._ask_in_thread(request)
        for place in places:
            transcript = self._transcripts.get(place.branch.number) or self._claim(place)
            try:
                for piece in place.context:
                    transcript.add_context(piece)
            except NotReplayed as error:
                raise self._break(error) from error
        return places

    async def _ask_in_thread(self, request: CompletionRequest) -> list[Continuation]:
        def undo(places: list[Continuation]) -> None:
            self._retract(places)
            self.num_replies -= sum(not place.resumed for place in places)

        return await self._in_thread(partial(self._ask_all, request), undo)

    async def _in_thread(self, work: Callable[[], _T], undo: Callable[[_T], None]) -> _T:
        """Run `work`, which changes the conversation, in a thread, and return its result.

        If the caller is cancelled, wait for the thread and call `undo` with the result.
        """
        asking = asyncio.create_task(off_loop(work, "the chat template"))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait([asking])
            if not asking.cancelled() and not asking.exception():
                undo(asking.result())
            raise
        except Refused as error:
            # The thread may still change the conversation.
            self.closed = self.closed or error.code == "too_slow"
            raise
        finally:
            del asking  # its error holds this frame, and so would hold the request

    def _ask_all(self, request: CompletionRequest) -> list[Continuation]:
        """Return a branch (conversation) for each answer of a request, with its encoded context."""
        places: list[Continuation] = []
        try:
            with self._refusing(request.field):
                self._check_size(request)
                for _ in range(request.choices):
                    place = self._conversation.ask(request.call)
                    places.append(place)
                    if not place.resumed:
                        pieces = (*place.branch.pieces, *place.context)
                        self._require_budget(request, sum(len(piece.tokens) for piece in pieces))
                self._count_replies(sum(not place.resumed for place in places))
        except Refused:
            self._retract(places)
            raise
        return places

    @contextmanager
    def _refusing(self, field: str) -> Iterator[None]:
        """Return a context that raises `Refused` if the chat template or the model cannot handle a
        history.

        `field` is the name of the history in the request.
        """
        try:
            yield
        except (TemplateError, ValueError, TypeError, RecursionError) as error:
            reason = str(error)[:300]
            if not isinstance(error, Unanswerable | PictureError):
                reason = f"the chat template cannot write these messages: {reason}"
            raise Refused(reason, param=field) from None

    def _retract(self, places: Sequence[Continuation]) -> None:
        for place in reversed(places):
            self._conversation.retract(place)

    def _check_size(self, request: CompletionRequest) -> None:
        """Raise `Refused` for a prompt that is certainly too long.

        This is checked before tokenizing, which would take long.
        """
        call = request.call
        history = () if isinstance(call.history, str) else call.history
        tokens = [token for token in history if isinstance(token, int)]
        if tokens and not self.chat.are_token_ids(tokens):
            raise Refused("the prompt has token ids that are not in the vocabulary", param="prompt")
        characters = call.num_characters(tools=bool(call.tools) and self.chat.renders_tools)
        num_tokens = len(tokens) or -(-characters // self.chat.longest_token)
        self._require_budget(request, num_tokens, "at least ")

    def _refuse(self, stop: Stop) -> None:
        """Record why a call is refused. If the agent fails because of it, the episode ends with
        this reason.
        """
        self.stop = stop
        self._num_refusals += 1

    def _require_budget(
        self, request: CompletionRequest, num_tokens: int, qualifier: str = ""
    ) -> None:
        if self.rollout.generator.reply_budget(num_tokens) < 1:
            self._refuse("max_tokens")
            limit = self.rollout.generator.config.max_context
            raise Refused(
                f"the context has {qualifier}{num_tokens} tokens; with --engine.max_context "
                f"{limit} no reply fits",
                code="context_length_exceeded",
                param=request.field,
            )

    def _count_replies(self, replies: int) -> None:
        limit = AllowedTurns(
            self.rollout.turn_limit,
            most=self.rollout.config.max_turns,
            transcript=self.transcript,
            chat=self.chat,
        ).number([0.0] * self.num_replies)
        if replies and self.num_replies + replies > limit:
            self._refuse("max_turns")
            option = "--limit-turns" if self.rollout.turn_limit else "--rollout.max_turns"
            raise Refused(f"an episode has at most {limit} replies ({option})", code="max_turns")
        self.num_replies += replies

    def _claim(self, place: Continuation) -> Transcript:
        """Return the transcript of a new branch (conversation).

        In a resumed episode, it is the recorded branch that begins with the same context, if there
        is such a branch.
        """
        role = place.branch.role
        matching = [
            each
            for each in self._unclaimed
            if each.role == role and _begins_with(each.all_pieces, place.context)
        ]
        if matching:
            transcript = matching[0]
            self._unclaimed.remove(transcript)
        else:
            transcript = self.transcript.add_branch(self.rollout.next_episode(), role=role)
        if place.fork and not transcript.replaying:
            self.on_event(
                "forked",
                episode=transcript.episode,
                parent=self._transcripts[place.fork.branch.number].episode,
                at=place.fork.differs_at,
                shared_replies=place.fork.exchanges,
                reason=place.fork.difference,
            )
        self._transcripts[place.branch.number] = transcript
        place.branch.pieces = transcript.pieces
        return transcript

    async def _reply(
        self, place: Continuation, request: CompletionRequest, on_text: Callable[[str], None]
    ) -> Choice | Refused:
        """Return a sampled reply. If it lacks the requested `response_format`, sample another one.

        Each further sample is in a new branch (conversation). After the last retry, return a
        refusal.
        """
        wanted = request.format
        if wanted is None:
            return await self._generate(place, request, on_text)
        for num_left in range(wanted.retries, -1, -1):
            choice = await self._generate(place, request, lambda text: None)
            try:
                if isinstance(choice, Refused) or await off_loop(
                    wanted.accepts, "response_format", choice.message.message
                ):
                    return choice
                self.facts["format_retries"] += num_left > 0
                if num_left:
                    (place,) = await self._place_all(replace(request, choices=1))
            except Refused as error:
                return error
        self._refuse("invalid_format")
        return Refused(
            f"none of {wanted.retries + 1} replies has the requested response_format "
            f"(--endpoint.format_retries)",
            code="invalid_format",
            param="response_format",
        )

    async def _generate(
        self, place: Continuation, request: CompletionRequest, on_text: Callable[[str], None]
    ) -> Choice | Refused:
        branch = place.branch
        options = generation_options(self.chat, request, on_text)
        if self.reply_tokens:
            shorter = min(options.max_tokens, self.reply_tokens)
            options = replace(options, max_tokens=shorter)
        try:
            tokens, ended = await self.rollout.generator.generate(
                self._transcripts[branch.number], options, since=branch.exchanges[-1].start
            )
            async with self._asking:
                return self._choice(branch, request, tokens, ended=ended)
        except NotReplayed as error:
            return self._break(error)
        finally:
            branch.pending = False

    def _choice(
        self, branch: Branch, request: CompletionRequest, tokens: list[int], *, ended: bool
    ) -> Choice:
        """Return the sampled tokens as an answer, and record its text for comparison with later
        histories.
        """
        call = request.call
        chat = call.chat(self.chat)
        text = chat.text(tokens)
        found = [(text.index(stop), stop) for stop in request.stops if stop in text]
        cut, stop_text = min(found, default=(None, ""))
        start = branch.exchanges[-1].start
        num_prompt = num_prompt_tokens(branch)
        message = parse_reply(chat, text[:cut], tools=request.calls, plain=not call.is_chat)
        message = with_call_ids(message, f"{branch.number}/{num_prompt}")
        answer: History = (message,)
        if not call.is_chat:
            as_text = isinstance(call.history, str)
            answer = chat.text(tokens, whole=True) if as_text else tuple(tokens)
        logps = [
            AnswerToken(chat.bytes_of(token) if request.logprobs else b"", logp)
            for piece in branch.pieces[start:]
            if isinstance(piece, Sampled)
            for token, logp in zip(piece.tokens, piece.behavior_logp, strict=True)
        ]
        self._conversation.add_answer(branch, answer, ended=ended)
        finish = "stop" if ended or cut is not None else "length"
        self.own_end = "done" if finish == "stop" else "cut_reply"
        self.facts.update([CUT_REPLIES] * (finish == "length"))
        if message.message.tool_calls:
            finish = "tool_calls"
        return Choice(message, finish, tuple(logps), num_prompt, stop_text)

    def _break(self, error: NotReplayed) -> Refused:
        self.broken = str(error)
        return self._cannot_continue()

    def _cannot_continue(self) -> Refused:
        return Refused(
            f"this episode cannot be resumed: {self.broken}", status=409, code="not_replayed"
        )


def num_prompt_tokens(branch: Branch) -> int:
    """Return how many tokens of a conversation come before its last answer."""
    return sum(len(piece.tokens) for piece in branch.pieces[: branch.exchanges[-1].start])


def generation_options(
    chat: Chat, request: CompletionRequest, on_text: Callable[[str], None]
) -> GenerationOptions:
    """Return the sampling options of a request: its limit of tokens and its stop texts.

    If the request is streamed, `on_text` is called with the text after each chunk.
    """

    def has_stop(text: str) -> bool:
        return any(stop in text for stop in request.stops)

    def find_end(tokens: Sequence[int]) -> int | None:
        """Return how many tokens it takes to complete the first stop text. None without a stop
        text.
        """
        text = chat.text(tokens)
        if request.stream:
            on_text(text)
        if not has_stop(text):
            return None
        counts = range(len(tokens))
        return bisect_left(counts, True, key=lambda count: has_stop(chat.text(tokens[:count])))

    limit = GenerationOptions().max_tokens if request.max_tokens is None else request.max_tokens
    if request.stops or request.stream:
        return GenerationOptions(limit, CHUNK_TOKENS, find_end)
    return GenerationOptions(limit)


def _begins_with(pieces: Sequence[Piece], context: Sequence[ContextPiece]) -> bool:
    """Return True if recorded tokens and a context agree, up to the end of the shorter one."""
    known = pieces[: len(context)]
    return list(known) == list(context[: len(known)])
