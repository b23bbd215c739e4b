"""The endpoint's answers to requests, sent as one JSON object or as a stream of events."""

import asyncio
import json
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unstale.envs.chat import Chat
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.endpoint.wire import Choice, CompletionRequest

Fields = dict[str, Any]
Answer = asyncio.Task[list[Choice] | Refused]
Texts = asyncio.Queue[tuple[int, str] | None]
"""A queue with an entry each time the text of an answer grows: (index of the answer among the `n`
that a request asks for, its whole text so far). None ends the queue.
"""


def json_response(
    record: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response. It is ASCII, since UTF-8 cannot encode one half of a surrogate
    pair.
    """
    return Response(json.dumps(record), status, headers, "application/json")


class AnswerFormat:
    """The JSON format of answers to `/completions`. Subclasses define those to other paths."""

    id_prefix = "cmpl"
    kinds = ("text_completion", "text_completion")
    """Values of OpenAI's field `object`: in a whole answer, and in each event of a stream."""
    opening: ClassVar[Fields] = {}
    """Fields of the event with which a stream begins each of the `n` answers that a request asks
    for. Empty if there is no such event.
    """
    logprobs_of = staticmethod(wire.text_logprobs)
    last = "[DONE]"
    """Data of the event that ends a stream. Empty if there is no such event."""

    def __init__(self, model: str, chat: Chat) -> None:
        self._chat = chat
        self.num_prompt_tokens = 0
        """Number of tokens of the prompt. 0 until the first event of a stream is due."""
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.model = model
        self._sent: defaultdict[int, dict[str, str]] = defaultdict(dict)
        """Index of an answer -> name of a field -> text that the stream has sent in this field."""

    def whole(self, choices: list[Choice], request: CompletionRequest) -> Fields:
        """Return the answer to a request without streaming."""
        return self._message(
            [
                self.choice(
                    index,
                    self.content_of(choice),
                    self.end_of(choice, logprobs=request.logprobs),
                    streamed=False,
                )
                for index, choice in enumerate(choices)
            ],
            streamed=False,
            usage=wire.usage(choices),
        )

    def begin(self, request: CompletionRequest) -> Iterator[Fields]:
        """Yield the events that begin a stream."""
        for index in range(request.choices if self.opening else 0):
            yield self._part(index, self.opening)

    def grow(self, index: int, text: str, request: CompletionRequest) -> Iterator[Fields]:
        """Yield an event for each content field of which more text can be sent.

        `text` is the whole text so far of the answer number `index` among those asked for.
        """
        sent = self._sent[index]
        for name, known in self.final_text(text, request).items():
            num_sent = len(sent.get(name, ""))
            if len(known) > num_sent:
                yield self._part(index, {name: known[num_sent:]})
                sent[name] = known

    def end(self, choices: list[Choice], request: CompletionRequest) -> Iterator[Fields]:
        """Yield the events that end a stream: unsent content, reasons of the end, numbers of
        tokens.
        """
        for index, choice in enumerate(choices):
            for part in _unsent(self.content_of(choice), self._sent[index]):
                yield self._part(index, part)
            yield self._part(index, {}, self.end_of(choice, logprobs=request.logprobs))
        if request.usage:
            yield self._message([], streamed=True, usage=wire.usage(choices))

    @staticmethod
    def error(refused: Refused) -> Fields:
        """Return the body of an error answer."""
        return refused.body()

    def fail(self, refused: Refused) -> Fields:
        """Return the event that ends a stream with an error."""
        return self.error(refused)

    def _part(self, index: int, content: Fields, end: Fields | None = None) -> Fields:
        return self._message([self.choice(index, content, end, streamed=True)], streamed=True)

    def _message(self, choices: list[Fields], *, streamed: bool, **others: Any) -> Fields:
        head = {"id": self.id, "created": self.created, "model": self.model}
        return {**head, "object": self.kinds[streamed], "choices": choices, **others}

    def choice(
        self, index: int, content: Fields, end: Fields | None = None, *, streamed: bool
    ) -> Fields:
        """Return the JSON object of an answer, the one with this index among those asked for.

        In a stream (`streamed`), it is the part of the answer in one event, with the new text in
        `content`. `end` has the fields that only the last part has (see `end_of`).
        """
        return {"index": index, "text": "", **content, **(end or _NO_END)}

    def content_of(self, choice: Choice) -> Fields:
        return {"text": choice.message.message.content}

    def end_of(self, choice: Choice, *, logprobs: bool) -> Fields:
        """Return the fields that follow the content of an answer, such as `finish_reason`."""
        return {
            "finish_reason": choice.finish,
            "logprobs": self.logprobs_of(choice.tokens) if logprobs else None,
        }

    def final_text(self, text: str, request: CompletionRequest) -> dict[str, str]:
        """Return, by content field, the beginning of `text` that further tokens cannot change."""
        return {"text": _without_open_end(text, request)}


_NO_END: Fields = {"finish_reason": None, "logprobs": None}


class ChatFormat(AnswerFormat):
    """The JSON format of answers to `/chat/completions`."""

    id_prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")
    opening: ClassVar[Fields] = {"role": "assistant", "content": ""}
    logprobs_of = staticmethod(wire.chat_logprobs)

    def choice(
        self, index: int, content: Fields, end: Fields | None = None, *, streamed: bool
    ) -> Fields:
        return {
            "index": index,
            "delta" if streamed else "message": content,
            **(end or _NO_END),
        }

    def content_of(self, choice: Choice) -> Fields:
        return wire.message(choice.message)

    def final_text(self, text: str, request: CompletionRequest) -> dict[str, str]:
        text = _without_open_end(text, request)
        chat = request.call.chat(self._chat)
        thoughts, content = chat.reader.parse_partial(text, calls=request.calls)
        return {"reasoning_content": thoughts, "content": content}


class AnswerResponse(Response):
    """The HTTP response to a request for an answer. Sampling is cancelled if the client
    disconnects.
    """

    def __init__(
        self, session: AgentSession, request: CompletionRequest, answer_format: AnswerFormat
    ) -> None:
        self._session = session
        self._request = request
        self._format = answer_format
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: Texts = asyncio.Queue()
        try:
            answer = self._session.start(
                self._request,
                lambda index, text: texts.put_nowait((index, text)),
                lambda num_tokens: setattr(self._format, "num_prompt_tokens", num_tokens),
            )
        except Refused as refused:
            return await self._whole(refused)(scope, receive, send)
        answer.add_done_callback(lambda _: texts.put_nowait(None))
        disconnected = asyncio.ensure_future(_disconnected(receive))
        disconnected.add_done_callback(lambda _: answer.cancel())
        try:
            # A stream sends its status with its first text. An earlier refusal can still set
            # another status.
            first = await texts.get()
            if self._request.stream and (first or isinstance(_result(answer), list)):
                await self._stream(texts, first, answer, send)
            else:
                await self._whole(_result(answer))(scope, receive, send)
        except OSError:
            pass  # the client has disconnected
        finally:
            disconnected.cancel()
            answer.cancel()
            with suppress(asyncio.CancelledError):
                await disconnected

    def _whole(self, result: list[Choice] | Refused) -> Response:
        if isinstance(result, Refused):
            return json_response(self._format.error(result), result.status)
        return json_response(self._format.whole(result, self._request))

    async def _stream(
        self, texts: Texts, first: tuple[int, str] | None, answer: Answer, send: Send
    ) -> None:
        """Send an answer as server-sent events.

        Text is sent as soon as it cannot become part of a tool call or of a stop text. All else is
        sent at the end.
        """
        form = self._format
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

        async def send_events(events: Iterable[Fields]) -> None:
            text = ""
            for event in events:
                name = f"event: {event['type']}\n" if "type" in event else ""
                text += f"{name}data: {json.dumps(event)}\n\n"
            if text:
                await _send_text(send, text)

        await send_events(form.begin(self._request))
        item = first
        while item is not None:
            await send_events(form.grow(*item, self._request))
            item = await texts.get()
        result = _result(answer)
        if isinstance(result, Refused):
            await send_events([form.fail(result)])
        else:
            await send_events(form.end(result, self._request))
        await _send_text(send, f"data: {form.last}\n\n" * bool(form.last), last=True)


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
]


async def _send_text(send: Send, text: str, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": not last})


def _result(answer: Answer) -> list[Choice] | Refused:
    if answer.cancelled() or answer.exception():
        return Refused("this episode has ended", status=503, code="episode_over")
    return answer.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _unsent(content: Fields, sent: Mapping[str, str]) -> list[Fields]:
    """Return the parts of an answer's content that the stream has not sent. `sent` is field -> sent
    text.
    """
    parts: list[Fields] = []
    for name in ("reasoning_content", "content", "text"):
        if unsent := (content.get(name) or "")[len(sent.get(name, "")) :]:
            parts.append({name: unsent})
    if calls := content.get("tool_calls"):
        parts.append({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
    return parts


def _without_open_end(text: str, request: CompletionRequest) -> str:
    """Return the part of a text that further tokens cannot change: all but an end that may be the
    beginning of a stop text or part of a character.

    Empty if the text contains a stop text.
    """
    if any(stop in text for stop in request.stops):
        return ""
    text = text.rstrip("\ufffd")
    longest = max((len(stop) for stop in request.stops), default=1) - 1
    return text[: len(text) - longest] if longest else text
