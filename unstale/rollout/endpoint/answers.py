"""Answers of the endpoint: whole or streamed, for chats and for texts."""

import asyncio
import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from unstale.envs.chat import Chat
from unstale.rollout.endpoint import wire
from unstale.rollout.endpoint.schemas import Refused
from unstale.rollout.endpoint.session import AgentSession
from unstale.rollout.endpoint.wire import Choice, CompletionRequest

Fields = dict[str, Any]
Answer = asyncio.Task[list[Choice] | Refused]


def json_response(
    record: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response in ASCII: UTF-8 cannot encode half a surrogate pair."""
    return Response(json.dumps(record), status, headers, "application/json")


class AnswerFormat(Protocol):
    """The JSON format of the answers to one request."""

    def head(self, *, streamed: bool) -> Fields:
        """Return the fields that every message of the answer has."""
        ...

    def choice(self, index: int, choice: Choice, *, logprobs: bool) -> Fields:
        """Return a whole choice."""
        ...

    def first_deltas(self) -> list[Fields]: ...

    def final_text(self, text: str, request: CompletionRequest) -> dict[str, str]:
        """Return the start of each field that no continuation of `text` can change."""
        ...

    def last_deltas(self, choice: Choice, sent: Mapping[str, str]) -> list[Fields]:
        """Return the part of a choice that is not yet in `sent`."""
        ...

    def delta(self, index: int, delta: Fields) -> Fields: ...

    def end(self, index: int, choice: Choice, *, logprobs: bool) -> Fields: ...


class AnswerResponse(Response):
    """The answer to a call. The reply is cancelled when the client disconnects."""

    def __init__(
        self, session: AgentSession, request: CompletionRequest, answer_format: AnswerFormat
    ) -> None:
        self._session = session
        self._request = request
        self._format = answer_format
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        try:
            answer = self._session.start(
                self._request, lambda index, text: texts.put_nowait((index, text))
            )
        except Refused as refused:
            return await json_response(refused.body(), refused.status)(scope, receive, send)
        answer.add_done_callback(lambda _: texts.put_nowait(None))
        disconnected = asyncio.ensure_future(_disconnected(receive))
        disconnected.add_done_callback(lambda _: answer.cancel())
        try:
            # A stream sends its status with its first text, so an earlier refusal can set another.
            first = await texts.get()
            refused_at_once = first is None and isinstance(_result(answer), Refused)
            if self._request.stream and not refused_at_once:
                await self._stream(texts, first, answer, send)
            else:
                while first is not None:
                    first = await texts.get()
                await self._whole(_result(answer))(scope, receive, send)
        except OSError:
            pass  # the client is gone
        finally:
            disconnected.cancel()
            answer.cancel()
            with suppress(asyncio.CancelledError):
                await disconnected

    def _whole(self, result: list[Choice] | Refused) -> Response:
        if isinstance(result, Refused):
            return json_response(result.body(), result.status)
        choices = [
            self._format.choice(index, choice, logprobs=self._request.logprobs)
            for index, choice in enumerate(result)
        ]
        head = self._format.head(streamed=False)
        return json_response({**head, "choices": choices, "usage": wire.usage(result)})

    async def _stream(
        self,
        texts: "asyncio.Queue[tuple[int, str] | None]",
        first: tuple[int, str] | None,
        answer: Answer,
        send: Send,
    ) -> None:
        """Send server-sent events: text as soon as it is final, everything else at the end."""
        form = self._format
        stream = _EventStream(send, form.head(streamed=True))
        await stream.open()
        sent: list[dict[str, str]] = [{} for _ in range(self._request.choices)]
        for index in range(len(sent)):
            for delta in form.first_deltas():
                await stream.choice(form.delta(index, delta))
        item = first
        while item is not None:
            index, text = item
            for name, known in form.final_text(text, self._request).items():
                num_sent = len(sent[index].get(name, ""))
                if len(known) > num_sent:
                    await stream.choice(form.delta(index, {name: known[num_sent:]}))
                    sent[index][name] = known
            item = await texts.get()
        result = _result(answer)
        if isinstance(result, Refused):
            await stream.event(json.dumps(result.body()))
        else:
            for index, choice in enumerate(result):
                for delta in form.last_deltas(choice, sent[index]):
                    await stream.choice(form.delta(index, delta))
                await stream.choice(form.end(index, choice, logprobs=self._request.logprobs))
            if self._request.usage:
                await stream.event(
                    json.dumps({**stream.head, "choices": [], "usage": wire.usage(result)})
                )
        await stream.close()


class _EventStream:
    def __init__(self, send: Send, head: Fields) -> None:
        self._send = send
        self.head = head

    async def open(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def choice(self, record: Fields) -> None:
        await self.event(json.dumps({**self.head, "choices": [record]}))

    async def event(self, data: str) -> None:
        body = f"data: {data}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def close(self) -> None:
        await self.event("[DONE]")
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _result(answer: Answer) -> list[Choice] | Refused:
    if answer.cancelled() or answer.exception():
        return Refused("this episode has ended", status=503, code="episode_over")
    return answer.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ChatFormat:
    """The format of answers to `/chat/completions`."""

    def __init__(self, model: str, chat: Chat) -> None:
        self._common = _common_fields("chatcmpl", model)
        self._chat = chat

    def head(self, *, streamed: bool) -> Fields:
        return {**self._common, "object": "chat.completion" + ".chunk" * streamed}

    def choice(self, index: int, choice: Choice, *, logprobs: bool) -> Fields:
        return {
            "index": index,
            "message": _message(choice),
            "finish_reason": choice.finish,
            "logprobs": wire.chat_logprobs(choice.tokens) if logprobs else None,
        }

    def first_deltas(self) -> list[Fields]:
        return [{"role": "assistant", "content": ""}]

    def final_text(self, text: str, request: CompletionRequest) -> dict[str, str]:
        text = _without_open_end(text, request)
        thoughts, content = self._chat.parse_partial(text, calls=request.calls)
        return {"reasoning_content": thoughts, "content": content}

    def last_deltas(self, choice: Choice, sent: Mapping[str, str]) -> list[Fields]:
        message = _message(choice)
        deltas: list[Fields] = []
        for name in ("reasoning_content", "content"):
            if unsent := (message.get(name) or "")[len(sent.get(name, "")) :]:
                deltas.append({name: unsent})
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
        return deltas

    def delta(self, index: int, delta: Fields) -> Fields:
        return {"index": index, "delta": delta, "finish_reason": None}

    def end(self, index: int, choice: Choice, *, logprobs: bool) -> Fields:
        return {
            "index": index,
            "delta": {},
            "finish_reason": choice.finish,
            "logprobs": wire.chat_logprobs(choice.tokens) if logprobs else None,
        }


class TextFormat:
    """The format of answers to `/completions`."""

    def __init__(self, model: str) -> None:
        self._common = _common_fields("cmpl", model)

    def head(self, *, streamed: bool) -> Fields:
        return {**self._common, "object": "text_completion"}

    def choice(self, index: int, choice: Choice, *, logprobs: bool) -> Fields:
        text = choice.message.message.content
        return {**self.end(index, choice, logprobs=logprobs), "text": text}

    def first_deltas(self) -> list[Fields]:
        return []

    def final_text(self, text: str, request: CompletionRequest) -> dict[str, str]:
        return {"text": _without_open_end(text, request)}

    def last_deltas(self, choice: Choice, sent: Mapping[str, str]) -> list[Fields]:
        unsent = choice.message.message.content[len(sent.get("text", "")) :]
        return [{"text": unsent}] if unsent else []

    def delta(self, index: int, delta: Fields) -> Fields:
        return {"index": index, "finish_reason": None, "logprobs": None, **delta}

    def end(self, index: int, choice: Choice, *, logprobs: bool) -> Fields:
        return {
            "index": index,
            "text": "",
            "finish_reason": choice.finish,
            "logprobs": wire.text_logprobs(choice.tokens) if logprobs else None,
        }


def _common_fields(prefix: str, model: str) -> Fields:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model,
    }


def _message(choice: Choice) -> Fields:
    return wire.message(choice.message, partial(_call_id, choice))


def _call_id(choice: Choice, index: int) -> str:
    """Return an id that is the same in a replay: some agents repeat it in their next prompt."""
    return f"call_{choice.branch}_{choice.num_prompt_tokens}_{index}"


def _without_open_end(text: str, request: CompletionRequest) -> str:
    """Remove an end that may be part of a character or of a stop text."""
    if any(stop in text for stop in request.stops):
        return ""
    text = text.rstrip("\ufffd")
    longest = max((len(stop) for stop in request.stops), default=1) - 1
    return text[: len(text) - longest] if longest else text
